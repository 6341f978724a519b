"""Parameters as symbols that wait for their indices."""

from __future__ import annotations

from typing import Any

from attngen.ir.expr import Const, Expr
from attngen.ir.loads import element, size_of
from attngen.ir.params import Param
from attngen.ir.symbol import Symbol, expr_of, fail, unsupported

LONGEST_ROW = 64


class ParamSymbol(Symbol):
    """A parameter that still lacks some of its indices."""

    __slots__ = ("_indices", "_param")

    def __init__(self, param: Param, indices: tuple[Expr, ...] = ()) -> None:
        self._param, self._indices = param, indices

    @property
    def expr(self) -> Expr:
        param, given = self._param, len(self._indices)
        raise fail(
            f"parameter {param.name!r} is indexed wrongly",
            f"it has {len(param.dims)} dimensions {param.dims}, and {given} indices were given",
            f"index it down to an element: {param.name}[{', '.join('...' for _ in param.dims)}]",
        )

    @property
    def shape(self) -> tuple[Any, ...]:
        """Sizes of the dimensions that are not indexed yet: numbers, or symbols where only a call decides."""
        sizes = (size_of(self._param, axis) for axis in range(len(self._indices), len(self._param.dims)))
        return tuple(size.value if isinstance(size, Const) else Symbol(size) for size in sizes)

    def values(self) -> tuple[Symbol, ...] | None:
        """All elements along the last dimension, where it is the only one without an index and its size is known."""
        size = self._param.dims[-1]
        if len(self._indices) != len(self._param.dims) - 1 or not isinstance(size, int):
            return None
        if size > LONGEST_ROW:
            raise unsupported(
                f"{size} elements of parameter {self._param.name!r} are used at once",
                f"each becomes a term of the expression, and rows have at most {LONGEST_ROW}",
                "index single elements, or prepare a smaller parameter before the call",
            )
        return tuple(load(self._param, (*self._indices, Const(n))) for n in range(size))

    def __getitem__(self, index: Any) -> Symbol:
        parts = index if isinstance(index, tuple) else (index,)
        indices = (*self._indices, *(self._index(part, len(self._indices) + n) for n, part in enumerate(parts)))
        return load(self._param, indices)

    def _index(self, value: Any, axis: int) -> Expr:
        if value is None or value is Ellipsis or isinstance(value, slice):
            raise fail(
                f"parameter {self._param.name!r} is indexed with {value!r}",
                "an expression reads single elements",
                "give one integer index a dimension",
            )
        expr = expr_of(value)
        if expr.type != "i32":
            raise fail(
                f"an index of parameter {self._param.name!r} has type {expr.type}",
                "indices are integers",
                "convert it with .int(), or use // instead of /",
            )
        return self._wrapped(expr, axis)

    def _wrapped(self, expr: Expr, axis: int) -> Expr:
        """Constant negative indices count from the end, as in torch; those of unknown sizes are refused."""
        if not (isinstance(expr, Const) and expr.value < 0) or axis >= len(self._param.dims):
            return expr
        size = self._param.dims[axis]
        if isinstance(size, int):
            return Const(int(expr.value) + size)
        raise fail(
            f"parameter {self._param.name!r} is indexed with {expr.value}",
            f"its size {size!r} is unknown, and an index below 0 is out of range",
            "count from the start",
        )

    def __repr__(self) -> str:
        return f"ParamSymbol({self._param.name!r})"


def load(param: Param, indices: tuple[Expr, ...] = ()) -> Symbol:
    """The element ``indices`` of ``param``, or a symbol that waits for the missing indices.

    Raises:
        SpecError: too many indices.
    """
    if len(indices) == len(param.dims):
        return Symbol(element(param, *indices))
    partial = ParamSymbol(param, indices)
    return partial if len(indices) < len(param.dims) else Symbol(partial.expr)
