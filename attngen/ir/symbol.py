"""Symbols: what a user's mod receives instead of numbers. Every operation on one builds a node.

A :class:`Symbol` answers Python operators, torch functions (through ``__torch_function__``, by name, without importing
torch) and the methods people call on FlexAttention's scalar tensors.
"""

from __future__ import annotations

import linecache
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from attngen.errors import SpecError
from attngen.ir.expr import Const, Expr, Type, and_, binary, cast, compare, lift, not_, or_, select, unary
from attngen.ir.loads import element, size_of
from attngen.ir.params import Param

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


def _bool_of(value: Any, sign: str) -> Expr:
    expr = expr_of(value)
    if expr.type != "bool":
        raise fail(
            f"`{sign}` of a value of type {expr.type}",
            "`&`, `|`, `^` and `~` are logical here: operands are bool",
            "compare first, with parentheses around each comparison",
        )
    return expr


def _wrap(build: Callable[..., Expr]) -> Callable[..., Symbol]:
    return lambda *operands: Symbol(build(*(expr_of(x) for x in operands)))


def _arithmetic(op: str) -> tuple[Callable[[Any, Any], Symbol], Callable[[Any, Any], Symbol]]:
    forward = _wrap(lambda x, y: binary(op, x, y))
    return forward, lambda x, y: forward(y, x)


def _xor(x: Expr, y: Expr) -> Expr:
    return compare("ne", x, y)


def _logical(build: Callable[[Expr, Expr], Expr], sign: str) -> Callable[[Any, Any], Symbol]:
    def apply(x: Any, y: Any) -> Symbol:
        left, right = _bool_of(x, sign), _bool_of(y, sign)
        return Symbol(build(left, right))

    return apply


def _compare(op: str) -> Callable[[Any, Any], Symbol]:
    return _wrap(lambda x, y: compare(op, x, y))


