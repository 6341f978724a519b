"""Keys and values of every storage in Triton kernels: their numbers, and what they compile to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import attngen as ag
from attngen.backends.triton import argument_divisors
from tests.backends.stored_numbers import STORAGES, mismatches
from tests.backends.triton_kernels import forward_kernel, run_python

NUMBERS = "import sys; from tests.backends.stored_numbers import mismatches; print(mismatches(*sys.argv[1:]))"
HEADS = ag.GQA(num_qo_heads=8, num_kv_heads=2, head_dim=128)


def _forward(target: str, op: str, **fields: Any) -> Any:
    """The built forward kernel of a spec's op."""
    return forward_kernel(ag.AttentionSpec(heads=HEADS, mask=ag.Causal(), **fields), target, op)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_numbers_are_those_that_dequantize_defines(dtype: str) -> None:
    assert run_python(NUMBERS, "interpret", dtype, "cpu", TRITON_INTERPRET="1").strip() == "[]"


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", STORAGES)
def test_a_gpu_reads_the_same_numbers(name: str, dtype: str, dim: int) -> None:
    assert mismatches(None, dtype, "cuda", (name,), dim) == []


@pytest.mark.parametrize("op", ["decode", "prefill"])
@pytest.mark.parametrize("target", ["cuda:sm90a", "cuda:sm80", "hip:gfx942"])
@pytest.mark.parametrize("name", ["fp8_e4m3", "int8-token", "int4-32", "nvfp4"])
def test_every_storage_builds_without_its_device(name: str, target: str, op: str) -> None:
    kernel = _forward(target, op, kv=ag.Paged(page_size=16, **STORAGES[name]))
    assert kernel.binary.read_bytes()[:4] == b"\x7fELF"


def test_queries_of_fp8_are_multiplied_with_keys_of_fp8_by_the_hardware() -> None:
    # On sm90a tiles of few rows, as decode has, are widened to fp16 by Triton, exactly.
    for target, op in (("cuda:sm90a", "prefill"), ("cuda:sm89", "decode")):
        kernel = _forward(target, op, dtype="fp8_e4m3", kv=ag.Paged(page_size=16))
        assert "e4m3.e4m3" in Path(kernel.binary).with_suffix(".ptx").read_text(encoding="utf-8")
    for target in ("cuda:sm80", "cuda:sm86"):
        with pytest.raises(ag.UnsupportedError, match="does not multiply fp8 queries") as error:
            _forward(target, "decode", dtype="fp8_e4m3", kv=ag.Paged(page_size=16))
        assert "read the same fp8 cache" in error.value.fix


@pytest.mark.parametrize(
    ("name", "op", "target"),
    [
        ("int4-zero", "decode", "cuda:sm90a"),
        ("nvfp4", "prefill", "cuda:sm80"),
        ("int4-32", "decode", "cuda:sm86"),
        ("nvfp4", "decode", "hip:gfx942"),
    ],
)
def test_packed_keys_turn_as_they_come_out_of_storage(name: str, op: str, target: str) -> None:
    for rope in (ag.Rope(), ag.Rope(dim=64), ag.Rope(interleaved=True)):
        assert _forward(target, op, rope=rope, kv=ag.Paged(page_size=16, **STORAGES[name])).binary.exists()


def test_pairs_that_start_inside_of_a_byte_are_refused() -> None:
    spec = ag.AttentionSpec(heads=HEADS, rope=ag.Rope(dim=62), kv=ag.Paged(page_size=16, dtype="int4"))
    with pytest.raises(ag.UnsupportedError, match="does not rotate 62 dims of keys as they come out of storage int4"):
        forward_kernel(spec, "cuda:sm90a", "decode")


def test_rows_of_few_bytes_are_promised_the_alignment_that_they_have() -> None:
    heads = ag.MHA(num_heads=2, head_dim=40)
    ops = ag.compile(
        ag.AttentionSpec(heads=heads, kv=ag.Paged(16, dtype="fp8_e4m3")), target="cuda:sm90a", backend="triton", ops=()
    )
    divisors = argument_divisors(ops.op("decode").plan.kernel("forward"))
    assert divisors["k"] == divisors["v_stride_t"] == 8
    assert divisors["out"] == 16
    spec = ag.AttentionSpec(heads=heads, kv=ag.Paged(16), dtype="fp8_e4m3")
    ops = ag.compile(spec, target="cuda:sm90a", backend="triton", ops=())
    assert argument_divisors(ops.op("decode").plan.kernel("forward"))["q_stride_t"] == 8
