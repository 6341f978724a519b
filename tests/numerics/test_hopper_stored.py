"""Prefill over caches of 8 bits by the kernels of the cuda backend, run on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

import attngen as ag
from attngen.compiler import plan_op
from tests.backends.cuda_host.emulator import HOPPER, host_ops
from tests.numerics.harness import Case, run_case

CAUSAL, WINDOW = ag.Causal(), ag.Causal() & ag.SlidingWindow(left=37)
# Prefixes longer than a tile, requests without queries or keys, last pages that are full, and lengths that nothing divides.
QO_LENS, KV_LENS = (37, 0, 20, 150, 9), (293, 5, 70, 150, 0)
SEEDS = (0, 1, 2)  # of the order in which threads run, copies land and products are done
ONE = ag.MHA(1, 128)

CASES: dict[str, dict[str, Any]] = {
    "e4m3": {"kv": ag.Ragged(dtype="fp8_e4m3"), "mask": CAUSAL, "heads": ONE},
    "e4m3-fp16-full": {"kv": ag.Ragged(dtype="fp8_e4m3", scale="head"), "heads": ag.GQA(4, 2, 128), "dtype": "fp16"},
    "e5m2-window": {"kv": ag.Ragged(dtype="fp8_e5m2"), "mask": WINDOW, "heads": ONE},
    "e5m2-fp16": {"kv": ag.Ragged(dtype="fp8_e5m2"), "mask": CAUSAL, "dtype": "fp16"},
    "int8": {"kv": ag.Ragged(dtype="int8"), "mask": CAUSAL, "heads": ag.GQA(4, 2, 128)},
    "int8-fp16-tensor": {"kv": ag.Ragged(dtype="int8", scale="tensor"), "mask": CAUSAL, "dtype": "fp16"},
    "both-dims": {"kv": ag.Ragged(k_dtype="int8", v_dtype="fp8_e4m3"), "heads": ag.MHA(1, 192, head_dim_vo=80)},
    "wide": {"kv": ag.Ragged(dtype="int8"), "mask": CAUSAL, "heads": ag.MHA(1, 256)},
    "mods": {
        "kv": ag.Ragged(dtype="fp8_e4m3"),
        "mask": CAUSAL,
        "score_mods": (ag.ALiBi(), ag.SoftCap(cap=20.0)),
        "normalizer": ag.Softmax(sink=True),
    },
    "lists": {"kv": ag.Paged(16, dtype="int8"), "mask": CAUSAL & ag.Document("doc_ids"), "heads": ONE},
    "paged-8": {"kv": ag.Paged(8, dtype="fp8_e4m3"), "mask": CAUSAL},
    "paged-16": {"kv": ag.Paged(16, dtype="int8"), "mask": WINDOW, "heads": ag.GQA(4, 2, 64)},
    "paged-64-hnd": {"kv": ag.Paged(64, layout="HND", dtype="fp8_e4m3"), "mask": CAUSAL, "heads": ONE},
    "paged-rope": {"kv": ag.Paged(16, dtype="fp8_e4m3"), "mask": CAUSAL, "rope": ag.Rope(keys="append")},
}


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    spec = ag.AttentionSpec(**{"heads": ag.MHA(2, 64), **CASES[name]})
    assert plan_op(spec, "prefill", HOPPER, "cuda").kernel("forward").backend == "cuda"
    case = Case(f"hopper-{name}", spec, "prefill", QO_LENS, KV_LENS, seed=len(name))
    for seed in SEEDS:
        verdict = run_case(case, host_ops(spec, seed, ops=("prefill",)))
        assert not verdict.failures, (seed, verdict.failures)
