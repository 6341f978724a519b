"""Attention within chunks of fixed size (Llama 4's local layers)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from attngen.ir.expr import Expr, K, Q, binary, compare
from attngen.masks.base import MaskMod


class Chunked(MaskMod):
    """Keep ``q // size == k // size``.

    ``Causal() & Chunked(8192)`` is Llama 4's local attention. ``Causal() | Chunked(size)`` is block-causal: a query sees its
    whole block and all blocks before, as block-wise diffusion models decode (SDAR, arXiv 2510.06303; Fast-dLLM, arXiv 2505.22618)
    and autoregressive video models frame by frame.

    Attributes:
        size: tokens of a chunk; chunks count from position 0 of the request.
    """

    positional: ClassVar[tuple[str, ...]] = ("size",)
    kind: Literal["chunked"] = "chunked"
    size: int = Field(ge=1, lt=2**30)

    def expr(self) -> Expr:
        return compare("eq", binary("floordiv", Q, self.size), binary("floordiv", K, self.size))
