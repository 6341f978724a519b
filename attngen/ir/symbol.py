"""Symbols: what a user's mod receives instead of numbers. Every operation on one builds a node.

A :class:`Symbol` answers Python operators, torch functions (through ``__torch_function__``, by name, without importing
torch) and the methods people call on FlexAttention's scalar tensors. A :class:`Row` is several values in a row, like
``indices[b, h]``: operations apply to each, until ``any``, ``all`` or ``sum`` make one of them.
"""

from __future__ import annotations

import linecache
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from attngen.errors import SpecError, UnsupportedError
from attngen.ir.expr import Const, Expr, Type, and_, binary, compare, lift, not_, or_, unary

_PACKAGE = str(Path(__file__).resolve().parent)
_INT_DTYPES = ("i32", "int64", "int32", "int16", "int8", "uint8", "long", "int")
_FLOAT_DTYPES = ("f32", "float32", "float64", "float16", "bfloat16", "float", "double", "half")


def user_location() -> str:
    """File, line and text of the innermost frame of the user's code."""
    frame = sys._getframe(1)
    while frame.f_back and (frame.f_code.co_filename.startswith(_PACKAGE) or "/torch/" in frame.f_code.co_filename):
        frame = frame.f_back
    name, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(name, line).strip()
    return f"{name}:{line}: {text}" if text else f"{name}:{line}"


def fail(what: str, why: str, fix: str) -> SpecError:
    """An error placed at the line of the user's code that caused it."""
    return SpecError(what, where=user_location(), why=why, fix=fix)


def unsupported(what: str, why: str, fix: str) -> UnsupportedError:
    """An error, placed likewise, about something that means something in torch and nothing in an expression."""
    return UnsupportedError(what, where=user_location(), why=why, fix=fix)


def expr_of(value: Any) -> Expr:
    """The expression of a symbol, number, or zero-dimensional tensor.

    Raises:
        SpecError: it has no meaning in a kernel, or is an integer beyond int32.
    """
    if isinstance(value, Symbol):
        return value.expr
    if not isinstance(value, (bool, int, float)) and hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if not isinstance(value, (bool, int, float)):
        raise fail(
            f"cannot use a {type(value).__name__} in a traced function",
            "numbers, arguments and elements of captured tensors or ag.Tensor parameters have a meaning",
            "bind the tensor to a local variable that the function closes over, and index it",
        )
    if isinstance(value, int) and not -(2**31) <= value < 2**31:
        raise fail(f"{value} does not fit int32", "positions and indices are int32", "use a smaller integer or a float")
    if math.isnan(value):
        raise fail("nan is not a constant", "no comparison with nan is true", "remove it")
    return lift(value)


def wrap(build: Callable[..., Expr]) -> Callable[..., Symbol]:
    """A function of expressions as one of symbols and numbers; rows go through it element by element."""

    def apply(*operands: Any) -> Symbol:
        rows = [row_of(x) for x in operands]
        lengths = {len(row) for row in rows if row is not None}
        if not lengths:
            return Symbol(build(*(expr_of(x) for x in operands)))
        if len(lengths) > 1:
            raise fail(f"rows of {sorted(lengths)} values meet", "they go together value by value", "index them first")
        columns = [row or (x,) * max(lengths) for row, x in zip(rows, operands, strict=True)]
        return Row(tuple(apply(*values) for values in zip(*columns, strict=True)))

    return apply


def row_of(value: Any) -> tuple[Symbol, ...] | None:
    """The values of a row; None for whatever is one value."""
    return value.values() if isinstance(value, Symbol) else None


def arithmetic(op: str) -> tuple[Callable[[Any, Any], Symbol], Callable[[Any, Any], Symbol]]:
    """The operator, and the same with its operands exchanged."""
    forward = wrap(lambda x, y: binary(op, x, y))
    return forward, lambda x, y: forward(y, x)


def logical(name: str, sign: str) -> Callable[[Any, Any], Symbol]:
    """``&``, ``|`` or ``^``: logical of two bools, bit by bit of integers."""
    of_bools: Callable[[Expr, Expr], Expr] = {"and": and_, "or": or_, "xor": lambda x, y: compare("ne", x, y)}[name]

    def combine(x: Expr, y: Expr) -> Expr:
        if x.type == y.type == "bool":
            return of_bools(x, y)
        return binary(f"bit{name}", *(_bits(operand, sign) for operand in (x, y)))

    return wrap(combine)


def _bits(x: Expr, sign: str) -> Expr:
    if x.type == "f32":
        raise fail(
            f"`{sign}` of a value of type f32",
            "its operands are both bool or both integers",
            "compare first, with parentheses around each comparison",
        )
    return x


def _inverted(x: Expr) -> Expr:
    return not_(x) if x.type == "bool" else binary("bitxor", _bits(x, "~"), -1)


def _shifted_left(x: Expr, count: Expr) -> Expr:
    if not isinstance(count, Const) or not 0 <= count.value < 31:
        raise unsupported("`<<` by a value cannot be traced", "expressions shift left by 0 .. 30 only", "use a number")
    return binary("mul", x, 1 << int(count.value))


def _compare(op: str) -> Callable[[Any, Any], Symbol]:
    return wrap(lambda x, y: compare(op, x, y))


def _power(x: Expr, y: Expr) -> Expr:
    """Squares and cubes are products, so that integers stay integers."""
    if isinstance(y, Const) and type(y.value) is int and y.value in (2, 3):
        square = binary("mul", x, x)
        return square if y.value == 2 else binary("mul", square, x)
    return binary("pow", x, y)


power = wrap(_power)