def power(x: Any, y: Any) -> Symbol:
    """``x ** y``; squares and cubes are products, so that integers stay integers."""
    if isinstance(y, int) and not isinstance(y, bool) and y in (2, 3):
        base = expr_of(x)
        square = binary("mul", base, base)
        return Symbol(square if y == 2 else binary("mul", square, base))
    return Symbol(binary("pow", expr_of(x), expr_of(y)))


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

    __add__, __radd__ = _arithmetic("add")
    __sub__, __rsub__ = _arithmetic("sub")
    __mul__, __rmul__ = _arithmetic("mul")
    __truediv__, __rtruediv__ = _arithmetic("div")
    __floordiv__, __rfloordiv__ = _arithmetic("floordiv")
    __mod__, __rmod__ = _arithmetic("mod")
    __rshift__, __rrshift__ = _arithmetic("shr")
    __and__ = __rand__ = _logical(and_, "&")
    __or__ = __ror__ = _logical(or_, "|")
    __xor__ = __rxor__ = _logical(_xor, "^")
    __lt__, __le__, __gt__, __ge__ = _compare("lt"), _compare("le"), _compare("gt"), _compare("ge")
    __eq__ = _compare("eq")  # type: ignore[assignment]
    __ne__ = _compare("ne")  # type: ignore[assignment]

    def __pow__(self, other: Any) -> Symbol:
        return power(self, other)

    def __rpow__(self, other: Any) -> Symbol:
        return power(other, self)

    def __neg__(self) -> Symbol:
        return Symbol(unary("neg", self.expr))

    def __pos__(self) -> Symbol:
        return self

    def __abs__(self) -> Symbol:
        return Symbol(unary("abs", self.expr))

    def __invert__(self) -> Symbol:
        return Symbol(not_(_bool_of(self, "~")))

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
        return _torch_function(func.__name__)(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        method = _METHODS.get(name) or _torch_function(name)
        return lambda *args, **kwargs: method(self, *args, **kwargs)

    @property
    def dtype(self) -> Type:
        """Type of the value, for ``x.to(score.dtype)``."""
        return self.expr.type

    @property
    def device(self) -> str:
        """Accepted and ignored where torch functions take a device."""
        return "cpu"


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


def _torch_function(name: str) -> Callable[..., Any]:
    plain = name.strip("_")
    function = TORCH_FUNCTIONS.get(plain)
    if function is None:
        raise fail(
            f"torch function {plain!r} cannot be traced",
            f"expressions have {', '.join(sorted(TORCH_FUNCTIONS))}",
            "rewrite it with these",
        )
    return function


def _floor(x: Any) -> Symbol:
    expr = expr_of(x)
    return Symbol(unary("floor", expr) if expr.type == "f32" else cast(expr, "i32"))


def _divide(x: Any, y: Any, rounding_mode: str | None = None) -> Symbol:
    if rounding_mode not in (None, "floor"):
        raise fail(f"rounding_mode={rounding_mode!r} cannot be traced", "expressions divide exactly or floor", "use //")
    return Symbol(binary("floordiv" if rounding_mode else "div", expr_of(x), expr_of(y)))


def _clamp(x: Any, min: Any = None, max: Any = None) -> Symbol:  # noqa: A002 (torch's names)
    expr = expr_of(x)
    if min is not None:
        expr = binary("max", expr, expr_of(min))
    return Symbol(expr if max is None else binary("min", expr, expr_of(max)))


def _where(condition: Any, x: Any, y: Any) -> Symbol:
    return Symbol(select(_bool_of(condition, "where"), expr_of(x), expr_of(y)))


def _to(x: Any, target: Any = None, *_: Any, dtype: Any = None, **__: Any) -> Symbol:
    """Conversion to a dtype; devices and memory formats change nothing."""
    to = dtype_type(target if dtype is None else dtype)
    return Symbol(expr_of(x) if to is None else cast(expr_of(x), to))


def _full_like(x: Any, value: Any, *, dtype: Any = None, **_: Any) -> Symbol:
    return Symbol(cast(expr_of(value), dtype_type(dtype) or expr_of(x).type))


def _new_full(x: Any, size: Any, fill_value: Any, *, dtype: Any = None, **_: Any) -> Symbol:
    if tuple(size) != ():
        raise fail(f"a tensor of size {tuple(size)} cannot be traced", "an expression is one number", "use size ()")
    return _full_like(x, fill_value, dtype=dtype)


_to_f32, _to_i32, _to_bool = (_wrap(lambda x, to=to: cast(x, to)) for to in ("f32", "i32", "bool"))
_METHODS: dict[str, Callable[..., Symbol]] = {
    **dict.fromkeys(("float", "double", "half", "bfloat16"), _to_f32),
    **dict.fromkeys(("int", "long", "short"), _to_i32),
    "bool": _to_bool,
    "to": _to,
    "type_as": lambda x, other: Symbol(cast(expr_of(x), expr_of(other).type)),
    "new_full": _new_full,
    "new_ones": lambda x, size, **options: _new_full(x, size, 1, **options),
    "new_zeros": lambda x, size, **options: _new_full(x, size, 0, **options),
}


def _table() -> dict[str, Callable[..., Symbol]]:
    """Torch's functions, methods and operators by name, without the underscores around it."""
    table: dict[str, Callable[..., Symbol]] = {
        op: _wrap(lambda x, op=op: unary(op, x))
        for op in ("abs", "neg", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos")
    }
    for op in ("add", "sub", "mul", "floordiv", "mod"):
        table[op], table[f"r{op}"] = _arithmetic(op)
    table["rshift"], table["rrshift"] = _arithmetic("shr")
    for op in ("lt", "le", "gt", "ge", "eq", "ne"):
        table[op] = _compare(op)
    for op, build, sign in (("and", and_, "&"), ("or", or_, "|"), ("xor", _xor, "^")):
        table[op] = table[f"r{op}"] = table[f"bitwise_{op}"] = _logical(build, sign)
    table |= {
        "absolute": table["abs"],
        "bitwise_not": lambda x: ~Symbol(expr_of(x)),
        "bitwise_right_shift": table["rshift"],
        "clamp": _clamp,
        "clamp_max": lambda x, bound: _clamp(x, max=bound),
        "clamp_min": lambda x, bound: _clamp(x, min=bound),
        "clip": _clamp,
        "div": _divide,
        "expit": table["sigmoid"],
        "floor": _floor,
        "floor_divide": table["floordiv"],
        "full_like": _full_like,
        "invert": lambda x: ~Symbol(expr_of(x)),
        "logical_and": _wrap(and_),
        "logical_not": _wrap(not_),
        "logical_or": _wrap(or_),
        "logical_xor": _wrap(lambda x, y: compare("ne", cast(x, "bool"), cast(y, "bool"))),
        "maximum": _wrap(lambda x, y: binary("max", x, y)),
        "minimum": _wrap(lambda x, y: binary("min", x, y)),
        "multiply": table["mul"],
        "negative": table["neg"],
        "ones_like": lambda x, **options: _full_like(x, 1, **options),
        "pow": power,
        "rdiv": lambda x, y: _divide(y, x),
        "reciprocal": lambda x: _divide(1.0, x),
        "relu": lambda x: _clamp(x, min=0),
        "remainder": table["mod"],
        "rpow": lambda x, y: power(y, x),
        "square": lambda x: power(x, 2),
        "subtract": table["sub"],
        "true_divide": _divide,
        "truediv": _divide,
        "where": _where,
        "zeros_like": lambda x, **options: _full_like(x, 0, **options),
    }
    return table | {"max": table["maximum"], "min": table["minimum"]}


TORCH_FUNCTIONS = _table()
