"""Modified attention beside compiled FlexAttention on the CPU: ``python -m benchmarks.cpu_variants``.

fp32, 2 x 4 heads x 8192, d 128, causal, forward only. Rates count the pairs that each mask keeps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask

import attngen as ag
from benchmarks.cpu import flex
from benchmarks.measure import Row, relative_error, report, time_cpu

BATCH, HEADS, LENGTH, DIM = 2, 4, 8192, 128
DOCUMENTS = 12
CHECKED = 128  # queries, the last ones, that are compared with the oracle
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


def settings() -> list[Setting]:
    """Those that are measured."""
    cuts = torch.rand(BATCH, DOCUMENTS - 1).mul(LENGTH).long().sort().values
    ids = torch.searchsorted(cuts, torch.arange(LENGTH).expand(BATCH, -1).contiguous(), right=True).int()
    slopes = torch.exp2(-8 * torch.arange(1, HEADS + 1) / HEADS)
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


def kept_pairs(mask: Mod) -> int:
    """Pairs of all requests that a mask keeps, of one head."""
    rows, columns = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    return sum(int(mask(b, 0, rows, columns).sum()) for b in range(BATCH))


def measure(setting: Setting) -> list[Row]:
    """Both systems on one variant."""
    q, k, v = (torch.randn(BATCH, LENGTH, HEADS, DIM) for _ in range(3))
    qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
    spec = ag.AttentionSpec(heads=ag.MHA(num_heads=HEADS, head_dim=DIM), dtype="fp32", **setting.fields)
    blocks = create_block_mask(setting.mask, BATCH, None, LENGTH, LENGTH, device="cpu")

    def peer() -> torch.Tensor:
        return flex(qt, kt, vt, score_mod=setting.score, block_mask=blocks).transpose(1, 2)

    contenders = {
        "attngen": partial(ag.compile(spec, backend="cpp").prefill, q, k, v, params=setting.params),
        "flex": peer,
    }
    oracle = ag.compile(spec, backend="reference")
    exact = oracle.prefill(q[:, -CHECKED:].contiguous(), k, v, params=setting.params)
    errors = {name: relative_error(fn()[:, -CHECKED:], exact) for name, fn in contenders.items()}
    work = 4 * DIM * HEADS * kept_pairs(setting.mask)
    times = time_cpu(contenders, rounds=5)
    case = f"{setting.name} {BATCH}x{HEADS}x{LENGTH}x{DIM}"
    return [Row(case, name, ms, work / ms / 1e6, "GFLOP/s", errors[name]) for name, ms in times.items()]


if __name__ == "__main__":
    torch.manual_seed(0)
    wanted = sys.argv[1:]
    report("cpu-variants", [row for s in settings() if not wanted or s.name in wanted for row in measure(s)])
