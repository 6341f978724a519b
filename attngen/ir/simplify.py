"""Algebra on expressions: fewer operations, the same meaning.

Integers and bools keep every value exactly. Sums of positions and lengths are collected (:class:`Affine`), which relies on their
products with coefficients staying within int32, as everywhere; whatever holds a load or a local may be any int32 and is only
folded by identities. Division and remainder by 0 stay as they are.

Floats may change by rounding alone, and only so:

* constants are computed in binary64 and rounded once; a constant that float32 cannot hold, or a nan, is not folded;
* what is affine in the score (:func:`affine`), which is taken to be finite for this, becomes ``slope * score + offset``, and their
  constants merge: ``(score / 8.0 + b) * 3.0`` is ``score * 0.375 + b * 3.0``, one multiplication and one addition of the pair;
* a constant factor of anything else that holds the score moves to the next constant: into products, into selections with a constant
  in each branch; constant terms of its sums become one.

Expressions without the score, such as positions over a bucket size, change only where that is exact (powers of two), since a
``floor`` or a comparison may follow. They are rounded anew where they are terms or factors of an affine form: terms without the
score are added first, and multiplied by what multiplied the sum.

Intermediate overflow may vanish thereby; none appears where all terms and factors are finite and of ordinary size. Nothing is
cancelled: ``x - x`` and ``0 * x`` are nan where ``x`` is infinite, ``~(x < y)`` is not ``x >= y`` where one is nan. Factors of 0,
infinity, and below or above normal float32 numbers neither merge nor move. Selections keep their branches apart: what is applied
to a branch was applied to it before, so an infinity of the branch not taken never meets a 0. The sign of zero is not kept.
"""

from __future__ import annotations

import math

from attngen.ir.affine import Affine
from attngen.ir.bounds import OPPOSITE
from attngen.ir.expr import (
    FALSE,
    SCORE,
    TRUE,
    Binary,
    Cast,
    Compare,
    Const,
    Expr,
    Extent,
    Load,
    Local,
    Select,
    Size,
    Unary,
    and_,
    binary,
    cast,
    compare,
    not_,
    or_,
    select,
    substitute,
    unary,
)
from attngen.ir.scalar import evaluate_scalar

ZERO, ONE = Const(0.0), Const(1.0)
_F32_MAX, _F32_NORMAL = 3.4028234663852886e38, 2.0**-126
_NEUTRAL: dict[str, tuple[float, ...]] = {
    "add": (0,),
    "sub": (0,),
    "mul": (1,),
    "div": (1,),
    "floordiv": (1,),
    "shr": (0,),
}


def simplify(expr: Expr) -> Expr:
    """An equal expression; see the module for what equal means."""
    return _Simplifier().of(expr)


def affine(expr: Expr, variable: Expr = SCORE) -> tuple[Expr, Expr] | None:
    """``(slope, offset)`` such that ``expr`` is ``slope * variable + offset`` and neither holds the variable; else ``None``.

    Sums, negation, and products and quotients with one side free of the variable are seen through; selections are not, since
    ``0 * variable`` would stand for the branch without it.
    """
    if expr == variable:
        return ONE, ZERO
    if not _holds(expr, variable):
        return ZERO, expr
    match expr:
        case Unary("neg", x):
            parts = affine(x, variable)
            return parts and (_scaled(parts[0], -1.0), _scaled(parts[1], -1.0))
        case Binary("add" | "sub" as op, x, y):
            left, right = affine(x, variable), affine(y, variable)
            if left is None or right is None:
                return None
            return _plus(op, left[0], right[0]), _plus(op, left[1], right[1])
        case Binary("mul", x, y) if not _holds(x, variable) or not _holds(y, variable):
            factor, other = (y, x) if _holds(x, variable) else (x, y)
            parts = affine(other, variable)
            return parts and (_times(factor, parts[0]), _times(factor, parts[1]))
        case Binary("div", x, Const(value)) if _is_plain(1.0 / value if value else 0.0):
            parts = affine(x, variable)
            return parts and (_scaled(parts[0], 1.0 / value), _scaled(parts[1], 1.0 / value))
    return None


def of_product(expr: Expr, sm_scale: float, *, base_2: bool = False) -> Expr:
    """An expression of the scaled score as one of the raw dot product, which then goes by the name ``score``.

    Args:
        expr: the logit, or its slope.
        sm_scale: factor on the dot product.
        base_2: multiply by ``log2(e)``: of a logit, so that ``exp2`` of it is what ``exp`` was.
    """
    raw = substitute(expr, {SCORE: binary("mul", SCORE, Const(sm_scale))})
    return simplify(binary("mul", raw, Const(math.log2(math.e))) if base_2 else raw)


