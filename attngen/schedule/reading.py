"""How Triton kernels read stored numbers: what tiles of them are multiplied in, how they are decoded, and how deep products are."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Literal

from attngen.dtypes import DTYPES, Storage
from attngen.target import Target
from attngen.variant import Variant

Side = Literal["q", "k", "v"]
Axis = Literal["dims", "keys", "queries"]


@dataclass(frozen=True)
class Reading:
    """Tiles of queries, keys or values.

    Attributes:
        storage: how numbers lie in memory.
        dtype: what tiles of them are multiplied in.
        decoding: nothing; a ``cast``; of each ``byte`` by its bits; or of bytes of two numbers with the scales of their ``blocks``.
        words: rows are loaded as words of 32 bits, and decoded by PTX, two numbers an instruction.
        parts: tiles that words come apart in, the i-th with the i-th number of each, so that scores are sums of as many products;
            0 where tiles are whole.
        scale_bytes: block scales of fp8 are decoded by their bits.
        moved: of keys whose pairs are no neighbours, how many adjacent dims both share a scale and are paired with dims that do; 0
            where keys are not rotated so, or have no scales of blocks.
    """

    storage: Storage
    dtype: str
    decoding: Literal["", "cast", "byte", "blocks"] = ""
    words: bool = False
    parts: int = 0
    scale_bytes: bool = False
    moved: int = 0

    @property
    def columns(self) -> str:
        """Which dim a column of a tile is: numbers of packed words come apart in pairs four places apart."""
        return (
            "dim // 8 * 8 + dim % 2 * 4 + dim // 2 % 4"
            if self.words and self.storage.packed == 2 and not self.parts
            else ""
        )

    @property
    def tile_dtype(self) -> str:
        """The dtype of tiles, spelled."""
        return {"fp32": "tl.float32", "bf16": "tl.bfloat16", "fp16": "tl.float16", "fp8_e4m3": "tl.float8e4nv"}[
            self.dtype
        ]


def has_fp8(target: Target) -> bool:
    """Whether the hardware converts and multiplies the fp8 that attngen stores; elsewhere Triton kernels see bytes."""
    return target.kind == "cuda" and target.capability >= 89


def reading(variant: Variant, side: Side, target: Target) -> Reading:
    """How a Triton kernel reads queries, keys or values."""
    storage = {"q": Storage(variant.dtype), "k": variant.k_storage, "v": variant.v_storage}[side]
    # Triton's interpreter has no products of bf16: there fp8 queries meet numbers of fp32, which are not rounded to bf16.
    dtype = "fp32" if target.kind == "interpret" and variant.compute_dtype == "bf16" else variant.compute_dtype
    if side != "v" and _multiplies_fp8(variant, target):
        dtype = storage.dtype
    if storage.dtype == dtype:
        return Reading(storage, dtype)
    words = side != "q" and target.kind == "cuda" and _fits_words(storage, dtype, target) and not variant.is_transformed
    count = 32 // storage.row.bits
    apart = words and side == "k" and variant.value_source == "values" and variant.head_dim_main > 8 * count
    parts = count if apart else 0
    if storage.block:
        distance = pair_distance(variant) if side == "k" else 0
        moved = gcd(storage.block, distance) if distance else 0
        return Reading(storage, dtype, "blocks", words, parts, scale_bytes=not has_fp8(target), moved=moved)
    bits = storage.dtype.startswith("fp8") and not has_fp8(target)
    return Reading(storage, dtype, "byte" if words or bits else "cast", words, parts)


def pair_distance(variant: Variant) -> int:
    """How many dims apart the elements of a pair lie, where keys turn when they are read; 0 for neighbours, and where none turn."""
    rope = variant.rope
    if rope is None or rope.keys != "load" or rope.interleaved:
        return 0
    return (rope.dim or 0) // 2


def _fits_words(storage: Storage, dtype: str, target: Target) -> bool:
    """Whether PTX makes of words of stored numbers exactly what they are."""
    if dtype not in ("bf16", "fp16"):
        return False
    if storage.block:
        # A zero point may be any number, and a power of two none that fp16 has.
        return not storage.zero_point and (storage.dtype != "mxfp4" or dtype == "bf16")
    return storage.dtype == "int8" or (storage.is_quantized and has_fp8(target))


def _multiplies_fp8(variant: Variant, target: Target) -> bool:
    """Whether products of queries and keys are of fp8: nothing is done to them before, and keys are not values too."""
    stored = variant.dtype == variant.k_storage.dtype == "fp8_e4m3"
    return stored and has_fp8(target) and not variant.is_transformed and variant.value_source == "values"


def pointer_dtype(element: str, target: Target) -> str:
    """Triton's name of what a pointer to elements of :data:`DTYPES` points to."""
    return "u8" if element.startswith("fp8") and not has_fp8(target) else DTYPES[element].triton_name


def smallest_depth(variant: Variant, axis: Axis, target: Target) -> int:
    """Fewest terms that Triton's products of tiles may add up: products over head dims, over keys or over queries.

    Where mma.sync multiplies, Triton gives a thread ``32 // bits`` adjacent terms, ``bits`` being those of the narrowest load that
    an operand is made of, and twice as many where the operand is joined of two: eight of bytes. Four threads share a row; if it
    has fewer terms than they hold, terms are added twice (mended in Triton by pull request 11691, September 2026).
    """
    if target.kind != "cuda" or DTYPES[variant.compute_dtype].itemsize != 2:
        return 16
    if axis == "dims":
        joined = (
            _multiplies_fp8(variant, target) or _joins_bytes(variant, "q", target) or _joins_bytes(variant, "k", target)
        )
    else:
        masked = variant.dropout > 0 and any(DTYPES[param.dtype].itemsize == 1 for param in variant.params)
        joined = masked or (axis == "keys" and _joins_bytes(variant, "v", target))
    return 32 if joined else 16


def _joins_bytes(variant: Variant, side: Side, target: Target) -> bool:
    """Whether tiles of one side are put together of two, and some of what they are made of is loaded as bytes."""
    tile = reading(variant, side, target)
    if tile.storage.block:
        scale_bytes = DTYPES[tile.storage.row.block_scale].itemsize == 1
        return not tile.parts and (scale_bytes or not tile.words)
    turned = variant.rope is not None and (side == "q" or (side == "k" and variant.rope.keys == "load"))
    return turned and tile.storage.row.itemsize == 1
