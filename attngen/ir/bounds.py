"""Intervals of integer expressions and truth of bool expressions over a tile of positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from attngen.ir.affine import Affine, choose, is_small, is_zero, largest, nonnegative, smallest
from attngen.ir.expr import (
    FALSE,
    TRUE,
    Binary,
    Cast,
    Compare,
    Const,
    Coord,
    Expr,
    Extent,
    Load,
    Select,
    Unary,
    and_,
    binary,
    cast,
    compare,
    coords,
    not_,
    or_,
)

OPPOSITE = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}
UNIFORM = frozenset({"b", "h", "qo_len", "kv_len"})
_ENDS: tuple[Literal["lo", "hi"], ...] = ("lo", "hi")


def position_axes(load: Load) -> frozenset[str]:
    """Which of ``q`` and ``k`` the indices of a load depend on."""
    return coords(load) & {"q", "k"}


@dataclass(frozen=True)
class Interval:
    """All values lie in ``lo .. hi``; ``None`` is unbounded."""

    lo: Affine | None
    hi: Affine | None


@dataclass(frozen=True)
class Truth:
    """``any`` false: never true in the tile; ``all`` true: always true."""

    any: Expr
    all: Expr


UNBOUNDED, UNKNOWN = Interval(None, None), Truth(TRUE, FALSE)


class Bounds:
    """Bounds over a tile.

    Args:
        ranges: coordinate name -> its first and last value.
        uniform: coordinates with one value in the tile. Others, ``h`` among them, are only known not to be negative,
            and ``q`` and ``k`` not even that.
        extents: an i32 or bool load indexed by position lies between its two :class:`Extent`; else it may be anything.
    """

    def __init__(
        self, ranges: Mapping[str, tuple[Coord, Coord]], uniform: frozenset[str], *, extents: bool = False
    ) -> None:
        self.ranges, self.uniform, self.extents = ranges, uniform, extents
        self._intervals: dict[Expr, Interval] = {}
        self._truths: dict[Expr, Truth] = {}

    def is_uniform(self, expr: Expr) -> bool:
        """Whether the value is the same in the whole tile."""
        return coords(expr) <= self.uniform

    def interval(self, form: Affine) -> Interval:
        """Bounds of a sum; every atom counts once, so sums of independent atoms are tight."""
        lo: Affine | None = Affine((), form.const)
        hi: Affine | None = Affine((), form.const)
        for atom, n in form.terms:
            found = self._atom(atom)
            low, high = (found.lo, found.hi) if n > 0 else (found.hi, found.lo)
            lo = None if lo is None or low is None else lo + low * n
            hi = None if hi is None or high is None else hi + high * n
        return Interval(lo, hi)

    def of(self, expr: Expr) -> Interval:
        """Bounds of an i32 expression."""
        return self.interval(Affine.of(expr))

    def _atom(self, atom: Expr) -> Interval:
        if atom not in self._intervals:
            exact = Affine(((atom, 1),), 0)
            found = Interval(exact, exact) if self.is_uniform(atom) else self._compute(atom)
            small = (end if end is not None and is_small(end.expr()) else None for end in (found.lo, found.hi))
            self._intervals[atom] = Interval(*small)
        return self._intervals[atom]

    def _compute(self, atom: Expr) -> Interval:
        match atom:
            case Coord(name):
                return self._coordinate(name)
            case Load() if self.extents and position_axes(atom):
                return Interval(*(Affine(((Extent(atom, end), 1),), 0) for end in _ENDS))
            case Binary("floordiv", x, Const(m)) if m:
                return _quotient(self.of(x), int(m))
            case Binary("shr", x, _):
                return _towards_zero(self.of(x))
            case Binary("bitand", _, Const(m)) if m >= 0:
                return Interval(Affine((), 0), Affine((), int(m)))
            case Binary("mod", Binary("shr", x, n), Const(m)) if m > 1:
                return self._bits(x, n, int(m)) or _remainder(self.of(atom.x), int(m))
            case Binary("mod", x, Const(m)) if m:
                return _remainder(self.of(x), int(m))
            case Binary("mul", x, y):
                return self._square(x) if x == y else _product(self.of(x), self.of(y))
            case Binary("min", x, y):
                return _negated(_maximum(_negated(self.of(x)), _negated(self.of(y))))
            case Binary("max", x, y):
                return _maximum(self.of(x), self.of(y))
            case Unary("abs", x):
                return _absolute(self.of(x))
            case Select(condition, x, y):
                return _either(self.truth(condition), self.of(x), self.of(y))
            case Cast(x, "i32") if x.type == "bool":
                truth, zero, one = self.truth(x), Affine((), 0), Affine((), 1)
                return Interval(choose(truth.all, one, zero), choose(truth.any, one, zero))
        return UNBOUNDED

    def _coordinate(self, name: str) -> Interval:
        if name in self.ranges:
            first, last = self.ranges[name]
            return Interval(Affine(((first, 1),), 0), Affine(((last, 1),), 0))
        return UNBOUNDED if name in ("q", "k") else Interval(Affine((), 0), None)

    def _bits(self, word: Expr, count: Expr, m: int) -> Interval | None:
        """``(word >> count) % m`` for a power of two: 0 of a word of zeros, ``m - 1`` of one whose bits in reach are all set."""
        most, size, ends = Affine.of(count).most(), m.bit_length() - 1, self.of(word)
        if m != 1 << size or most is None or most + size > 30 or ends.lo is None or ends.hi is None:
            return None
        ones, none, every = (1 << (max(most, 0) + size)) - 1, Affine((), 0), Affine((), m - 1)
        is_zero_word = and_(nonnegative(ends.lo), nonnegative(ends.hi * -1))
        is_full_word = and_(nonnegative(ends.lo - ones), nonnegative(ends.hi * -1 + ones))
        return Interval(choose(is_full_word, every, none), choose(is_zero_word, none, every))

    def _square(self, x: Expr) -> Interval:
        size = _absolute(self.of(x))
        return Interval(size.lo and _times(size.lo, size.lo), size.hi and _times(size.hi, size.hi))

    def truth(self, expr: Expr) -> Truth:
        """Whether a bool expression is never, sometimes or always true."""
        if expr not in self._truths:
            truth = self._decide(expr)
            self._truths[expr] = Truth(
                truth.any if is_small(truth.any) else TRUE, truth.all if is_small(truth.all) else FALSE
            )
        return self._truths[expr]

    def _decide(self, expr: Expr) -> Truth:
        match expr:
            case Const(value):
                return Truth(TRUE, TRUE) if value else Truth(FALSE, FALSE)
            case Binary("and", x, y):
                left, right = self.truth(x), self.truth(y)
                return Truth(_both(left.any, right.any), _both(left.all, right.all))
            case Binary("or", x, y):
                left, right = self.truth(x), self.truth(y)
                return Truth(_one(left.any, right.any), _one(left.all, right.all))
            case Unary("not", x):
                inner = self.truth(x)
                return Truth(negation(inner.all), negation(inner.any))
            case Select(condition, x, y):
                return _selected(self.truth(condition), self.truth(x), self.truth(y))
            case Compare(op, x, y) if x.type == "i32":
                return self.comparison(op, Affine.of(x) - Affine.of(y))
            case Compare("eq" | "ne" as op, x, y) if x.type == "bool":
                same = _equal(self.truth(x), self.truth(y))
                return same if op == "eq" else Truth(negation(same.all), negation(same.any))
            case Compare(op, x, y) if x.type == "bool":
                return self.comparison(op, Affine.of(cast(x, "i32")) - Affine.of(cast(y, "i32")))
            case Cast(x, "bool") if x.type == "i32":
                return self.comparison("ne", Affine.of(x))
            case Load() if self.extents and position_axes(expr) and expr.type == "bool":
                low, high = (compare("ne", Extent(expr, end), 0) for end in _ENDS)
                return Truth(high, low)
        return Truth(expr, expr) if self.is_uniform(expr) else UNKNOWN

    def comparison(self, op: str, difference: Affine) -> Truth:
        """Truth of ``difference op 0``."""
        match op:
            case "ge":
                bounds = self.interval(difference)
                return Truth(_reaches(bounds.hi, TRUE), _reaches(bounds.lo, FALSE))
            case "gt":
                return self.comparison("ge", difference - 1)
            case "le":
                return self.comparison("ge", difference * -1)
            case "lt":
                return self.comparison("ge", difference * -1 - 1)
            case "ne":
                same = self.comparison("eq", difference)
                return Truth(negation(same.all), negation(same.any))
        bounds = self.interval(difference)
        if bounds.lo is not None and bounds.lo == bounds.hi:
            return Truth(is_zero(bounds.lo), is_zero(bounds.lo))
        above, below = self.comparison("ge", difference), self.comparison("le", difference)
        return Truth(_both(above.any, below.any), _both(above.all, below.all))


def negation(x: Expr) -> Expr:
    """``~x``; integer comparisons turn around."""
    if isinstance(x, Compare) and x.x.type == "i32":
        return compare(OPPOSITE[x.op], x.x, x.y)
    return not_(x)


def _reaches(end: Affine | None, unknown: Expr) -> Expr:
    return unknown if end is None else nonnegative(end)


def _both(x: Expr, y: Expr) -> Expr:
    return x if x == y else and_(x, y)


def _one(x: Expr, y: Expr) -> Expr:
    return x if x == y else or_(x, y)


def _selected(condition: Truth, x: Truth, y: Truth) -> Truth:
    return Truth(
        _one(_both(condition.any, x.any), _both(negation(condition.all), y.any)),
        _both(_one(negation(condition.any), x.all), _one(condition.all, y.all)),
    )


def _equal(x: Truth, y: Truth) -> Truth:
    never_x, never_y = negation(x.any), negation(y.any)
    differ = _one(_both(x.all, never_y), _both(never_x, y.all))
    return Truth(negation(differ), _one(_both(x.all, y.all), _both(never_x, never_y)))


def _negated(x: Interval) -> Interval:
    return Interval(None if x.hi is None else x.hi * -1, None if x.lo is None else x.lo * -1)


def _maximum(x: Interval, y: Interval) -> Interval:
    known = [end for end in (x.lo, y.lo) if end is not None]
    hi = None if x.hi is None or y.hi is None else largest(x.hi, y.hi)
    return Interval(largest(*known) if known else None, hi)


def _absolute(x: Interval) -> Interval:
    low = [Affine((), 0)]
    if x.lo is not None:
        low.append(x.lo)
    if x.hi is not None:
        low.append(x.hi * -1)
    return Interval(largest(*low), None if x.lo is None or x.hi is None else largest(x.hi, x.lo * -1))


def _either(condition: Truth, x: Interval, y: Interval) -> Interval:
    def end(a: Affine | None, b: Affine | None, low: bool) -> Affine | None:
        if TRUE in (condition.all, negation(condition.any)):
            return a if condition.all == TRUE else b
        if a is None or b is None:
            return None
        both = smallest(a, b) if low else largest(a, b)
        return choose(condition.all, a, choose(condition.any, both, b))

    return Interval(end(x.lo, y.lo, True), end(x.hi, y.hi, False))


def _towards_zero(x: Interval) -> Interval:
    """Arithmetic shifts by whatever count: ``0 .. x`` of what is not negative, else ``x .. -1``."""
    zero, minus_one = Affine((), 0), Affine((), -1)
    return Interval(None if x.lo is None else smallest(x.lo, zero), None if x.hi is None else largest(x.hi, minus_one))


def _quotient(x: Interval, m: int) -> Interval:
    if m < 0:
        return _quotient(_negated(x), -m)
    return Interval(None if x.lo is None else x.lo // m, None if x.hi is None else x.hi // m)


def _remainder(x: Interval, m: int) -> Interval:
    """``lo % m .. hi % m`` where both ends have one quotient, else everything that a remainder can be."""
    if m < 0:
        return _negated(_remainder(_negated(x), -m))
    zero, most = Affine((), 0), Affine((), m - 1)
    if x.lo is None or x.hi is None:
        return Interval(zero, most)
    same = is_zero(x.hi // m - x.lo // m)
    return Interval(choose(same, _mod(x.lo, m), zero), choose(same, _mod(x.hi, m), most))


def _mod(x: Affine, m: int) -> Affine:
    return Affine.of(binary("mod", x.expr(), m))


def _product(x: Interval, y: Interval) -> Interval:
    if x.lo is None or y.lo is None or x.hi is None or y.hi is None:
        positive = x.lo and y.lo and x.lo.is_nonnegative() and y.lo.is_nonnegative()
        return Interval(_times(x.lo, y.lo) if positive and x.lo and y.lo else None, None)
    corners = dict.fromkeys(_times(a, b) for a in (x.lo, x.hi) for b in (y.lo, y.hi))
    return Interval(smallest(*corners), largest(*corners))


def _times(x: Affine, y: Affine) -> Affine:
    return Affine.of(binary("mul", x.expr(), y.expr()))
