"""Which kernels of an op the cuda backend makes, and what they need of a multiprocessor."""

from __future__ import annotations

from attngen.dtypes import DTYPES
from attngen.ir.expr import coords
from attngen.schedule import one_walk
from attngen.schedule.launch import ROW_BYTES, in_pieces, maps_fit
from attngen.schedule.plan import KernelPlan
from attngen.variant import Variant

ARCH = "sm90a"
_MAX_GROUP = 8
_CHUNK = 16  # bytes of a row that a thread copies at a time
_LOADS = 8  # distinct parameters of a score that registers hold beside sums
_WIDENED = ("fp8_e4m3", "fp8_e5m2", "int8")  # stored numbers that prefill widens to those of queries
_CONSUMER_ROWS = 64  # queries of a warpgroup
_ITEMS, _ITEM = 3, 112  # tiles of queries that are known in advance, and bytes, at most, that describe one
_ORDER = 16  # bytes of the order to copy a tile, and of its barrier


def serves(variant: Variant, schedule: str, *, packed: bool, requests: str) -> bool:
    """Whether the cuda backend has a kernel of this schedule for the variant; else Triton's runs in its place.

    Args:
        packed, requests: ``packed`` and ``serves`` of the plan.
    """
    if schedule in ("dqkv", "dq_cast"):
        return _serves_backward(variant)
    if schedule != "forward":
        return False
    return (requests == "all" and _serves_packed(variant)) if packed else _serves_query_tiles(variant)


def _serves_query_tiles(variant: Variant) -> bool:
    """Many queries of one head, in prefill: queries, keys and values of one dtype that the tensor cores multiply, or keys and
    values of 8 bits that are widened to it.

    What reads data of pairs waits for memory, which Triton's smaller tiles hide better; many numbers that all pairs read spill.
    Narrower heads would leave half of shared memory empty. The warps that copy small pages turn or widen stored numbers where these
    have 8 bits.
    """
    itemsize, storages = DTYPES[variant.dtype].itemsize, (variant.k_storage, variant.v_storage)
    widened = variant.widens and all(storage.dtype in _WIDENED for storage in storages)
    prepared = widened or itemsize == 1
    return (
        variant.dtype in ("bf16", "fp16", "fp8_e4m3")
        and (variant.is_softmax or not prepared)
        and (widened or all(storage.dtype == variant.dtype for storage in storages))
        and all(storage.scale != "token" for storage in storages)
        and (maps_fit(variant.page_size) or not prepared)
        and (not variant.is_transformed or (_turns_queries_alone(variant) and itemsize == 2))
        and variant.value_source == "values"
        and not variant.head_dim_pe
        and not variant.mask_reads_pairs
        and not variant.score_reads_pairs
        and len(variant.score_loads) <= _LOADS
        and all(
            2 * dim * itemsize > ROW_BYTES and dim <= 256 and dim * (1 if prepared else itemsize) % _CHUNK == 0
            for dim in (variant.head_dim_qk, variant.head_dim_vo)
        )
    )


def _turns_queries_alone(variant: Variant) -> bool:
    """Whether queries turn when they are read, and keys have turned on their way into a cache."""
    return variant.qk_norm is None and variant.rope is not None and variant.rope.keys == "append"


def _serves_backward(variant: Variant) -> bool:
    """All gradients in one walk: where a multiprocessor holds dk and dv of 128 keys in registers, or of 64.

    Data of each pair as in prefill. Parameters' gradients would take a walk of their own, and with it what is gained.
    """
    return (
        variant.is_softmax
        and variant.dtype in ("bf16", "fp16")
        and variant.out_dtype == variant.dtype
        and not variant.is_transformed
        and not variant.dropout
        and not variant.mask_reads_each_pair
        and not variant.score_reads_pairs
        and not variant.gradient_params
        and all(32 < dim <= 256 for dim in (variant.head_dim_qk, variant.head_dim_vo))
    )


def _serves_packed(variant: Variant) -> bool:
    """Rows of a group that share their keys, in decode."""
    storages = (variant.k_storage, variant.v_storage)
    return (
        variant.is_softmax
        and variant.compute_dtype in ("bf16", "fp16")
        and not variant.is_transformed
        and not variant.dropout
        and variant.value_source == "values"
        and not variant.head_dim_pe
        and variant.group_size <= _MAX_GROUP
        and any(storage.is_quantized for storage in storages)
        and all(storage.is_quantized or storage.dtype == variant.compute_dtype for storage in storages)
        and (variant.compute_dtype == "bf16" or not any(storage.block for storage in storages))
        and all(dim % 64 == 0 and dim <= 256 for dim in (variant.head_dim_qk, variant.head_dim_vo))
        # Scales of a token are copied without registers, in pieces of 4 bytes or more.
        and variant.k_storage.block_bytes(variant.head_dim_qk) % 4 == 0
        and variant.v_storage.block_bytes(variant.head_dim_vo) % 4 == 0
    )


