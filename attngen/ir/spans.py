"""Which keys a tile of queries can see, and the reverse: masks solved for one position.

A mask in negation normal form is a tree of ``and`` and ``or`` over constraints ``sum >= 0``. A constraint with the
wanted position is a half-line (:class:`Band`); one without it is a :class:`Condition`, which keeps or drops everything,
and so is whatever cannot be solved, with the answer "perhaps". :mod:`attngen.ir.regions` combines them.
"""

from __future__ import annotations

from dataclasses import dataclass

from attngen.ir.affine import Affine, quotient
from attngen.ir.bounds import OPPOSITE, UNIFORM, Bounds
from attngen.ir.expr import (
    K0,
    K1,
    KV_LEN,
    Q0,
    Q1,
    Binary,
    Cast,
    Compare,
    Const,
    Coord,
    Expr,
    K,
    Q,
    Select,
    Unary,
    coords,
    not_,
)
from attngen.ir.regions import (
    BIG,
    EVERYTHING,
    NOTHING,
    PERHAPS,
    Band,
    Condition,
    Edge,
    Region,
    as_band,
    choice,
    conjunction,
    disjunction,
)

MAX_STEPS = 1000  # nested equalities of bools double the work; past this, the answer is "perhaps"


@dataclass(frozen=True)
class Span:
    """Positions that a tile can see; ``None`` is unbounded, ``lo > hi`` is empty.

    Attributes:
        lo, hi: every visible position lies in ``lo .. hi``, both inclusive.
        full_lo, full_hi: positions in ``full_lo .. full_hi`` are visible from the whole tile; often empty.
        has_full: false: no position is provably visible from the whole tile, and ``full_lo``, ``full_hi`` mean nothing.
        exact: every position in ``lo .. hi`` outside the hole is visible from some position of the tile, so no part can be skipped.
        hole_lo, hole_hi: no position in ``hole_lo .. hole_hi`` is visible from anywhere in the tile. Both are ``None`` without
            a hole; else ``hole_hi >= hole_lo - 1``, with equality where this tile has none, so that ``lo .. hole_lo - 1`` and
            ``hole_hi + 1 .. hi`` never overlap. Either may be empty, as the hole may reach beyond ``lo .. hi``.
    """

    lo: Expr | None
    hi: Expr | None
    full_lo: Expr | None
    full_hi: Expr | None
    has_full: bool
    exact: bool
    hole_lo: Expr | None = None
    hole_hi: Expr | None = None

    @property
    def solid(self) -> bool:
        """Whether every position in ``lo .. hi`` is visible from some position of the tile: a kernel that ignores the hole may
        take them all without a test.
        """
        return self.exact and self.hole_lo is None


def key_span(mask: Expr, uniform: frozenset[str] = UNIFORM) -> Span:
    """Keys that queries ``q0 .. q1`` can see, over ``q0``, ``q1`` and the uniform coordinates.

    Args:
        mask: a bool expression.
        uniform: coordinates with one value in the tile.
    """
    return _Solver(K, Bounds({"q": (Q0, Q1)}, uniform)).span(mask)


def query_span(mask: Expr, uniform: frozenset[str] = UNIFORM) -> Span:
    """Queries that can see keys ``k0 .. k1``, over ``k0``, ``k1`` and the uniform coordinates; see :func:`key_span`."""
    return _Solver(Q, Bounds({"k": (K0, K1)}, uniform)).span(mask)


