"""Keys fade by learned forget gates (Forgetting Transformer)."""

from __future__ import annotations

from typing import ClassVar, Literal

from attngen.ir.expr import B, Expr, H, K, Q, binary
from attngen.ir.loads import element
from attngen.ir.names import ParamName
from attngen.ir.params import Param
from attngen.score_mods.base import ScoreMod


class Forgetting(ScoreMod):
    """``score + c[b, h, q] - c[b, h, k]`` with ``c`` the running sum of the logarithms of forget gates (Lin et al., arXiv
    2503.02130).

    Attributes:
        c: name of a run-time fp32 parameter ``[batch, num_qo_heads, max_kv_len]``; it has a gradient, which
            reaches the gates through ``c = log_gates.cumsum(-1)``.
    """

    positional: ClassVar[tuple[str, ...]] = ("c",)
    kind: Literal["forgetting"] = "forgetting"
    c: ParamName

    def params(self) -> tuple[Param, ...]:
        return (Param(self.c, ("batch", "num_qo_heads", "max_kv_len")),)

    def expr(self, score: Expr, num_qo_heads: int) -> Expr:
        (c,) = self.params()
        return binary("add", score, binary("sub", element(c, B, H, Q), element(c, B, H, K)))
