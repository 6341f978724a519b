"""What torch's functions and methods mean on symbols."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, NoReturn

from attngen.ir.activations import ACTIVATIONS
from attngen.ir.expr import Const, Expr, and_, binary, cast, compare, not_, or_, select, unary
from attngen.ir.symbol import (
    METHODS,
    TORCH_FUNCTIONS,
    Symbol,
    arithmetic,
    dtype_type,
    expr_of,
    fail,
    logical,
    power,
    row_of,
    unsupported,
    wrap,
)


def _floor(x: Expr) -> Expr:
    return unary("floor", x) if x.type == "f32" else cast(x, "i32")


def _divide(x: Any, y: Any, rounding_mode: str | None = None) -> Symbol:
    if rounding_mode not in (None, "floor"):
        raise fail(f"rounding_mode={rounding_mode!r} cannot be traced", "expressions divide exactly or floor", "use //")
    return wrap(lambda a, b: binary("floordiv" if rounding_mode else "div", a, b))(x, y)


_maximum, _minimum = (wrap(lambda x, y, op=op: binary(op, x, y)) for op in ("max", "min"))


def _clamp(x: Any, min: Any = None, max: Any = None) -> Symbol:  # noqa: A002 (torch's names)
    if min is not None:
        x = _maximum(x, min)
    return _minimum(x, max) if max is not None else wrap(lambda a: a)(x)


def _where(condition: Expr, x: Expr, y: Expr) -> Expr:
    if condition.type != "bool":
        raise fail(f"`where` of a value of type {condition.type}", "its condition is a bool", "compare first")
    return select(condition, x, y)


def _to(x: Any, target: Any = None, *_: Any, dtype: Any = None, **__: Any) -> Symbol:
    """Conversion to a dtype; devices and memory formats change nothing."""
    to = dtype_type(target if dtype is None else dtype)
    return wrap(lambda a: a if to is None else cast(a, to))(x)


def _full_like(x: Any, value: Any, *, dtype: Any = None, **_: Any) -> Symbol:
    return Symbol(cast(expr_of(value), dtype_type(dtype) or expr_of(x).type))


def _new_full(x: Any, size: Any, fill_value: Any, *, dtype: Any = None, **_: Any) -> Symbol:
    if tuple(size) != ():
        raise fail(f"a tensor of size {tuple(size)} cannot be traced", "an expression is one number", "use size ()")
    return _full_like(x, fill_value, dtype=dtype)


_to_f32, _to_i32, _to_bool = (wrap(lambda x, to=to: cast(x, to)) for to in ("f32", "i32", "bool"))


def _reduce(combine: Callable[[Any, Any], Symbol], start: bool | int) -> Callable[..., Symbol]:
    """A row as one value; a single value stays."""

    def apply(x: Any, dim: Any = -1, keepdim: bool = False, **_: Any) -> Symbol:
        if dim not in (-1, 0, None) or keepdim:
            raise unsupported("this reduction cannot be traced", "a row has one dimension", "reduce dim=-1")
        values = row_of(x)
        return reduce(combine, (x,) if values is None else values, Symbol(Const(start)))

    return apply


def _same(x: Any, *_: Any, **__: Any) -> Any:
    """Reshapes: a value has no dimensions, and those around it broadcast."""
    return x


def _dot(x: Any, *_: Any, **__: Any) -> NoReturn:
    size = len(row_of(x) or ()) or 1
    raise unsupported(
        f"a dot product of vectors of {size} elements cannot be traced",
        "an expression computes one number from single elements; a product of vectors needs the matrix units",
        "append the vectors to q and k along head_dim (scaled), so that q . k contains the product",
    )


METHODS |= {
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
        op: wrap(lambda x, op=op: unary(op, x))
        for op in ("abs", "neg", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos")
    }
    for op in ("add", "sub", "mul", "floordiv", "mod"):
        table[op], table[f"r{op}"] = arithmetic(op)
    table["rshift"], table["rrshift"] = arithmetic("shr")
    table["lshift"] = Symbol.__lshift__
    for op in ("lt", "le", "gt", "ge", "eq", "ne"):
        table[op] = wrap(lambda x, y, op=op: compare(op, x, y))
    for op, sign in (("and", "&"), ("or", "|"), ("xor", "^")):
        table[op] = table[f"r{op}"] = table[f"bitwise_{op}"] = logical(op, sign)
    table |= {
        "absolute": table["abs"],
        "all": _reduce(wrap(and_), True),
        "any": _reduce(wrap(or_), False),
        "bitwise_left_shift": table["lshift"],
        "bitwise_not": Symbol.__invert__,
        "bitwise_right_shift": table["rshift"],
        "clamp": _clamp,
        "clamp_max": lambda x, bound: _clamp(x, max=bound),
        "clamp_min": lambda x, bound: _clamp(x, min=bound),
        "clip": _clamp,
        "div": _divide,
        "expit": table["sigmoid"],
        "dot": _dot,
        "floor": wrap(_floor),
        "floor_divide": table["floordiv"],
        "full_like": _full_like,
        "inner": _dot,
        "invert": Symbol.__invert__,
        "logical_and": wrap(and_),
        "logical_not": wrap(not_),
        "logical_or": wrap(or_),
        "logical_xor": wrap(lambda x, y: compare("ne", cast(x, "bool"), cast(y, "bool"))),
        "matmul": _dot,
        "maximum": _maximum,
        "minimum": _minimum,
        "multiply": table["mul"],
        "negative": table["neg"],
        "ones_like": lambda x, **options: _full_like(x, 1, **options),
        "pow": power,
        "rdiv": lambda x, y: _divide(y, x),
        "reciprocal": lambda x: _divide(1.0, x),
        "remainder": table["mod"],
        "rpow": lambda x, y: power(y, x),
        "square": lambda x: power(x, 2),
        "squeeze": _same,
        "subtract": table["sub"],
        "sum": _reduce(table["add"], 0),
        "true_divide": _divide,
        "truediv": _divide,
        "unsqueeze": _same,
        "vdot": _dot,
        "where": wrap(_where),
        "zeros_like": lambda x, **options: _full_like(x, 0, **options),
    }
    return table | {"max": table["maximum"], "min": table["minimum"]} | ACTIVATIONS


TORCH_FUNCTIONS |= _table()
