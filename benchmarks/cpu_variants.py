"""Modified attention beside compiled FlexAttention on the CPU: ``python -m benchmarks.cpu_variants``.

fp32, 2 x 4 heads x 8192, d 128, causal, forward only. Rates count the pairs that each mask keeps.
"""

from __future__ import annotations

import sys
from functools import partial

import torch

import attngen as ag
from attngen.timing import time_cpu
from benchmarks.cpu import flex
from benchmarks.measure import Row, relative_error, report
from benchmarks.settings import BATCH, DIM, LENGTH, Setting, document_ids, variants

HEADS = 4
CHECKED = 128  # queries, the last ones, that are compared with the oracle


def measure(setting: Setting) -> list[Row]:
    """Both systems on one variant."""
    q, k, v = (torch.randn(BATCH, LENGTH, HEADS, DIM) for _ in range(3))
    qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
    spec = ag.AttentionSpec(heads=ag.MHA(num_heads=HEADS, head_dim=DIM), dtype="fp32", **setting.fields)
    blocks = setting.blocks(BATCH, LENGTH, "cpu")

    def peer() -> torch.Tensor:
        return flex(qt, kt, vt, score_mod=setting.score, block_mask=blocks).transpose(1, 2)

    contenders = {
        "attngen": partial(ag.compile(spec, backend="cpp").prefill, q, k, v, params=setting.params),
        "flex": peer,
    }
    oracle = ag.compile(spec, backend="reference")
    exact = oracle.prefill(q[:, -CHECKED:].contiguous(), k, v, params=setting.params)
    errors = {name: relative_error(fn()[:, -CHECKED:], exact) for name, fn in contenders.items()}
    work = 4 * DIM * HEADS * setting.visible_pairs(BATCH, LENGTH, "cpu")
    times = time_cpu(contenders, rounds=5)
    case = f"{setting.name} {BATCH}x{HEADS}x{LENGTH}x{DIM}"
    return [Row(case, name, ms, work / ms / 1e6, "GFLOP/s", errors[name]) for name, ms in times.items()]


if __name__ == "__main__":
    torch.manual_seed(0)
    wanted = sys.argv[1:]
    chosen = [s for s in variants(document_ids("cpu"), HEADS) if not wanted or s.name in wanted]
    report("cpu-variants", [row for setting in chosen for row in measure(setting)])
