"""Dropout's random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

Every weight has a word of its own, whatever tiles or splits compute it: word ``k % 4`` of the block of counter
``(k // 4, q, b * num_qo_heads + h, offset)`` and key ``(seed, seed >> 32 ^ offset >> 32)``, all of 32 bits. A weight stays where
its word is at least :attr:`attngen.variant.Variant.dropout_threshold`. Kernels compute the same; here it is torch's int64.
"""

from __future__ import annotations

import torch

ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def block(counter: list[torch.Tensor], key: list[int]) -> list[torch.Tensor]:
    """Four random words of a counter of four and a key of two; words are int64 in ``[0, 2 ** 32)``."""
    for _ in range(ROUNDS):
        high0, low0 = _product(_MULTIPLIERS[0], counter[0])
        high1, low1 = _product(_MULTIPLIERS[1], counter[2])
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(word + step) & _WORD for word, step in zip(key, _WEYL, strict=True)]
    return counter


def kept(threshold: int, seed: int, offset: int, row: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Where weights stay, bool, broadcast over int64 ``row = b * num_qo_heads + h`` and positions ``q``, ``k``."""
    counter = [x & _WORD for x in torch.broadcast_tensors(k >> 2, q, row, torch.tensor(offset))]  # type: ignore[no-untyped-call]
    words = torch.stack(block(counter, [seed & _WORD, (seed >> 32 ^ offset >> 32) & _WORD]))
    word = torch.gather(words, 0, (k % 4).expand(words.shape[1:])[None])[0]
    return word >= threshold


def _product(x: int, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of the product of two words; int64 holds neither half of it in one step."""
    low = x * (y & 0xFFFF)
    middle = x * (y >> 16) + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)
