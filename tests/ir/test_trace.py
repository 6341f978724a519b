"""FlexAttention-style functions give the expected text; what cannot be traced says why, and where."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from attngen.errors import SpecError, UnsupportedError
from attngen.ir import functions as ag
from attngen.ir.params import Param
from attngen.ir.text import parse, to_text
from attngen.ir.trace import Tensor, trace

MASK, SCORE = ("b", "h", "q", "k"), ("score", "b", "h", "q", "k")
GLOBAL_BIAS = torch.arange(4.0)
GLOBAL_LIMIT = 3


def mask_text(fn):
    traced = trace(fn, MASK, "bool")
    text = to_text(traced.expr)
    assert parse(text, traced.params, result="bool") == traced.expr
    return text


def score_text(fn):
    traced = trace(fn, SCORE, "f32")
    text = to_text(traced.expr)
    assert parse(text, traced.params, result="f32") == traced.expr
    return text


def error_of(fn, args=MASK, result="bool"):
    with pytest.raises((SpecError, UnsupportedError)) as info:
        trace(fn, args, result)
    return str(info.value)


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, "q >= k"),
        (lambda b, h, q, k: (q - k) % 2 == 0, "(q - k) % 2 == 0"),
        (lambda b, h, q, k: (q >= k) & (q - k <= 128), "(q >= k) & (q - k <= 128)"),
        (lambda b, h, q, k: ~((5 - q) // 3 > -k) | (h == 0), "~((5 - q) // 3 > -k) | (h == 0)"),
        (lambda b, h, q, k: (q < k) ^ (h < 2), "(q < k) != (h < 2)"),
        (lambda b, h, q, k: torch.logical_and(q >= k, torch.logical_not(h == 1)), "(q >= k) & ~(h == 1)"),
        (lambda b, h, q, k: abs(q - k).to(torch.float32) < 2.5, "abs(q - k) < 2.5"),
        (lambda b, h, q, k: ag.where(h < 2, q >= k, True), "where(h < 2, q >= k, True)"),
        (lambda b, h, q, k: torch.maximum(q, k) - torch.min(q, k) < 2**q, "maximum(q, k) - minimum(q, k) < 2.0 ** q"),
        (lambda b, h, q, k: (q - k) ** 2 < GLOBAL_LIMIT, "(q - k) * (q - k) < 3"),
        (lambda b, h, q, k: b.new_ones((), dtype=torch.bool) & (q >= k), "q >= k"),
        (lambda b, h, q, k: True, "True"),
    ],
)
def test_masks(fn, text):
    assert mask_text(fn) == text


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (lambda score, b, h, q, k: score, "score"),
        (lambda score, b, h, q, k: 20.0 * torch.tanh(score / 20.0), "20.0 * tanh(score / 20.0)"),
        (
            lambda score, b, h, q, k: score + torch.exp2(-((h + 1) * 8.0 / 4)) * (k - q),
            "score + exp2(-((h + 1) * 8.0 / 4.0)) * (k - q)",
        ),
        (lambda score, b, h, q, k: torch.where(q >= k, score, -float("inf")), "where(q >= k, score, -inf)"),
        (lambda score, b, h, q, k: torch.clamp(score, min=-5, max=5.5), "minimum(maximum(score, -5.0), 5.5)"),
        (lambda score, b, h, q, k: torch.sigmoid(score).to(torch.bfloat16) * torch.tensor(2.0), "sigmoid(score) * 2.0"),
        (lambda score, b, h, q, k: torch.tensor(2.0) - score.float().abs(), "2.0 - abs(score)"),
        (lambda score, b, h, q, k: score.tanh().exp() + q.float() / k, "exp(tanh(score)) + q / k"),
        (lambda score, b, h, q, k: torch.div(score, 3, rounding_mode="floor") % 2, "score // 3.0 % 2.0"),
        (lambda score, b, h, q, k: ag.sqrt(4.0) * score + ag.abs(-3), "2.0 * score + 3.0"),
        (lambda score, b, h, q, k: torch.zeros_like(score) + torch.relu(score), "0.0 + maximum(score, 0.0)"),
        (lambda score, b, h, q, k: q - k, "f32(q - k)"),
        (lambda score, b, h, q, k: math.pi * score, "3.141592653589793 * score"),
    ],
)
def test_scores(fn, text):
    assert score_text(fn) == text


def test_closure_tensor_becomes_a_parameter():
    slopes = torch.linspace(0.1, 0.4, 4, dtype=torch.float64)

    def alibi(score, b, h, q, k):
        return score + slopes[h] * (k - q)

    traced = trace(alibi, SCORE, "f32")
    assert to_text(traced.expr) == "score + slopes[h] * (k - q)"
    assert traced.params == (Param("slopes", (4,), "fp32"),)
    assert traced.defaults["slopes"] is slopes
    assert traced.name == "alibi"
    assert alibi.__closure__[0].cell_contents is slopes


def test_document_mask_indexes_one_tensor_twice():
    doc_ids = torch.zeros(2, 7, dtype=torch.int64)
    traced = trace(lambda b, h, q, k: (q >= k) & (doc_ids[b, q] == doc_ids[b][k]), MASK, "bool")
    assert to_text(traced.expr) == "(q >= k) & (doc_ids[b, q] == doc_ids[b, k])"
    assert traced.params == (Param("doc_ids", (2, 7), "i32"),)


def test_one_tensor_under_two_names_is_one_parameter():
    first = second = torch.ones(3)
    traced = trace(lambda score, b, h, q, k: score * first[h] + second[h], SCORE, "f32")
    assert to_text(traced.expr) == "score * first[h] + first[h]"
    assert list(traced.defaults) == ["first"]


def test_equal_names_are_told_apart():
    def make(bias):
        return lambda score, h: score + bias[h]

    left, right = make(torch.ones(3)), make(torch.zeros(3, dtype=torch.bfloat16))
    traced = trace(lambda score, b, h, q, k: right(left(score, h), h), SCORE, "f32")
    assert to_text(traced.expr) == "score + bias[h] + bias_2[h]"
    assert [p.dtype for p in traced.params] == ["fp32", "bf16"]


def test_a_tensor_named_like_a_coordinate_is_renamed():
    h = torch.ones(())
    traced = trace(lambda score, b, head, q, k: score * h, SCORE, "f32")
    assert to_text(traced.expr) == "score * h_2"
    assert traced.params == (Param("h_2", (), "fp32"),)


def test_globals_partials_defaults_and_nested_functions():
    table = torch.tensor([True, False])

    def visible(h, table=table):
        def inner(i):
            return table[i] | (GLOBAL_BIAS[i] > 1.0)

        return inner(h)

    def mask(limit, b, h, q, k, *, extra=table):
        return visible(h) & (q < limit[b]) & extra[b]

    limits = torch.tensor([3, 4], dtype=torch.int32)
    traced = trace(functools.partial(mask, limits), MASK, "bool")
    assert to_text(traced.expr) == "(extra[h] | (GLOBAL_BIAS[h] > 1.0)) & (q < fn_0[b]) & extra[b]"
    assert traced.defaults["fn_0"] is limits
    assert traced.defaults["extra"] is table


def test_masks_in_a_captured_tuple():
    window = torch.tensor(5)
    masks = (lambda b, h, q, k: q >= k, lambda b, h, q, k: q - k < window)

    def both(b, h, q, k):
        result = b.new_ones((), dtype=torch.bool)
        for mask in masks:
            result = result & mask(b, h, q, k)
        return result

    assert mask_text(both) == "(q >= k) & (q - k < window)"


def test_torch_combinators_of_masks():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    doc = torch.zeros(5, dtype=torch.int32)
    mask = flex.or_masks(
        flex.and_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: doc[q] == doc[k]), lambda b, h, q, k: k < 2
    )
    assert mask_text(mask) == "(q >= k) & (doc[q] == doc[k]) | (k < 2)"


def test_recursion_and_unused_tensors():
    unused = torch.ones(2)

    def times(x, n):
        return x if n == 0 else x + times(x, n - 1)

    def score(score, b, h, q, k):
        _ = unused
        return times(score, 2)

    traced = trace(score, SCORE, "f32")
    assert to_text(traced.expr) == "score + (score + score)"
    assert traced.params == ()
    assert traced.defaults == {}


def test_annotated_parameters_under_postponed_annotations():
    def bias(
        score,
        b,
        h,
        q,
        k,
        slopes: Tensor("num_qo_heads"),
        table: Tensor("rows", 8, dtype="i32"),
        scale: Tensor(),
    ):
        return score * scale + slopes[table[h, -1]] * (k - q)

    assert isinstance(bias.__annotations__["slopes"], str)
    traced = trace(bias, SCORE, "f32")
    assert to_text(traced.expr) == "score * scale + slopes[table[h, 7]] * (k - q)"
    assert traced.params == (
        Param("slopes", ("num_qo_heads",), "fp32"),
        Param("table", ("rows", 8), "i32"),
        Param("scale", (), "fp32"),
    )
    assert traced.defaults == {}


def branches(b, h, q, k):
    if q >= k:
        return h == 0
    return h == 1


def test_branching_names_the_line():
    text = error_of(branches)
    line = branches.__code__.co_firstlineno + 1
    assert "Python cannot branch on a traced value" in text
    assert f"test_trace.py:{line}: if q >= k:" in text
    assert "use ag.where or torch.where to choose, and `&`, `|`, `~` to combine conditions" in text


@pytest.mark.parametrize(
    "fn",
    [
        lambda b, h, q, k: q >= k and q < 5,
        lambda b, h, q, k: not q >= k,
        lambda b, h, q, k: 0 <= q - k <= 5,
        lambda b, h, q, k: q in (1, 2),
        lambda b, h, q, k: any(q == x for x in (1, 2)),
    ],
)
def test_every_hidden_branch_is_refused(fn):
    assert "Python cannot branch on a traced value" in error_of(fn)


@pytest.mark.parametrize(
    "fn",
    [
        lambda b, h, q, k: int(q) > 1,
        lambda b, h, q, k: math.exp(q) > 1,
        lambda b, h, q, k: [1, 2][q] > 1,
        lambda b, h, q, k: list(q) == [],
        lambda b, h, q, k: len(q) > 1,
        lambda b, h, q, k: sum(range(q)) > 1,
    ],
)
def test_numbers_of_symbols_are_refused(fn):
    text = error_of(fn)
    assert "a traced value has no Python number" in text
    assert "test_trace.py" in text


@pytest.mark.parametrize(
    ("fn", "parts"),
    [
        (
            lambda b, h, q, k: torch.erfinv(q) > 0,
            ("torch function 'erfinv' cannot be traced", "expressions have abs, absolute, add"),
        ),
        (lambda b, h, q, k: q.cumsum(0) > 0, ("torch function 'cumsum' cannot be traced",)),
        (
            lambda b, h, q, k: GLOBAL_BIAS[b, h] > 0,
            ("parameter 'GLOBAL_BIAS' is indexed wrongly", "it has 1 dimensions (4,), and 2 indices"),
        ),
        (lambda b, h, q, k: GLOBAL_BIAS[b][h] > 0, ("a scalar cannot be indexed",)),
        (
            lambda b, h, q, k: GLOBAL_BIAS > 0,
            ("lambda_ returns 4 values", "reduce them with any, all or sum"),
        ),
        (lambda b, h, q, k: GLOBAL_BIAS[q / 2] > 0, ("an index of parameter 'GLOBAL_BIAS' has type f32",)),
        (lambda b, h, q, k: GLOBAL_BIAS[q > 2] > 0, ("an index of parameter 'GLOBAL_BIAS' has type bool",)),
        (lambda b, h, q, k: GLOBAL_BIAS[:] > 0, ("parameter 'GLOBAL_BIAS' is indexed with slice",)),
        (lambda b, h, q, k: q & 0.5, ("`&` of a value of type f32", "compare first, with parentheses")),
        (lambda b, h, q, k: ~(q / 2), ("`~` of a value of type f32",)),
        (lambda b, h, q, k: q << k > 0, ("`<<` by a value cannot be traced",)),
        (lambda b, h, q, k: ag.where(q, True, False), ("`where` of a value of type i32",)),
        (lambda b, h, q, k: q - k, ("returns a value of type i32", "return a comparison")),
        (lambda b, h, q, k: None, ("returns None", "add a return")),
        (lambda b, h, q, k: q > 2**31, ("2147483648 does not fit int32",)),
        (lambda b, h, q, k: q + math.nan > 0, ("nan is not a constant",)),
        (lambda b, h, q, k: q > "x", ("cannot use a str in a traced function",)),
        (lambda b, h, q, k: q.missing.attribute, ("torch function 'missing' cannot be traced",)),
        (
            lambda b, h, q, k: undefined_name,  # noqa: F821
            ("failed while it was traced", "NameError: name 'undefined_name' is not defined"),
        ),
        (lambda b, h, q: q > 0, ("lambda_ has the wrong arguments", "(b, h, q, k)")),
        (lambda b, h, q, k, x: q > 0, ("nothing says what 'x' is: annotate it with ag.Tensor",)),
    ],
)
def test_errors(fn, parts):
    text = error_of(fn)
    for part in parts:
        assert part in text
    assert "test_trace.py" in text


def test_unknown_sizes_refuse_negative_indices():
    def bias(score, b, h, q, k, slopes: Tensor("num_qo_heads")):
        return score + slopes[-1]

    assert "its size 'num_qo_heads' is unknown" in error_of(bias, SCORE, "f32")


def test_reserved_parameter_names():
    def bias(score, b, h, q, k, exp: Tensor("num_qo_heads")):
        return score + exp[h]

    assert "a parameter cannot be called 'exp'" in error_of(bias, SCORE, "f32")


def test_unresolvable_annotation():
    def bias(score, b, h, q, k, x: missing.Tensor()):  # noqa: F821
        return score + x

    assert "the annotation of 'x' cannot be resolved" in error_of(bias, SCORE, "f32")


def test_unrolled_loops_are_bounded():
    def deep(b, h, q, k):
        x = q
        for _ in range(60):
            x = x + x
        return x > 0

    assert "the expression is too large" in error_of(deep)


def test_twins_of_numbers_are_numbers():
    assert ag.where(True, 1, 2) == 1
    assert ag.exp(0.0) == 1.0
    assert ag.abs(-2) == 2
    assert ag.minimum(3, 2.5) == 2.5
    assert ag.clamp(7, 0, 5) == 5
    assert ag.sigmoid(0.0) == 0.5


def test_a_mod_may_ask_for_the_lengths_of_its_request() -> None:
    def last_quarter(b, h, q, k, kv_len):
        return k * 4 >= kv_len * 3

    traced = trace(last_quarter, ("b", "h", "q", "k"), "bool")
    assert to_text(traced.expr) == "k * 4 >= kv_len * 3"
    assert traced.params == ()


def test_shifts_and_captured_bytes():
    bits = torch.tensor([3, 255], dtype=torch.uint8)

    def mask(b, h, q, k):
        return torch.bitwise_right_shift(bits[k >> 3], k % 8) % 2 == (1 >> q)

    traced = trace(mask, ("b", "h", "q", "k"), "bool")
    assert to_text(traced.expr) == "(bits[k >> 3] >> k % 8) % 2 == 1 >> q"
    assert [(p.name, p.dtype, p.expr_type) for p in traced.params] == [("bits", "u8", "i32")]
    with pytest.raises(SpecError, match="floats have no bits"):
        trace(lambda score, b, h, q, k: score >> 1, ("score", "b", "h", "q", "k"), "f32")
