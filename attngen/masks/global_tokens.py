"""First tokens that everybody sees (StreamingLLM, Longformer)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from attngen.ir.expr import Expr, K, Q, compare, or_
from attngen.masks.base import MaskMod


class GlobalTokens(MaskMod):
    """Keep ``k < n``; with ``both``, also every key of the queries ``q < n``.

    ``Causal() & (SlidingWindow(left=w) | GlobalTokens(4))`` is StreamingLLM (Xiao et al., arXiv 2309.17453):
    attention sinks and a window. ``SlidingWindow(left=w, right=w) | GlobalTokens(n, both=True)`` is Longformer with its global
    tokens first (Beltagy et al., arXiv 2004.05150).

    Attributes:
        n: number of global tokens at the start of a request.
        both: global queries see every key.
    """

    positional: ClassVar[tuple[str, ...]] = ("n",)
    kind: Literal["global_tokens"] = "global_tokens"
    n: int = Field(ge=0, lt=2**30)
    both: bool = False

    def expr(self) -> Expr:
        seen = compare("lt", K, self.n)
        return or_(seen, compare("lt", Q, self.n)) if self.both else seen
