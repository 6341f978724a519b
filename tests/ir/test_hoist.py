"""Expressions taken apart by rows and columns have the value of the whole."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attngen.ir.differentiate import differentiate
from attngen.ir.evaluate import evaluate
from attngen.ir.expr import SCORE, Const, Local, binary, coords
from attngen.ir.hoist import hoist, where
from attngen.ir.params import Param
from attngen.ir.simplify import of_product
from attngen.ir.text import parse, to_text
from tests.ir.expressions import PARAMS, SMALL, TENSORS, stable
from tests.ir.test_simplify import points, values

CUMULATIVE = Param("c", ("batch", "num_qo_heads", "max_kv_len"))


def computed(hoisted, dtype=torch.float64):
    """The bodies, by way of every definition; each definition may read only what comes before it."""
    env = points()
    for part in (hoisted.uniform, hoisted.rows, hoisted.columns, hoisted.shared):
        for local, value in part:
            env[local.name] = evaluate(value, env, TENSORS, dtype)
    return [evaluate(body, env, TENSORS, dtype).expand(8, 6, 3) for body in hoisted.bodies]


def has_local(expr):
    return any(isinstance(node, Local) for node in expr.walk())


def definitions(hoisted):
    parts = (hoisted.uniform, hoisted.rows, hoisted.columns, hoisted.shared)
    return {local.name: to_text(value) for part in parts for local, value in part}


@stable(200)
@given(st.lists(SMALL.f32(4), min_size=1, max_size=2), st.booleans())
def test_parts_keep_the_value(exprs, split_positions):
    hoisted = hoist(exprs, split_positions=split_positions)
    for expr, found in zip(exprs, computed(hoisted), strict=True):
        expected = values(expr)
        steady = torch.isclose(values(expr, torch.float32).double(), expected, 1e-3, 1e-3) & (expected.abs() < 1e6)
        assert torch.isclose(found, expected, rtol=1e-7, atol=1e-7)[steady].all()
    for part, hidden in ((hoisted.uniform, "qk"), (hoisted.rows, "k"), (hoisted.columns, "q")):
        for _, value in part:
            assert not coords(value) & {*hidden, "score"}
    for body in hoisted.bodies:
        assert all(where(node) == "body" or not node.children() or has_local(node) for node in body.walk())


@pytest.mark.parametrize(
    ("text", "split", "parts", "body"),
    [
        ("score", True, {}, "score * 0.18033688011112042"),
        ("32.0 * tanh(score / 32.0)", True, {}, "tanh(score * 0.00390625) * 46.16624130844683"),
        (
            "score + bias[h] * (k - q)",
            True,
            {
                "uniform_0": "bias[h] * 1.4426950408889634",
                "row_0": "uniform_0 * q",
                "column_0": "uniform_0 * k",
            },
            "score * 0.18033688011112042 + (column_0 - row_0)",
        ),
        (
            "score + bias[h] * (k - q)",
            False,
            {"uniform_0": "bias[h] * 1.4426950408889634"},
            "score * 0.18033688011112042 + (k - q) * uniform_0",
        ),
        (
            "score + c[b, h, q] - c[b, h, k]",
            True,
            {
                "row_0": "1.4426950408889634 * c[b, h, q]",
                "column_0": "1.4426950408889634 * c[b, h, k]",
            },
            "score * 0.18033688011112042 + (row_0 - column_0)",
        ),
        (
            "score * (log(floor((q + 1) / 8192.0) + 1.0) * 0.1 + 1.0)",
            True,
            {"row_0": "0.18033688011112042 * (log(floor((q + 1) * 0.0001220703125) + 1.0) * 0.1 + 1.0)"},
            "score * row_0",
        ),
        (
            "score - bias[0] * log(1.0 + bias[1] * abs(q - k))",
            True,
            {"uniform_0": "bias[1]", "uniform_1": "bias[0] * -1.4426950408889634"},
            "score * 0.18033688011112042 + log(abs(q - k) * uniform_0 + 1.0) * uniform_1",
        ),
    ],
)
def test_logits_are_taken_apart(text, split, parts, body):
    logit = of_product(parse(text, (*PARAMS, CUMULATIVE), result="f32"), 0.125, base_2=True)
    hoisted = hoist([logit], split_positions=split)
    assert definitions(hoisted) == parts
    assert to_text(hoisted.bodies[0]) == body


def test_a_slope_shares_what_the_logit_computes():
    score = parse("30.0 * tanh((score + bias[h]) / 30.0)", PARAMS)
    logit, slope = of_product(score, 0.5), of_product(differentiate(score, SCORE), 0.5)
    hoisted = hoist([logit, slope], split_positions=True)
    assert definitions(hoisted) == {
        "uniform_0": "bias[h] * 0.03333333333333333",
        "shared_0": "tanh(score * 0.016666666666666666 + uniform_0)",
    }
    assert [to_text(body) for body in hoisted.bodies] == ["shared_0 * 30.0", "1.0 - shared_0 * shared_0"]


def test_split_positions_stay_accurate():
    """In float32, at a position of 65536, the two products cost at most half a unit of the last place of a bf16 weight."""
    expr = binary("mul", parse("score + bias[0] * (k - q)", PARAMS), Const(math.log2(math.e)))
    table = {"bias": torch.tensor([0.5], dtype=torch.float64)}
    env = {"score": 0.0, "q": torch.tensor(65536), "k": 65536 - torch.arange(64)}
    exact = evaluate(expr, env, table)
    hoisted = hoist([of_product(parse("score + bias[0] * (k - q)", PARAMS), 1.0, base_2=True)], split_positions=True)
    for part in (hoisted.uniform, hoisted.rows, hoisted.columns):
        for local, value in part:
            env[local.name] = evaluate(value, env, table, torch.float32)
    found = evaluate(hoisted.bodies[0], env, table, torch.float32).double()
    assert 0 < (found - exact).abs().max() < 2**-8
