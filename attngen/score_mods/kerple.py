"""Kernelized relative positions (KERPLE)."""

from __future__ import annotations

from typing import ClassVar, Literal

from attngen.ir.expr import Expr, H, K, Q, binary, cast, compare, select, unary
from attngen.ir.loads import element
from attngen.ir.names import ParamName
from attngen.ir.params import Param
from attngen.score_mods.base import ScoreMod


class Kerple(ScoreMod):
    """A learned bias that falls with the distance ``d = |q - k|`` (Chi et al., arXiv 2205.09921).

    ``form="log"``: ``score - r1[h] * log(1 + r2[h] * d)``; ``form="power"``: ``score - r1[h] * d ** r2[h]``, 0 at ``d = 0``.
    The paper wants ``r1, r2 > 0``, and ``r2 <= 2`` for powers; nothing checks it.

    Attributes:
        form: ``log`` or ``power``.
        r1, r2: names of run-time fp32 parameters ``[num_qo_heads]``; they have gradients.
    """

    positional: ClassVar[tuple[str, ...]] = ("form",)
    kind: Literal["kerple"] = "kerple"
    form: Literal["log", "power"] = "log"
    r1: ParamName = "kerple_r1"
    r2: ParamName = "kerple_r2"

    def params(self) -> tuple[Param, ...]:
        return (Param(self.r1, ("num_qo_heads",)), Param(self.r2, ("num_qo_heads",)))

    def expr(self, score: Expr, num_qo_heads: int) -> Expr:
        r1, r2 = (element(param, H) for param in self.params())
        distance = unary("abs", binary("sub", Q, K))
        if self.form == "log":
            size = unary("log", binary("add", 1.0, binary("mul", r2, distance)))
        else:  # a power of d >= 1, whose gradient exists
            logarithm = unary("log", cast(binary("max", distance, 1), "f32"))
            size = select(compare("gt", distance, 0), unary("exp", binary("mul", r2, logarithm)), 0.0)
        return binary("sub", score, binary("mul", r1, size))
