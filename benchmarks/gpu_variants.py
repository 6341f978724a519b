"""Modified attention beside compiled FlexAttention on one GPU: ``python -m benchmarks.gpu_variants``.

bf16, 2 x 16 heads x 8192, d 128, causal; forward and backward, contenders in turn in random order, and what it takes to find the
tiles of a document mask. Rates count the pairs that each mask keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask

import attngen as ag
from attngen.ops.batching import collect_inputs
from attngen.ops.storage import Extras
from benchmarks.gpu import flex, timed
from benchmarks.measure import Row, relative_error, report, time_gpu
from benchmarks.settings import BATCH, DIM, LENGTH, Setting, blocks_of, document_ids, settings, visible_pairs

HEADS = 16


def measure(setting: Setting) -> list[Row]:
    """Forward, then backward."""
    q, k, v, dout = (torch.randn(BATCH, LENGTH, HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    ops = ag.compile(ag.AttentionSpec(heads=ag.MHA(num_heads=HEADS, head_dim=DIM), **setting.fields), backend="triton")
    options = {"block_mask": blocks_of(setting.mask, "cuda"), "score_mod": setting.score}
    peer = partial(flex, *(x.detach() for x in leaves), **options)
    work = 4 * HEADS * DIM * visible_pairs(setting.mask, "cuda")
    case = f"{setting.name} d{DIM} s{LENGTH} b{BATCH}"
    rows = timed(
        f"prefill {case}",
        {"attngen": partial(ops.prefill, q, k, v, params=setting.params), "flex": lambda: peer().transpose(1, 2)},
        peer().transpose(1, 2),
        work,
        "TFLOP/s",
    )
    out, lse = ops.prefill(q, k, v, params=setting.params, return_lse=True)
    flexed, upstream = flex(*leaves, **options), dout.transpose(1, 2)
    ours = partial(ops.backward, dout, q, k, v, out, lse, params=setting.params)
    theirs = partial(torch.autograd.grad, flexed, leaves, upstream, retain_graph=True)
    got = torch.cat([grad.transpose(1, 2).flatten() for grad in ours()[:3]])
    error = relative_error(got, torch.cat([grad.flatten() for grad in theirs()]))
    times = time_gpu({"attngen": ours, "flex": theirs})
    return rows + [Row(f"backward {case}", n, ms, 2.5 * work / ms / 1e9, "TFLOP/s", error) for n, ms in times.items()]


def tile_lists(ids: torch.Tensor) -> list[Row]:
    """Which tiles of a causal document mask to visit: device time, then time until it is known on an idle device."""
    spec = ag.AttentionSpec(heads=ag.MHA(num_heads=HEADS, head_dim=DIM), mask=ag.Causal() & ag.Document("doc_ids"))
    q = torch.randn(BATCH, LENGTH, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    op = ag.compile(spec, backend="triton").op("prefill", q.device)
    inputs = collect_inputs(op.variant, q, q, q, Extras(), {"doc_ids": ids})
    consumer = op.plan.kernel("forward")

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (ids[b, i] == ids[b, j])

    contenders = {
        "attngen": lambda: op.tile_lists("key_lists", consumer, inputs),
        "create_block_mask": lambda: blocks_of(mask, "cuda"),
        "create_block_mask compiled": lambda: create_block_mask(
            mask, BATCH, None, LENGTH, LENGTH, device="cuda", _compile=True
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
    documents = document_ids("cuda")
    results = [row for setting in settings(documents, HEADS) for row in measure(setting)] + tile_lists(documents)
    report("gpu-variants", results, triton=__import__("triton").__version__)
