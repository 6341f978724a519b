"""Any bias, given as a tensor (AlphaFold's pair bias, SDPA's additive mask)."""

from __future__ import annotations

from typing import ClassVar, Literal

from attngen.ir.expr import KV_LEN, QO_LEN, B, Expr, H, K, Q, binary
from attngen.ir.loads import element
from attngen.ir.names import ParamName
from attngen.ir.params import Param
from attngen.score_mods.base import ScoreMod


class DenseBias(ScoreMod):
    """``score + bias[b, h, row, k]``, where ``row`` counts the queries of the call: ``q - (kv_len - qo_len)``.

    Axes of size 1 for the batch or the heads serve every request or head, and their gradient is the sum. Used for the pair bias of
    AlphaFold 2 (Jumper et al. 2021, supplement 1.6) and 3, and for biases that have no formula.

    Attributes:
        bias: name of a run-time parameter ``[batch or 1, num_qo_heads or 1, max_qo_len, max_kv_len]``; it has a gradient.
        dtype: its element type.
    """

    positional: ClassVar[tuple[str, ...]] = ("bias",)
    kind: Literal["dense_bias"] = "dense_bias"
    bias: ParamName
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"

    def params(self) -> tuple[Param, ...]:
        return (Param(self.bias, ("batch or 1", "num_qo_heads or 1", "max_qo_len", "max_kv_len"), self.dtype),)

    def expr(self, score: Expr, num_qo_heads: int) -> Expr:
        (bias,) = self.params()
        row = binary("sub", Q, binary("sub", KV_LEN, QO_LEN))
        return binary("add", score, element(bias, B, H, row, K))
