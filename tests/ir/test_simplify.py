"""Simplified expressions have the value of the original, and the form that kernels want."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attngen.ir.evaluate import evaluate
from attngen.ir.expr import SCORE, Const, K, Load, binary
from attngen.ir.simplify import affine, of_product, simplify
from attngen.ir.text import parse, to_text
from tests.ir.expressions import PARAMS, SMALL, TENSORS, stable

LOG2_E = math.log2(math.e)


def points():
    q, k, h = torch.meshgrid(torch.arange(-2, 6), torch.arange(-1, 5), torch.arange(3), indexing="ij")
    score = torch.sin(q * 1.7 + k * 0.6 + h).double() * 3
    return {"h": h, "q": q, "k": k, "score": score, "b": 1, "qo_len": 5, "kv_len": 7}


def values(expr, dtype=torch.float64, **extra):
    return evaluate(expr, {**points(), **extra}, TENSORS, dtype).expand(8, 6, 3)


def assert_same_value(expr, other):
    """Equal within rounding, wherever rounding to float32 does not change the original much."""
    expected, found = values(expr), values(other)
    if expr.type != "f32":
        assert torch.equal(expected, found)
        return
    stable_points = torch.isclose(values(expr, torch.float32).double(), expected, 1e-3, 1e-3, equal_nan=True)
    stable_points &= expected.isnan() | expected.isinf() | (expected.abs() < 1e6)
    close = torch.isclose(found, expected, rtol=1e-7, atol=1e-7, equal_nan=True)
    assert close[stable_points].all()


@stable(300)
@given(st.one_of(SMALL.f32(4), SMALL.f32(3), SMALL.boolean(3), SMALL.i32(3)))
def test_simplified_expressions_keep_their_value(expr):
    assert_same_value(expr, simplify(expr))


@stable(100)
@given(SMALL.f32(3), st.sampled_from([0.125, 0.08838834764831845]), st.booleans())
def test_logits_of_the_raw_product_keep_their_value(expr, sm_scale, base_2):
    raw = of_product(expr, sm_scale, base_2=base_2)
    scaled = {"score": points()["score"] * sm_scale}
    expected = values(expr, **scaled) * (LOG2_E if base_2 else 1.0)
    rounded = values(expr, torch.float32, **scaled).double() * (LOG2_E if base_2 else 1.0)
    close = torch.isclose(values(raw), expected, rtol=1e-7, atol=1e-7, equal_nan=True)
    assert close[torch.isclose(rounded, expected, 1e-3, 1e-3) & (expected.abs() < 1e6)].all()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(score * 0.125) * 4.0", "score * 0.5"),
        ("(score * 0.25) * (1 / 32)", "score * 0.0078125"),
        ("32.0 * tanh(score * 0.5 / 32.0)", "tanh(score * 0.015625) * 32.0"),
        ("(score / 8.0 + bias[h]) * 3.0", "score * 0.375 + bias[h] * 3.0"),
        ("-(-score) + 0.0", "score"),
        ("-(score - bias[h])", "-score + bias[h]"),
        ("score + 1.0 + bias[h] - 3.0", "score + (bias[h] - 2.0)"),
        ("where(k < q, score * 0.5, -inf) * 2.0", "where(k < q, score, -inf)"),
        ("where(k < q, score, tanh(score)) * 2.0", "where(k < q, score, tanh(score)) * 2.0"),
        ("where(True, score, 1.0)", "score"),
        ("where(q < k, score, score)", "score"),
        ("where(~(q < k), score, 1.0)", "where(q >= k, score, 1.0)"),
        ("score * (q - k + k - q)", "score * 0"),
        ("score + 0 * (q - k)", "score"),
        ("floor(q / 10.0) + floor(q / 8.0)", "floor(q / 10.0) + floor(q * 0.125)"),
        ("floor(q * 0.1 * 10.0) + score", "score + floor(q * 0.1 * 10.0)"),
        ("minimum(score, score)", "score"),
        ("bias[h] - bias[h]", "bias[h] - bias[h]"),
        ("bias[h] * 0.0", "bias[h] * 0.0"),
        ("score + exp(200.0)", "score + exp(200.0)"),
        ("score / (1.0 - 1.0)", "score / 0.0"),
        ("score * inf * 2.0", None),
    ],
)
def test_forms(text, expected):
    expr = parse(text, PARAMS, result="f32")
    found = simplify(expr)
    if expected is not None:
        assert to_text(found) == to_text(parse(expected, PARAMS, result="f32"))
    assert simplify(found) == found
    assert_same_value(expr, found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("~(q < k)", "q >= k"),
        ("~(score < 1.0)", "~(score < 1.0)"),
        ("(q < q) | (k <= k) & flags[h]", "flags[h]"),
        ("bias[h] == bias[h]", "bias[h] == bias[h]"),
        ("q - k + 0 < 3 + 4", "q - k < 7"),
        ("q + q - q < k", "q < k"),
        ("lengths[b] + q - lengths[b] < k", "lengths[b] + q - lengths[b] < k"),
        ("(q * 1) // 1 % 1 == (k >> 0) * 0", "True"),
        ("where(flags[h], True, False) & ~~(q == k)", "flags[h] & (q == k)"),
        ("q // 0 == 0", "q // 0 == 0"),
        ("2147483647 + 1 > q", "2147483647 + 1 > q"),
    ],
)
def test_bools_and_integers(text, expected):
    found = simplify(parse(text, PARAMS))
    assert to_text(found) == to_text(parse(expected, PARAMS))


@pytest.mark.parametrize(
    ("text", "slope", "offset"),
    [
        ("score", "1.0", "0.0"),
        ("2.0 * (score + bias[h]) - 3.0 * score", "-1.0", "bias[h] * 2.0"),
        ("score * bias[h] / 4.0", "bias[h] * 0.25", "0.0"),
        ("bias[h] + 1.0", "0.0", "bias[h] + 1.0"),
        ("-score + (k - q)", "-1.0", "f32(k - q)"),
    ],
)
def test_affine(text, slope, offset):
    parts = affine(parse(text, PARAMS, result="f32"))
    assert parts is not None
    assert [to_text(part) for part in parts] == [to_text(parse(x, PARAMS, result="f32")) for x in (slope, offset)]


@pytest.mark.parametrize("text", ["score * score", "tanh(score)", "where(q < k, score, 0.0)", "1.0 / score"])
def test_not_affine(text):
    assert affine(parse(text, PARAMS, result="f32")) is None
    assert affine(Load("bias", (K,), "f32"), Load("bias", (K,), "f32")) == (Const(1.0), Const(0.0))


def test_infinities_of_the_branch_not_taken_stay_away():
    expr = parse("where(q > 0, score, -inf) * 0.5 + where(q > 0, bias[h], 0.0)", PARAMS)
    found = values(simplify(binary("mul", expr, Const(LOG2_E))))
    assert not found.isnan().any()
    assert torch.allclose(found, values(expr) * LOG2_E)


def test_simplified_once_is_simplified():
    expr = SCORE
    for n in range(12):
        expr = binary("mul", binary("add", expr, Const(float(n))), Const(1.5))
    assert len(to_text(simplify(expr))) < 50
