"""Angles of rotary embeddings as fixed-point fractions of a turn: products with positions wrap where turns do, and stay exact."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, localcontext

from attngen.spec import Rope

_PI = Decimal("3.14159265358979323846264338327950288419716939937510582")
_UNIT = 2**64


@dataclass(frozen=True)
class Turns:
    """Pair ``i`` makes ``theta ** (-2 i / dim) / (2 pi)`` of a turn from one position to the next.

    Attributes:
        first: that of pair 0, in units of ``2 ** -64``.
        factors: for each bit of ``i``, its value and what it multiplies the turns by, in the same units.
    """

    first: int
    factors: tuple[tuple[int, int], ...]


def turns(rope: Rope) -> Turns:
    """The frequencies of a rotation without a table, whose ``dim`` is known."""
    assert rope.dim is not None
    pairs = rope.dim // 2
    bits = [1 << number for number in range((pairs - 1).bit_length())]
    with localcontext() as context:
        context.prec = 50
        factors = [(bit, Decimal(rope.theta) ** (Decimal(-2 * bit) / rope.dim)) for bit in bits]
        return Turns(
            first=round(_UNIT / (2 * _PI)),
            factors=tuple((bit, min(round(factor * _UNIT), _UNIT - 1)) for bit, factor in factors),
        )
