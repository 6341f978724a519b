"""The variants that are measured, in attngen's words and in FlexAttention's: 2 requests x 8192, d 128, causal."""

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
    """

    name: str
    fields: dict[str, Any]
    mask: Mod
    score: Mod | None = None
    params: dict[str, torch.Tensor] = field(default_factory=dict)


def document_ids(device: str) -> torch.Tensor:
    """int32 ``[batch, length]``: documents of random lengths, one after another."""
    cuts = torch.rand(BATCH, DOCUMENTS - 1).mul(LENGTH).long().sort().values
    positions = torch.arange(LENGTH).expand(BATCH, -1).contiguous()
    return torch.searchsorted(cuts, positions, right=True).int().to(device)


def settings(ids: torch.Tensor, num_heads: int) -> list[Setting]:
    """Those that are measured."""
    slopes = torch.exp2(-8 * torch.arange(1, num_heads + 1, device=ids.device) / num_heads)
    causal = ag.Causal()
    return [
        Setting("causal", {"mask": causal}, lambda b, h, i, j: i >= j),
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
        ),
        Setting(
            "window 1024",
            {"mask": causal & ag.SlidingWindow(left=1023)},
            lambda b, h, i, j: (i >= j) & (i - j <= 1023),
        ),
        Setting(
            "document",
            {"mask": causal & ag.Document("doc_ids")},
            lambda b, h, i, j: (i >= j) & (ids[b, i] == ids[b, j]),
            params={"doc_ids": ids},
        ),
    ]


def blocks_of(mask: Mod, device: str) -> Any:
    """FlexAttention's block mask."""
    return create_block_mask(mask, BATCH, None, LENGTH, LENGTH, device=device)


def visible_pairs(mask: Mod, device: str) -> int:
    """Pairs that the mask keeps in one head, over the batch."""
    q, k = torch.arange(LENGTH, device=device)[:, None], torch.arange(LENGTH, device=device)
    return sum(int(mask(b, 0, q, k).sum()) for b in range(BATCH))
