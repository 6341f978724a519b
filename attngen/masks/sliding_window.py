"""A query sees a band of keys around its own position."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from attngen.ir.expr import Expr, K, Q, and_, binary, compare
from attngen.masks.base import MaskMod


class SlidingWindow(MaskMod):
    """Keep keys ``q - left .. q + right``.

    Attributes:
        left: keys before the query's own position, so ``left + 1`` keys with ``right=0``. Hugging Face's
            ``sliding_window=W`` and Mistral's count the own key: ``left = W - 1``.
        right: keys after the query's own position.
    """

    positional: ClassVar[tuple[str, ...]] = ("left", "right")
    kind: Literal["sliding_window"] = "sliding_window"
    left: int = Field(ge=0, lt=2**30)
    right: int = Field(default=0, ge=0, lt=2**30)

    def expr(self) -> Expr:
        upper = K if self.right == 0 else binary("sub", K, self.right)
        return and_(compare("le", binary("sub", Q, self.left), K), compare("le", upper, Q))
