"""What all kernel plans share: tiles, padded head dims, and what a tile can see."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Literal

from attngen.dtypes import Storage
from attngen.ir.expr import FALSE, TRUE, Compare, Const, Expr, H, K, Select, Size, and_, coords, select
from attngen.ir.intervals import Span, TileClass, classify, data_loads, key_span, query_span
from attngen.schedule import hopper
from attngen.schedule.arguments import tensor_maps, turns
from attngen.schedule.naming import entry_name
from attngen.schedule.plan import Arg, KernelPlan, Tiles
from attngen.schedule.reading import smallest_depth
from attngen.schedule.tables import fitting_tiles, padded
from attngen.target import Target
from attngen.variant import OpName, Variant

# Keys of a part, at least. Parts of wide outputs cost more to write and to merge than they bring.
MIN_SPLIT, MIN_WIDE_SPLIT = 512, 1024
MAX_SPLITS = 64
_TILES_A_WARP = 8
# Up to so many queries a request, heads of a group share tiles in prefill too: a tile of one head would be mostly empty.
SHORT_QUERIES = 16

_UNIFORM = frozenset({"b", "qo_len", "kv_len"})


def plan_kernel(
    variant: Variant,
    op: OpName,
    schedule: str,
    target: Target,
    backend: str,
    *,
    args: tuple[Arg, ...],
    packed: bool = False,
    split: bool = False,
    tiles: Tiles | None = None,
    gradients: Literal["", "added", "exact"] = "",
    serves: Literal["all", "short", "long"] = "all",
) -> KernelPlan:
    """A kernel's plan.

    Args:
        backend: of the op; kernels that the cuda backend does not serve are Triton's.
        packed: query heads of a group share a tile, so bounds may not depend on the head.
        split: keys are divided among programs.
        tiles: tile sizes; the table's choice when omitted.
        gradients: how it sums parameter gradients.
        serves: requests of which lengths.
    """
    if backend == "cuda" and not hopper.serves(variant, schedule, packed=packed, requests=serves):
        backend = "triton"
    lists = has_lists(variant) and not packed and schedule not in ("merge", "delta")
    per_head = not packed and (schedule not in ("dkdv", "dqkv") or lists)
    keys, queries, tile = _visibility(variant.mask, _UNIFORM | {"h"} if per_head else _UNIFORM, extents=lists)
    if packed and has_lists(variant):
        # What is left without the data is in the span, and a test would cost more than it saves.
        tile = TileClass(TRUE, FALSE)
    if tiles is None:
        tiles = _table(variant, op, schedule, target, backend, keys, packed=packed, lists=lists, serves=serves).fitting[
            0
        ]
    multiplies = backend == "triton" and schedule in ("forward", "dkdv", "dq", "dparams")
    depth = smallest_depth(variant, "dims", target) if multiplies else 16
    if tiles.maps:
        args += tensor_maps(variant, queries=backend == "cuda")
    if backend == "cuda" and schedule == "forward" and not packed:
        args += turns()
    return KernelPlan(
        schedule=schedule,
        entry=entry_name(variant, op, f"{op}_short" if serves == "short" else schedule),
        op=op,
        variant=variant,
        target=target,
        backend=backend,
        tiles=tiles,
        block_qk=padded(variant.head_dim_main, backend, depth),
        block_vo=padded(variant.head_dim_vo, backend),
        block_pe=padded(variant.head_dim_pe, backend, depth) if variant.head_dim_pe else 0,
        packed=packed,
        split=split,
        min_split=min_split(variant, backend, tiles),
        max_splits=MAX_SPLITS,
        args=args,
        keys=keys,
        queries=queries,
        tile=tile,
        lists=lists,
        list_heads=variant.num_qo_heads if "h" in coords(variant.mask) else 1,
        list_head=_list_head(variant.mask),
        gradients=gradients,
        serves=serves,
        short_queries=SHORT_QUERIES if serves != "all" else 0,
    )


@dataclass(frozen=True)
class Choices:
    """Where the tiles of a kernel come from.

    Attributes:
        schedule: what the backend's table calls it.
        mappable: whether it can use tensor maps.
        fitting: tiles of the table that fit, the first choice first.
    """

    schedule: str
    mappable: bool
    fitting: tuple[Tiles, ...]


def choices(kernel: KernelPlan) -> Choices:
    """Where the tiles of a planned kernel come from."""
    return _table(
        kernel.variant,
        kernel.op,
        kernel.schedule,
        kernel.target,
        kernel.backend,
        kernel.keys,
        packed=kernel.packed,
        lists=kernel.lists,
        serves=kernel.serves,
    )


def _table(
    variant: Variant,
    op: OpName,
    schedule: str,
    target: Target,
    backend: str,
    keys: Span,
    *,
    packed: bool,
    lists: bool,
    serves: str,
) -> Choices:
    mappable = backend == "cuda" or (schedule == "forward" and _fits_maps(variant, keys, packed=packed, lists=lists))
    table = schedule if schedule != "forward" else "decode" if packed else op
    rows = variant.group_size * (SHORT_QUERIES if serves == "short" else 1)
    windowed = keys.lo is not None
    fitting = fitting_tiles(backend, table, variant, target, mappable=mappable, windowed=windowed, rows=rows)
    return Choices(table, mappable, fitting)


def min_split(variant: Variant, backend: str, tiles: Tiles) -> int:
    """Keys of a part, at least: enough for each warp of the cuda backend, which work alone, to get into its stride."""
    smallest = MIN_SPLIT if variant.head_dim_vo <= 256 else MIN_WIDE_SPLIT
    return max(smallest, _TILES_A_WARP * tiles.num_warps * tiles.kv) if backend == "cuda" else smallest


def _fits_maps(variant: Variant, keys: Span, *, packed: bool, lists: bool) -> bool:
    """Whether keys and values can come by tensor maps, and a pair needs so little that two blocks fit a multiprocessor.

    To packed rows keys come so only where they are the values too: the kernel then walks them from the first on.
    """
    if packed:
        plain = variant.is_softmax and not variant.has_score_mod and variant.k_storage == Storage(variant.dtype)
        from_first = keys.has_full and keys.lo is None and keys.hole_lo is None
        return variant.value_source == "keys" and variant.head_dim_pe > 0 and plain and from_first
    if not (keys.has_full or lists):
        return False
    gathers = any(coords(load) >= {"q", "k"} and load.indices[-1] != K for load in variant.score_loads)
    stored = any(storage.dtype != variant.dtype for storage in (variant.k_storage, variant.v_storage))
    costly = (
        stored
        or variant.dtype not in ("bf16", "fp16", "fp32")
        or variant.dropout
        or variant.mask_reads_each_pair
        or gathers
        or len(variant.score_loads) > 8
    )
    return variant.kv_layout != "paged" and not variant.is_transformed and not costly


def has_lists(variant: Variant) -> bool:
    """Whether tiles of the mask are told apart by data that is read by position."""
    return _reads_data(variant.mask)


@lru_cache(maxsize=256)
def _reads_data(mask: Expr) -> bool:
    return bool(data_loads(mask))


def _list_head(mask: Expr) -> Expr:
    """The head whose list serves head ``h``: 0 for all where every parameter that ``h`` indexes turns out to have one head."""
    shared: list[Expr] = []

    def reads_head(expr: Expr) -> bool:
        match expr:
            case Select(Compare("eq", Size(), Const(1)) as test, Const(0), x) if x == H:
                shared.append(test)
                return False
        return expr == H or any(reads_head(operand) for operand in expr.children())

    return H if reads_head(mask) or not shared else select(reduce(and_, dict.fromkeys(shared)), 0, H)


@lru_cache(maxsize=256)
def _visibility(mask: Expr, uniform: frozenset[str], *, extents: bool) -> tuple[Span, Span, TileClass]:
    """What tiles see, worked out once for all kernels of a mask."""
    return key_span(mask, uniform), query_span(mask, uniform), classify(mask, uniform, extents=extents)
