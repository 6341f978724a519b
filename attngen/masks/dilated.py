"""Every n-th key (Sparse Transformer, LongNet)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from attngen.ir.expr import Expr, K, Q, binary, compare
from attngen.masks.base import MaskMod


class Dilated(MaskMod):
    """Keep keys at a multiple of ``step`` from the query: ``(q - k) % step == 0``.

    The strided pattern of the Sparse Transformer (Child et al., arXiv 1904.10509); with a window,
    ``SlidingWindow(left=w, right=w) & Dilated(step)``, Longformer's dilated window (arXiv 2004.05150).

    Attributes:
        step: distance of neighbouring visible keys.
    """

    positional: ClassVar[tuple[str, ...]] = ("step",)
    kind: Literal["dilated"] = "dilated"
    step: int = Field(ge=1, lt=2**30)

    def expr(self) -> Expr:
        return compare("eq", binary("mod", binary("sub", Q, K), self.step), 0)
