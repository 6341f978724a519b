"""Other tiles for the kernels of a plan: what may be tried, and what changes with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attngen.dtypes import DTYPES
from attngen.schedule.arguments import tensor_maps
from attngen.schedule.plan import Arg, KernelPlan, OpPlan, Tiles
from attngen.schedule.planner import choices, min_split
from attngen.schedule.tables import PRODUCT_BYTES, may_run

# Kernels that take the time of an op. Others follow their tiles, or take a small part of it.
_TUNABLE = frozenset({"forward", "dkdv", "dq", "dqkv", "append"})
_MOST_WARPS, _MOST_STAGES = 8, 7
_SMALLEST = {"cpp": 32, "triton": 16}  # rows of a panel, and terms and rows of a product


def with_tiles(plan: OpPlan, role: str, tiles: Tiles) -> OpPlan:
    """The same op with other tiles for the kernel called ``role``, and for those that go by its tiles."""
    changed = plan.kernel(role)
    lists = "key_lists" if changed.schedule in ("forward", "dq") else "query_lists"
    # What one walk adds up is read in the same tiles; parameters' gradients are summed over the lists of dq.
    followers = {"dqkv": "dq_cast", "dq": "dparams"}

    def retiled(kernel: KernelPlan) -> KernelPlan:
        if kernel.role == role or kernel.schedule == followers.get(changed.schedule):
            smallest = min_split(kernel.variant, kernel.backend, tiles)
            return replace(kernel, tiles=tiles, args=_arguments(kernel, tiles), min_split=smallest)
        if changed.lists and kernel.schedule == lists:
            return replace(kernel, tiles=replace(kernel.tiles, q=tiles.q, kv=tiles.kv))
        return kernel

    return replace(plan, kernels=tuple(retiled(kernel) for kernel in plan.kernels))


def _arguments(kernel: KernelPlan, tiles: Tiles) -> tuple[Arg, ...]:
    """With or without tensor maps of keys and values."""
    if tiles.maps == kernel.tiles.maps:
        return kernel.args
    plain = tuple(arg for arg in kernel.args if not arg.is_map)
    return (*plain, *tensor_maps(kernel.variant)) if tiles.maps else plain


def tile_candidates(kernel: KernelPlan) -> tuple[Tiles, ...]:
    """What a tuning tries in place of a kernel's tiles: the other rows of its table that fit, then neighbours of its own tiles.

    Nothing for kernels that take a small part of the time, or follow another's tiles. Not all of them build.
    """
    if kernel.schedule not in _TUNABLE:
        return ()
    table, mine = choices(kernel), kernel.tiles
    near = (
        tiles
        for tiles in _neighbours(kernel)
        if may_run(tiles, kernel.backend, table.schedule, kernel.variant, kernel.target, mappable=table.mappable)
    )
    return tuple(tiles for tiles in dict.fromkeys((*table.fitting, *near)) if tiles != mine)


def _neighbours(kernel: KernelPlan) -> Iterator[Tiles]:
    """Tiles that differ from the kernel's in one number, by one step."""
    tiles = kernel.tiles
    if kernel.backend == "cuda":
        yield from _cuda_neighbours(kernel)
        return
    sizes: tuple[str, ...]
    if kernel.schedule == "append":  # cpp writes a row at a time
        sizes, smallest = ("q",) if kernel.backend == "triton" else (), 1
    else:
        sizes, smallest = ("q", "kv"), 8 if tiles.keys_first else _SMALLEST[kernel.backend]
    for name in sizes:
        for size in (getattr(tiles, name) // 2, getattr(tiles, name) * 2):
            if size >= smallest:
                yield replace(tiles, **{name: size})
    if kernel.backend == "triton":
        for warps in (tiles.num_warps // 2, tiles.num_warps * 2):
            if 1 <= warps <= _MOST_WARPS:
                yield replace(tiles, num_warps=warps)
        yield from _staged(tiles, smallest=1)


def _cuda_neighbours(kernel: KernelPlan) -> Iterator[Tiles]:
    """Of what the templates leave open: keys of a tile where queries have tiles of their own, stages, and blocks that share a
    multiprocessor."""
    tiles = kernel.tiles
    if kernel.schedule != "forward":
        return
    if kernel.packed:
        for blocks in (tiles.blocks - 1, tiles.blocks + 1):
            if blocks >= 1:
                yield replace(tiles, blocks=blocks)
    else:
        step = PRODUCT_BYTES // DTYPES[kernel.variant.dtype].itemsize
        for keys in (tiles.kv - step, tiles.kv + step):
            yield replace(tiles, kv=keys)
    yield from _staged(tiles, smallest=2)


def _staged(tiles: Tiles, smallest: int) -> Iterator[Tiles]:
    for stages in (tiles.num_stages - 1, tiles.num_stages + 1):
        if smallest <= stages <= _MOST_STAGES:
            yield replace(tiles, num_stages=stages)
