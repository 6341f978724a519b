"""Scores scaled by the position of the query, or by a learned factor a head."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from attngen.errors import SpecError
from attngen.ir.expr import Expr, H, Q, binary, cast, unary
from attngen.ir.loads import element
from attngen.ir.names import ParamName
from attngen.ir.params import Param
from attngen.score_mods.base import ScoreMod


class Temperature(ScoreMod):
    """``score * factor``, where exactly one of these says what the factor is:

    * ``gain``: ``gain[h]``, learned. Swin v2's scaled cosine attention (arXiv 2111.09883), together with normalized q and k.
    * ``floor_scale``: ``1 + attn_scale * log(1 + floor((q + 1) / floor_scale))``: the layers without positions of Llama 4.
    * ``train_len``: ``max(1, log(q + 1) / log(train_len))``: Qwen's log-n scaling beyond the length of training (arXiv 2309.16609).

    Attributes:
        gain: name of a run-time fp32 parameter ``[num_qo_heads]``; it has a gradient.
        floor_scale: 8192 in Llama 4.
        attn_scale: 0.1 in Llama 4.
        train_len: tokens of a training sample.
    """

    positional: ClassVar[tuple[str, ...]] = ("gain",)
    kind: Literal["temperature"] = "temperature"
    gain: ParamName | None = None
    floor_scale: int | None = Field(default=None, ge=1, lt=2**30)
    attn_scale: float = 0.1
    train_len: int | None = Field(default=None, ge=2, lt=2**30)

    @model_validator(mode="after")
    def _one(self) -> Temperature:
        given = [name for name in ("gain", "floor_scale", "train_len") if getattr(self, name) is not None]
        if len(given) != 1:
            raise SpecError(
                f"{' and '.join(given) or 'nothing'} is given",
                where="Temperature",
                why="exactly one of gain, floor_scale and train_len says what the factor is",
                fix="pass one, or two Temperature mods",
            )
        if self.floor_scale is None and self.attn_scale != type(self).model_fields["attn_scale"].default:
            raise SpecError(
                f"attn_scale is given beside {given[0]}",
                where="Temperature.attn_scale",
                why="it belongs to floor_scale",
                fix="leave it out",
            )
        return self

    def params(self) -> tuple[Param, ...]:
        return () if self.gain is None else (Param(self.gain, ("num_qo_heads",)),)

    def expr(self, score: Expr, num_qo_heads: int) -> Expr:
        return binary("mul", score, self._factor())

    def _factor(self) -> Expr:
        if self.gain is not None:
            return element(self.params()[0], H)
        length = binary("add", Q, 1)
        if self.floor_scale is not None:
            steps = binary("add", 1.0, binary("floordiv", binary("max", length, 0), self.floor_scale))
            return binary("add", binary("mul", unary("log", steps), self.attn_scale), 1.0)
        assert self.train_len is not None
        logarithm = unary("log", cast(binary("max", length, 1), "f32"))
        return binary("max", binary("mul", logarithm, 1.0 / math.log(self.train_len)), 1.0)
