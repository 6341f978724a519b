"""Expr -> Python number: tile bounds evaluated at plan time, without torch."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from attngen.errors import ArgumentError
from attngen.ir.expr import Binary, Cast, Compare, Const, Coord, Expr, Extent, Load, Local, Select, Size, Type, Unary

Number = bool | int | float
Loads = Callable[[str, tuple[int, ...]], Number]


def evaluate_scalar(expr: Expr, env: Mapping[Any, Number], loads: Loads | None = None) -> Number:
    """The value of ``expr`` for one assignment; the same meaning as :func:`attngen.ir.evaluate.evaluate`.

    Args:
        expr: any expression.
        env: number of each coordinate and local, by name, and of each extent and size, by node.
        loads: ``loads(param, indices)`` gives an element; it answers 0 for indices out of range.

    Raises:
        ArgumentError: a coordinate has no value, or a parameter is read and ``loads`` is missing.
    """
    match expr:
        case Const(value):
            return value
        case Coord(name) | Local(name):
            return _named(name, name, env)
        case Extent(load, end):
            return _named(expr, f"the {end} extent of {load.param}", env)
        case Size(param, axis):
            return _named(expr, f"size {axis} of {param}", env)
        case Load(param, indices):
            if loads is None:
                raise ArgumentError(f"parameter {param!r} is missing", where="expression", fix="pass its values")
            return loads(param, tuple(int(evaluate_scalar(i, env, loads)) for i in indices))
        case Select(condition, x, y):
            return evaluate_scalar(x if evaluate_scalar(condition, env, loads) else y, env, loads)
        case Cast(x, to):
            return convert(evaluate_scalar(x, env, loads), to)
        case Unary(op, x):
            return apply(op, evaluate_scalar(x, env, loads))
        case Binary(op, x, y) | Compare(op, x, y):
            return apply(op, evaluate_scalar(x, env, loads), evaluate_scalar(y, env, loads))
    raise TypeError(f"no meaning for {type(expr).__name__}")


def _named(key: object, what: str, env: Mapping[Any, Number]) -> Number:
    if key not in env:
        given = sorted(name for name in env if isinstance(name, str))
        raise ArgumentError(f"{what!r} has no value", where="expression", fix=f"pass it; given are {given}")
    return env[key]


def clamp_count(count: int) -> int:
    """Number of bits that ``>>`` shifts by."""
    return min(max(count, 0), 31)


def convert(value: Number, to: Type) -> Number:
    """A number as another type; floats truncate towards zero, and what int32 cannot hold becomes 0."""
    if to == "i32":
        return int(value) if math.isfinite(value) else 0
    return bool(value) if to == "bool" else float(value)


def apply(op: str, *operands: Number) -> Number:
    """One operator on numbers of one type; as in torch, nothing raises: 1.0 / 0 is inf, log(-1) nan, 1 // 0 zero."""
    if op in ("floordiv", "mod", "div") and operands[1] == 0:
        return _divided_by_zero(op, operands[0])
    try:
        return _OPERATORS[op](*operands)
    except OverflowError:
        return math.nan if math.inf in map(abs, operands) else math.inf
    except ValueError:
        return -math.inf if op in ("log", "log2") and operands[0] == 0 else math.nan
    except ZeroDivisionError:
        return math.inf


def _divided_by_zero(op: str, x: Number) -> Number:
    if not isinstance(x, float):
        return 0
    return math.nan if op == "mod" or x == 0 or math.isnan(x) else math.copysign(math.inf, x)


def _floor(x: float) -> float:
    return float(math.floor(x)) if math.isfinite(x) else x


def _power(x: float, y: float) -> float:
    result = x**y
    return result if isinstance(result, float) else math.nan


def _sigmoid(x: float) -> float:
    small = math.exp(-abs(x))
    return 1.0 / (1.0 + small) if x >= 0 else small / (1.0 + small)


_OPERATORS: dict[str, Callable[..., Number]] = {
    "neg": operator.neg,
    "not": operator.not_,
    "abs": abs,
    "floor": _floor,
    "exp": math.exp,
    "exp2": lambda x: _power(2.0, x),
    "log": math.log,
    "log2": math.log2,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1.0 / math.sqrt(x),
    "tanh": math.tanh,
    "sigmoid": _sigmoid,
    "sin": math.sin,
    "cos": math.cos,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "floordiv": lambda x, y: _floor(x / y) if isinstance(x, float) else x // y,
    "mod": operator.mod,
    "bitand": operator.and_,
    "bitor": operator.or_,
    "bitxor": operator.xor,
    "shr": lambda x, y: x >> clamp_count(y),
    "min": lambda x, y: math.nan if math.isnan(x) or math.isnan(y) else min(x, y),
    "max": lambda x, y: math.nan if math.isnan(x) or math.isnan(y) else max(x, y),
    "pow": _power,
    "and": lambda x, y: x and y,
    "or": lambda x, y: x or y,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}