class _Simplifier:
    def __init__(self) -> None:
        self.memo: dict[Expr, Expr] = {}

    def of(self, expr: Expr) -> Expr:
        """Operands first; then the node's own rules."""
        if expr not in self.memo:
            node = expr.rebuild(tuple(self.of(x) for x in expr.children()))
            self.memo[expr] = _folded(node) or _RULES.get(type(node), _same)(node)
        return self.memo[expr]


def _same(node: Expr) -> Expr:
    return node


def _folded(node: Expr) -> Const | None:
    """The value of a node over constants, where a kernel can hold it."""
    operands = node.children()
    if not operands or isinstance(node, Load) or not all(isinstance(x, Const) for x in operands):
        return None
    value = evaluate_scalar(node, {})
    if node.type == "i32":
        return Const(int(value)) if -(2**31) <= value < 2**31 else None
    if node.type == "f32" and (math.isnan(value) or (math.isfinite(value) and abs(value) > _F32_MAX)):
        return None
    return Const({"bool": bool, "f32": float}[node.type](value))


def _unary(node: Expr) -> Expr:
    match node:
        case Unary("neg", Unary("neg", x)):
            return x
        case Unary("not", Compare(op, x, y)) if x.type != "f32":
            return compare(OPPOSITE[op], x, y)
        case Unary("not", x):
            return not_(x)
        case Unary("neg", x) if x.type == "f32":
            return (_affine_form(node) if _holds(node, SCORE) else None) or _scaled(x, -1.0)
    return _collected(node)


def _binary(node: Expr) -> Expr:
    assert isinstance(node, Binary)
    x, y, op = node.x, node.y, node.op
    if op in ("and", "or"):
        return and_(x, y) if op == "and" else or_(x, y)
    if isinstance(y, Const) and y.value in _NEUTRAL.get(op, ()) and not (op == "floordiv" and x.type == "f32"):
        return x
    if isinstance(x, Const) and x.value in _NEUTRAL[op] if op in ("add", "mul") else False:
        return y
    if op in ("min", "max") and x == y:
        return x
    if node.type == "f32":
        return _float(node)
    return Const(0) if (op == "mul" and Const(0) in (x, y)) or (op == "mod" and y == Const(1)) else _collected(node)


def _float(node: Binary) -> Expr:
    has_score = _holds(node, SCORE)
    match node:
        case Binary("mul", Const(value), x) | Binary("mul", x, Const(value)) if has_score or _is_power(float(value)):
            return _affine_form(node) or (_scaled(x, float(value)) if _is_plain(value) else node)
        case Binary("div", x, Const(value)) if value and (has_score or _is_power(float(value))):
            return _affine_form(node) or (_scaled(x, 1.0 / value) if _is_plain(1.0 / value) else node)
        case Binary("add" | "sub" | "mul", _, _) if has_score:
            return _affine_form(node) or _gathered(node)
    return node


def _affine_form(node: Expr) -> Expr | None:
    """``slope * score + offset``, where a node is that and holds the score."""
    parts = affine(node)
    if parts is None or parts[0] == ZERO:
        return None
    slope, offset = parts[0], _gathered(parts[1])
    return _plus("add", _times(slope, SCORE), offset)


def _gathered(expr: Expr) -> Expr:
    """A sum with its constants in one place, the end."""
    terms = signed_terms(expr)
    constants = [sign * term.value for sign, term in terms if isinstance(term, Const)]
    if len(constants) < 2 or not all(map(math.isfinite, constants)):
        return expr
    total = math.fsum(constants)
    rest = [(sign, term) for sign, term in terms if not isinstance(term, Const)]
    return expr if abs(total) > _F32_MAX or not rest else _plus("add", add_signed(rest), Const(total))


def _scaled(x: Expr, factor: float) -> Expr:
    """``factor * x`` for a normal number, moved to where it merges with a constant."""
    if factor == 1.0:
        return x
    if _absorbs(x, factor):
        match x:
            case Const(value):
                return Const(float(value) * factor)
            case Unary("neg", y):
                return _scaled(y, -factor)
            case Binary("mul", Const(value), y) | Binary("mul", y, Const(value)):
                return _scaled(y, float(value) * factor)
            case Binary("add" | "sub" as op, y, z):
                return _plus(op, _scaled(y, factor), _scaled(z, factor))
            case Select(condition, y, z):
                return select(condition, _scaled(y, factor), _scaled(z, factor))
    return unary("neg", x) if factor == -1.0 else binary("mul", x, Const(factor))


