"""What a tile of a mask holds, without looking at its elements: none, some or all, and where.

A tile is the queries ``q0 .. q1`` times the keys ``k0 .. k1``, ends included. Replacing ``q`` and ``k`` in the mask by
intervals and computing with the ends gives bool expressions over the corners (:func:`classify`). Solving the mask
for ``k`` gives the range of keys that a tile of queries needs (:func:`key_span`), for ``q`` the reverse
(:func:`query_span`). All are expressions like any other: printed into kernels, or evaluated in Python by
:func:`evaluate_scalar`.

Loads indexed by position (document ids, block masks, packed bits) enter :func:`classify` as their :class:`Extent`, the least and
greatest value in the tile, which kernels compute; spans solve for positions and take such loads as "perhaps".

Every answer is on the safe side. A tile that is not proved empty may hold something, a key that is not proved visible from the
whole tile is tested, and whatever cannot be analysed (float comparisons) is "some". Sums are collected first, so
``q - k >= 0``, ``q >= k`` and ``k - q <= 0`` are one constraint with exact bounds; ``min``, ``max``, ``abs``, ``where`` and
quotients by constants are solved too.
"""

from __future__ import annotations

from dataclasses import dataclass

from attngen.ir.bounds import UNIFORM, Bounds, position_axes
from attngen.ir.expr import K0, K1, Q0, Q1, Expr, Extent, Load
from attngen.ir.regions import BIG
from attngen.ir.scalar import evaluate_scalar
from attngen.ir.spans import Span, key_span, query_span

__all__ = [
    "BIG",
    "UNIFORM",
    "Span",
    "TileClass",
    "classify",
    "data_loads",
    "evaluate_scalar",
    "key_span",
    "position_axes",
    "query_span",
]


@dataclass(frozen=True)
class TileClass:
    """Bool expressions over ``q0 q1 k0 k1``, the uniform coordinates, and extents of loads indexed by position.

    Attributes:
        any: false proves that no pair of the tile is visible.
        all: true proves that every pair is.
    """

    any: Expr
    all: Expr

    @property
    def loads(self) -> tuple[Load, ...]:
        """Distinct loads whose extents are needed to answer, in order of appearance."""
        nodes = (*self.any.walk(), *self.all.walk())
        return tuple(dict.fromkeys(node.load for node in nodes if isinstance(node, Extent)))


def classify(mask: Expr, uniform: frozenset[str] = UNIFORM, *, extents: bool = True) -> TileClass:
    """None, some or all of a tile.

    Args:
        mask: a bool expression.
        uniform: coordinates with one value in the tile, besides the lengths usually the request and the head.
        extents: i32 and bool loads indexed by position are bounded by their extents in the tile; else they may be anything.
            An extent is over the values that the load gives for all pairs of the tile (and for all heads of it where ``h`` is
            not uniform), so the 0 that it gives outside the parameter counts too.
    """
    truth = Bounds({"q": (Q0, Q1), "k": (K0, K1)}, uniform, extents=extents).truth(mask)
    return TileClass(truth.any, truth.all)


def data_loads(mask: Expr, uniform: frozenset[str] = UNIFORM) -> tuple[Load, ...]:
    """Loads whose extents :func:`classify` needs: those of i32 and bool parameters indexed by position that can decide a tile.

    :func:`position_axes` tells whether a load depends on ``q``, ``k`` or both, so whether its extents are those of a tile of
    queries, of a tile of keys, or of a pair of tiles. An index may itself hold a load; extents are of evaluated values.
    """
    return classify(mask, uniform).loads
