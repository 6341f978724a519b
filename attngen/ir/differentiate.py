"""Symbolic derivatives of score mods.

The rules are those of torch's autograd, subgradients included: ``where`` passes the selected branch, ``minimum`` and
``maximum`` give each side half at a tie, ``abs`` gives 0 at 0, ``floor``, ``//``, comparisons and integer casts give 0.
A derivative selects where its function selects, so an infinite slope of the branch not taken never turns into nan.
"""

from __future__ import annotations

import math

from attngen.errors import SpecError
from attngen.ir.expr import (
    Binary,
    Cast,
    Compare,
    Const,
    Coord,
    Expr,
    Load,
    Select,
    Size,
    Unary,
    binary,
    compare,
    select,
    unary,
)

ZERO, HALF, ONE, TWO = Const(0.0), Const(0.5), Const(1.0), Const(2.0)


def differentiate(expr: Expr, wrt: Expr) -> Expr:
    """``d expr / d wrt``, an f32 expression.

    Args:
        expr: an f32 expression.
        wrt: ``SCORE`` or a float :class:`Load`, which is matched whole: other loads of the parameter are constants.

    Raises:
        SpecError: either is not f32, or ``wrt`` is no leaf.
    """
    if expr.type != "f32" or wrt.type != "f32" or not isinstance(wrt, (Coord, Load)):
        raise SpecError(
            "only f32 expressions have derivatives, with respect to the score or a floating parameter",
            where="expression",
            why=f"the expression is {expr.type}, the variable a {type(wrt).__name__} of type {wrt.type}",
            fix="convert the expression with f32(...)",
        )
    return _Derivative(wrt).of(expr)


def param_gradients(expr: Expr) -> tuple[tuple[Load, Expr], ...]:
    """Derivatives with respect to each distinct load of a floating parameter, in order of appearance.

    Loads that the value does not depend on differentiably (all derivatives identically 0) are left out.
    """
    loads = dict.fromkeys(node for node in expr.walk() if isinstance(node, Load) and node.type == "f32")
    gradients = ((load, differentiate(expr, load)) for load in loads)
    return tuple((load, slope) for load, slope in gradients if slope != ZERO)


class _Derivative:
    def __init__(self, wrt: Expr) -> None:
        self.wrt = wrt
        self.memo: dict[Expr, Expr] = {}

    def of(self, expr: Expr) -> Expr:
        if expr not in self.memo:
            self.memo[expr] = ONE if expr == self.wrt else ZERO if expr.type != "f32" else self.derive(expr)
        return self.memo[expr]

    def derive(self, expr: Expr) -> Expr:
        match expr:
            case Const() | Coord() | Load() | Size() | Compare():
                return ZERO
            case Cast(x, _):
                return self.of(x)
            case Select(condition, x, y):
                return choose(condition, self.of(x), self.of(y))
            case Unary("neg", x):
                return neg(self.of(x))
            case Unary(_, x):
                slope = self.of(x)
                return ZERO if slope == ZERO else mul(_slope(expr), slope)
            case Binary("floordiv", _, _):
                return ZERO
            case Binary(_, x, y):
                return _binary(expr, self.of(x), self.of(y))
        raise TypeError(f"no derivative of {type(expr).__name__}")


def _slope(node: Unary) -> Expr:
    """Derivative of a function by its operand, in terms of the function's own value where that is shorter."""
    x = node.x
    match node.op:
        case "abs":
            return choose(compare("gt", x, ZERO), ONE, choose(compare("lt", x, ZERO), Const(-1.0), ZERO))
        case "exp":
            return node
        case "exp2":
            return mul(node, Const(math.log(2.0)))
        case "log":
            return div(ONE, x)
        case "log2":
            return div(Const(1.0 / math.log(2.0)), x)
        case "sqrt":
            return div(HALF, node)
        case "rsqrt":
            return mul(Const(-0.5), mul(node, mul(node, node)))
        case "tanh":
            return sub(ONE, mul(node, node))
        case "sigmoid":
            return mul(node, sub(ONE, node))
        case "sin":
            return unary("cos", x)
        case "cos":
            return neg(unary("sin", x))
        case _:  # floor
            return ZERO


def _binary(node: Binary, dx: Expr, dy: Expr) -> Expr:
    x, y = node.x, node.y
    match node.op:
        case "add":
            return add(dx, dy)
        case "sub":
            return sub(dx, dy)
        case "mul":
            return add(mul(dx, y), mul(x, dy))
        case "div":
            return sub(div(dx, y), ZERO if dy == ZERO else mul(div(node, y), dy))
        case "mod":
            return sub(dx, ZERO if dy == ZERO else mul(binary("floordiv", x, y), dy))
        case "pow":
            return add(_pow_base(node, dx), _pow_exponent(node, dy))
    return _extreme(node, dx, dy)


