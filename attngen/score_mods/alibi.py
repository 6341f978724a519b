"""Attention with linear biases (Press et al., arXiv 2108.12409)."""

from __future__ import annotations

from typing import ClassVar, Literal

from attngen.ir.expr import Expr, H, K, Load, Q, binary, compare, select, unary
from attngen.ir.names import ParamName
from attngen.ir.params import Param
from attngen.score_mods.base import ScoreMod


class ALiBi(ScoreMod):
    """``score + slope[h] * (k - q)``.

    Attributes:
        slopes: name of a run-time fp32 parameter ``[num_qo_heads]``; ``None`` computes the paper's slopes:
            ``2 ** (-8 (h + 1) / n)`` for the first ``n`` heads, ``n`` the largest power of two within ``num_qo_heads``, and
            every other slope of ``2 n`` heads for the rest.
    """

    positional: ClassVar[tuple[str, ...]] = ("slopes",)
    kind: Literal["alibi"] = "alibi"
    slopes: ParamName | None = None

    def expr(self, score: Expr, num_qo_heads: int) -> Expr:
        slope = _paper_slope(num_qo_heads) if self.slopes is None else Load(self.slopes, (H,), "f32")
        return binary("add", score, binary("mul", slope, binary("sub", K, Q)))

    def params(self) -> tuple[Param, ...]:
        return () if self.slopes is None else (Param(self.slopes, ("num_qo_heads",)),)


def _paper_slope(num_qo_heads: int) -> Expr:
    whole = 1 << (num_qo_heads.bit_length() - 1)
    first = unary("exp2", binary("mul", binary("add", H, 1), -8.0 / whole))
    if whole == num_qo_heads:
        return first
    odd = binary("add", binary("mul", binary("sub", H, whole), 2), 1)
    return select(compare("lt", H, whole), first, unary("exp2", binary("mul", odd, -4.0 / whole)))
