"""Where kernels read a mask's loads to find their least and greatest value in a tile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from attngen.ir.expr import Coord, Load
from attngen.ir.intervals import position_axes
from attngen.ir.loads import position_step
from attngen.schedule.plan import Tiles

# Values of one load that a program holds at a time, and tiles it looks at together, at most.
_VALUES, _TILES = 8192, 128


@dataclass(frozen=True)
class Samples:
    """Positions of one axis of a tile at which a load is read: ``count``, ``step`` apart; between them it does not change."""

    step: int
    count: int


def samples(load: Load, axis: str, tile: int) -> Samples:
    """Enough positions of a tile, a power of two, to meet every value: an index ``q // 128`` needs two of each 128."""
    step = min(position_step(load, Coord(axis)) or tile, tile)
    return Samples(1, tile) if step == 1 else Samples(step, 1 << (-(-tile // step)).bit_length())


def tiles_at_once(loads: Iterable[Load], tiles: Tiles) -> int:
    """Tiles of the other side that a program looks at together, a power of two."""
    sizes = {"q": tiles.q, "k": tiles.kv}
    largest = 1
    for load in loads:
        size = 1
        for axis in position_axes(load):
            size *= samples(load, axis, sizes[axis]).count
        largest = max(largest, size)
    return max(1, min(_TILES, _VALUES // largest))
