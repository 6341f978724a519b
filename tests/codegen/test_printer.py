"""Spelling of expressions in both kernel languages."""

from __future__ import annotations

import pytest

import attngen as ag
from attngen.codegen.dialects import CppDialect, TritonDialect
from attngen.codegen.printer import Printer
from attngen.compiler import plan_op, render_kernel
from attngen.errors import SpecError
from attngen.ir.expr import SCORE, Extent, K, Load, Local, Q, binary
from attngen.ir.params import Param
from attngen.ir.text import parse
from attngen.target import Target

PARAMS = (Param("bits", ("batch", "n"), "u8"), Param("slope", ()), Param("steps", (8,), "i32"))
NAMES = {"q": "q_pos", "k": "kv_pos", "b": "b"}


def printed(text, dialect):
    return Printer(dialect, NAMES, {param.name: param for param in PARAMS}).print(parse(text, PARAMS))


@pytest.mark.parametrize(
    ("text", "triton", "cpp"),
    [
        ("q >> 3", "q_pos >> 3", "q_pos >> 3"),
        ("q >> 40", "q_pos >> 31", "q_pos >> 31"),
        ("q + (k >> 3) * 2", "q_pos + (kv_pos >> 3) * 2", "q_pos + (kv_pos >> 3) * 2"),
        ("(q >> 1) >> k", "shift_right(q_pos >> 1, kv_pos)", "shift_right(q_pos >> 1, kv_pos)"),
        (
            "steps[k >> 3]",
            "tl.load(param_steps + (kv_pos >> 3), mask=((kv_pos >> 3) >= 0) & ((kv_pos >> 3) < param_steps_dim0), other=0)",
            "(((kv_pos >> 3) >= 0) & ((kv_pos >> 3) < param_steps_dim0) ? param_steps[(kv_pos >> 3)] : 0)",
        ),
        ("q + k >> 1", "(q_pos + kv_pos) >> 1", "(q_pos + kv_pos) >> 1"),
        (
            "bits[b, 0]",
            "tl.load(param_bits + tl.cast(b, tl.int64) * param_bits_dim1 + 0,"
            " mask=(0 >= 0) & (0 < param_bits_dim1), other=0).to(tl.int32)",
            "((0 >= 0) & (0 < param_bits_dim1) ? int32_t(param_bits[int64_t(b) * param_bits_dim1 + 0]) : 0)",
        ),
    ],
)
def test_shifts_and_bytes(text, triton, cpp):
    assert printed(text, TritonDialect()) == triton
    assert printed(text, CppDialect()) == cpp


def test_locals_and_extents_are_spelled_by_their_names():
    extent = Extent(Load("bits", (Q, K), "i32"), "lo")
    printer = Printer(CppDialect(), {"row_0": "row_term", extent: "bits_lo"}, {})
    assert printer.print(binary("add", Local("row_0", "f32"), 1.0)) == "row_term + 1.0f"
    assert printer.print(binary("mul", extent, 2)) == "bits_lo * 2"
    assert extent.children() == ()
    with pytest.raises(SpecError, match="'the hi extent of bits' has no value here"):
        printer.print(Extent(extent.load, "hi"))
    with pytest.raises(SpecError, match="'score' has no value here"):
        printer.print(SCORE)


def test_masks_reach_kernels_without_arithmetic_on_constants() -> None:
    """``-6 % 8`` of two literals has no helper's type to go by in Triton."""
    mask = ag.CustomMask(name="folded", expression="(q - k) % 8 == -6 % 8")
    spec = ag.AttentionSpec(heads=ag.MHA(num_heads=1, head_dim=16), mask=mask, dtype="fp16")
    plan = plan_op(spec, "prefill", Target.parse("interpret"), "triton")
    source = render_kernel(plan.kernel("forward")).source
    assert "floor_mod(q_pos - kv_pos, 8) == 2" in source
    assert "-6" not in source
