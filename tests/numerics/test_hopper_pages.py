"""Prefill over pages by the kernels of the cuda backend, run on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attngen as ag
from attngen.compiler import plan_op
from tests.backends.cuda_host.emulator import HOPPER, host_ops
from tests.numerics.harness import Case, run_case

CAUSAL, WINDOW = ag.Causal(), ag.Causal() & ag.SlidingWindow(left=37)
SINKS = ag.Causal() & (ag.SlidingWindow(left=30) | ag.GlobalTokens(5))
# Prefixes longer than a tile, requests without queries or keys, last pages that are full, and lengths that nothing divides.
QO_LENS, KV_LENS = (37, 0, 20, 150, 9), (293, 5, 70, 150, 0)
SEEDS = (0, 1, 2)  # of the order in which threads run, copies land and products are done

# Pages in which tiles of 128 keys come as a whole, in parts, in parts of pages that tiles do not divide, and row by row.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "8-table": ("table", {"kv": ag.Paged(8), "mask": CAUSAL}),
    "16-csr": ("csr", {"kv": ag.Paged(16), "mask": CAUSAL, "dtype": "fp16"}),
    "16-full-176": ("table", {"kv": ag.Paged(16), "heads": ag.MHA(1, 128)}),
    "24-hnd": ("csr", {"kv": ag.Paged(24, layout="HND"), "mask": WINDOW}),
    "32-group": ("table", {"kv": ag.Paged(32), "mask": CAUSAL, "heads": ag.GQA(4, 2, 64)}),
    "64-stacked-hnd": ("stacked", {"kv": ag.Paged(64, layout="HND"), "mask": WINDOW}),
    "64-full-176": ("csr", {"kv": ag.Paged(64), "heads": ag.MHA(1, 128)}),
    "128-stacked": ("stacked", {"kv": ag.Paged(128), "mask": CAUSAL, "score_mods": (ag.ALiBi(),)}),
    "256-hole": ("table", {"kv": ag.Paged(256), "mask": SINKS}),
    "16-dims": ("table", {"kv": ag.Paged(16), "mask": CAUSAL, "heads": ag.MHA(1, 192, head_dim_vo=128)}),
    "16-lists": ("table", {"kv": ag.Paged(16), "mask": CAUSAL & ag.Document("doc_ids")}),
    "1-table": ("table", {"kv": ag.Paged(1), "mask": CAUSAL, "heads": ag.GQA(4, 2, 64)}),
    "1-full-176": ("csr", {"kv": ag.Paged(1), "heads": ag.MHA(1, 128), "dtype": "fp16"}),
    "3-stacked-hnd": ("stacked", {"kv": ag.Paged(3, layout="HND"), "mask": WINDOW}),
    "4-dims": ("table", {"kv": ag.Paged(4), "mask": CAUSAL, "heads": ag.MHA(2, 192, head_dim_vo=40)}),
    "5-hole": ("csr", {"kv": ag.Paged(5), "mask": SINKS, "normalizer": ag.Softmax(sink=True)}),
    "7-lists": ("table", {"kv": ag.Paged(7), "mask": CAUSAL & ag.Document("doc_ids")}),
    "12-dropout": ("table", {"kv": ag.Paged(12), "mask": CAUSAL, "dropout": 0.2}),
    "16-rope": ("csr", {"kv": ag.Paged(16), "mask": CAUSAL, "rope": ag.Rope(keys="append")}),
    "3-rope-part": (
        "table",
        {
            "kv": ag.Paged(3),
            "heads": ag.MHA(2, 72, head_dim_vo=64),
            "mask": WINDOW,
            "rope": ag.Rope(dim=24, theta=500.0, interleaved=True, keys="append"),
        },
    ),
    "32-rope-table": (
        "table",
        {
            "kv": ag.Paged(32),
            "heads": ag.MHA(1, 128),
            "dtype": "fp16",
            "rope": ag.Rope(table="cos_sin", keys="append"),
        },
    ),
    "32-fp8": ("csr", {"kv": ag.Paged(32), "mask": WINDOW, "heads": ag.MHA(1, 128), "dtype": "fp8_e4m3"}),
    "40-sink": ("csr", {"kv": ag.Paged(40), "mask": WINDOW, "normalizer": ag.Softmax(sink=True)}),
}


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    pages, fields = CASES[name]
    spec = ag.AttentionSpec(**{"heads": ag.MHA(2, 64), **fields})
    assert plan_op(spec, "prefill", HOPPER, "cuda").kernel("forward").backend == "cuda"
    case = Case(f"hopper-{name}", spec, "prefill", QO_LENS, KV_LENS, pages=pages, seed=len(name))
    for seed in SEEDS:
        verdict = run_case(case, host_ops(spec, seed, ops=("prefill",)))
        assert not verdict.failures, (seed, verdict.failures)


def _ragged(lens: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lens).cumsum(0)], dtype=torch.int32)


@pytest.mark.parametrize("size", [1, 4, 8, 16, 32, 64, 128, 256])
def test_keys_in_pages_that_requests_share_give_the_same_bits_as_adjacent_ones(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    heads, prefix, lens, qo_lens = ag.MHA(1, 64), 256, (389, 300), (140, 33)
    shared = torch.randn(2, prefix, 1, 64, generator=generator).bfloat16()
    own = [torch.randn(2, n - prefix, 1, 64, generator=generator).bfloat16() for n in lens]
    q = torch.randn(sum(qo_lens), 1, 64, generator=generator).bfloat16()
    k, v = torch.cat([torch.cat([shared, rest], 1) for rest in own], 1)
    spec = ag.AttentionSpec(heads=heads, mask=CAUSAL, kv=ag.Ragged(), dtype="bf16")
    wanted = host_ops(spec).prefill(q, k, v, qo_indptr=_ragged(qo_lens), kv_indptr=_ragged(lens))
    assert wanted.isfinite().all()

    parts = [shared, *(torch.cat([x, x.new_full((2, -x.shape[1] % size, 1, 64), torch.nan)], 1) for x in own)]
    counts = [part.shape[1] // size for part in parts]
    order = torch.randperm(sum(counts) + 1, generator=generator)
    pool = torch.full((2, len(order), size, 1, 64), torch.nan).bfloat16()
    pool[:, order[:-1]] = torch.cat(parts, 1).view(2, -1, size, 1, 64)
    prefix_pages, *own_pages = order[:-1].int().split(counts)
    rows = [torch.cat([prefix_pages, pages]) for pages in own_pages]
    table = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    spec = ag.AttentionSpec(heads=heads, mask=CAUSAL, kv=ag.Paged(size), dtype="bf16")
    kv_lens = torch.tensor(lens, dtype=torch.int32)
    got = host_ops(spec, 1).prefill(q, tuple(pool), qo_indptr=_ragged(qo_lens), page_table=table, kv_lens=kv_lens)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("size", [2, 16])
def test_pages_that_no_query_sees_are_not_read(size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    kv_len, qo_len, left = 400, 40, 70
    first = kv_len - qo_len - left  # the first key that any query sees
    pool = torch.randn(2, kv_len // size + 1, size, 1, 64, generator=generator).bfloat16()
    pool[:, -1] = torch.nan
    spec = ag.AttentionSpec(
        heads=ag.MHA(1, 64), mask=ag.Causal() & ag.SlidingWindow(left=left), kv=ag.Paged(size), dtype="bf16"
    )
    q = torch.randn(qo_len, 1, 64, generator=generator).bfloat16()
    table = torch.arange(kv_len // size, dtype=torch.int32)[None]
    unread = torch.tensor([[kv_len // size]], dtype=torch.int32)
    evicted = torch.cat([unread.expand(1, first // size), table[:, first // size :], unread.expand(1, 9)], 1)
    lens = {"qo_indptr": _ragged((qo_len,)), "kv_lens": torch.tensor([kv_len], dtype=torch.int32)}
    outs = [host_ops(spec).prefill(q, tuple(pool), page_table=pages, **lens) for pages in (table, evicted)]
    assert outs[0].isfinite().all()
    assert torch.equal(*outs)
