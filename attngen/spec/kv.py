"""Where keys and values lie."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from attngen.dtypes import DTypeName
from attngen.model import SpecModel


class Contiguous(SpecModel):
    """``[batch, kv_len, num_kv_heads, head_dim]``, padded on the right to the longest request."""

    kind: Literal["contiguous"] = "contiguous"
    dtype: DTypeName | None = None


class Ragged(SpecModel):
    """``[nnz_kv, num_kv_heads, head_dim]``: requests one after another, delimited by ``kv_indptr``."""

    kind: Literal["ragged"] = "ragged"
    dtype: DTypeName | None = None


class Paged(SpecModel):
    """Pages of ``page_size`` tokens, found through a page table or CSR index lists.

    Attributes:
        page_size: tokens a page; any positive number.
        layout: ``NHD`` ``[num_pages, page_size, num_kv_heads, head_dim]`` or ``HND``
            ``[num_pages, num_kv_heads, page_size, head_dim]``.
        dtype: element type of the cache; the spec's dtype when omitted.
    """

    positional: ClassVar[tuple[str, ...]] = ("page_size", "layout", "dtype")
    kind: Literal["paged"] = "paged"
    page_size: int = Field(ge=1, le=65536)
    layout: Literal["NHD", "HND"] = "NHD"
    dtype: DTypeName | None = None


KV = Annotated[Contiguous | Ragged | Paged, Field(discriminator="kind")]
