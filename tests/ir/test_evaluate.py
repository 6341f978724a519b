"""The torch evaluator against the scalar one and against plain torch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attngen.errors import ArgumentError
from attngen.ir.evaluate import evaluate
from attngen.ir.expr import SCORE, Binary, Const, K, Load, Q, binary, cast, unary
from attngen.ir.scalar import evaluate_scalar
from attngen.ir.text import parse
from tests.ir.expressions import PARAMS, SMALL, TENSORS, element, stable

LENGTHS = {"qo_len": 5, "kv_len": 7}


def value(text, **env):
    return evaluate(parse(text, PARAMS), env, TENSORS)


@stable(250)
@given(st.one_of(SMALL.i32(3), SMALL.boolean(3), SMALL.f32(3)))
def test_both_evaluators_agree(expr):
    q, k, h = torch.meshgrid(torch.arange(-2, 6), torch.arange(-1, 5), torch.arange(3), indexing="ij")
    env = {"h": h, "q": q, "k": k, "score": q * 0.75 - k + h / 3}
    tensor = evaluate(expr, {**env, "b": 1, **LENGTHS}, TENSORS).expand(8, 6, 3)
    assert tensor.dtype == {"i32": torch.int64, "bool": torch.bool, "f32": torch.float64}[expr.type]
    for i, j, n in [(0, 0, 0), (1, 5, 2), (2, 1, 1), (7, 3, 0), (4, 4, 2), (3, 0, 1)]:
        point = {"b": 1, **LENGTHS, **{name: x[i, j, n].item() for name, x in env.items()}}
        expected = evaluate_scalar(expr, point, element)
        found = tensor[i, j, n].item()
        if isinstance(expected, float):
            assert found == pytest.approx(expected, rel=1e-9, abs=1e-9, nan_ok=True)
        else:
            assert found == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("q // 3", [-2, -1, -1, -1, 0, 0]),
        ("q % 3", [2, 0, 1, 2, 0, 1]),
        ("q // -3", [1, 1, 0, 0, 0, -1]),
        ("q % -3", [-1, 0, -2, -1, 0, -2]),
        ("q // (q - q)", [0] * 6),
        ("q % 0", [0] * 6),
        ("i32(q / 2)", [-2, -1, -1, 0, 0, 0]),
        ("q >> 1", [-2, -2, -1, -1, 0, 0]),
        ("-q >> (q + 2)", [4, 3, 2, 0, 0, -1]),
        ("q * 8 >> 99", [-1, -1, -1, -1, 0, 0]),
        ("i32(bool(q))", [1, 1, 1, 1, 0, 1]),
        ("abs(q) - maximum(q, -1) * minimum(q, 0)", [0, 0, 0, 0, 0, 1]),
    ],
)
def test_integers_floor(text, expected):
    assert value(text, q=torch.arange(-4, 2)).tolist() == expected
    assert [evaluate_scalar(parse(text), {"q": q}) for q in range(-4, 2)] == expected


def test_float_division_floors():
    score = torch.tensor([-1.5, 0.75], dtype=torch.float64)
    assert value("score // 0.5", score=score).tolist() == [-3.0, 1.0]
    assert value("score % 1.0", score=score).tolist() == [0.5, 0.75]
    assert value("score / 0.0", score=score).tolist() == [-math.inf, math.inf]


def test_float_dtype_is_the_callers():
    result = evaluate(binary("div", K, 3), {"k": torch.arange(4)}, {}, torch.float32)
    assert torch.equal(result, torch.arange(4, dtype=torch.float32) / 3)


def test_loads_outside_read_zero():
    k = torch.tensor([-1, 0, 7, 8])
    assert value("doc_ids[b, k]", b=torch.tensor([[0], [1], [2]]), k=k).tolist() == [
        [0, 0, 5, 0],
        [0, 0, 4, 0],
        [0] * 4,
    ]
    assert value("flags[k]", k=k).tolist() == [False, True, False, False]
    assert evaluate(Load("empty", (K,), "f32"), {"k": k}, {"empty": torch.zeros(0)}).tolist() == [0.0] * 4


def test_nan_outside_the_index_range_is_not_read():
    poisoned = {"bias": torch.tensor([math.nan, 2.0])}
    assert evaluate(Load("bias", (K,), "f32"), {"k": torch.tensor([1, 2, -1])}, poisoned).tolist() == [2.0, 0.0, 0.0]


def test_gradients_flow_to_score_and_parameters():
    score = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    bias = torch.tensor([1.0, 2.0], requires_grad=True)
    expr = parse("tanh(score) * bias[k]", PARAMS)
    evaluate(expr, {"score": score, "k": torch.tensor([0, 1, 2])}, {"bias": bias}).sum().backward()
    slope = 1 - torch.tanh(score.detach()) ** 2
    torch.testing.assert_close(score.grad, slope * torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(bias.grad, torch.tanh(score.detach())[:2].float())


def test_shared_operands_are_computed_once():
    expr = SCORE
    for _ in range(14):
        expr = binary("mul", unary("tanh", expr), expr)
    small = evaluate(expr, {"score": 0.5}, {})
    x = 0.5
    for _ in range(14):
        x = math.tanh(x) * x
    assert small.item() == pytest.approx(x, rel=1e-12)


@pytest.mark.parametrize(
    ("expr", "message"),
    [
        (Q, "'q' has no value"),
        (Load("missing", (K,), "f32"), "parameter 'missing' is missing"),
        (Load("doc_ids", (K,), "i32"), "parameter 'doc_ids' has the wrong shape"),
    ],
)
def test_missing_values(expr, message):
    with pytest.raises(ArgumentError, match=message):
        evaluate(expr, {"k": 0}, TENSORS)


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (unary("exp", 1000.0), math.inf),
        (unary("log", 0.0), -math.inf),
        (unary("log", -1.0), math.nan),
        (unary("sqrt", -1.0), math.nan),
        (unary("rsqrt", 0.0), math.inf),
        (unary("sigmoid", -1000.0), 0.0),
        (unary("floor", float("-inf")), -math.inf),
        (binary("pow", -8.0, 1 / 3), math.nan),
        (binary("pow", 0.0, -1.0), math.inf),
        (binary("div", 0.0, 0.0), math.nan),
        (binary("mod", 1.0, 0.0), math.nan),
        (cast(unary("exp", 1000.0), "i32"), 0),
        (Binary("and", Const(True), Const(False)), False),
    ],
)
def test_scalars_never_raise(expr, expected):
    found = evaluate_scalar(expr, {})
    assert type(found) is type(expected)
    assert found == expected or (math.isnan(found) and math.isnan(expected))


def test_scalars_without_values():
    with pytest.raises(ArgumentError, match="'q' has no value"):
        evaluate_scalar(Q, {"k": 1})
    with pytest.raises(ArgumentError, match="parameter 'bias' is missing"):
        evaluate_scalar(Load("bias", (K,), "f32"), {"k": 1})
