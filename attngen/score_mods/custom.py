"""Score mods written as Python functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field, PrivateAttr, model_validator

from attngen.ir.expr import SCORE, Expr, substitute
from attngen.ir.params import Param
from attngen.ir.text import parse, to_text
from attngen.ir.trace import trace
from attngen.score_mods.base import ScoreMod

ARGUMENTS = ("score", "b", "h", "q", "k")


class CustomScoreMod(ScoreMod):
    """A traced ``score_mod(score, b, h, q, k)``, kept as the text of its expression.

    Attributes:
        name: the function's name, for people.
        expression: Python syntax over ``score b h q k qo_len kv_len`` and the parameters.
        parameters: run-time tensors it reads.
    """

    kind: Literal["custom"] = "custom"
    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")
    expression: str
    parameters: tuple[Param, ...] = ()
    _defaults: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _parses(self) -> CustomScoreMod:
        self._parsed()
        return self

    def _parsed(self) -> Expr:
        return parse(self.expression, self.parameters, result="f32")

    def expr(self, score: Expr, num_qo_heads: int) -> Expr:
        return substitute(self._parsed(), {SCORE: score})

    def params(self) -> tuple[Param, ...]:
        return self.parameters

    def defaults(self) -> dict[str, Any]:
        return self._defaults


def score_mod(fn: Callable[..., Any]) -> CustomScoreMod:
    """Declare a score mod from a Python function with FlexAttention's signature ``fn(score, b, h, q, k)``.

    The function runs once, with symbolic arguments. Extra arguments annotated ``ag.Tensor(*dims)`` and tensors it closes over
    become run-time parameters.

    Raises:
        SpecError: it branches on a symbolic value, or uses something expressions cannot say.
    """
    traced = trace(fn, ARGUMENTS, "f32")
    mod = CustomScoreMod(name=traced.name, expression=to_text(traced.expr), parameters=traced.params)
    mod._defaults.update(traced.defaults)
    return mod
