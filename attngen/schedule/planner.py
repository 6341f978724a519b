"""What all kernel plans share: tiles, padded head dims, and what a tile can see."""

from __future__ import annotations

from functools import lru_cache

from attngen.ir.expr import Expr
from attngen.ir.intervals import Span, TileClass, classify, key_span, query_span
from attngen.schedule.arguments import tensor_maps
from attngen.schedule.naming import entry_name
from attngen.schedule.plan import Arg, KernelPlan
from attngen.schedule.tables import choose_tiles, padded
from attngen.target import Target
from attngen.variant import OpName, Variant

MIN_SPLIT = 512
MAX_SPLITS = 64

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
) -> KernelPlan:
    """A kernel's plan.

    Args:
        packed: query heads of a group share a tile, so bounds may not depend on the head.
        split: keys are divided among programs.
    """
    uniform = _UNIFORM if packed or schedule == "dkdv" else _UNIFORM | {"h"}
    keys, queries, tile = _visibility(variant.mask, uniform)
    mappable = schedule == "forward" and not split and variant.kv_layout != "paged" and keys.has_full
    tiles = choose_tiles(backend, op if schedule == "forward" else schedule, variant, target, mappable=mappable)
    return KernelPlan(
        schedule=schedule,
        entry=entry_name(variant, op, schedule),
        op=op,
        variant=variant,
        target=target,
        backend=backend,
        tiles=tiles,
        block_qk=padded(variant.head_dim_qk, backend),
        block_vo=padded(variant.head_dim_vo, backend),
        packed=packed,
        split=split,
        min_split=MIN_SPLIT,
        max_splits=MAX_SPLITS,
        args=args + tensor_maps(variant) if tiles.maps else args,
        keys=keys,
        queries=queries,
        tile=tile,
    )


@lru_cache(maxsize=256)
def _visibility(mask: Expr, uniform: frozenset[str]) -> tuple[Span, Span, TileClass]:
    """What tiles see, worked out once for all kernels of a mask."""
    return key_span(mask, uniform), query_span(mask, uniform), classify(mask, uniform)
