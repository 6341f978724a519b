"""Symbolic derivatives against torch's autograd in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given

from attngen.errors import SpecError
from attngen.ir.differentiate import differentiate, param_gradients
from attngen.ir.evaluate import evaluate
from attngen.ir.expr import SCORE, Const, H, Load, Q, cast, unary
from attngen.ir.text import parse, to_text
from tests.ir.expressions import PARAMS, SMALL, TENSORS, stable

SHAPE = (5, 4, 3)
INDEX = {
    "b": torch.tensor(1),
    "q": torch.arange(5)[:, None, None],
    "k": torch.arange(4)[None, :, None],
    "h": torch.arange(3),
    "qo_len": 5,
    "kv_len": 7,
}


def scores():
    return torch.linspace(-3.1, 2.9, 60, dtype=torch.float64).reshape(SHAPE)


def check_close(found, expected, value):
    """Where the value is a number and autograd finds a finite slope."""
    found, value = found.expand(expected.shape), value.expand(expected.shape)
    usable = torch.isfinite(expected) & ~torch.isnan(value) & (expected.abs() < 1e12)
    torch.testing.assert_close(found[usable], expected[usable], rtol=1e-7, atol=1e-9)


@stable(300)
@given(SMALL.f32(3))
def test_derivative_by_score(expr):
    score = scores().requires_grad_()
    result = evaluate(expr, {**INDEX, "score": score}, TENSORS).expand(SHAPE)
    (expected,) = torch.autograd.grad(result.sum() + 0.0 * score.sum(), score)
    check_close(evaluate(differentiate(expr, SCORE), {**INDEX, "score": scores()}, TENSORS), expected, result)


@stable(300)
@given(SMALL.f32(3))
def test_parameter_gradients(expr):
    """Scattering the derivative of every load to its element gives the parameter's gradient."""
    params = {name: t.clone().requires_grad_(t.is_floating_point()) for name, t in TENSORS.items()}
    env = {**INDEX, "score": scores()}
    values = evaluate(expr, env, params).expand(SHAPE)
    assume(not values.isnan().any())
    result = values.sum() + 0.0 * (params["bias"].sum() + params["scale"])
    expected = dict(zip(("bias", "scale"), torch.autograd.grad(result, (params["bias"], params["scale"])), strict=True))
    found = {name: torch.zeros_like(grad) for name, grad in expected.items()}
    for load, slope in param_gradients(expr):
        values = evaluate(slope, env, TENSORS).expand(SHAPE)
        if not load.indices:
            found[load.param] += values.sum()
            continue
        index = evaluate(load.indices[0], env, TENSORS).expand(SHAPE)
        inside = (index >= 0) & (index < 3)
        found[load.param].index_put_((index[inside],), values[inside], accumulate=True)
    for name, grad in expected.items():
        usable = torch.isfinite(grad) & torch.isfinite(found[name]) & (grad.abs() < 1e10)
        torch.testing.assert_close(found[name][usable], grad[usable], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("text", "slope"),
    [
        ("score", "1.0"),
        ("score + bias[h] * (k - q)", "1.0"),
        ("where(q >= k, score, -inf)", "where(q >= k, 1.0, 0.0)"),
        ("50.0 * tanh(score / 50.0)", "1.0 - tanh(score / 50.0) * tanh(score / 50.0)"),
        ("tanh(score / 50.0) * 50.0", "1.0 - tanh(score / 50.0) * tanh(score / 50.0)"),
        ("score * 0.5 * 4.0", "2.0"),
        ("-(-score)", "1.0"),
        ("score * bias[h]", "bias[h]"),
        ("exp(score)", "exp(score)"),
        (f"49.0 * tanh(score * {1 / 49})", f"1.0 - tanh(score * {1 / 49}) * tanh(score * {1 / 49})"),
        (
            "sqrt(maximum(score, 0.0))",
            "where(score >= 0.0, where(score == 0.0, 0.5, 1.0) * (0.5 / sqrt(maximum(score, 0.0))), 0.0)",
        ),
        ("sigmoid(score)", "sigmoid(score) * (1.0 - sigmoid(score))"),
        ("minimum(score, 5.0)", "where(score <= 5.0, where(score == 5.0, 0.5, 1.0), 0.0)"),
        ("maximum(score, score)", "1.0"),
        ("score ** 2.0", "2.0 * score"),
        ("f32(q - k)", "0.0"),
        ("floor(score) + f32(i32(score)) + f32(score > 0.0)", "0.0"),
    ],
)
def test_derivatives_are_short(text, slope):
    assert to_text(differentiate(parse(text, PARAMS), SCORE)) == slope


@pytest.mark.parametrize("points", [[-1.0, 0.0, 0.5, 1.0]])
@pytest.mark.parametrize(
    "text",
    [
        "abs(score)",
        "minimum(score, 0.5)",
        "maximum(0.5, score)",
        "score % 0.5",
        "score // 0.5 + score",
        "1.0 % score",
        "score ** 3.0 + score ** 0.0 + score ** 1.0",
        "2.0 ** score",
        "where(score >= 0.0, score * 2.0, score)",
        "where(score > 0.0, 3.0, 1.0) * score",
        "minimum(maximum(score, -1.0), 1.0)",
    ],
)
def test_kinks_follow_torch(text, points):
    expr, score = parse(text, PARAMS), torch.tensor(points, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(evaluate(expr, {"score": score}, {}).sum(), score)
    found = evaluate(differentiate(expr, SCORE), {"score": score.detach()}, {})
    torch.testing.assert_close(found.expand(len(points)), expected, equal_nan=True)


def test_the_branch_not_taken_gives_no_nan():
    expr = parse("where(score > 0.0, log(score) + sqrt(score), score)", PARAMS)
    score = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    assert evaluate(differentiate(expr, SCORE), {"score": score}, {}).tolist() == [1.0, 1.0, 1.5]


def test_loads_are_matched_whole():
    expr = parse("score * bias[h] + bias[q] * bias[q] * scale + f32(bias[k] > 0.0)", PARAMS)
    gradients = [(to_text(load), to_text(slope)) for load, slope in param_gradients(expr)]
    assert gradients == [
        ("bias[h]", "score"),
        ("bias[q]", "(bias[q] + bias[q]) * scale"),
        ("scale", "bias[q] * bias[q]"),
    ]


def test_what_has_no_derivative():
    for expr, wrt in [(Q, SCORE), (SCORE, H), (SCORE, unary("exp", SCORE)), (cast(SCORE, "i32"), SCORE)]:
        with pytest.raises(SpecError, match="only f32 expressions have derivatives"):
            differentiate(expr, wrt)
    assert differentiate(SCORE, Load("bias", (H,), "f32")) == Const(0.0)
