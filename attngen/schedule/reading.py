"""How Triton kernels read stored numbers: what tiles of them are multiplied in, and how they are decoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attngen.dtypes import DTYPES, Storage
from attngen.target import Target
from attngen.variant import Variant

Side = Literal["q", "k", "v"]


@dataclass(frozen=True)
class Reading:
    """Tiles of queries, keys or values.

    Attributes:
        storage: how numbers lie in memory.
        dtype: what tiles of them are multiplied in.
        decoding: nothing; a ``cast``; of each ``byte`` by its bits; or of bytes of two numbers with the scales of their ``blocks``.
        assembly: decoding is spelled in PTX, several numbers an instruction.
        scale_bytes: block scales of fp8 are decoded by their bits.
    """

    storage: Storage
    dtype: str
    decoding: Literal["", "cast", "byte", "blocks"] = ""
    assembly: bool = False
    scale_bytes: bool = False

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
    # Triton's interpreter has no products of bf16.
    dtype = "fp32" if target.kind == "interpret" and variant.compute_dtype == "bf16" else variant.compute_dtype
    if side != "v" and _multiplies_fp8(variant, target):
        dtype = storage.dtype
    fast = target.kind == "cuda" and dtype in ("bf16", "fp16")
    if storage.dtype == dtype:
        return Reading(storage, dtype)
    if storage.block:
        # A zero point may be any number, and a power of two none that fp16 has.
        exact = not storage.zero_point and (storage.dtype != "mxfp4" or dtype == "bf16")
        return Reading(storage, dtype, "blocks", assembly=fast and exact, scale_bytes=not has_fp8(target))
    if storage.dtype == "int8" and fast:
        return Reading(storage, dtype, "byte", assembly=True)
    if storage.dtype.startswith("fp8") and not has_fp8(target):
        return Reading(storage, dtype, "byte")
    return Reading(storage, dtype, "cast")


def _multiplies_fp8(variant: Variant, target: Target) -> bool:
    """Whether products of queries and keys are of fp8: nothing is done to them before, and keys are not values too."""
    stored = variant.dtype == variant.k_storage.dtype == "fp8_e4m3"
    return stored and has_fp8(target) and not variant.is_transformed and variant.value_source == "values"


def pointer_dtype(element: str, target: Target) -> str:
    """Triton's name of what a pointer to elements of :data:`DTYPES` points to."""
    return "u8" if element.startswith("fp8") and not has_fp8(target) else DTYPES[element].triton_name
