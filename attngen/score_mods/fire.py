"""A small network of the relative distance (FIRE)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from attngen.ir.expr import Const, Expr, H, K, Q, binary, cast, unary
from attngen.ir.loads import element
from attngen.ir.names import ParamName
from attngen.ir.params import Param
from attngen.score_mods.base import ScoreMod


class Fire(ScoreMod):
    """``score + b2[h] + sum_i w2[h, i] * max(0, w1[i] * x + b1[i])`` (Li et al., arXiv 2310.04418).

    ``x = psi(|q - k|) / psi(max(q, L, 1))`` with ``psi(y) = log(1 + |c| * y)``: the distance, compressed, as a share of the
    position. The network is written out, so its cost grows with ``width``, and backward adds a sum for each of its weights: at
    the paper's width its kernels take minutes to build for a GPU.

    Attributes:
        width: hidden units; 32 in the paper.
        prefix: of the names of the run-time fp32 parameters, which all have gradients: ``fire_w1`` and ``fire_b1`` ``[width]``,
            ``fire_w2`` ``[num_qo_heads, width]``, ``fire_b2`` ``[num_qo_heads]``, and without dimensions ``fire_c``
            and ``fire_len`` (L: up to this length positions do not shrink distances).
    """

    positional: ClassVar[tuple[str, ...]] = ("width",)
    kind: Literal["fire"] = "fire"
    width: int = Field(default=32, ge=1, le=64)
    prefix: ParamName = "fire"

    def params(self) -> tuple[Param, ...]:
        shapes: dict[str, tuple[str | int, ...]] = {
            "w1": (self.width,),
            "b1": (self.width,),
            "w2": ("num_qo_heads", self.width),
            "b2": ("num_qo_heads",),
            "c": (),
            "len": (),
        }
        return tuple(Param(f"{self.prefix}_{name}", dims) for name, dims in shapes.items())

    def expr(self, score: Expr, num_qo_heads: int) -> Expr:
        w1, b1, w2, b2, c, length = self.params()
        rate = unary("abs", element(c))
        span = binary("max", cast(binary("max", Q, 1), "f32"), unary("abs", element(length)))
        x = binary("div", _psi(rate, unary("abs", binary("sub", Q, K))), _psi(rate, span))
        total: Expr = element(b2, H)
        for unit in range(self.width):
            hidden = binary("add", binary("mul", element(w1, unit), x), element(b1, unit))
            total = binary("add", total, binary("mul", element(w2, H, unit), binary("max", hidden, Const(0.0))))
        return binary("add", score, total)


def _psi(rate: Expr, y: Expr) -> Expr:
    return unary("log", binary("add", 1.0, binary("mul", rate, y)))
