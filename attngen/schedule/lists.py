"""Lists of the tiles that a tile meets, for masks whose tiles only their data tell apart (documents, block lists, bit masks).

One program a list bounds the mask's loads over the tiles and writes the tiles that may be visible. Lists take memory as the number
of tiles squared, and are made anew by each call, on the device.
"""

from __future__ import annotations

from typing import Literal

from attngen.schedule.arguments import parameters, sequences
from attngen.schedule.plan import Arg, KernelPlan, Tiles
from attngen.schedule.planner import plan_kernel


def plan_lists(consumer: KernelPlan, schedule: Literal["key_lists", "query_lists"]) -> tuple[KernelPlan, ...]:
    """The kernel that makes the lists ``consumer`` reads; none if it reads none.

    Args:
        consumer: a kernel over tiles of queries (``key_lists``) or of keys (``query_lists``).
    """
    if not consumer.lists:
        return ()
    variant = consumer.variant
    kernel = plan_kernel(
        variant,
        consumer.op,
        schedule,
        consumer.target,
        consumer.backend,
        tiles=Tiles(consumer.tiles.q, consumer.tiles.kv, num_warps=8, num_stages=1),
        args=(
            Arg("tile_list", "*i32"),
            Arg("tile_counts", "*i32"),
            Arg("list_capacity", "i32"),
            *sequences(variant),
            Arg("num_tokens", "i32"),
            Arg("num_tiles", "i32"),
            *parameters(variant),
        ),
    )
    return (kernel,)
