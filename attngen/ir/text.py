"""Expr <-> text. The text is a Python expression, so that specs stay readable and any editor can check it.

``parse(to_text(e)) == e`` holds for every expression made by the builders of :mod:`attngen.ir.expr`. Conversions that
the builders would insert by themselves are not written: ``slopes[h] * (k - q)``, not ``slopes[h] * f32(k - q)``.
Reading executes nothing: the text becomes a Python syntax tree, and only the kinds of node listed here are accepted.
"""

from __future__ import annotations

import ast
import keyword
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from attngen.errors import SpecError
from attngen.ir.expr import (
    BITWISE,
    COORDS,
    FLOAT_UNARY,
    Binary,
    Cast,
    Compare,
    Const,
    Coord,
    Expr,
    Extent,
    Load,
    Local,
    Select,
    Size,
    Type,
    Unary,
    binary,
    cast,
    compare,
    select,
    unary,
)
from attngen.ir.limits import MAX_DEPTH, MAX_NODES, MAX_TEXT, check_size, too_large
from attngen.ir.loads import element, size_of
from attngen.ir.params import Param

MASK_NAMES = ("b", "h", "q", "k", "qo_len", "kv_len")
SCORE_NAMES = ("score", *MASK_NAMES)
I32_MIN, I32_MAX = -(2**31), 2**31 - 1

_CALLS: dict[str, str] = {**{op: op for op in FLOAT_UNARY}, "abs": "abs", "neg": "neg"}
_CALLS2 = {"minimum": "min", "maximum": "max"}
_CASTS: dict[str, Type] = {"i32": "i32", "f32": "f32", "bool": "bool"}
RESERVED = frozenset({*COORDS, *_CALLS, *_CALLS2, *_CASTS, "where", "inf", "score"})

_COMPARE_LEVEL, _UNARY_LEVEL, _POW_LEVEL, _ATOM = 1, 8, 9, 10
_INFIX = {
    "or": ("|", 2),
    "bitor": ("|", 2),
    "bitxor": ("^", 3),
    "and": ("&", 4),
    "bitand": ("&", 4),
    "shr": (">>", 5),
    "add": ("+", 6),
    "sub": ("-", 6),
    "mul": ("*", 7),
    "div": ("/", 7),
    "floordiv": ("//", 7),
    "mod": ("%", 7),
    "pow": ("**", _POW_LEVEL),
}
_COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


def to_text(expr: Expr) -> str:
    """``expr`` as a Python expression on one line.

    Raises:
        SpecError: it is too large to be read back.
    """
    check_size(expr)
    text = _print(expr)[0]
    if len(text) > MAX_TEXT:
        raise too_large(f"{len(text)} characters of text, limit {MAX_TEXT}")
    return text


def _print(expr: Expr) -> tuple[str, int]:
    """Text and how tightly it binds."""
    match expr:
        case Const(value):
            text = repr(value)
            return text, _UNARY_LEVEL if text.startswith("-") else _ATOM
        case Coord(name) | Local(name):  # a local is for people to read: no text makes one
            return name, _ATOM
        case Extent(load, end):
            return f"{end}({_at(load, 0)})", _ATOM
        case Load(param, indices):
            return (f"{param}[{', '.join(_at(i, 0) for i in indices)}]" if indices else param), _ATOM
        case Size(param, axis):
            return f"{param}.shape[{axis}]", _ATOM
        case Unary("not", x):
            return f"~{_at(x, _UNARY_LEVEL)}", _UNARY_LEVEL
        case Unary(op, x):
            (x,) = _without_casts(expr, (x,), lambda xs: unary(op, *xs))
            if op != "neg" or (isinstance(x, Const) and not repr(x.value).startswith("-")):
                return f"{op}({_at(x, 0)})", _ATOM
            text = _at(x, _UNARY_LEVEL)
            return (f"-({text})" if text.startswith("-") else f"-{text}"), _UNARY_LEVEL
        case Binary(op, x, y):
            if op not in ("and", "or", *BITWISE):
                x, y = _without_casts(expr, (x, y), lambda xs: binary(op, *xs))
            return _print_binary(op, x, y)
        case Compare(op, x, y):
            x, y = _without_casts(expr, (x, y), lambda xs: compare(op, *xs))
            return f"{_at(x, _COMPARE_LEVEL + 1)} {_COMPARE[op]} {_at(y, _COMPARE_LEVEL + 1)}", _COMPARE_LEVEL
        case Select(condition, x, y):
            x, y = _without_casts(expr, (x, y), lambda xs: select(condition, *xs))
            return f"where({_at(condition, 0)}, {_at(x, 0)}, {_at(y, 0)})", _ATOM
        case Cast(x, to):
            return f"{to}({_at(x, 0)})", _ATOM
    raise TypeError(f"no text for {type(expr).__name__}")