def _extreme(node: Binary, dx: Expr, dy: Expr) -> Expr:
    """The slope of the smaller or larger side, the mean of both at a tie."""
    if dx == dy:
        return dx
    tie, (below, above) = compare("eq", node.x, node.y), ("lt", "le") if node.op == "min" else ("gt", "ge")
    if dy == ZERO:
        return choose(compare(above, node.x, node.y), mul(choose(tie, HALF, ONE), dx), ZERO)
    if dx == ZERO:
        return choose(compare(below, node.x, node.y), ZERO, mul(choose(tie, HALF, ONE), dy))
    return choose(tie, mul(HALF, add(dx, dy)), choose(compare(below, node.x, node.y), dx, dy))


def _pow_base(node: Binary, dx: Expr) -> Expr:
    if dx == ZERO:
        return ZERO
    if isinstance(node.y, Const):
        n = float(node.y.value)
        power = {0.0: ZERO, 1.0: ONE, 2.0: node.x}.get(n, binary("pow", node.x, n - 1.0))
        return mul(mul(Const(n), power), dx)
    slope = mul(node.y, binary("pow", node.x, sub(node.y, ONE)))
    return mul(choose(compare("eq", node.y, ZERO), ZERO, slope), dx)


def _pow_exponent(node: Binary, dy: Expr) -> Expr:
    if dy == ZERO:
        return ZERO
    flat = binary("and", compare("eq", node.x, ZERO), compare("ge", node.y, ZERO))
    return mul(choose(flat, ZERO, mul(node, unary("log", node.x))), dy)


def add(x: Expr, y: Expr) -> Expr:
    """``x + y`` without zeros."""
    if isinstance(x, Const) and isinstance(y, Const):
        return Const(float(x.value + y.value))
    return y if x == ZERO else x if y == ZERO else binary("add", x, y)


def sub(x: Expr, y: Expr) -> Expr:
    """``x - y`` without zeros."""
    if isinstance(x, Const) and isinstance(y, Const):
        return Const(float(x.value - y.value))
    return neg(y) if x == ZERO else x if y == ZERO else binary("sub", x, y)


def mul(x: Expr, y: Expr) -> Expr:
    """``x * y`` without zeros, ones and minus ones; constants move to the left and merge.

    A factor that selects zero keeps the other factor, which may be infinite there, inside the selection.
    """
    if isinstance(y, Const):
        x, y = y, x
    if isinstance(x, Const):
        if isinstance(y, Const):
            return Const(_rounded(float(x.value * y.value)))
        if x in (ZERO, ONE, Const(-1.0)):
            return ZERO if x == ZERO else y if x == ONE else neg(y)
    for factor, other in ((x, y), (y, x)):
        if isinstance(factor, Select) and _may_be_zero(factor):
            return choose(factor.condition, mul(factor.x, other), mul(factor.y, other))
    if isinstance(y, Binary) and y.op == "mul" and isinstance(y.x, Const):
        return mul(mul(y.x, x), y.y) if isinstance(x, Const) else mul(y.x, mul(x, y.y))
    return binary("mul", x, y)


def _may_be_zero(expr: Expr) -> bool:
    """Whether some branch of a selection is the constant 0."""
    return expr == ZERO or (isinstance(expr, Select) and (_may_be_zero(expr.x) or _may_be_zero(expr.y)))


def _rounded(value: float) -> float:
    """``50.0`` times ``1 / 50.0`` is meant to be 1, whatever the last bit says."""
    nearest = float(round(value)) if math.isfinite(value) else value
    return nearest if math.isclose(value, nearest, rel_tol=4e-16) else value


def div(x: Expr, y: Expr) -> Expr:
    """``x / y``, a product for constant ``y``; without zeros on top."""
    if isinstance(y, Const) and y != ZERO and math.isfinite(y.value):
        return mul(Const(1.0 / y.value), x)
    if isinstance(x, Select) and _may_be_zero(x):
        return choose(x.condition, div(x.x, y), div(x.y, y))
    return ZERO if x == ZERO else binary("div", x, y)


def neg(x: Expr) -> Expr:
    """``-x``, folded for constants and double negation."""
    if isinstance(x, Const):
        return Const(-float(x.value)) if x != ZERO else ZERO
    return x.x if isinstance(x, Unary) and x.op == "neg" else unary("neg", x)


def choose(condition: Expr, x: Expr, y: Expr) -> Expr:
    """``x`` where ``condition`` holds, else ``y``; one of them if they are equal."""
    return x if x == y else select(condition, x, y)
