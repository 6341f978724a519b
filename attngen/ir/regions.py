"""Sets of positions seen from a tile, and their algebra under ``and`` and ``or``.

A :class:`Band` is a range of positions whose ends depend on the tile; a :class:`Condition` is everything or nothing,
whichever a test of the tile says. Ends are sums (:class:`Affine`), and ``None`` is unbounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from attngen.ir.affine import Affine, choose, is_small, largest, nonnegative, smallest
from attngen.ir.expr import FALSE, TRUE, Coord, Expr, and_, binary, not_, or_, substitute

BIG = 2**28  # beyond every position, and sums of several still fit int32
_LOW, _HIGH, _ZERO = Affine((), -BIG), Affine((), BIG), Affine((), 0)


@dataclass(frozen=True)
class Edge:
    """A bound of a band, as a sum in the tile's own position ``mover``; ``direction`` is the sign of its slope."""

    form: Affine
    direction: int
    mover: Coord


@dataclass(frozen=True)
class Band:
    """A range under construction.

    Attributes:
        lo, hi: contain every visible position.
        full_lo, full_hi: positions visible from the whole tile, if ``has_full``.
        exact: every position of ``lo .. hi`` is visible from some position of the tile.
        lowers, uppers: all edges, if the band is a conjunction of edges and nothing else.
        hole_lo, hole_hi: no position in between, ends included, is visible; ``hole_hi`` is at least ``hole_lo - 1``.
        parts: the bands on both sides of the hole, if there is nothing else.
    """

    lo: Affine | None = None
    hi: Affine | None = None
    full_lo: Affine | None = None
    full_hi: Affine | None = None
    has_full: bool = True
    exact: bool = True
    lowers: tuple[Edge, ...] | None = None
    uppers: tuple[Edge, ...] | None = None
    hole_lo: Affine | None = None
    hole_hi: Affine | None = None
    parts: tuple[Band, Band] | None = None


@dataclass(frozen=True)
class Condition:
    """Everything where ``all``, nothing where not ``any``."""

    any: Expr
    all: Expr


Region = Band | Condition
EVERYTHING, NOTHING, PERHAPS = Condition(TRUE, TRUE), Condition(FALSE, FALSE), Condition(TRUE, FALSE)


def as_band(condition: Condition) -> Band:
    """A condition as a range: all positions or none."""
    return kept_if(condition, Band())


def conjunction(regions: Sequence[Region], end: Affine) -> Region:
    """Positions in all regions; ``end`` as for :func:`disjunction`."""
    condition = EVERYTHING
    for region in regions:
        if isinstance(region, Condition):
            condition = Condition(and_(condition.any, region.any), and_(condition.all, region.all))
    bands = [region for region in regions if isinstance(region, Band)]
    if not bands or condition.any == FALSE:
        return condition
    return kept_if(condition, reduce(lambda x, y: _intersection(x, y, end), bands))


def disjunction(regions: Sequence[Region], end: Affine) -> Region:
    """Positions in some region; ``end`` is about the last position, to compare ranges that are open above."""
    condition = NOTHING
    for region in regions:
        if isinstance(region, Condition):
            condition = Condition(or_(condition.any, region.any), or_(condition.all, region.all))
    bands = [region for region in regions if isinstance(region, Band)]
    if not bands or condition.all == TRUE:
        return condition
    return _all_if(condition, reduce(lambda x, y: _hull(x, y, end), bands))


def choice(condition: Expr, x: Region, y: Region) -> Region:
    """``x`` where ``condition``, which is one bool for the whole tile, else ``y``."""
    if isinstance(x, Condition) and isinstance(y, Condition):
        return Condition(_where(condition, x.any, y.any), _where(condition, x.all, y.all))
    left, right = (as_band(z) if isinstance(z, Condition) else z for z in (x, y))

    def end(a: Affine | None, b: Affine | None, far: Affine) -> Affine | None:
        return None if a is None and b is None else choose(condition, a or far, b or far)

    return Band(
        end(left.lo, right.lo, _LOW),
        end(left.hi, right.hi, _HIGH),
        end(left.full_lo if left.has_full else _HIGH, right.full_lo if right.has_full else _HIGH, _LOW),
        end(left.full_hi, right.full_hi, _HIGH),
        left.has_full or right.has_full,
        left.exact and right.exact,
        hole_lo=end(left.hole_lo, right.hole_lo, _HIGH),
        hole_hi=end(left.hole_hi, right.hole_hi, _HIGH - 1),
    )


