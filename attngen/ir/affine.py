"""Integer expressions as sums ``n1 * atom1 + n2 * atom2 + ... + constant``.

Equal atoms cancel, which is what makes bounds of ``q - k`` or ``q - (q - 3)`` tight. The positions of a tile are ordered,
``q0 <= q1`` and ``k0 <= k1``, as are the extents of a load, and :meth:`Affine.is_nonnegative` knows it. Arithmetic is exact:
positions times coefficients are taken to stay within int32, as they must in kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from attngen.ir.expr import (
    FALSE,
    K0,
    K1,
    Q0,
    Q1,
    TRUE,
    Binary,
    Cast,
    Compare,
    Const,
    Coord,
    Expr,
    Extent,
    Select,
    Unary,
    and_,
    binary,
    compare,
    not_,
    or_,
    select,
    unary,
)
from attngen.ir.scalar import clamp_count, evaluate_scalar

MAX_NODES = 200
_EXACT = (Const, Unary, Binary, Compare, Select, Cast)
_ORDERED = ((Q1, Q0), (K1, K0))
_NONNEGATIVE = ("b", "h", "qo_len", "kv_len")


@dataclass(frozen=True)
class Affine:
    """``sum(n * atom) + const``.

    Attributes:
        terms: atoms (i32 expressions that are no sums) and their coefficients, none of them 0.
        const: the constant.
    """

    terms: tuple[tuple[Expr, int], ...]
    const: int

    @staticmethod
    def make(terms: Mapping[Expr, int], const: int) -> Affine:
        """From a dictionary; zero coefficients vanish."""
        return Affine(tuple((atom, n) for atom, n in terms.items() if n), const)

    @staticmethod
    def of(expr: Expr) -> Affine:
        """The sum that an i32 expression is."""
        match expr:
            case Const(value):
                return Affine((), int(value))
            case Unary("neg", x):
                return Affine.of(x) * -1
            case Binary("add", x, y):
                return Affine.of(x) + Affine.of(y)
            case Binary("sub", x, y):
                return Affine.of(x) - Affine.of(y)
            case Binary("mul", x, y):
                left, right = Affine.of(x), Affine.of(y)
                if not left.terms or not right.terms:
                    return left * right.const if not right.terms else right * left.const
            case Binary("floordiv", x, y):
                divisor = Affine.of(y)
                if not divisor.terms and divisor.const > 0:
                    return Affine.of(x) // divisor.const
            case Binary("shr", x, y):
                count = Affine.of(y)
                if not count.terms and clamp_count(count.const) < 31:  # 2 ** 31 is no i32
                    return Affine.of(x) // (1 << clamp_count(count.const))
        if all(isinstance(node, _EXACT) and node.type != "f32" for node in expr.walk()):
            return Affine((), int(evaluate_scalar(expr, {})))
        return Affine(((expr, 1),), 0)

    def __add__(self, other: Affine | int) -> Affine:
        if isinstance(other, int):
            return Affine(self.terms, self.const + other)
        terms = dict(self.terms)
        for atom, n in other.terms:
            terms[atom] = terms.get(atom, 0) + n
        return Affine.make(terms, self.const + other.const)

    def __sub__(self, other: Affine | int) -> Affine:
        return self + (-other if isinstance(other, int) else other * -1)

    def __mul__(self, n: int) -> Affine:
        return Affine(tuple((atom, c * n) for atom, c in self.terms) if n else (), self.const * n)

    def __floordiv__(self, n: int) -> Affine:
        """Floored quotient by ``n > 0``; multiples of ``n`` leave the division."""
        whole = Affine(tuple((atom, c // n) for atom, c in self.terms if c % n == 0), self.const // n)
        rest = Affine(tuple((atom, c) for atom, c in self.terms if c % n), self.const % n)
        if not rest.terms:
            return whole
        return whole + Affine(((Binary("floordiv", rest.expr(), Const(n)), 1),), 0)

    def coefficient(self, atom: Expr) -> int:
        """How often ``atom`` counts."""
        return next((n for a, n in self.terms if a == atom), 0)

    def without(self, atom: Expr) -> Affine:
        """The sum less its term in ``atom``."""
        return Affine(tuple((a, n) for a, n in self.terms if a != atom), self.const)

    def expr(self) -> Expr:
        """As an expression: what is added first, then what is subtracted."""
        positive = [_term(atom, n) for atom, n in self.terms if n > 0]
        negative = [_term(atom, -n) for atom, n in self.terms if n < 0]
        const = self.const
        if positive:
            total = positive[0]
        elif const > 0 or not negative:
            total, const = Const(const), 0
        else:
            total, negative = unary("neg", negative[0]), negative[1:]
        for term in positive[1:]:
            total = binary("add", total, term)
        for term in negative:
            total = binary("sub", total, term)
        if const:
            total = binary("add" if const > 0 else "sub", total, abs(const))
        return total

    def most(self) -> int | None:
        """A constant that the sum never exceeds."""
        total = self.const
        for atom, n in self.terms:
            end = _limits(atom)[1 if n > 0 else 0]
            if end is None:
                return None
            total += n * end
        return total

    def is_nonnegative(self, depth: int = 2) -> bool:
        """Whether the sum is provably at least 0 for every tile; ``depth`` minima and maxima are opened."""
        extremes = [(a, n) for a, n in self.terms if isinstance(a, Binary) and a.op in ("min", "max")]
        if extremes and depth:
            # A minimum is at least 0 if both pieces are, its negative if one is: what needs both is opened first.
            extreme, count = min(extremes, key=lambda term: (term[0].op == "min") != (term[1] > 0))
            rest = self.without(extreme)
            pieces = ((Affine.of(x) * count + rest).is_nonnegative(depth - 1) for x in (extreme.x, extreme.y))
            if all(pieces) if (extreme.op == "min") == (count > 0) else any(pieces):
                return True
        left = _cancel_quotients(self)
        for atom, n in left.terms:
            parts = quotient(atom)
            if parts is not None:
                x, m = Affine.of(parts[0]), parts[1]
                if n % m == 0:  # m * (x // m) lies in x - (m - 1) .. x
                    left = left.without(atom) + x * (n // m) - max(0, (n // m) * (m - 1))
        terms = dict(left.terms)
        extents = [(a, Extent(a.load, "lo")) for a in terms if isinstance(a, Extent) and a.end == "hi"]
        for high, low in (*_ORDERED, *extents):
            both = min(terms.get(high, 0), -terms.get(low, 0))
            if both > 0:
                terms[high] -= both
                terms[low] += both
        least: int | None = left.const
        for atom, n in terms.items():
            if n and least is not None:
                end = _limits(atom)[0 if n > 0 else 1]
                least = None if end is None else least + n * end
        return least is not None and least >= 0


def quotient(expr: Expr) -> tuple[Expr, int] | None:
    """``x`` and ``m`` if ``expr`` is ``x // m`` for a constant ``m > 0``."""
    match expr:
        case Binary("floordiv", x, Const(m)) if m > 0:
            return x, int(m)
    return None


