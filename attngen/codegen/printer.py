"""Expr -> text of a kernel language."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Protocol

from attngen.errors import SpecError
from attngen.ir.bounds import Bounds
from attngen.ir.expr import Binary, Cast, Compare, Const, Coord, Expr, Extent, Load, Local, Select, Size, Type, Unary
from attngen.ir.loads import plain_index
from attngen.ir.params import OR_ONE, Param
from attngen.ir.scalar import clamp_count

_ATOM, _PRODUCT, _SUM, _LOOSE = 3, 2, 1, 0
_INFIX = {"add": ("+", _SUM), "sub": ("-", _SUM), "mul": ("*", _PRODUCT), "div": ("/", _PRODUCT)}
_COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


class Dialect(Protocol):
    """What differs between kernel languages. Operands arrive as text that is safe inside parentheses or between commas."""

    def constant(self, value: bool | int | float) -> str:
        """A literal of type bool, i32 or f32."""

    def call(self, function: str, *operands: str) -> str:
        """A unary function, or one of floordiv, mod, shr, min, max, pow, select."""

    def cast(self, text: str, to: Type) -> str:
        """A conversion to bool, i32 or f32."""

    def invert(self, text: str) -> str:
        """Logical not of a parenthesized operand."""

    def load(self, param: Param, offset: str, valid: str | None) -> str:
        """The element at ``offset`` as f32, i32 or bool; 0 where ``valid`` does not hold."""


def float32_literal(value: float) -> str:
    """The shortest decimal that reads back as the same float32.

    Raises:
        SpecError: the value is finite but too large for float32.
    """
    rounded = _as_float32(value)
    if rounded is None:
        raise SpecError(f"{value!r} does not fit float32", where="expression", fix="use a smaller constant")
    candidates = (f"{rounded:.{digits}g}" for digits in range(1, 10))
    return repr(float(next(text for text in candidates if _as_float32(float(text)) == rounded)))


def _as_float32(value: float) -> float | None:
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return None


class Printer:
    """Prints expressions in one dialect.

    Args:
        dialect: the kernel's language.
        names: spelling of each coordinate and local, by name, and of each extent, by node.
        params: parameters by name.
    """

    def __init__(self, dialect: Dialect, names: Mapping[Any, str], params: Mapping[str, Param]) -> None:
        self.dialect, self.names, self.params = dialect, names, params

    def print(self, expr: Expr) -> str:
        """``expr`` as a statement's right side.

        Raises:
            SpecError: it uses a coordinate that has no spelling here.
        """
        return self.text(expr, _LOOSE)

    def text(self, expr: Expr, context: int) -> str:
        """``expr``, parenthesized if it binds less tightly than ``context``."""
        text, binds = self._print(expr)
        return f"({text})" if binds < context else text

    def _print(self, expr: Expr) -> tuple[str, int]:
        match expr:
            case Const(value):
                text = self.dialect.constant(value)
                return text, _SUM if text.startswith("-") else _ATOM
            case Coord(name) | Local(name):
                return self._named(name, name), _ATOM
            case Extent(load, end):
                return self._named(expr, f"the {end} extent of {load.param}"), _ATOM
            case Load(param, indices):
                return self._load(self.params[param], indices), _ATOM
            case Size():
                return expr.symbol, _ATOM
            case Unary("neg", x):
                return f"-{self.text(x, _ATOM)}", _SUM
            case Unary("not", x):
                return self.dialect.invert(self.text(x, _ATOM)), _ATOM
            case Unary(op, x):
                return self.dialect.call(op, self.text(x, _LOOSE)), _ATOM
            case Binary("and" | "or" as op, x, y):
                sign = "&" if op == "and" else "|"
                return f"{self.text(x, _ATOM)} {sign} {self.text(y, _ATOM)}", _LOOSE
            case Binary(op, x, y) if op in _INFIX:
                sign, level = _INFIX[op]
                right_context = level + 1 if op in ("sub", "div") or y.type == "f32" else level
                return f"{self.text(x, level)} {sign} {self.text(y, right_context)}", level
            case Binary("bitand" | "bitor" | "bitxor" as op, x, y):
                sign = {"bitand": "&", "bitor": "|", "bitxor": "^"}[op]
                return f"{self.text(x, _ATOM)} {sign} {self.text(y, _ATOM)}", _LOOSE
            case Binary("shr", x, Const(n)):
                return f"{self.text(x, _ATOM)} >> {clamp_count(int(n))}", _LOOSE
            case Binary(op, x, y):
                return self.dialect.call(op, self.text(x, _LOOSE), self.text(y, _LOOSE)), _ATOM
            case Compare(op, x, y):
                return f"{self.text(x, _SUM)} {_COMPARE[op]} {self.text(y, _SUM)}", _LOOSE
            case Select(condition, x, y):
                parts = (self.text(part, _LOOSE) for part in (condition, x, y))
                return self.dialect.call("select", *parts), _ATOM
            case Cast(x, to):
                return self.dialect.cast(self.text(x, _LOOSE), to), _ATOM
        raise TypeError(f"no spelling for {type(expr).__name__}")

    def _named(self, key: object, what: str) -> str:
        if key not in self.names:
            known = sorted(name for name in self.names if isinstance(name, str))
            raise SpecError(
                f"{what!r} has no value here",
                where="expression",
                why=f"this part of the kernel knows {', '.join(known)}",
                fix="use another coordinate",
            )
        return self.names[key]

    def _load(self, param: Param, indices: tuple[Expr, ...]) -> str:
        offset, valid = self.offset(param, indices), self.valid(param, indices)
        return self.dialect.load(param, offset, valid)

    def offset(self, param: Param, indices: tuple[Expr, ...]) -> str:
        """Element offset of ``param[indices]`` in a contiguous tensor."""
        if not indices:
            return "0"
        text = self.text(indices[0], _SUM if len(indices) == 1 else _ATOM)
        if len(indices) > 1:
            text = self.dialect.call("widen", text)
        for axis, index in enumerate(indices[1:], start=1):
            level = _PRODUCT if axis == 1 else _ATOM
            text = f"{text if level == _PRODUCT else f'({text})'} * {param.symbol}_dim{axis} + {self.text(index, _SUM)}"
        return text

    def valid(self, param: Param, indices: tuple[Expr, ...]) -> str | None:
        """Condition that every index lies inside the parameter; ``None`` where that is known."""
        tests = []
        for axis, (index, dim) in enumerate(zip(indices, param.dims, strict=True)):
            if _is_inside(plain_index(param, axis, index), dim):
                continue
            text = self.text(index, _SUM)
            tests.append(f"({text} >= 0) & ({text} < {param.symbol}_dim{axis})")
        return " & ".join(tests) or None


def _is_inside(index: Expr, dim: str | int) -> bool:
    """Whether an index is known to lie within an axis."""
    if isinstance(dim, str):
        return (index, dim.removesuffix(OR_ONE)) in ((Coord("h"), "num_qo_heads"), (Coord("b"), "batch"))
    bounds = Bounds({}, frozenset()).of(index)
    if bounds.lo is None or bounds.hi is None or bounds.lo.terms or bounds.hi.terms:
        return False
    return bounds.lo.const >= 0 and bounds.hi.const < dim