def _where(condition: Expr, x: Expr, y: Expr) -> Expr:
    return x if x == y else or_(and_(condition, x), and_(not_(condition), y))


def _intersection(x: Band, y: Band, end: Affine) -> Band:
    """``x & y``. A band is cut from both sides of a hole apart, so that what is left of them stays exact."""
    if x.parts is None and y.parts is not None:
        x, y = y, x
    if x.parts is not None and y.lowers is not None and y.uppers is not None:
        left, right = (_intersection(part, y, end) for part in x.parts)
        return _hull(left, right, end)
    lowers = None if x.lowers is None or y.lowers is None else x.lowers + y.lowers
    uppers = None if x.uppers is None or y.uppers is None else x.uppers + y.uppers
    return Band(
        _tighter(largest, x.lo, y.lo),
        _tighter(smallest, x.hi, y.hi),
        _tighter(largest, x.full_lo, y.full_lo),
        _tighter(smallest, x.full_hi, y.full_hi),
        x.has_full and y.has_full,
        lowers is not None and uppers is not None and _has_no_gap(lowers, uppers),
        lowers,
        uppers,
        *((x.hole_lo, x.hole_hi) if x.hole_lo is not None else (y.hole_lo, y.hole_hi)),
    )


def _tighter(pick: Callable[[Affine, Affine], Affine], x: Affine | None, y: Affine | None) -> Affine | None:
    return y if x is None else x if y is None else pick(x, y)


def _has_no_gap(lowers: tuple[Edge, ...], uppers: tuple[Edge, ...]) -> bool:
    """Whether the rows ``max(lowers) .. min(uppers)`` of a tile, taken together, are one range between extremes.

    So it is if all edges that move do so in one direction, no row is empty, and each row starts at most one position
    after the end of the row before. Edges that do not move only clip the range.
    """
    moving = [edge.direction for edge in (*lowers, *uppers) if edge.direction]
    if len(set(moving)) > 1:
        return False
    pairs = [(lower, upper) for lower in lowers for upper in uppers if lower.direction and upper.direction]
    return all(
        (upper.form - lower.form).is_nonnegative() and (upper.form + 1 - _next(lower)).is_nonnegative()
        for lower, upper in pairs
    )


def _next(edge: Edge) -> Affine:
    """The edge one position further in the direction in which it rises."""
    return Affine.of(substitute(edge.form.expr(), {edge.mover: binary("add", edge.mover, edge.direction)}))


def kept_if(condition: Condition, band: Band) -> Band:
    """``condition & band``: beyond every position there is nothing, so an edge moved there empties the range."""
    if condition == EVERYTHING:
        return band
    return replace(
        band,
        lo=band.lo if condition.any == TRUE else choose(condition.any, band.lo or _LOW, _HIGH),
        full_lo=choose(condition.all, band.full_lo or _LOW, _HIGH),
        has_full=band.has_full and condition.all != FALSE,
        exact=band.exact and condition.any == condition.all,
        lowers=None,
        uppers=None,
        parts=None,
    )


def _all_if(condition: Condition, band: Band) -> Band:
    """``condition | band``."""
    if condition == NOTHING:
        return band

    def opened(flag: Expr, end: Affine | None, far: Affine) -> Affine | None:
        return None if end is None or flag == TRUE else choose(flag, far, end)

    result = replace(
        band,
        lo=opened(condition.any, band.lo, _LOW),
        hi=opened(condition.any, band.hi, _HIGH),
        exact=band.exact and condition.any == condition.all,
        lowers=None,
        uppers=None,
        hole_lo=opened(condition.any, band.hole_lo, _HIGH) if condition.any != TRUE else None,
        hole_hi=opened(condition.any, band.hole_hi, _HIGH - 1) if condition.any != TRUE else None,
        parts=None,
    )
    if band.has_full:
        low, high = opened(condition.all, band.full_lo, _LOW), opened(condition.all, band.full_hi, _HIGH)
        return replace(result, full_lo=low, full_hi=high)
    return replace(result, full_lo=choose(condition.all, _LOW, _HIGH), full_hi=None, has_full=condition.all != FALSE)


