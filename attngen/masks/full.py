"""Every query sees every key."""

from __future__ import annotations

from typing import Literal

from attngen.ir.expr import TRUE, Expr
from attngen.masks.base import MaskMod


class Full(MaskMod):
    """No mask: encoders, cross attention."""

    kind: Literal["full"] = "full"

    def expr(self) -> Expr:
        return TRUE