def _limits(atom: Expr) -> tuple[int | None, int | None]:
    """Constants between which an atom lies."""
    match atom:
        case Const(value):
            return int(value), int(value)
        case Coord(name) if name in _NONNEGATIVE:
            return 0, None
        case Binary("mod", _, Const(m)) if m > 0:
            return 0, int(m) - 1
        case Select(_, x, y):
            (a, b), (c, d) = _limits(x), _limits(y)
            return None if a is None or c is None else min(a, c), None if b is None or d is None else max(b, d)
    return None, None


def _term(atom: Expr, n: int) -> Expr:
    return atom if n == 1 else binary("mul", atom, n)


def _cancel_quotients(form: Affine) -> Affine:
    """Drop ``n * (x // m) - n * (y // m)`` where ``x >= y``: a lower bound of the sum."""
    quotients = [(atom, n, found) for atom, n in form.terms if (found := quotient(atom)) is not None]
    for high, n, (x, divisor) in quotients:
        for low, m, (y, other) in quotients:
            alike = n > 0 and n == -m and divisor == other
            if alike and (Affine.of(x) - Affine.of(y)).is_nonnegative():
                return _cancel_quotients(form.without(high).without(low))
    return form


def nonnegative(form: Affine) -> Expr:
    """``form >= 0`` as a comparison without minus signs; a constant where it is provable."""
    if form.is_nonnegative():
        return TRUE
    if (form * -1 - 1).is_nonnegative():
        return FALSE
    opened = _opened(form)
    if opened is not None:
        return opened
    strict = form.const < 0 and len(form.terms) > 0
    left, right = _sides(form + 1 if strict else form)
    if not left.terms:
        return compare("lt" if strict else "le", right.expr(), left.expr())
    return compare("gt" if strict else "ge", left.expr(), right.expr())