def _hull(x: Band, y: Band, end: Affine) -> Band:
    """``x | y``: what is between them is a hole, or may be visible."""
    hull = replace(
        _larger_full(x, y, end),
        lo=None if x.lo is None or y.lo is None else smallest(x.lo, y.lo),
        hi=None if x.hi is None or y.hi is None else largest(x.hi, y.hi),
        exact=x.exact and y.exact and ((x.lo is None and y.lo is None) or (x.hi is None and y.hi is None)),
        lowers=None,
        uppers=None,
        hole_lo=None,
        hole_hi=None,
        parts=None,
    )
    if x.hole_lo is not None or y.hole_lo is not None:
        hole_lo, hole_hi = _remaining_hole(x, y)
        return replace(hull, hole_lo=hole_lo, hole_hi=hole_hi, exact=False)
    for low, high in ((x, y), (y, x)):
        if low.hi is None or high.lo is None:
            continue
        starts_first = low.lo is None or (high.lo - low.lo).is_nonnegative()
        if not starts_first and not (high.lo - low.hi).is_nonnegative():
            continue
        hole_lo, hole_hi = _hole(low.hi + 1, high.lo - 1)
        if hole_lo is not None:
            # Whatever is not in the hole is up to low.hi, so in low if that starts first, or beyond it, so in high.
            edges = all(band.lowers is not None and band.uppers is not None for band in (low, high))
            exact = x.exact and y.exact and starts_first
            parts = (low, high) if edges else None
            return replace(hull, hole_lo=hole_lo, hole_hi=hole_hi, exact=exact, parts=parts)
    return hull


def _hole(lo: Affine, hi: Affine) -> tuple[Affine, Affine] | tuple[None, None]:
    """Ends of a hole, none where it is always shorter than a tile or too complex to be worth its tests."""
    if _is_sliver(hi - lo + 1):
        return None, None
    hi = largest(hi, lo - 1)
    return (lo, hi) if is_small(lo.expr()) and is_small(hi.expr()) else (None, None)


def _remaining_hole(x: Band, y: Band) -> tuple[Affine, Affine] | tuple[None, None]:
    """What both leave of their holes: what they have in common, or the side of the only one that the other does not reach."""
    if x.hole_lo is None or x.hole_hi is None:
        x, y = y, x
    assert x.hole_lo is not None
    assert x.hole_hi is not None
    if y.hole_lo is not None and y.hole_hi is not None:
        return _hole(largest(x.hole_lo, y.hole_lo), smallest(x.hole_hi, y.hole_hi))
    if y.hi is not None and (y.lo is None or (x.hole_hi - y.hi).is_nonnegative()):
        return _hole(largest(x.hole_lo, y.hi + 1), x.hole_hi)
    return (None, None) if y.lo is None else _hole(x.hole_lo, smallest(x.hole_hi, y.lo - 1))


def _is_sliver(size: Affine) -> bool:
    """Whether a range is always shorter than a tile of keys, so not worth a choice at run time."""
    return (size * -1 + 15).is_nonnegative()


def _larger_full(x: Band, y: Band, end: Affine) -> Band:
    """A band with a full part of ``x | y``: the union if both are open on one side, else the longer at run time."""
    if not x.has_full or not y.has_full:
        return x if x.has_full else y
    if x.full_lo is None and y.full_lo is None:
        hi = None if x.full_hi is None or y.full_hi is None else largest(x.full_hi, y.full_hi)
        return replace(x, full_hi=hi)
    if x.full_hi is None and y.full_hi is None:
        lo = None if x.full_lo is None or y.full_lo is None else smallest(x.full_lo, y.full_lo)
        return replace(x, full_lo=lo)
    x_lo, x_hi, y_lo, y_hi = x.full_lo or _ZERO, x.full_hi or end, y.full_lo or _ZERO, y.full_hi or end
    x_size, y_size = x_hi - x_lo, y_hi - y_lo
    if _is_sliver(x_size) or _is_sliver(y_size):
        return y if _is_sliver(x_size) else x
    longer = nonnegative(x_size - y_size)
    if not is_small(longer):
        return x
    return replace(x, full_lo=choose(longer, x_lo, y_lo), full_hi=choose(longer, x_hi, y_hi))