def _absorbs(x: Expr, factor: float) -> bool:
    """Whether a factor leaves no operation of its own behind in ``x``."""
    match x:
        case Const(value):
            return not math.isfinite(value) or value == 0.0 or _is_plain(float(value) * factor)
        case Unary("neg", _):
            return True
        case Binary("mul", Const(value), _) | Binary("mul", _, Const(value)):
            return _is_plain(value) and _is_plain(float(value) * factor)
        case Binary("add" | "sub", y, z):
            return _holds(x, SCORE) and _absorbs(y, factor) and _absorbs(z, factor)
        case Select(_, y, z):
            return _absorbs(y, factor) and _absorbs(z, factor)
    return False


def _times(x: Expr, y: Expr) -> Expr:
    """A product; constants merge, and the 0 of an absent slope or offset absorbs."""
    for factor, other in ((x, y), (y, x)):
        if isinstance(factor, Const) and (factor == ZERO or _is_plain(factor.value)):
            return ZERO if factor == ZERO else _scaled(other, float(factor.value))
    return binary("mul", y, x) if y == SCORE else binary("mul", x, y)


def _plus(op: str, x: Expr, y: Expr) -> Expr:
    """A sum or difference; zeros vanish, constants merge, and a negated right side turns the operation around."""
    if isinstance(x, Const) and isinstance(y, Const):
        return _folded(binary(op, x, y)) or binary(op, x, y)
    if y == ZERO:
        return x
    if x == ZERO:
        return y if op == "add" else _scaled(y, -1.0)
    match y:
        case Unary("neg", z):
            return binary("sub" if op == "add" else "add", x, z)
        case Const(value) if value < 0:
            return binary("sub" if op == "add" else "add", x, Const(-float(value)))
    return binary(op, x, y)


def _is_plain(value: float) -> bool:
    """Whether a factor is a normal float32 number, so that merging it loses nothing but a rounding."""
    return _F32_NORMAL <= abs(value) <= _F32_MAX


def _is_power(value: float) -> bool:
    """Whether a factor is a power of two, so that multiplying by it is exact."""
    return _is_plain(value) and abs(math.frexp(value)[0]) == 0.5


def _holds(expr: Expr, variable: Expr) -> bool:
    return any(node == variable for node in expr.walk())


def signed_terms(expr: Expr, sign: int = 1) -> list[tuple[int, Expr]]:
    """The terms of an f32 sum with their signs, in order."""
    match expr:
        case Binary("add" | "sub" as op, x, y) if expr.type == "f32":
            return [*signed_terms(x, sign), *signed_terms(y, sign if op == "add" else -sign)]
        case Unary("neg", x) if expr.type == "f32":
            return signed_terms(x, -sign)
    return [(sign, expr)]


def add_signed(terms: list[tuple[int, Expr]]) -> Expr:
    """The sum of terms, those that are added first."""
    ordered = [*(t for t in terms if t[0] > 0), *(t for t in terms if t[0] < 0)]
    sign, total = ordered[0]
    total = total if sign > 0 else unary("neg", total)
    for sign, term in ordered[1:]:
        total = binary("add" if sign > 0 else "sub", total, term)
    return total


def _collected(node: Expr) -> Expr:
    """An integer sum with equal positions and lengths collected, where that is shorter."""
    if node.type != "i32" or any(isinstance(part, (Load, Size, Extent, Local)) for part in node.walk()):
        return node
    form = Affine.of(node).expr()
    fits = all(-(2**31) <= part.value < 2**31 for part in form.walk() if isinstance(part, Const))
    return form if fits and _size(form) < _size(node) else node


def _size(expr: Expr) -> int:
    return sum(1 for _ in expr.walk())


def _compare(node: Expr) -> Expr:
    assert isinstance(node, Compare)
    if node.x == node.y and node.x.type != "f32":
        return TRUE if node.op in ("le", "ge", "eq") else FALSE
    return node


def _select(node: Expr) -> Expr:
    assert isinstance(node, Select)
    match node:
        case Select(Const(value), x, y):
            return x if value else y
        case Select(_, x, y) if x == y:
            return x
        case Select(condition, Const(True), Const(False)):
            return condition
        case Select(condition, Const(False), Const(True)):
            return not_(condition)
        case Select(Unary("not", condition), x, y):
            return select(condition, y, x)
    return node


def _cast(node: Expr) -> Expr:
    match node:
        case Cast(Cast(x, "i32"), "f32") if x.type == "bool":
            return cast(x, "f32")
    return node


_RULES = {Unary: _unary, Binary: _binary, Compare: _compare, Select: _select, Cast: _cast}
