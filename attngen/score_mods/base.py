"""What a score mod is: a float expression that replaces the scaled score."""

from __future__ import annotations

from typing import Any

from attngen.ir.expr import Expr
from attngen.ir.params import Param
from attngen.model import SpecModel


class ScoreMod(SpecModel):
    """A declared change of the logit ``sm_scale * (q . k)``."""

    def expr(self, score: Expr, num_qo_heads: int) -> Expr:
        """The new logit, as an expression of ``score`` (the logit so far) and the coordinates."""
        raise NotImplementedError(type(self).__name__)

    def params(self) -> tuple[Param, ...]:
        """Run-time tensors the expression loads."""
        return ()

    def defaults(self) -> dict[str, Any]:
        """Tensors captured at declaration, by parameter name. They live in this Python object only."""
        return {}
