"""Modified attention beside compiled FlexAttention on one GPU: ``python -m benchmarks.gpu_variants``.

bf16, 2 x 16 heads x 8192, d 128, causal; forward and backward, contenders in turn in random order, and what it takes to find the
tiles of a document mask. Rates count the pairs that each mask keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask

import attngen as ag
from attngen.ops.batching import Lengths, collect_inputs
from benchmarks.gpu import flex, timed
from benchmarks.measure import Row, relative_error, report, time_gpu

BATCH, HEADS, LENGTH, DIM = 2, 16, 8192, 128
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


def document_ids() -> torch.Tensor:
    """int32 ``[batch, length]``: documents of random lengths, one after another."""
    cuts = torch.rand(BATCH, DOCUMENTS - 1).mul(LENGTH).long().sort().values
    return torch.searchsorted(cuts, torch.arange(LENGTH).expand(BATCH, -1).contiguous(), right=True).int().cuda()


def settings(ids: torch.Tensor) -> list[Setting]:
    """Those that are measured."""
    slopes = torch.exp2(-8 * torch.arange(1, HEADS + 1, device="cuda") / HEADS)
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


def blocks_of(mask: Mod) -> Any:
    """FlexAttention's block mask."""
    return create_block_mask(mask, BATCH, None, LENGTH, LENGTH, device="cuda")


def visible_pairs(mask: Mod) -> int:
    """Pairs that the mask keeps, over the batch."""
    q, k = torch.arange(LENGTH, device="cuda")[:, None], torch.arange(LENGTH, device="cuda")
    return sum(int(mask(b, 0, q, k).sum()) for b in range(BATCH))


def measure(setting: Setting) -> list[Row]:
    """Forward, then backward."""
    q, k, v, dout = (torch.randn(BATCH, LENGTH, HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    ops = ag.compile(ag.AttentionSpec(heads=ag.MHA(num_heads=HEADS, head_dim=DIM), **setting.fields), backend="triton")
    options = {"block_mask": blocks_of(setting.mask), "score_mod": setting.score}
    peer = partial(flex, *(x.detach() for x in leaves), **options)
    work = 4 * HEADS * DIM * visible_pairs(setting.mask)
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
    inputs = collect_inputs(op.variant, spec.kv, q, q, q, Lengths(), {"doc_ids": ids})
    consumer = op.plan.kernel("forward")

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (ids[b, i] == ids[b, j])

    contenders = {
        "attngen": lambda: op.tile_lists("key_lists", consumer, inputs),
        "create_block_mask": lambda: blocks_of(mask),
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
    documents = document_ids()
    results = [row for setting in settings(documents) for row in measure(setting)] + tile_lists(documents)
    report("gpu-variants", results, triton=__import__("triton").__version__)
