"""Shipped specs build to machine code for GPUs that are not here."""

from __future__ import annotations

from typing import Any

import pytest

import attngen as ag
from attngen.backends.triton_compile import SHARED_LIMITS

# Every spec for the two main targets; for the others a subset that covers dtypes, storages, head dims and masks.
COVERING = ("minilm", "llama3-70b", "qwen3-8b", "gemma2-9b-local", "bloom-7b")
# Some kernel of these spills more than a few registers on sm90a, or waits for each of its products (ptxas says so): norms and
# rotations at head dim 256, reads of data for each pair, masks whose tiles a branch tells apart, and latents, whose output takes
# half of all registers; two only under triton 3.6.
UNTUNED = (
    "alphafold2-row",
    "alphafold3-pair-bias",
    "bd3lm-owt",
    "deepseek-v3",
    "flashinfer-custom-mask",
    "gemma2-9b-local",
    "hstu-large",
    "hunyuanvideo-gna",
    "llama2-7b-streaming",
    "llama3-8b-eagle2",
    "llama3-8b-minference",
    "kimi-k2",
    "longformer-base",
    "modernbert-base-local",
    "nat-tiny",
    "paligemma-3b",
    "qwen3-next-80b",
    "sdar-8b",
    "sparse-transformer-strided",
    "swin-v2-tiny",
)
# Also built under the oldest supported triton: one of each feature of the templates.
OLDEST = (
    "bert-base-training",
    "bloom-7b",
    "falcon-7b",
    "gemma2-9b-local",
    "gpt-oss-20b-global",
    "llama2-7b-streaming",
    "llama3-70b",
    "llama3-8b",
    "llama3-8b-eagle2",
    "mistral-7b",
    "olmo2-7b-packed",
    "qwen3-8b",
    "qwen3-next-80b",
    "sigmoid-vit-b16",
    "t5-small-encoder",
)
PAIRS = [(name, target) for target in ("cuda:sm90a", "hip:gfx942") for name in sorted(ag.shipped_specs())]
PAIRS += [
    (name, target)
    for index, target in enumerate(("cuda:sm80", "cuda:sm86", "cuda:sm89", "cuda:sm100", "hip:gfx950"))
    for name in (COVERING[index], COVERING[(index + 2) % len(COVERING)])
]


def pairs() -> list[Any]:
    """Sets of test parameters, those of :data:`OLDEST` marked."""
    marks = {name: [pytest.mark.triton_compile] for name in OLDEST}
    return [pytest.param(name, target, marks=marks.get(name, ())) for name, target in PAIRS]


@pytest.mark.parametrize(("name", "target"), pairs())
def test_every_kernel_of_every_op_builds(name: str, target: str) -> None:
    spec = ag.load_spec(name)
    ops = ag.compile(spec, target=target, backend="triton")
    expected = {
        "prefill",
        "append",
        *(() if spec.dropout else ("decode",)),
        *(() if spec.kv.kind == "paged" and spec.heads.kind != "mla" else ("backward",)),
    }
    assert ops.artifacts.keys() == expected
    for op, folders in ops.artifacts.items():
        assert len(folders) == len(ops.op(op).plan.kernels)
        for kernel in ops.op(op).kernels:
            assert kernel.binary.read_bytes()[:4] == b"\x7fELF"
            assert kernel.metadata["shared"] <= SHARED_LIMITS[ops.op(op).plan.target.arch]
            if target == "cuda:sm90a" and name not in UNTUNED:
                assert kernel.metadata["spills"] <= 192, kernel.plan.entry  # bytes: none in an unmasked loop
                assert not kernel.metadata.get("warnings"), kernel.metadata["warnings"]
