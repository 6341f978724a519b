"""What is measured, in attngen's words, in FlexAttention's and in FlashAttention's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask

import attngen as ag

BATCH, LENGTH, DIM = 2, 8192, 128
DOCUMENTS = 12
Mod = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Setting:
    """One variant in both systems.

    Attributes:
        fields: of the spec.
        mask: FlexAttention's ``mask_mod``.
        score: its ``score_mod``.
        params: attngen's run-time tensors.
        flash: arguments of ``flash_attn_func``; ``None`` where it has no words for it.
    """

    name: str
    fields: dict[str, Any]
    mask: Mod | None
    score: Mod | None = None
    params: dict[str, torch.Tensor] = field(default_factory=dict)
    flash: dict[str, Any] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is full or causal attention."""
        return self.flash in ({"causal": False}, {"causal": True})

    def blocks(self, batch: int, length: int, device: str) -> Any:
        """FlexAttention's block mask."""
        if self.mask is None:
            return None
        return create_block_mask(self.mask, batch if self.params else None, None, length, length, device=device)

    def visible_pairs(self, batch: int, length: int, device: str) -> int:
        """Pairs that the mask keeps in one head, over the batch; causal attention counts half of all pairs."""
        if self.is_plain:
            return batch * length**2 // (2 if self.mask else 1)
        q, k = torch.arange(length, device=device)[:, None], torch.arange(length, device=device)
        return sum(int(self.mask(b, 0, q, k).sum()) for b in range(batch))


def document_ids(device: str) -> torch.Tensor:
    """int32 ``[batch, length]``: documents of random lengths, one after another."""
    cuts = torch.rand(BATCH, DOCUMENTS - 1).mul(LENGTH).long().sort().values
    positions = torch.arange(LENGTH).expand(BATCH, -1).contiguous()
    return torch.searchsorted(cuts, positions, right=True).int().to(device)


FULL = Setting("full", {}, None, flash={"causal": False})
CAUSAL = Setting("causal", {"mask": ag.Causal()}, lambda b, h, i, j: i >= j, flash={"causal": True})


def variants(ids: torch.Tensor, num_heads: int) -> list[Setting]:
    """Modified attention, and causal attention to compare it with."""
    slopes = torch.exp2(-8 * torch.arange(1, num_heads + 1, device=ids.device) / num_heads)
    causal = ag.Causal()
    return [
        CAUSAL,
        Setting(
            "alibi",
            {"mask": causal, "score_mods": (ag.ALiBi(),)},
            lambda b, h, i, j: i >= j,
            lambda s, b, h, i, j: s + slopes[h] * (j - i),
        ),
        Setting(
            "soft cap 30",
            {"mask": causal, "score_mods": (ag.SoftCap(cap=30.0),)},
            lambda b, h, i, j: i >= j,
            lambda s, b, h, i, j: 30 * torch.tanh(s / 30),
            flash={"causal": True, "softcap": 30.0},
        ),
        Setting(
            "window 1024",
            {"mask": causal & ag.SlidingWindow(left=1023)},
            lambda b, h, i, j: (i >= j) & (i - j <= 1023),
            flash={"causal": True, "window_size": (1023, 0)},
        ),
        Setting(
            "document",
            {"mask": causal & ag.Document("doc_ids")},
            lambda b, h, i, j: (i >= j) & (ids[b, i] == ids[b, j]),
            params={"doc_ids": ids},
        ),
    ]