def launch_shape(plan: KernelPlan) -> tuple[int, int]:
    """Threads of a block, and bytes of its dynamic shared memory."""
    tiles = plan.tiles
    if plan.schedule == "dq_cast":
        return 256, 0
    if plan.schedule == "dqkv":
        return 32 * tiles.num_warps, one_walk.shared_bytes(plan.variant, tiles)
    return 32 * tiles.num_warps, _packed_rows_bytes(plan) if plan.packed else _query_tiles_bytes(plan)


def _packed_rows_bytes(plan: KernelPlan) -> int:
    """Shared memory of a kernel over packed rows: queries, and the tiles of all warps, later what they leave."""
    tiles, variant = plan.tiles, plan.variant
    columns = tiles.q * (2 if 16 in (variant.k_storage.block, variant.v_storage.block) else 1)
    queries = columns * variant.head_dim_qk * 2
    if variant.k_storage.dtype == "int4":  # and their sums over the dims of each scale
        queries += columns * variant.head_dim_qk // variant.k_storage.block * 4
    sides = ((variant.k_storage, variant.head_dim_qk), (variant.v_storage, variant.head_dim_vo))
    row = sum(_pitch(dim * storage.row.bits // 8) + storage.block_bytes(dim) for storage, dim in sides)
    row += sum(4 for storage, _ in sides if storage.scale == "token")
    stage = -(-tiles.kv * row // _CHUNK) * _CHUNK
    results = tiles.num_warps * tiles.q * (variant.head_dim_vo + 4 + 2) * 4
    return queries + max(tiles.num_warps * tiles.num_stages * stage, results)


def _pitch(row_bytes: int) -> int:
    """Bytes between rows of numbers: a chunk more where chunks of adjacent rows cannot be exchanged for other banks."""
    return row_bytes if row_bytes & (row_bytes - 1) == 0 else row_bytes + _CHUNK


def _query_tiles_bytes(plan: KernelPlan) -> int:
    """Shared memory of a kernel over tiles of queries: these, keys and values, barriers, and what there is to do."""
    tiles, variant = plan.tiles, plan.variant
    itemsize = DTYPES[variant.dtype].itemsize
    qk, vo = (in_pieces(dim, itemsize) * itemsize for dim in (variant.head_dim_qk, variant.head_dim_vo))
    # Values of 8 bits lie there a second time, turned; stored numbers beside those that they are widened to.
    again, rings = 0, 4
    if variant.widens:
        again, rings = tiles.kv * sum(in_pieces(dim, 1) for dim in (variant.head_dim_qk, variant.head_dim_vo)), 8
    elif itemsize == 1:
        again, rings = in_pieces(tiles.kv, 1) * variant.head_dim_vo, 6
    barriers = 8 * (2 * tiles.q_stages * tiles.q // _CONSUMER_ROWS + rings * tiles.num_stages + 2 * _ITEMS)
    # Up to four columns that keys read from memory, of two tiles, for each warpgroup.
    loads = {*variant.score_loads, *variant.mask_loads}
    gathered = 4 * 4 * 2 * tiles.kv * tiles.q // _CONSUMER_ROWS if any(coords(load) & {"k"} for load in loads) else 0
    return (
        gathered
        + tiles.q_stages * tiles.q * qk
        + tiles.num_stages * (tiles.kv * (qk + vo) + again)
        + barriers
        + _ITEMS * _ITEM
        + (2 * tiles.num_stages * _ORDER if plan.orders_copies else 0)
        + 4 * tiles.num_stages * (2 if variant.widens else 1)
    )


def map_boxes(plan: KernelPlan) -> list[tuple[int, ...]]:
    """What one copy takes by each of a kernel's tensor maps ``[request, head, token, dim]``."""
    tiles = plan.tiles
    q_rows = tiles.q if plan.schedule == "dqkv" else _CONSUMER_ROWS
    rows = {"q_tiles": q_rows, "dout_tiles": q_rows, "k_tiles": plan.box_rows, "v_tiles": plan.box_rows}
    return [(1, 1, rows[arg.name], ROW_BYTES // DTYPES[arg.element].itemsize) for arg in plan.args if arg.is_map]
