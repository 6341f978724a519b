"""Text round trips exactly, and whatever is no expression is refused with a caret."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attngen.errors import SpecError
from attngen.ir.expr import TRUE, Binary, Cast, Const, K, Q, Unary, and_, binary, cast, compare, or_, select, unary
from attngen.ir.limits import MAX_DEPTH
from attngen.ir.params import Param
from attngen.ir.text import parse, to_text
from tests.ir.expressions import ANYTHING, PARAMS, stable


def error_of(text, **options):
    with pytest.raises(SpecError) as info:
        parse(text, PARAMS, **options)
    return str(info.value)


@stable(600)
@given(st.one_of(ANYTHING.i32(4), ANYTHING.f32(4), ANYTHING.boolean(4)))
def test_round_trip(expr):
    text = to_text(expr)
    assert parse(text, PARAMS) == expr
    assert to_text(parse(text, PARAMS)) == text


@pytest.mark.parametrize(
    "text",
    [
        "(q - k) % 2 == 0",
        "q - k <= 3",
        "~(q < k) & (h == 0) | flags[h]",
        "(q < k) == (h < 2)",
        "where(q >= k, score, -inf)",
        "score + bias[h] * (k - q)",
        "tanh(score / 50.0) * 50.0",
        "-score ** -2.0 * scale",
        "(-score) ** 2.0",
        "(score ** 2.0) ** 3.0",
        "score ** 2.0 ** 3.0",
        "q - (k - h)",
        "q - k - h",
        "q // (k * 2) * 3 % 5",
        "minimum(q, maximum(k, -3))",
        "f32(i32(score)) + (q < k)",
        "bool(q) & ~bool(score)",
        "doc_ids[b, i32(q / 2.0)] == lengths[b]",
        "neg(5) - -5 + neg(inf) * -inf + -(-2147483648)",
        "where(q < k, q, q < k) + 1",
        "f32(q) + k",
        "(q + k >> 2) - (q >> (k >> 1)) * (i32(score) >> 3)",
        "abs(-q) + floor(1e+300) - 1e-07",
    ],
)
def test_spelling(text):
    """Texts that are already in the form that is written."""
    assert to_text(parse(text, PARAMS)) == text


@pytest.mark.parametrize(
    ("text", "expr"),
    [
        ("q * 1.5", binary("mul", Q, 1.5)),
        ("-5", Const(-5)),
        ("neg(5)", Unary("neg", Const(5))),
        ("-inf", Const(float("-inf"))),
        ("q < k", compare("lt", Q, K)),
        ("(q < k) ^ True", compare("ne", compare("lt", Q, K), TRUE)),
        ("i32(q < k)", Cast(compare("lt", Q, K), "i32")),
        ("q / k", Binary("div", Cast(Q, "f32"), Cast(K, "f32"))),
        ("minimum(q,\n  k)", binary("min", Q, K)),
    ],
)
def test_meaning(text, expr):
    assert parse(text) == expr


def test_results():
    assert parse("q", result="f32") == cast(Q, "f32")
    assert parse("True", result="bool") == TRUE
    assert "the mask has type i32" in error_of("q - k", result="bool")
    assert "'score' has no value here" in error_of("score > 0.0", result="bool")
    assert "'q0' has no value here" in error_of("score + q0", result="f32")
    assert "'k' has no value here" in error_of("q < k", names=("q",))


@pytest.mark.parametrize(
    ("text", "message", "column"),
    [
        ("q.__class__", "Attribute is not part of the expression language", 0),
        ("1 + foo(q)", "unknown function 'foo'", 4),
        ("q + [x for x in k]", "ListComp is not part", 4),
        ("q < 'a'", "Constant is not part", 4),
        ("q + ...", "Constant is not part", 4),
        ("q + 1j", "Constant is not part", 4),
        ("q < k < 3", "comparisons cannot be chained", 0),
        ("q is k", "Compare is not part", 0),
        ("q in (1, 2)", "Compare is not part", 0),
        ("q << 2", "BinOp is not part", 0),
        ("+q", "UnaryOp is not part", 0),
        ("(q < k) and True", "`and` and `or` have no meaning here", 0),
        ("not q < k", "`not` has no meaning here", 0),
        ("q if True else k", "IfExp is not part", 0),
        ("lambda: q", "Lambda is not part", 0),
        ("(q := 3)", "NamedExpr is not part", 1),
        ("exp(q, k)", "exp takes 1 operands", 0),
        ("exp(x=q)", "Call is not part", 0),
        ("exp(*q)", "Starred is not part", 4),
        ("__import__('os')", "Constant is not part", 11),
        ("bias[h, q]", "'bias' is indexed wrongly", 0),
        ("bias", "'bias' is indexed wrongly", 0),
        ("scale[0]", "'scale' is indexed wrongly", 0),
        ("bias[h:2]", "Slice is not part", 5),
        ("bias[score]", "an index of 'bias' has type f32", 5),
        ("q + missing", "unknown name 'missing'", 4),
        ("missing[q]", "unknown parameter 'missing'", 0),
        ("q[0]", "unknown parameter 'q'", 0),
        ("(q & (k > 0))", "`&` of a value of type i32", 1),
        ("~q", "`~` of a value of type i32", 0),
        ("where(q, 1, 2)", "`where` of a value of type i32", 0),
        ("q < 3000000000", "3000000000 does not fit int32", 4),
        ("q +", "the expression is not valid Python", None),
        ("1if q else 2", "the expression is not valid Python", None),
        ("", "the expression is not valid Python", 0),
        ("q\0", "unexpected character '\\x00'", 1),
        ("q < é", "unexpected character 'é'", 4),
        ("(" * 150 + "q" + ")" * 150 + "." * 3, "not valid Python", None),
        # Python's parser gives up first, or, where somebody has raised its recursion limit, ours does.
        ("-" * 15_000 + "q", "the expression", None),
        ("+".join(["q"] * 3_000), "the expression", None),
        ("(" * 300 + "q" + ")" * 300, "too many nested parentheses", None),
        ("9" * 10_000, "9999", None),
    ],
)
def test_refusals_point_at_the_place(text, message, column):
    shown = error_of(text)
    assert message in shown
    if column is not None:
        caret = next(line for line in shown.splitlines() if line.strip() == "^")
        assert caret.index("^") - 4 == column


def test_limits():
    assert "20001 characters" in error_of("q" * 20_001)
    assert "the expression is too large" in error_of("-" * 160 + "(q)")
    assert "the expression is too large" in error_of("maximum(" * 30 + "q" + ",k)" * 30 + "+ q" * 140)
    wide = "|".join(["(q+k+h<b)"] * 140)
    assert "the expression is too large" in error_of(f"({wide})|" + "|".join(f"({wide})" for _ in range(9)))


@pytest.mark.parametrize(
    "grow",
    [
        lambda e: unary("not", e),
        lambda e: select(e, TRUE, TRUE),
        lambda e: compare("eq", TRUE, e),
        lambda e: or_(and_(compare("lt", Q, K), e), compare("lt", K, Q)),
        lambda e: compare("lt", binary("pow", binary("add", e, 1), Q), 3),
        lambda e: cast(cast(e, "i32"), "bool"),
    ],
)
def test_whatever_is_written_can_be_read(grow):
    expr = compare("lt", Q, K)
    for _ in range(MAX_DEPTH):
        try:
            text = to_text(expr)
        except SpecError as error:
            assert "the expression is too large" in str(error)  # noqa: PT017 (the loop ends here on purpose)
            return
        assert parse(text) == expr
        expr = grow(expr)
    pytest.fail("no limit was met")


def test_reserved_parameter_names():
    for name in ("q", "exp", "where", "score", "inf", "if"):
        with pytest.raises(SpecError, match=f"a parameter cannot be called '{name}'"):
            parse("1", [Param(name, ())])
