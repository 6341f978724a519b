"""A query sees the keys at and before its own position."""

from __future__ import annotations

from typing import Literal

from attngen.ir.expr import Expr, K, Q, compare
from attngen.masks.base import MaskMod


class Causal(MaskMod):
    """Keep ``k <= q``. Positions count within the request, so with fewer queries than keys it is bottom-right aligned."""

    kind: Literal["causal"] = "causal"

    def expr(self) -> Expr:
        return compare("le", K, Q)