def _at(expr: Expr, level: int) -> str:
    text, binds = _print(expr)
    return text if binds >= level else f"({text})"


def _print_binary(op: str, x: Expr, y: Expr) -> tuple[str, int]:
    if op in ("min", "max"):
        return f"{op}imum({_at(x, 0)}, {_at(y, 0)})", _ATOM
    sign, level = _INFIX[op]
    if op == "pow":  # binds to the right, and more tightly than a minus on its left
        return f"{_at(x, _ATOM)} ** {_at(y, _UNARY_LEVEL)}", level
    return f"{_at(x, level)} {sign} {_at(y, level + 1)}", level


def _without_casts(node: Expr, operands: tuple[Expr, ...], build: Callable[[Sequence[Expr]], Expr]) -> tuple[Expr, ...]:
    """The operands with as few conversions as the builder needs to make ``node`` again."""
    bare = tuple(x.x if isinstance(x, Cast) and x.to != "bool" else x for x in operands)
    attempts = [bare] if len(operands) == 1 else [bare, (operands[0], bare[1]), (bare[0], operands[1])]
    return next((a for a in attempts if a != operands and build(a) == node), operands)


def parse(
    text: str,
    params: Iterable[Param] = (),
    names: Iterable[str] | None = None,
    result: Literal["bool", "f32"] | None = None,
) -> Expr:
    """Read an expression.

    Args:
        text: a Python expression, as :func:`to_text` writes it.
        params: parameters it may load.
        names: coordinates it may use; by default those of a mask for ``result="bool"``, those of a score mod for
            ``result="f32"`` and all otherwise.
        result: type the whole must have. A mask must be bool as written; a score is converted to f32.

    Raises:
        SpecError: anything but the accepted syntax, names, types and sizes; the message shows the place.
    """
    if names is None:
        names = {"bool": MASK_NAMES, "f32": SCORE_NAMES, None: tuple(COORDS)}[result]
    reader = _Reader(text, tuple(params), frozenset(names))
    expr = reader.read()
    if result == "bool" and expr.type != "bool":
        raise reader.fail(
            0, f"the mask has type {expr.type}", "a mask is true where a key is visible", "compare, or use bool(...)"
        )
    return cast(expr, "f32") if result == "f32" else expr


def check_param_name(name: str) -> None:
    """Refuse parameter names that mean something else in an expression.

    Raises:
        SpecError: it is a coordinate, a function or a Python keyword.
    """
    if name in RESERVED or keyword.iskeyword(name):
        raise SpecError(
            f"a parameter cannot be called {name!r}",
            where=f"parameter {name}",
            why="the name is a coordinate, a function or a keyword in expressions",
            fix="rename it",
        )


