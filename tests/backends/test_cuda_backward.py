"""The backward kernels of the cuda backend build for Hopper without spills, and no product waits for another."""

from __future__ import annotations

import re

import pytest

import attngen as ag
from attngen.backends.cuda import compile_cubin
from attngen.compiler import plan_op, render_kernel
from attngen.target import Target

H200 = Target.parse("cuda:sm90a")
SPECS = {
    "full-64": {"heads": ag.MHA(4, 64)},
    "causal-128": {"heads": ag.MHA(4, 128), "mask": ag.Causal()},
    "window-ragged-fp16": {
        "heads": ag.GQA(8, 2, 128),
        "mask": ag.Causal() & ag.SlidingWindow(left=1023),
        "kv": ag.Ragged(),
        "dtype": "fp16",
    },
    "soft-cap": {"heads": ag.GQA(8, 2, 128), "mask": ag.Causal(), "score_mods": (ag.SoftCap(cap=30.0),)},
    "alibi-96": {"heads": ag.MHA(4, 96), "mask": ag.Causal(), "score_mods": (ag.ALiBi(),)},
    "documents": {"heads": ag.MHA(4, 128), "mask": ag.Causal() & ag.Document("doc_ids"), "kv": ag.Ragged()},
    "hole": {"heads": ag.MHA(4, 64), "mask": ag.Causal() & (ag.SlidingWindow(left=200) | ag.GlobalTokens(4))},
    "neighborhood": {"heads": ag.MHA(4, 128), "mask": ag.Neighborhood((10, 13), (3, 5))},
    "full-256": {"heads": ag.MHA(4, 256)},
    "window-256-ragged-fp16": {
        "heads": ag.GQA(8, 2, 256),
        "mask": ag.Causal() & ag.SlidingWindow(left=1023),
        "kv": ag.Ragged(),
        "dtype": "fp16",
    },
    "soft-cap-256": {"heads": ag.GQA(8, 2, 256), "mask": ag.Causal(), "score_mods": (ag.SoftCap(cap=30.0),)},
    "alibi-256": {"heads": ag.MHA(4, 256), "mask": ag.Causal(), "score_mods": (ag.ALiBi(),)},
    "documents-256": {"heads": ag.MHA(4, 256), "mask": ag.Causal() & ag.Document("doc_ids"), "kv": ag.Ragged()},
    "neighborhood-256": {"heads": ag.MHA(4, 256), "mask": ag.Neighborhood((10, 13), (3, 5))},
    "hole-192-128": {
        "heads": ag.MHA(4, 192, head_dim_vo=128),
        "mask": ag.Causal() & (ag.SlidingWindow(left=200) | ag.GlobalTokens(4)),
    },
    "causal-64-160": {"heads": ag.MHA(4, 64, head_dim_vo=160), "mask": ag.Causal()},
    "causal-128-64": {"heads": ag.MHA(4, 128, head_dim_vo=64), "mask": ag.Causal()},
    "sink-gate": {"heads": ag.MQA(4, 64), "normalizer": ag.Softmax(sink="sinks"), "output_gate": "gate"},
}


@pytest.mark.parametrize("name", SPECS)
def test_kernels_build_without_spills(name: str) -> None:
    plan = plan_op(ag.AttentionSpec(**SPECS[name]), "backward", H200, "cuda")
    kernels = [kernel for kernel in plan.kernels if kernel.backend == "cuda"]
    assert [kernel.schedule for kernel in kernels] == ["dqkv", "dq_cast"]
    for kernel in kernels:
        rendered = render_kernel(kernel)
        _, log = compile_cubin(rendered, [flag for flag in rendered.flags if not flag.startswith("launch:")])
        assert re.findall(r"(\d+) bytes spill stores", log) == ["0"]
        assert not re.findall(r"C751[0-5]", log), "ptxas serializes products"
