"""Random expressions have one value: by the torch evaluator, in C++, and in Triton under its interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attngen.ir.evaluate import evaluate
from attngen.ir.expr import FLOAT_UNARY, Binary, Const, Expr, Unary
from attngen.ir.simplify import simplify
from tests.codegen.languages import POINTS, data, points, run_cpp, run_triton
from tests.ir.expressions import SMALL, stable

NUMBER = 150


def sample() -> list[Expr]:
    """Distinct random expressions of all types, the same in every run."""
    found: dict[Expr, None] = {}

    @stable(3 * NUMBER)
    @given(st.one_of(SMALL.f32(4), SMALL.f32(3), SMALL.i32(4), SMALL.boolean(4)))
    def collect(expr: Expr) -> None:
        if expr.children() and is_comparable(expr):
            found[expr] = None

    collect()
    return list(found)[:NUMBER]


def is_comparable(expr: Expr) -> bool:
    """No remainder by the integer 0, which Triton leaves undefined; no floor of what rounding alone may move across a step."""
    for node in expr.walk():
        if isinstance(node, Binary) and node.op in ("floordiv", "mod") and node.y == Const(0):
            return False
        if isinstance(node, Unary) and node.op == "floor":
            inexact = [
                x for x in node.x.walk() if isinstance(x, (Unary, Binary)) and x.op in (*FLOAT_UNARY, "div", "mul")
            ]
            if inexact:
                return False
    return True


@pytest.fixture(scope="module")
def exprs() -> list[Expr]:
    found = sample()
    assert len(found) == NUMBER
    assert {expr.type for expr in found} == {"bool", "i32", "f32"}
    assert any(isinstance(node, Binary) and node.op == "shr" for expr in found for node in expr.walk())
    return found


def check(exprs: list[Expr], results: torch.Tensor) -> None:
    """Integers and bools exactly; floats within float32's rounding, at points where that does not change much."""
    compared = 0
    for expr, found in zip(exprs, results, strict=True):
        exact = evaluate(expr, points(), data()).double().expand(POINTS)
        if expr.type != "f32":
            assert torch.equal(found, exact), expr
            continue
        rounded = evaluate(expr, points(), data(), torch.float32).double().expand(POINTS)
        steady = exact.isfinite() & (exact.abs() < 1e6) & ((rounded - exact).abs() <= 1e-5 * (1 + exact.abs()))
        assert ((found - exact).abs() <= 1e-3 * (1 + exact.abs()))[steady].all(), expr
        compared += int(steady.sum())
    assert compared > 20 * POINTS


def test_cpp_agrees_with_the_evaluator(exprs: list[Expr], tmp_path: Path) -> None:
    check(exprs, run_cpp(exprs, tmp_path))


def test_triton_agrees_with_the_evaluator(exprs: list[Expr], tmp_path: Path) -> None:
    """Simplified first: Triton's functions need a tensor, and constants alone are Python's."""
    check(exprs, run_triton([simplify(expr) for expr in exprs], tmp_path))
