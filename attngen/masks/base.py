"""What a mask is: a boolean expression over ``b, h, q, k`` that combines with ``& | ~``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any, Literal, cast

from pydantic import Field

from attngen.ir.expr import Expr, and_, not_, or_
from attngen.ir.params import Param
from attngen.model import SpecModel

if TYPE_CHECKING:
    from attngen.masks import Mask


class MaskMod(SpecModel):
    """A declared mask. True keeps the pair (query ``q``, key ``k``)."""

    def expr(self) -> Expr:
        """The mask as a bool expression."""
        raise NotImplementedError(type(self).__name__)

    def params(self) -> tuple[Param, ...]:
        """Run-time tensors the expression loads."""
        return ()

    def defaults(self) -> dict[str, Any]:
        """Tensors captured at declaration, by parameter name. They live in this Python object only."""
        return {}

    def sample(self, dims: Mapping[str, int]) -> dict[str, Any]:
        """Small sensible values of the parameters as nested lists, by name: for pictures and tests.

        Args:
            dims: sizes by the names of :data:`attngen.ir.params.DIM_NAMES`.
        """
        return {}

    def __and__(self, other: Mask) -> And:
        return And(operands=(cast("Mask", self), other))

    def __or__(self, other: Mask) -> Or:
        return Or(operands=(cast("Mask", self), other))

    def __invert__(self) -> Not:
        return Not(operand=cast("Mask", self))


class _Combination(MaskMod):
    def _operands(self) -> tuple[MaskMod, ...]:
        raise NotImplementedError(type(self).__name__)

    def params(self) -> tuple[Param, ...]:
        return tuple(dict.fromkeys(param for mask in self._operands() for param in mask.params()))

    def defaults(self) -> dict[str, Any]:
        return {name: tensor for mask in self._operands() for name, tensor in mask.defaults().items()}

    def sample(self, dims: Mapping[str, int]) -> dict[str, Any]:
        return {name: values for mask in self._operands() for name, values in mask.sample(dims).items()}

    def _fold(self, combine: Callable[[Expr, Expr], Expr]) -> Expr:
        return reduce(combine, (mask.expr() for mask in self._operands()))


class And(_Combination):
    """``a & b``: keys that every operand keeps."""

    kind: Literal["and"] = "and"
    operands: tuple[Mask, ...] = Field(min_length=1)

    def _operands(self) -> tuple[MaskMod, ...]:
        return self.operands

    def expr(self) -> Expr:
        return self._fold(and_)


class Or(_Combination):
    """``a | b``: keys that some operand keeps."""

    kind: Literal["or"] = "or"
    operands: tuple[Mask, ...] = Field(min_length=1)

    def _operands(self) -> tuple[MaskMod, ...]:
        return self.operands

    def expr(self) -> Expr:
        return self._fold(or_)


class Not(_Combination):
    """``~a``: keys that the operand drops."""

    kind: Literal["not"] = "not"
    operand: Mask

    def _operands(self) -> tuple[MaskMod, ...]:
        return (self.operand,)

    def expr(self) -> Expr:
        return not_(self.operand.expr())
