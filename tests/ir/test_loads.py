"""Sizes of parameters in expressions, and axes that one element serves."""

from __future__ import annotations

import pytest
import torch

import attngen as ag
from attngen.codegen.dialects import CppDialect, TritonDialect
from attngen.codegen.printer import Printer
from attngen.ir.evaluate import evaluate
from attngen.ir.expr import B, Const, H, K, Load, Q, Size, binary
from attngen.ir.loads import element, plain_index, size_of
from attngen.ir.params import Param, is_broadcast
from attngen.ir.scalar import evaluate_scalar
from attngen.ir.text import parse, to_text

SHARED = Param("x", ("batch or 1", 4, "width"), "i32")
NAMES = {"q": "q_pos", "k": "kv_pos", "b": "b", "h": "h"}


def test_sizes() -> None:
    assert size_of(SHARED, 1) == Const(4)
    assert size_of(SHARED, 2) == Size("x", 2)
    text = "k < x.shape[2] - x.shape[1]"
    expr = parse(text, (SHARED,), result="bool")
    assert to_text(expr) == "k < x.shape[2] - 4"
    assert parse(to_text(expr), (SHARED,)) == expr
    tensor = torch.zeros(2, 4, 7, dtype=torch.int32)
    assert evaluate(expr, {"k": torch.arange(5)}, {"x": tensor}).tolist() == [True] * 3 + [False] * 2
    assert evaluate_scalar(expr, {"k": 2, Size("x", 2): 7}) is True
    assert Printer(CppDialect(), NAMES, {"x": SHARED}).print(expr) == "kv_pos < param_x_dim2 - 4"
    with pytest.raises(ag.ArgumentError, match="'size 2 of x' has no value"):
        evaluate_scalar(expr, {"k": 2})
    with pytest.raises(ag.SpecError, match="'x' has no dimension 3"):
        parse("k < x.shape[3]", (SHARED,))
    with pytest.raises(ag.SpecError, match="unknown parameter 'y'"):
        parse("k < y.shape[0]", (SHARED,))


def test_sizes_in_functions() -> None:
    @ag.mask_mod
    def last(b, h, q, k, table: ag.Tensor("batch", "n", 3, dtype="i32")):
        return k >= table.shape[1] + table[b].shape[1] - table[b, 0].shape[0]

    assert last.expression == "k >= table.shape[1] + 3 - 3"


def test_one_element_serves_every_index() -> None:
    assert is_broadcast("batch or 1")
    assert not any(map(is_broadcast, ("batch", "pages or 1", 1)))
    load = element(SHARED, B, Q, K)
    assert to_text(load) == "x[where(x.shape[0] == 1, 0, b), q, k]"
    assert parse("x[b, q, k]", (SHARED,)) == load == parse(to_text(load), (SHARED,))
    assert element(SHARED, *load.indices) == load
    assert plain_index(SHARED, 0, load.indices[0]) == B
    env = {"b": torch.tensor([0, 1, 2]), "q": 3, "k": 1}
    for batch, want in ((3, [13, 33, 53]), (1, [13, 13, 13]), (2, [13, 33, 0])):
        tensor = torch.arange(batch * 20).view(batch, 4, 5) - 3
        assert evaluate(load, env, {"x": tensor}).tolist() == want


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        (
            CppDialect(),
            "((kv_pos >= 0) & (kv_pos < param_x_dim2) ? param_x[(int64_t((param_x_dim0 == 1 ? 0 : b)) * param_x_dim1"
            " + 2) * param_x_dim2 + kv_pos] : 0)",
        ),
        (
            TritonDialect(),
            "tl.load(param_x + (tl.cast(tl.where(param_x_dim0 == 1, 0, b), tl.int64) * param_x_dim1 + 2) * param_x_dim2"
            " + kv_pos, mask=(kv_pos >= 0) & (kv_pos < param_x_dim2), other=0)",
        ),
    ],
)
def test_spelling(dialect, text: str) -> None:
    """Only the index that may lie outside is tested."""
    assert Printer(dialect, NAMES, {"x": SHARED}).print(element(SHARED, B, 2, K)) == text


@pytest.mark.parametrize(
    ("index", "inside"),
    [
        (Const(3), True),
        (Const(4), False),
        (Const(-1), False),
        (binary("mod", Q, 4), True),
        (binary("mod", Q, 5), False),
    ],
)
def test_indices_known_to_lie_inside_are_not_tested(index, inside: bool) -> None:
    param = Param("y", ("num_qo_heads", 4))
    printed = Printer(CppDialect(), NAMES, {"y": param}).print(Load("y", (H, index), "f32"))
    assert (">= 0" not in printed) is inside
