"""Modified attention beside its peers on one GPU: ``python -m benchmarks.gpu_variants``.

bf16, 2 x 16 heads x 8192, d 128, causal; forward and backward, contenders in turn in random order, and what it takes to find the
tiles of a document mask. Rates count the pairs that each mask keeps. Peers are those of :mod:`benchmarks.peers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask

import attngen as ag
from attngen.ops.batching import collect_inputs
from attngen.ops.storage import Extras
from attngen.timing import time_gpu
from benchmarks.measure import Row, report, versions
from benchmarks.passes import Cell, backward, forward
from benchmarks.settings import BATCH, DIM, LENGTH, document_ids, variants

HEADS = 16


def tile_lists(ids: torch.Tensor) -> list[Row]:
    """Which tiles of a causal document mask to visit: device time, then time until it is known on an idle device."""
    [documents] = [setting for setting in variants(ids, HEADS) if setting.params]
    spec = ag.AttentionSpec(heads=ag.MHA(num_heads=HEADS, head_dim=DIM), **documents.fields)
    q = torch.randn(BATCH, LENGTH, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    op = ag.compile(spec, ops=()).op("prefill", q.device)
    inputs = collect_inputs(op.variant, q, q, q, Extras(), {"doc_ids": ids})
    consumer = op.plan.kernel("forward")

    contenders = {
        "attngen": lambda: op.tile_lists("key_lists", consumer, inputs),
        "create_block_mask": lambda: documents.blocks(BATCH, LENGTH, "cuda"),
        "create_block_mask compiled": lambda: create_block_mask(
            documents.mask, BATCH, None, LENGTH, LENGTH, device="cuda", _compile=True
        ),
    }
    rows = [Row("tile lists document s8192, device", n, ms, 0.0, "", 0.0) for n, ms in time_gpu(contenders).items()]

    def waited(fn: Callable[[], Any]) -> Callable[[], None]:
        return lambda: (fn(), torch.cuda.synchronize())[1]

    alone = time_gpu({name: waited(fn) for name, fn in contenders.items()}, calls=1)
    return rows + [Row("tile lists document s8192, waited for", n, ms, 0.0, "", 0.0) for n, ms in alone.items()]


if __name__ == "__main__":
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 200
    ids = document_ids("cuda")
    cells = [Cell(setting, BATCH, LENGTH, HEADS, DIM) for setting in variants(ids, HEADS)]
    results = [row for cell in cells for row in forward(cell) + backward(cell)] + tile_lists(ids)
    report("gpu-variants", results, **versions())
