"""Logits squashed into (-cap, cap) by a scaled tanh (Gemma 2, Grok-1)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from attngen.ir.expr import Expr, binary, unary
from attngen.score_mods.base import ScoreMod


class SoftCap(ScoreMod):
    """``cap * tanh(score / cap)``; no cap is written by leaving the mod out, so 0 is refused."""

    positional: ClassVar[tuple[str, ...]] = ("cap",)
    kind: Literal["soft_cap"] = "soft_cap"
    cap: float = Field(gt=0)

    def expr(self, score: Expr, num_qo_heads: int) -> Expr:
        return binary("mul", self.cap, unary("tanh", binary("mul", score, 1.0 / self.cap)))
