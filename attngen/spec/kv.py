"""Where keys and values lie, and how their numbers are stored."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from attngen.dtypes import DTYPES, KVDTypeName, Scale, Storage
from attngen.model import SpecModel


class _Storage(SpecModel):
    """Element types of the cache.

    Attributes:
        dtype: of keys and values; the spec's dtype when omitted. ``fp8_e4m3``, ``fp8_e5m2`` and ``int8`` hold ``data * scale``; so
            do ``int4``, ``nvfp4`` and ``mxfp4``, packed in uint8 ``[..., head_dim / 2]``, low nibble first, with block scales
            in a tensor of their own ``[..., head_dim / group_size]``: fp16, e4m3 and e8m0 (uint8).
        k_dtype, v_dtype: where keys and values differ.
        scale: what one fp32 factor of ``k_scale`` and ``v_scale`` serves: the whole ``tensor`` (a scalar), a key ``head``
            (``[num_kv_heads]``) or a ``token`` of a head (the cache's shape without head_dim). By default ``tensor`` for fp8
            and nvfp4, ``head`` for int8, none for int4 and mxfp4.
        group_size: values of int4 that share a block scale: 32 (by default), 64 or 128; 16 for nvfp4, 32 for mxfp4.
        zero_point: int4 is unsigned, and its scales ``[..., head_dim / group_size, 2]`` are pairs of scale and zero point.
    """

    dtype: KVDTypeName | None = None
    k_dtype: KVDTypeName | None = None
    v_dtype: KVDTypeName | None = None
    scale: Scale | None = None
    group_size: Literal[16, 32, 64, 128] | None = None
    zero_point: bool = False

    @model_validator(mode="after")
    def _has_meaning(self) -> Self:
        if self.dtype and self.k_dtype and self.v_dtype:
            raise ValueError("dtype has no meaning beside k_dtype and v_dtype")
        names = {self.k_dtype or self.dtype, self.v_dtype or self.dtype}
        rows = [DTYPES[name] for name in names if name is not None]
        if self.scale is not None and None not in names and not any(self.scale in row.scales for row in rows):
            raise ValueError(f"no element type of this cache has scale={self.scale!r}")
        if self.scale is not None:
            for row in rows:
                if row.scales and self.scale not in row.scales and not row.block:
                    raise ValueError(f"{row.name} has no scale={self.scale!r}; it has {', '.join(row.scales)}")
        if self.zero_point and "int4" not in names:
            raise ValueError("zero_point has a meaning for int4 only")
        if self.group_size is not None:
            allowed = {"int4": (32, 64, 128), "nvfp4": (16,), "mxfp4": (32,)}
            fits = [name for name in names if name in allowed and self.group_size in allowed[name]]
            if not fits:
                raise ValueError(f"group_size={self.group_size} fits none of {sorted(n for n in names if n)}")
            if "int4" in names and "int4" not in fits:
                raise ValueError(f"group_size={self.group_size} is none of int4: 32, 64 or 128")
        return self

    def storages(self, default: str) -> tuple[Storage, Storage]:
        """Storage of keys and of values; ``default`` is the spec's dtype."""
        return self._storage(self.k_dtype or self.dtype or default), self._storage(
            self.v_dtype or self.dtype or default
        )

    def _storage(self, dtype: str) -> Storage:
        row = DTYPES[dtype]
        scale = self.scale if self.scale in row.scales else row.scales[0] if row.scales else ""
        int4 = dtype == "int4"
        block = (self.group_size or row.block) if int4 else row.block
        return Storage(dtype, scale, block, int4 and self.zero_point)  # type: ignore[arg-type]


class Contiguous(_Storage):
    """``[batch, kv_len, num_kv_heads, head_dim]``, padded on the right to the longest request."""

    kind: Literal["contiguous"] = "contiguous"


class Ragged(_Storage):
    """``[nnz_kv, num_kv_heads, head_dim]``: requests one after another, delimited by ``kv_indptr``."""

    kind: Literal["ragged"] = "ragged"


class Paged(_Storage):
    """Pages of ``page_size`` tokens, found through a page table or CSR index lists.

    Attributes:
        page_size: tokens a page; any positive number.
        layout: ``NHD`` ``[num_pages, page_size, num_kv_heads, head_dim]`` or ``HND``
            ``[num_pages, num_kv_heads, page_size, head_dim]``.
        stack_dim: where a stacked tensor of keys and values has its dim of 2: 1 after ``num_pages``, or 0 before it.
    """

    positional: ClassVar[tuple[str, ...]] = ("page_size", "layout", "dtype")
    kind: Literal["paged"] = "paged"
    page_size: int = Field(ge=1, le=65536)
    layout: Literal["NHD", "HND"] = "NHD"
    stack_dim: Literal[0, 1] = 1


KV = Annotated[Contiguous | Ragged | Paged, Field(discriminator="kind")]
