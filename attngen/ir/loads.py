"""Reading elements and sizes of a declared parameter."""

from __future__ import annotations

from math import gcd

from attngen.ir.expr import Binary, Compare, Const, Coord, Expr, ExprLike, Load, Select, Size, compare, lift, select
from attngen.ir.params import Param, is_broadcast


def size_of(param: Param, axis: int) -> Expr:
    """Elements of ``param`` along ``axis``."""
    dim = param.dims[axis]
    return Const(dim) if isinstance(dim, int) else Size(param.name, axis)


def element(param: Param, *indices: ExprLike) -> Load:
    """``param[indices]``; along an axis declared ``... or 1``, a tensor with one element gives that one for every index."""
    used = tuple(broadcast_index(param, axis, lift(index)) for axis, index in enumerate(indices))
    return Load(param.name, used, param.expr_type)  # type: ignore[arg-type]


def broadcast_index(param: Param, axis: int, index: Expr) -> Expr:
    """``index``, or 0 where an axis that may be broadcast has one element."""
    if not is_broadcast(param.dims[axis]) or plain_index(param, axis, index) != index:
        return index
    return select(compare("eq", Size(param.name, axis), 1), 0, index)


def plain_index(param: Param, axis: int, index: Expr) -> Expr:
    """The inverse of :func:`broadcast_index`."""
    match index:
        case Select(Compare("eq", Size(name, number), Const(1)), Const(0), plain) if (name, number) == (
            param.name,
            axis,
        ):
            return plain
    return index


def position_step(expr: Expr, axis: Coord) -> int:
    """How many adjacent positions, from a multiple of that number on, give one value; 0: all do, 1: each its own."""
    match expr:
        case Binary("floordiv", x, Const(divisor)) if x == axis and isinstance(divisor, int) and divisor > 0:
            return divisor
        case Coord():
            return int(expr == axis)
    return gcd(*(position_step(operand, axis) for operand in expr.children()))
