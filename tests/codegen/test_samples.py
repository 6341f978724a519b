"""Samples of a tile meet every value that a load has in it."""

from __future__ import annotations

import pytest

from attngen.codegen.samples import samples, tiles_at_once
from attngen.ir.expr import K, Load, Q, binary
from attngen.schedule.plan import Tiles


@pytest.mark.parametrize("divisor", [1, 2, 3, 8, 48, 64, 96, 128, 1000])
@pytest.mark.parametrize("tile", [16, 64, 128])
def test_every_block_of_a_tile_is_sampled(divisor: int, tile: int) -> None:
    load = Load("blocks", (binary("floordiv", Q, divisor),), "i32")
    found = samples(load, "q", tile)
    for first in range(0, 2 * divisor, max(divisor // 7, 1)):
        last = first + tile - 1
        read = {min(first + index * found.step, last) // divisor for index in range(found.count)}
        assert read == {q // divisor for q in range(first, last + 1)}
    assert found.count & (found.count - 1) == 0
    assert found.count <= max(tile, 2 * (tile // divisor + 2))


def test_positions_without_a_quotient_are_all_sampled() -> None:
    load = Load("ids", (binary("add", binary("floordiv", Q, 64), Q), binary("floordiv", K, 64)), "i32")
    assert (samples(load, "q", 128).step, samples(load, "q", 128).count) == (1, 128)
    assert (samples(load, "k", 128).step, samples(load, "k", 128).count) == (64, 4)


def test_more_tiles_are_looked_at_together_where_each_takes_less() -> None:
    tiles = Tiles(128, 128)
    by_key = Load("ids", (K,), "i32")
    by_block = Load("blocks", (binary("floordiv", Q, 128), binary("floordiv", K, 128)), "i32")
    by_pair = Load("mask", (Q, K), "bool")
    assert [tiles_at_once([load], tiles) for load in (by_key, by_block, by_pair)] == [64, 128, 1]