class _Solver:
    def __init__(self, target: Coord, bounds: Bounds) -> None:
        self.target, self.bounds, self.steps = target, bounds, 0
        self.other = Q if target == K else K

    def span(self, mask: Expr) -> Span:
        region = self.region(mask, True)
        if region == NOTHING:
            return Span(Const(0), Const(-1), None, None, False, True)
        band = region if isinstance(region, Band) else as_band(region)
        full = (band.full_lo, band.full_hi) if band.has_full else (None, None)
        ends = (band.lo, band.hi, *full, band.hole_lo, band.hole_hi)
        lo, hi, full_lo, full_hi, hole_lo, hole_hi = (None if end is None else end.expr() for end in ends)
        return Span(lo, hi, full_lo, full_hi, band.has_full, band.exact, hole_lo, hole_hi)

    def region(self, expr: Expr, wanted: bool) -> Region:
        """Where ``expr`` has the value ``wanted``."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            return PERHAPS
        match expr:
            case Const(value):
                return EVERYTHING if bool(value) == wanted else NOTHING
            case Unary("not", x):
                return self.region(x, not wanted)
            case Binary("and" | "or" as op, _, _):
                return self.combine((op == "and") == wanted, [self.region(x, wanted) for x in _operands(expr, op)])
            case Select(condition, x, y):
                return self.choice(condition, self.region(x, wanted), self.region(y, wanted))
            case Compare("eq" | "ne" as op, x, y) if x.type == "bool":
                equal = (op == "eq") == wanted
                return self.choice(x, self.region(y, equal), self.region(y, not equal))
            case Compare(op, x, y) if x.type == "i32":
                return self.comparison(op if wanted else OPPOSITE[op], Affine.of(x) - Affine.of(y))
            case Cast(x, "bool") if x.type == "i32":
                return self.comparison("ne" if wanted else "eq", Affine.of(x))
        return self.condition(expr if wanted else not_(expr))

    def choice(self, condition: Expr, x: Region, y: Region) -> Region:
        if self.bounds.is_uniform(condition):
            return choice(self.bounds.truth(condition).any, x, y)
        sides = ((True, x), (False, y))
        return self.combine(False, [self.combine(True, [self.region(condition, holds), z]) for holds, z in sides])

    def combine(self, both: bool, regions: list[Region]) -> Region:
        end = Affine(((KV_LEN, 1),), -1) if "kv_len" in self.bounds.uniform else Affine((), BIG)
        return conjunction(regions, end) if both else disjunction(regions, end)

    def condition(self, expr: Expr) -> Condition:
        if self.target.name in coords(expr):
            return PERHAPS
        truth = self.bounds.truth(expr)
        return Condition(truth.any, truth.all)

    def comparison(self, op: str, difference: Affine) -> Region:
        """Where ``difference op 0``."""
        match op:
            case "ge":
                return self.constraint(difference)
            case "gt":
                return self.constraint(difference - 1)
            case "le":
                return self.constraint(difference * -1)
            case "lt":
                return self.constraint(difference * -1 - 1)
        both = op == "eq"
        shift = 0 if both else 1
        return self.combine(both, [self.constraint(difference - shift), self.constraint(difference * -1 - shift)])

    def constraint(self, form: Affine) -> Region:
        """Where ``form >= 0``."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            return PERHAPS
        for atom, n in form.terms:
            if not self.bounds.is_uniform(atom):
                opened = self.opened(atom, n, form.without(atom))
                if opened is not None:
                    return opened
        n, rest = form.coefficient(self.target), form.without(self.target)
        hidden = [atom for atom, _ in rest.terms if self.target.name in coords(atom)]
        if not hidden:
            return self.half_line(n, rest) if n else self.free(rest)
        if n == 0 and len(hidden) == 1:
            return self.quotient(hidden[0], rest.coefficient(hidden[0]), rest.without(hidden[0]))
        return PERHAPS

    def opened(self, atom: Expr, n: int, rest: Affine) -> Region | None:
        """``n * atom + rest >= 0`` with a piecewise ``atom`` as constraints on its pieces."""
        match atom:
            case Unary("abs", x):
                pieces = [Affine.of(x) * n, Affine.of(x) * -n]
                both = n < 0
            case Binary("min" | "max" as op, x, y):
                pieces = [Affine.of(x) * n, Affine.of(y) * n]
                both = (op == "min") == (n > 0)
            case Select(condition, x, y):
                chosen = [self.constraint(Affine.of(z) * n + rest) for z in (x, y)]
                return self.choice(condition, *chosen)
            case Cast(x, "i32") if x.type == "bool":
                return self.choice(x, self.constraint(rest + n), self.constraint(rest))
            case _:
                return None
        return self.combine(both, [self.constraint(piece + rest) for piece in pieces])

    def quotient(self, atom: Expr, n: int, rest: Affine) -> Region:
        """``n * (x // m) + rest >= 0`` as a constraint on ``x``."""
        parts = quotient(atom)
        if parts is None:
            return PERHAPS
        x, m = Affine.of(parts[0]), parts[1]
        bound = rest // abs(n) * m
        return self.constraint(x + bound if n > 0 else bound + (m - 1) - x)

    def free(self, form: Affine) -> Condition:
        truth = self.bounds.comparison("ge", form)
        return Condition(truth.any, truth.all)

    def half_line(self, n: int, rest: Affine) -> Band:
        """``n * target + rest >= 0``."""
        ends, slope = self.bounds.interval(rest), self.monotone(rest)
        loose = None if ends.hi is None else ends.hi // abs(n)
        tight = None if ends.lo is None else ends.lo // abs(n)
        exact, has_full = slope is not None, tight is not None
        edge = None if slope is None else Edge(rest // abs(n) * -_sign(n), slope * -_sign(n), self.other)
        edges = None if edge is None else (edge,)
        if n > 0:
            lo, full_lo = (None if end is None else end * -1 for end in (loose, tight))
            return Band(lo, None, full_lo, None, has_full, exact, edges, None if edge is None else ())
        return Band(None, loose, None, tight, has_full, exact, None if edge is None else (), edges)

    def moving(self, form: Affine) -> list[tuple[Expr, int]]:
        return [(atom, n) for atom, n in form.terms if not self.bounds.is_uniform(atom)]

    def monotone(self, form: Affine) -> int | None:
        """Sign of the slope in the tile's own position, 0 for a constant; ``None``: not monotone."""
        moving = self.moving(form)
        if not moving:
            return 0
        if len(moving) > 1:
            return None
        atom, n = moving[0]
        parts = quotient(atom)
        if parts is not None:
            inner = self.monotone(Affine.of(parts[0]))
            return None if inner is None else _sign(n) * inner
        return _sign(n) if atom == self.other else None


def _sign(n: int) -> int:
    return (n > 0) - (n < 0)


def _operands(expr: Expr, op: str) -> list[Expr]:
    if isinstance(expr, Binary) and expr.op == op:
        return [*_operands(expr.x, op), *_operands(expr.y, op)]
    return [expr]
