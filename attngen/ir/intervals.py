"""What a tile of a mask holds, without looking at its elements: none, some or all, and where.

A tile is the queries ``q0 .. q1`` times the keys ``k0 .. k1``, ends included. Replacing ``q`` and ``k`` in the mask by
intervals and computing with the ends gives bool expressions over the corners (:func:`classify`). Solving the mask
for ``k`` gives the range of keys that a tile of queries needs (:func:`key_span`), for ``q`` the reverse
(:func:`query_span`). All are expressions like any other: printed into kernels, or evaluated in Python by
:func:`evaluate_scalar`.

Every answer is on the safe side. A tile that is not proved empty may hold something, a key that is not proved visible
from the whole tile is tested, and whatever cannot be analysed (float comparisons, parameters indexed by position) is
"some". Sums are collected first, so ``q - k >= 0``, ``q >= k`` and ``k - q <= 0`` are one constraint with exact bounds;
``min``, ``max``, ``abs``, ``where`` and quotients by constants are solved too.
"""

from __future__ import annotations

from dataclasses import dataclass

from attngen.ir.bounds import UNIFORM, Bounds
from attngen.ir.expr import K0, K1, Q0, Q1, Expr, Load, coords
from attngen.ir.regions import BIG
from attngen.ir.scalar import evaluate_scalar
from attngen.ir.spans import Span, key_span, query_span

__all__ = ["BIG", "UNIFORM", "Span", "TileClass", "classify", "data_loads", "evaluate_scalar", "key_span", "query_span"]


@dataclass(frozen=True)
class TileClass:
    """Bool expressions over ``q0 q1 k0 k1`` and the uniform coordinates.

    Attributes:
        any: false proves that no pair of the tile is visible.
        all: true proves that every pair is.
    """

    any: Expr
    all: Expr


def data_loads(mask: Expr) -> tuple[Load, ...]:
    """The distinct integer and bool loads of a mask that are indexed by position: data that tell its tiles apart."""
    loads = dict.fromkeys(node for node in mask.walk() if isinstance(node, Load) and node.type != "f32")
    return tuple(load for load in loads if coords(load) & {"q", "k"})


def classify(mask: Expr, uniform: frozenset[str] = UNIFORM) -> TileClass:
    """None, some or all of a tile.

    Args:
        mask: a bool expression.
        uniform: coordinates with one value in the tile, besides the lengths usually the request and the head.
    """
    truth = Bounds({"q": (Q0, Q1), "k": (K0, K1)}, uniform).truth(mask)
    return TileClass(truth.any, truth.all)