class _Reader:
    def __init__(self, text: str, params: tuple[Param, ...], names: frozenset[str]) -> None:
        self.text, self.names = text.replace("\n", " ").rstrip(), names
        self.params = {param.name: param for param in params}
        self.nodes = 0
        for name in self.params:
            check_param_name(name)

    def fail(self, column: int, what: str, why: str, fix: str) -> SpecError:
        start = max(0, column - 60)
        shown = self.text[start : column + 60]
        place = f"expression, column {column + 1}\n    {shown}\n    {' ' * (column - start)}^"
        return SpecError(what, where=place, why=why, fix=fix)

    def read(self) -> Expr:
        if len(self.text) > MAX_TEXT:
            raise too_large(f"{len(self.text)} characters of text, limit {MAX_TEXT}")
        for column, char in enumerate(self.text):
            if not " " <= char <= "~":
                raise self.fail(
                    column, f"unexpected character {char!r}", "expressions are printable ASCII", "remove it"
                )
        return self.expr(self.tree(), 1)

    def tree(self) -> ast.expr:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                return ast.parse(self.text, mode="eval").body
        except SyntaxError as error:
            column = max(0, (error.offset or 1) - 1)
            raise self.fail(column, "the expression is not valid Python", error.msg, "correct it") from None
        except (RecursionError, MemoryError, ValueError, Warning) as error:
            why = str(error) or "it is nested too deeply"
            raise self.fail(0, "the expression cannot be read", why, "simplify it") from None

    def expr(self, node: ast.expr, depth: int) -> Expr:
        self.nodes += 1
        if depth > MAX_DEPTH or self.nodes > MAX_NODES:
            why = f"limits: {MAX_DEPTH} deep, {MAX_NODES} nodes"
            raise self.fail(node.col_offset, "the expression is too large", why, "move data into a parameter")
        match node:
            case ast.Constant(value):
                return self.constant(node, value)
            case ast.Name(id):
                return self.name(node, id)
            case ast.Subscript(ast.Attribute(ast.Name(id), "shape"), ast.Constant(int(axis))) if type(axis) is int:
                return self.size(node, id, axis)
            case ast.Subscript(ast.Name(id), index):
                return self.load(node, id, index, depth)
            case ast.UnaryOp(op, operand):
                return self.unary(node, op, operand, depth)
            case ast.BinOp(x, op, y):
                return self.binary(node, op, self.expr(x, depth + 1), self.expr(y, depth + 1))
            case ast.Compare(x, [op], [y]) if type(op) in _COMPARE_NODES:
                return compare(_COMPARE_NODES[type(op)], self.expr(x, depth + 1), self.expr(y, depth + 1))
            case ast.Compare(_, [_, _, *_]):
                raise self.fail(node.col_offset, "comparisons cannot be chained", "", "write (a < b) & (b < c)")
            case ast.Call(ast.Name(id), args, []):
                return self.call(node, id, [self.expr(a, depth + 1) for a in args])
            case ast.BoolOp():
                raise self.fail(node.col_offset, "`and` and `or` have no meaning here", "", "write & and |")
        raise self.unknown(node)

    def unknown(self, node: ast.expr) -> SpecError:
        return self.fail(
            node.col_offset,
            f"{type(node).__name__} is not part of the expression language",
            "expressions hold numbers, coordinates, parameters, operators, comparisons and calls of known functions",
            "rewrite it",
        )

    def constant(self, node: ast.expr, value: object) -> Expr:
        if isinstance(value, (bool, float)):
            return Const(value)
        if not isinstance(value, int):
            raise self.unknown(node)
        if not I32_MIN <= value <= I32_MAX:
            raise self.fail(
                node.col_offset, f"{value} does not fit int32", "positions and indices are int32", "use a float"
            )
        return Const(value)

    def name(self, node: ast.expr, name: str) -> Expr:
        if name in self.names:
            return Coord(name)
        if name == "inf":
            return Const(float("inf"))
        if name in self.params:
            return self.checked_load(node, name, ())
        known = ", ".join([*sorted(self.names), *self.params])
        if name in COORDS:
            raise self.fail(
                node.col_offset, f"{name!r} has no value here", f"this expression may use {known}", "use one of them"
            )
        raise self.fail(
            node.col_offset, f"unknown name {name!r}", f"this expression may use {known}", "declare it as a parameter"
        )

    def declared(self, node: ast.expr, name: str) -> Param:
        if name not in self.params:
            why = f"declared are: {', '.join(self.params) or 'none'}"
            raise self.fail(node.col_offset, f"unknown parameter {name!r}", why, "declare it")
        return self.params[name]

    def size(self, node: ast.expr, name: str, axis: int) -> Expr:
        param = self.declared(node, name)
        if axis >= len(param.dims):
            why = f"it has {len(param.dims)} dimensions {param.dims}"
            raise self.fail(node.col_offset, f"{name!r} has no dimension {axis}", why, "count from 0")
        return size_of(param, axis)

    def load(self, node: ast.expr, name: str, index: ast.expr, depth: int) -> Expr:
        self.declared(node, name)
        parts = index.elts if isinstance(index, ast.Tuple) else [index]
        indices = tuple(self.expr(part, depth + 1) for part in parts)
        for part, value in zip(parts, indices, strict=True):
            if value.type != "i32":
                raise self.fail(
                    part.col_offset,
                    f"an index of {name!r} has type {value.type}",
                    "indices are integers",
                    "use i32(...)",
                )
        return self.checked_load(node, name, indices)

    def checked_load(self, node: ast.expr, name: str, indices: tuple[Expr, ...]) -> Expr:
        param = self.params[name]
        if len(indices) != len(param.dims):
            why = f"it has {len(param.dims)} dimensions {param.dims}, and {len(indices)} indices were given"
            raise self.fail(node.col_offset, f"{name!r} is indexed wrongly", why, "give one index a dimension")
        return element(param, *indices)

    def unary(self, node: ast.expr, op: ast.unaryop, operand: ast.expr, depth: int) -> Expr:
        match op, operand:
            case ast.USub(), ast.Constant(int(value)) if not isinstance(value, bool):
                return self.constant(node, -value)
            case ast.USub(), ast.Constant(float(value)):
                return Const(-value)
            case ast.USub(), ast.Name("inf"):
                return Const(float("-inf"))
            case ast.USub(), _:
                return unary("neg", self.expr(operand, depth + 1))
            case ast.Invert(), _:
                return unary("not", self.as_bool(node, "~", self.expr(operand, depth + 1)))
            case ast.Not(), _:
                raise self.fail(node.col_offset, "`not` has no meaning here", "", "write ~(...)")
        raise self.unknown(node)

    def binary(self, node: ast.expr, op: ast.operator, x: Expr, y: Expr) -> Expr:
        if type(op) in _BIT_NODES and x.type == y.type == "i32":
            return binary(_BIT_NODES[type(op)], x, y)
        if isinstance(op, ast.BitXor):
            return compare("ne", self.as_bool(node, "^", x), self.as_bool(node, "^", y))
        if type(op) not in _BINARY_NODES:
            raise self.unknown(node)
        name = _BINARY_NODES[type(op)]
        if name in ("and", "or"):
            x, y = self.as_bool(node, _INFIX[name][0], x), self.as_bool(node, _INFIX[name][0], y)
        return binary(name, x, y)

    def as_bool(self, node: ast.expr, sign: str, x: Expr) -> Expr:
        if x.type != "bool":
            fix = "compare first, with parentheses around each comparison"
            why = "its operands are both bool or both integers"
            raise self.fail(node.col_offset, f"`{sign}` of a value of type {x.type}", why, fix)
        return x

    def call(self, node: ast.expr, name: str, args: list[Expr]) -> Expr:
        arity = 1 if name in _CALLS or name in _CASTS else 2 if name in _CALLS2 else 3 if name == "where" else None
        if arity is None:
            known = ", ".join(["where", *_CALLS2, *_CASTS, *_CALLS])
            raise self.fail(node.col_offset, f"unknown function {name!r}", f"known are {known}", "use one of them")
        if len(args) != arity:
            raise self.fail(
                node.col_offset, f"{name} takes {arity} operands", f"{len(args)} were given", "correct the call"
            )
        if name == "where":
            return select(self.as_bool(node, "where", args[0]), args[1], args[2])
        if name in _CALLS2:
            return binary(_CALLS2[name], args[0], args[1])
        return cast(args[0], _CASTS[name]) if name in _CASTS else unary(_CALLS[name], args[0])


_COMPARE_NODES: dict[type[ast.cmpop], str] = {
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
    ast.Eq: "eq",
    ast.NotEq: "ne",
}
_BINARY_NODES: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.Pow: "pow",
    ast.RShift: "shr",
    ast.BitAnd: "and",
    ast.BitOr: "or",
}
_BIT_NODES: dict[type[ast.operator], str] = {ast.BitAnd: "bitand", ast.BitOr: "bitor", ast.BitXor: "bitxor"}
