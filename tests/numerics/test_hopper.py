"""The corpus by kernels of the cuda backend, run on the CPU: decode over stored caches, prefill and backward."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import attngen as ag
from attngen.compiler import plan_op
from attngen.dtypes import quantize
from attngen.variant import OpName
from tests.backends.cuda_host.emulator import HOPPER, host_ops
from tests.numerics.axes import declare
from tests.numerics.cases import corpus
from tests.numerics.harness import Case, run_case

WINDOW = ag.Causal() & ag.SlidingWindow(left=37)
SINKS = ag.Causal() & (ag.SlidingWindow(left=30) | ag.GlobalTokens(5))


@cache
def _served() -> list[Case]:
    """Cases of decode and of prefill that are not of shipped specs, which are made of what others cover."""
    shipped = tuple(f"{name}-" for name in ag.shipped_specs())
    ops = ("decode", "prefill")
    cases = [case for case in corpus(("bf16", "fp16")) if case.op in ops and not case.name.startswith(shipped)]
    return [case for case in cases if plan_op(case.spec, case.op, HOPPER, "cuda").kernel("forward").backend == "cuda"]


def _more() -> list[Case]:
    """Every storage with masks, mods, sinks and gates, rows of several tokens, many parts, and pages that tiles do not divide."""

    def case(
        name: str, kv: Any, group: int = 4, dim: int = 128, qo: int = 1, lens: Any = (129, 0, 40), **fields: Any
    ) -> Case:
        heads = ag.GQA(num_qo_heads=2 * group, num_kv_heads=2, head_dim=dim)
        spec = ag.AttentionSpec(heads=heads, kv=kv, **fields)
        return Case(f"hopper-{name}", spec, "decode", (qo,) * len(lens), lens)

    return [
        case("int4-window", ag.Paged(8, dtype="int4"), mask=WINDOW, qo=3),
        case("int4-zero-hole", ag.Paged(24, dtype="int4", zero_point=True), mask=SINKS, group=5, qo=2),
        case("int4-zero-wide", ag.Ragged(dtype="int4", zero_point=True), dim=256, mask=ag.Causal()),
        case("int4-64-parts", ag.Paged(64, dtype="int4", group_size=64), lens=(2300, 33), group=2),
        case("nvfp4-window", ag.Paged(3, dtype="nvfp4"), mask=WINDOW, score_mods=(ag.SoftCap(cap=20.0),), qo=2),
        case("nvfp4-eight", ag.Ragged(dtype="nvfp4"), group=8, mask=ag.Causal(), normalizer=ag.Softmax(sink=True)),
        case("nvfp4-wide", ag.Paged(16, dtype="nvfp4"), dim=256, group=1),
        case("nvfp4-parts", ag.Paged(32, dtype="nvfp4"), lens=(2300,), mask=ag.Causal(), output_gate="gate"),
        case("mxfp4-chunks", ag.Paged(16, dtype="mxfp4"), mask=ag.Chunked(48), score_mods=(ag.ALiBi(),), group=3),
        case(
            "e4m3-page-1", ag.Paged(1, dtype="fp8_e4m3", scale="token"), dim=64, mask=ag.Causal() & ag.Dilated(3), qo=3
        ),
        case("int8-parts", ag.Contiguous(dtype="int8"), lens=(1500, 700), group=8, normalizer=ag.Softmax(sink=True)),
        case("mixed", ag.Paged(16, k_dtype="int8", v_dtype="nvfp4"), mask=WINDOW, group=3),
        case("mixed-blocks", ag.Paged(16, k_dtype="nvfp4", v_dtype="int4"), mask=SINKS, qo=2),
        case("plain-keys", ag.Paged(16, k_dtype="bf16", v_dtype="fp8_e5m2"), dim=256, mask=ag.Causal()),
    ]


@pytest.mark.parametrize("case", [*_served(), *_more()], ids=lambda case: case.name)
def test_case(case: Case) -> None:
    verdict = run_case(case, host_ops(case.spec), "cpu")
    assert not verdict.failures, verdict.failures


# Spans with full tiles and holes, tests of tiles, lists; lengths that tiles do not divide, requests without queries or keys.
TRAINED: dict[str, dict[str, Any]] = {
    "full-64": {"heads": ag.GQA(2, 1, 64)},
    "causal-128": {"heads": ag.GQA(2, 1, 128), "mask": ag.Causal()},
    "window-ragged": {"heads": ag.GQA(4, 2, 64), "mask": WINDOW, "kv": ag.Ragged(), "dtype": "fp16"},
    "hole": {"heads": ag.MHA(1, 128), "mask": SINKS, "kv": ag.Ragged()},
    "soft-cap": {"heads": ag.MHA(2, 128), "mask": ag.Causal(), "score_mods": (ag.SoftCap(cap=5.0),)},
    "soft-cap-64": {"heads": ag.MHA(1, 64), "score_mods": (ag.SoftCap(cap=5.0),), "dtype": "fp16"},
    "alibi": {"heads": ag.MHA(2, 64), "mask": ag.Causal(), "score_mods": (ag.ALiBi(),)},
    "neighborhood": {"heads": ag.MHA(1, 64), "mask": ag.Neighborhood((14, 13), (5, 5))},
    "documents": {"heads": ag.GQA(2, 1, 64), "mask": ag.Causal() & ag.Document("doc_ids"), "kv": ag.Ragged()},
    "narrow": {"heads": ag.GQA(2, 2, 96, head_dim_vo=80), "mask": ag.Causal()},
    "narrow-values": {"heads": ag.MHA(2, 128, head_dim_vo=64), "mask": ag.Causal()},
    "narrow-keys": {"heads": ag.MHA(2, 64, head_dim_vo=128), "mask": ag.Causal()},
    "causal-256": {"heads": ag.GQA(2, 1, 256), "mask": ag.Causal()},
    "latent": {"heads": ag.MHA(2, 192, head_dim_vo=128), "mask": ag.Causal()},
    "wide-window-ragged": {"heads": ag.GQA(4, 2, 256), "mask": WINDOW, "kv": ag.Ragged(), "dtype": "fp16"},
    "wide-hole": {"heads": ag.MHA(1, 160, head_dim_vo=136), "mask": SINKS, "kv": ag.Ragged()},
    "wide-soft-cap": {"heads": ag.MHA(1, 192), "mask": ag.Causal(), "score_mods": (ag.SoftCap(cap=5.0),)},
    "wide-documents": {"heads": ag.GQA(2, 1, 192), "mask": ag.Causal() & ag.Document("doc_ids"), "kv": ag.Ragged()},
    "wide-values": {"heads": ag.MHA(1, 64, head_dim_vo=192)},
}

# Other numbers: of out, and 8-bit ones of queries, keys and values, with factors of tensors and heads.
SERVED: dict[str, dict[str, Any]] = {
    "fp16-out": {"heads": ag.MHA(1, 64), "mask": ag.Causal(), "out_dtype": "fp16"},
    "bf16-out": {"heads": ag.MHA(1, 64), "mask": ag.Causal(), "dtype": "fp16", "out_dtype": "bf16"},
    "fp8": {"heads": ag.MHA(2, 128), "mask": ag.Causal(), "dtype": "fp8_e4m3"},
    "fp8-soft-cap": {
        "heads": ag.MHA(2, 128, head_dim_vo=96),
        "dtype": "fp8_e4m3",
        "kv": ag.Ragged(scale="head"),
        "score_mods": (ag.SoftCap(cap=5.0),),
        "out_dtype": "fp16",
    },
    "fp8-window": {
        "heads": ag.MHA(1, 256),
        "mask": WINDOW,
        "dtype": "fp8_e4m3",
        "kv": ag.Ragged(),
        "normalizer": ag.Softmax(sink=True),
    },
    "fp8-wide": {"heads": ag.MHA(2, 192, head_dim_vo=128), "mask": ag.Causal(), "dtype": "fp8_e4m3"},
    "fp8-documents": {
        "heads": ag.MHA(1, 80),
        "mask": ag.Causal() & ag.Document("doc_ids"),
        "dtype": "fp8_e4m3",
        "kv": ag.Ragged(),
        "score_mods": (ag.ALiBi(),),
    },
}


def _case(name: str, op: OpName) -> Case:
    fields = (TRAINED | SERVED)[name]
    if op == "prefill":  # heads of a group have a second kernel, of Triton
        heads = fields["heads"]
        fields = fields | {"heads": ag.MHA(heads.num_kv_heads, heads.head_dim, head_dim_vo=heads.head_dim_vo)}
    spec = ag.AttentionSpec(**fields)
    lens = ((37, 0, 3, 150), (37, 5, 0, 200)) if spec.kv.kind == "ragged" else ((140, 9), (140, 3))
    return Case(f"hopper-{name}", spec, op, *lens, strided=name == "alibi", seed=len(name))


SEEDS = (0, 1, 2)  # of the order in which threads run, copies land and products are done
# Tiles of queries that meet from 0 to 6 tiles of keys, in one block after the other.
MANY = (
    declare((1, 1), (64, 64), mask=ag.Causal(), kv=ag.Ragged()),
    (200, 0, 1, 400, 130, 700),
    (800, 5, 0, 400, 130, 900),
)


@pytest.mark.parametrize("name", [*TRAINED, *SERVED])
def test_prefill(name: str) -> None:
    case = _case(name, "prefill")
    assert plan_op(case.spec, "prefill", HOPPER, "cuda").kernel("forward").backend == "cuda"
    for seed in SEEDS:
        verdict = run_case(case, host_ops(case.spec, seed))
        assert not verdict.failures, (seed, verdict.failures)


def test_prefill_of_many_tiles() -> None:
    spec, qo_lens, kv_lens = MANY
    for seed in SEEDS:
        verdict = run_case(Case("hopper-many", spec, "prefill", qo_lens, kv_lens, seed=3), host_ops(spec, seed))
        assert not verdict.failures, (seed, verdict.failures)


@pytest.mark.parametrize("name", TRAINED)
def test_backward(name: str) -> None:
    case = _case(name, "backward")
    assert plan_op(case.spec, "backward", HOPPER, "cuda").kernel("dqkv").backend == "cuda"
    for seed in SEEDS[:2]:
        verdict = run_case(case, host_ops(case.spec, seed, ops=("backward",)))
        assert not verdict.failures, (seed, verdict.failures)


@pytest.mark.parametrize("dtype", ["int4", "nvfp4", "fp8_e4m3"])
def test_the_same_numbers_give_the_same_bits_however_they_lie(dtype: str) -> None:
    generator = torch.Generator().manual_seed(2)
    heads, lens = ag.GQA(num_qo_heads=8, num_kv_heads=2, head_dim=64), (389, 70)
    storage = ag.Paged(16, dtype=dtype).storages("bf16")[0]
    factor = torch.tensor(0.02) if storage.scale else None
    sides = [
        [x for x in quantize(torch.randn(2, 392, 2, 64, generator=generator), storage, factor) if x is not None]
        for _ in "kv"
    ]
    q = torch.randn(2, 8, 64, generator=generator).bfloat16()
    scales = {} if factor is None else {"k_scale": factor, "v_scale": factor}
    kv_lens = torch.tensor(lens, dtype=torch.int32)

    def decode(kv: Any, cache: Any, **pages: torch.Tensor) -> torch.Tensor:
        spec = ag.AttentionSpec(heads=heads, mask=ag.Causal(), kv=kv, dtype="bf16")
        return host_ops(spec).decode(q, *cache, kv_lens=kv_lens, **pages, **scales)

    wanted = decode(ag.Contiguous(dtype=dtype), [parts[0] if len(parts) == 1 else tuple(parts) for parts in sides])
    assert wanted.isfinite().all()
    for size, layout in ((1, "NHD"), (8, "HND"), (56, "NHD")):
        per_request = 392 // size
        order = torch.randperm(2 * per_request, generator=generator)
        pools = []
        for parts in sides:
            pages = [x.reshape(2 * per_request, size, *x.shape[2:])[order.argsort()] for x in parts]
            pages = [x.transpose(1, 2).contiguous() if layout == "HND" else x for x in pages]
            pools.append(pages[0] if len(pages) == 1 else tuple(pages))
        table = order.view(2, per_request).int()
        got = decode(ag.Paged(size, dtype=dtype, layout=layout), [tuple(pools)], page_table=table)
        assert torch.equal(got, wanted), (size, layout)
