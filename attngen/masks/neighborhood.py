"""Neighborhood attention in one, two or three dimensions (NATTEN)."""

from __future__ import annotations

from math import prod
from typing import ClassVar, Literal, TypeVar

from pydantic import Field, model_validator

from attngen.errors import SpecError
from attngen.ir.expr import TRUE, Expr, K, Q, and_, binary, compare, lift
from attngen.masks.base import MaskMod

Value = TypeVar("Value", int, bool)


class Neighborhood(MaskMod):
    """Every query sees the ``window`` tokens nearest to it in each dimension; at an edge the window moves inwards, not out of
    the grid.

    A token of the grid ``shape`` stands at the position of its row-major index. In a dimension of length ``L``, query ``x`` sees
    ``s .. s + window - 1`` with ``s = clamp(x - window // 2, 0, L - window)``. With a dilation ``d`` the tokens of equal ``x % d``
    are a grid of their own: the rule holds for ``x // d`` among its ``ceil((L - x % d) / d)`` tokens. A causal dimension ends the
    window at the query, ``max(0, x - window + 1) .. x`` in the same grid. Hassani et al., arXiv 2204.07143; dilation: DiNAT,
    arXiv 2209.15001; causal dimensions: arXiv 2403.04690. ``kv_len`` is the number of tokens of the grid.

    Attributes:
        shape: lengths of one to three dimensions, slowest first: ``(height, width)``, ``(frames, height, width)``.
        window, dilation, causal: one value for all dimensions, or one each.
    """

    positional: ClassVar[tuple[str, ...]] = ("shape", "window", "dilation")
    kind: Literal["neighborhood"] = "neighborhood"
    shape: tuple[int, ...] = Field(min_length=1, max_length=3)
    window: int | tuple[int, ...]
    dilation: int | tuple[int, ...] = 1
    causal: bool | tuple[bool, ...] = False

    @model_validator(mode="after")
    def _fits(self) -> Neighborhood:
        dims = list(enumerate(self._dimensions()))
        if min(self.shape) < 1 or prod(self.shape) >= 2**30:
            raise self._error(f"shape is {self.shape}", "every length is at least 1, and positions are int32")
        for axis, (length, window, dilation, _) in dims:
            if window < 1 or dilation < 1 or window * dilation > length:
                why = f"dimension {axis} has {length} tokens, window {window} and dilation {dilation}"
                raise self._error("the window does not fit", f"{why}; window * dilation is 1 .. length")
        return self

    def _error(self, what: str, why: str) -> SpecError:
        return SpecError(what, where="Neighborhood", why=why, fix="correct shape, window and dilation")

    def _dimensions(self) -> list[tuple[int, int, int, bool]]:
        """Length, window, dilation and causality of each dimension."""
        each = (self._each(self.window), self._each(self.dilation), self._each(self.causal))
        return list(zip(self.shape, *each, strict=True))

    def _each(self, value: Value | tuple[Value, ...]) -> tuple[Value, ...]:
        values = value if isinstance(value, tuple) else (value,) * len(self.shape)
        if len(values) != len(self.shape):
            raise self._error(f"{values} has {len(values)} values", f"shape has {len(self.shape)} dimensions")
        return values

    def expr(self) -> Expr:
        mask: Expr = TRUE
        stride = prod(self.shape)
        for axis, (length, window, dilation, causal) in enumerate(self._dimensions()):
            stride //= length
            x, y = (_coordinate(position, stride, length if axis else None) for position in (Q, K))
            mask = and_(mask, _near(x, y, length, window, dilation, causal=causal))
        return mask


def _coordinate(position: Expr, stride: int, length: int | None) -> Expr:
    """A token's place in one dimension; the first one, without ``length``, is not wrapped."""
    row = position if stride == 1 else binary("floordiv", position, stride)
    return row if length is None else binary("mod", row, length)


def _near(x: Expr, y: Expr, length: int, window: int, dilation: int, *, causal: bool) -> Expr:
    """Whether key ``y`` is in the window of query ``x``."""
    same: Expr = TRUE
    last = lift(length - window)
    if dilation > 1:
        rest = binary("mod", x, dilation)
        same = compare("eq", rest, binary("mod", y, dilation))
        tokens = binary("floordiv", binary("add", binary("sub", length - 1, rest), dilation), dilation)
        x, y, last = binary("floordiv", x, dilation), binary("floordiv", y, dilation), binary("sub", tokens, window)
    if causal:
        return and_(same, and_(compare("le", binary("sub", x, window - 1), y), compare("le", y, x)))
    start = binary("min", binary("max", binary("sub", x, window // 2), 0), last)
    return and_(same, and_(compare("le", start, y), compare("lt", y, binary("add", start, window))))
