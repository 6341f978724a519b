"""Prefill on Hopper with other weights than those of a plain softmax, run on the CPU: element-wise normalizers, and dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attngen as ag
from attngen.compiler import plan_op
from tests.backends.cuda_host.emulator import HOPPER, host_ops
from tests.numerics.harness import Case, run_case

CAUSAL, WINDOW = ag.Causal(), ag.Causal() & ag.SlidingWindow(left=37)
QO_LENS, KV_LENS = (37, 0, 20, 150), (37, 5, 70, 301)
SEEDS = (0, 1)  # of the order in which threads run, copies land and products are done
RAGGED = ag.Ragged()

CASES: dict[str, dict[str, Any]] = {
    "sigmoid": {"kv": RAGGED, "normalizer": ag.Sigmoid()},
    "sigmoid-bias": {
        "kv": ag.Paged(16),
        "mask": WINDOW,
        "normalizer": ag.Sigmoid(bias="bias"),
        "score_mods": (ag.ALiBi(),),
    },
    "relu": {"kv": RAGGED, "mask": WINDOW, "normalizer": ag.ReLU(), "output_gate": "gate"},
    "squared-relu": {"heads": ag.MHA(1, 192, head_dim_vo=128), "mask": CAUSAL, "normalizer": ag.ReLU(power=2)},
    "silu": {"heads": ag.GQA(4, 2, 64), "kv": ag.Paged(32), "mask": CAUSAL, "normalizer": ag.SiLU(), "dtype": "fp16"},
    "silu-documents": {"kv": RAGGED, "mask": CAUSAL & ag.Document("doc_ids"), "normalizer": ag.SiLU()},
    "dropout": {"kv": RAGGED, "heads": ag.GQA(2, 1, 64), "mask": CAUSAL, "dropout": 0.3},
    "dropout-112": {"heads": ag.MHA(1, 192, head_dim_vo=128), "mask": CAUSAL, "dropout": 0.1},
    "dropout-sink": {
        "kv": ag.Paged(8),
        "mask": WINDOW,
        "normalizer": ag.Softmax(sink=True),
        "dropout": 0.5,
        "dtype": "fp16",
    },
    "dropout-fp8": {"heads": ag.MHA(1, 128), "mask": CAUSAL, "dropout": 0.2, "dtype": "fp8_e4m3"},
    "dropout-sigmoid": {"kv": RAGGED, "mask": CAUSAL, "normalizer": ag.Sigmoid(bias=-0.5), "dropout": 0.25},
}


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    spec = ag.AttentionSpec(**{"heads": ag.MHA(2, 64), **CASES[name]})
    assert plan_op(spec, "prefill", HOPPER, "cuda").kernel("forward").backend == "cuda"
    kv_lens = KV_LENS if spec.kv.kind != "contiguous" else QO_LENS
    case = Case(f"hopper-{name}", spec, "prefill", QO_LENS, kv_lens, seed=len(name))
    for seed in SEEDS:
        verdict = run_case(case, host_ops(spec, seed, ops=("prefill",)))
        assert not verdict.failures, (seed, verdict.failures)


def test_words_are_those_of_positions() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(4, 70, 1, 64, generator=generator).bfloat16() for _ in "qk")
    v = torch.ones_like(q)
    spec = ag.AttentionSpec(heads=ag.MHA(1, 64), dropout=0.5, out_dtype="fp32")
    seed, offset = (torch.tensor([x]) for x in (2**40 + 7, 3))
    stream = {"seed": seed, "offset": offset, "kv_offset": torch.arange(4, dtype=torch.int32)}
    got = host_ops(spec).prefill(q, k, v, **stream)
    wanted = ag.compile(spec, backend="reference").prefill(q, k, v, **stream)
    assert float(wanted.var(1).min()) > 1e-4  # rows lose different weights
    torch.testing.assert_close(got, wanted, atol=4e-3, rtol=4e-3)  # weights of 8 bits