def _opened(form: Affine) -> Expr | None:
    """A sum with one minimum or maximum as two comparisons; a choice of constants as its condition."""
    match form.terms:
        case ((Select(condition, Const(first), Const(second)), n),):
            above, below = (n * int(value) + form.const >= 0 for value in (first, second))
            return or_(and_(condition, above), and_(not_(condition), below))
    extremes = [(a, n) for a, n in form.terms if isinstance(a, Binary) and a.op in ("min", "max")]
    if len(extremes) != 1:
        return None
    (atom, n), rest = extremes[0], form.without(extremes[0][0])
    x, y = (nonnegative(Affine.of(z) * n + rest) for z in (atom.x, atom.y))
    return and_(x, y) if (atom.op == "min") == (n > 0) else or_(x, y)


def _sides(form: Affine) -> tuple[Affine, Affine]:
    """Left and right of a comparison with 0, such that nothing is negative."""
    left = Affine(tuple((a, n) for a, n in form.terms if n > 0), max(form.const, 0))
    return left, Affine(tuple((a, -n) for a, n in form.terms if n < 0), max(-form.const, 0))


def is_zero(form: Affine) -> Expr:
    """``form == 0``."""
    if not form.terms:
        return TRUE if form.const == 0 else FALSE
    if (form - 1).is_nonnegative() or (form * -1 - 1).is_nonnegative():
        return FALSE
    left, right = _sides(form)
    return compare("eq", left.expr(), right.expr()) if left.terms else compare("eq", right.expr(), left.expr())


def smallest(*forms: Affine) -> Affine:
    """The minimum; operands that are provably not smaller vanish."""
    return _extreme("min", 1, forms)


def largest(*forms: Affine) -> Affine:
    """The maximum; operands that are provably not larger vanish."""
    return _extreme("max", -1, forms)


def _extreme(op: str, sign: int, forms: tuple[Affine, ...]) -> Affine:
    kept: list[Affine] = []
    for form in forms:
        if any(((form - other) * sign).is_nonnegative() for other in kept):
            continue
        kept = [other for other in kept if not ((other - form) * sign).is_nonnegative()] + [form]
    expr = kept[0].expr()
    for form in kept[1:]:
        expr = binary(op, expr, form.expr())
    return kept[0] if len(kept) == 1 else Affine(((expr, 1),), 0)


def is_small(expr: Expr) -> bool:
    """Whether ``expr`` is worth computing for every tile; larger answers are given up."""
    return sum(1 for _ in islice(expr.walk(), MAX_NODES + 1)) <= MAX_NODES


def choose(condition: Expr, x: Affine, y: Affine) -> Affine:
    """``x`` where ``condition`` holds, else ``y``."""
    if x == y or condition == TRUE:
        return x
    return y if condition == FALSE else Affine(((select(condition, x.expr(), y.expr()), 1),), 0)