def dtype_type(dtype: Any) -> Type | None:
    """Expression type of a torch dtype or Python type; ``None`` if it is neither."""
    name = dtype.__name__ if isinstance(dtype, type) else str(dtype).removeprefix("torch.")
    if name == "bool":
        return "bool"
    return "i32" if name in _INT_DTYPES else "f32" if name in _FLOAT_DTYPES else None


class Symbol:
    """A value that is known only inside the kernel."""

    __slots__ = ("_expr",)
    __array_ufunc__: ClassVar[None] = None  # numpy scalars on the left leave the operation to us
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expr: Expr) -> None:
        self._expr = expr

    @property
    def expr(self) -> Expr:
        """The node this symbol stands for."""
        return self._expr

    __add__, __radd__ = arithmetic("add")
    __sub__, __rsub__ = arithmetic("sub")
    __mul__, __rmul__ = arithmetic("mul")
    __truediv__, __rtruediv__ = arithmetic("div")
    __floordiv__, __rfloordiv__ = arithmetic("floordiv")
    __mod__, __rmod__ = arithmetic("mod")
    __rshift__, __rrshift__ = arithmetic("shr")
    __lshift__ = wrap(_shifted_left)
    __and__ = __rand__ = logical("and", "&")
    __or__ = __ror__ = logical("or", "|")
    __xor__ = __rxor__ = logical("xor", "^")
    __lt__, __le__, __gt__, __ge__ = _compare("lt"), _compare("le"), _compare("gt"), _compare("ge")
    __eq__ = _compare("eq")  # type: ignore[assignment]
    __ne__ = _compare("ne")  # type: ignore[assignment]

    def __pow__(self, other: Any) -> Symbol:
        return power(self, other)

    def __rpow__(self, other: Any) -> Symbol:
        return power(other, self)

    __neg__, __abs__ = wrap(lambda x: unary("neg", x)), wrap(lambda x: unary("abs", x))
    __invert__ = wrap(_inverted)

    def __pos__(self) -> Symbol:
        return self

    def values(self) -> tuple[Symbol, ...] | None:
        """The values of a row; None for a single value."""
        return None

    def __getitem__(self, index: Any) -> Symbol:
        raise fail("a scalar cannot be indexed", "every argument of a mod is one number", "index a parameter instead")

    def _refuse(self, *_: object) -> NoReturn:
        raise fail(
            "a traced value has no Python number",
            "the function runs once, before any position or score exists; int(), float(), math functions, range(), "
            "iteration and indexing of uncaptured tensors need numbers",
            "use ag.exp, ag.where, ... or torch functions; let the function close over the tensors that it indexes",
        )

    __int__ = __float__ = __index__ = __complex__ = __iter__ = __len__ = __contains__ = _refuse

    def __bool__(self) -> bool:
        raise fail(
            "Python cannot branch on a traced value",
            "`if`, `while`, `and`, `or` and `not` need a bool, and the function runs once, before any position exists",
            "use ag.where or torch.where to choose, and `&`, `|`, `~` to combine conditions",
        )

    def __repr__(self) -> str:
        return f"Symbol({self._expr!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch when a symbol is passed to one of its functions."""
        return torch_function(_known_name(func))(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        method = METHODS.get(name) or torch_function(name)
        return lambda *args, **kwargs: method(self, *args, **kwargs)

    @property
    def dtype(self) -> Type:
        """Type of the value, for ``x.to(score.dtype)``."""
        return self.expr.type

    @property
    def device(self) -> str:
        """Accepted and ignored where torch functions take a device."""
        return "cpu"


class Row(Symbol):
    """Several values, one after another."""

    __slots__ = ("_values",)

    def __init__(self, values: tuple[Symbol, ...]) -> None:
        self._values = values

    @property
    def expr(self) -> Expr:
        raise fail(
            f"{len(self._values)} values are used as one",
            "an expression is one number",
            "index them, or reduce them with any, all or sum",
        )

    def values(self) -> tuple[Symbol, ...]:
        return self._values

    def __getitem__(self, index: Any) -> Symbol:
        if not isinstance(index, int):
            raise unsupported("a row is indexed with a traced value", "its values are no tensor", "index the parameter")
        return self._values[index]


# Torch's functions and methods by name, filled by :mod:`attngen.ir.torch_functions`.
TORCH_FUNCTIONS: dict[str, Callable[..., Any]] = {}
METHODS: dict[str, Callable[..., Any]] = {}
# Operators outside of torch whose meaning is known: attention-gym's hardware tanh.
_OPERATORS = {"approx::tanh": "tanh"}


def torch_function(name: str) -> Callable[..., Any]:
    """What stands for a function of torch.

    Raises:
        UnsupportedError: expressions cannot say it.
    """
    plain = name.strip("_")
    function = TORCH_FUNCTIONS.get(plain)
    if function is None:
        raise unsupported(
            f"torch function {plain!r} cannot be traced",
            f"expressions have {', '.join(sorted(TORCH_FUNCTIONS))}",
            "rewrite it with these",
        )
    return function


def _known_name(func: Any) -> str:
    """A torch function's name; a custom operator's only where its meaning is known."""
    qualified = getattr(func, "_qualified_op_name", "") or (func.name() if hasattr(func, "overloadpacket") else "")
    name = qualified.partition(".")[0]
    if not name or name.startswith("aten::"):
        return str(func.__name__).partition(".")[0]
    if name not in _OPERATORS:
        raise unsupported(
            f"custom operator {name} cannot be traced",
            "it is compiled code, whose meaning is not known",
            "write what it computes with torch functions",
        )
    return _OPERATORS[name]
