"""The expression language of masks and score mods.

Grammar (every node is frozen, hashable and typed)::

    Expr    = Const(value, type)             1, 0.5, True
            | Coord(name, type)              b h q k qo_len kv_len score, and q0 q1 k0 k1 in tile bounds
            | Load(param, indices, type)     slopes[h]; an index outside the parameter reads 0
            | Size(param, axis)              ancestors.shape[1], an i32
            | Extent(load, end)              least or greatest value of a load over a tile; made by passes
            | Local(name, type)              a value that the kernel has computed before; made by passes
            | Unary(op, x)                   neg not abs floor exp exp2 log log2 sqrt rsqrt tanh sigmoid sin cos
            | Binary(op, x, y)               add sub mul div floordiv mod shr bitand bitor bitxor min max pow and or
            | Compare(op, x, y)              lt le gt ge eq ne
            | Select(condition, x, y)        condition ? x : y
            | Cast(x, type)                  i32 f32 bool
    type    = "bool" | "i32" | "f32"

Positions and indices are ``i32``, values ``f32``; ``//`` and ``%`` floor as in Python. ``>>`` is the arithmetic shift of an
``i32``; counts are clamped to 0 .. 31, so that none is undefined. The functions at the end build nodes with type promotion
(bool -> i32 -> f32) and nothing else; algebra lives in passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Literal

from attngen.errors import SpecError

Type = Literal["bool", "i32", "f32"]
_RANK: dict[str, int] = {"bool": 0, "i32": 1, "f32": 2}

COORDS: dict[str, Type] = {
    "b": "i32",
    "h": "i32",
    "q": "i32",
    "k": "i32",
    "qo_len": "i32",
    "kv_len": "i32",
    "score": "f32",
    "q0": "i32",
    "q1": "i32",
    "k0": "i32",
    "k1": "i32",
}

FLOAT_UNARY = ("floor", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos")
UNARY = ("neg", "not", "abs", *FLOAT_UNARY)
ARITHMETIC = ("add", "sub", "mul", "div", "floordiv", "mod", "min", "max", "pow")
BITWISE = ("shr", "bitand", "bitor", "bitxor")
BINARY = (*ARITHMETIC, *BITWISE, "and", "or")
COMPARE = ("lt", "le", "gt", "ge", "eq", "ne")


@dataclass(frozen=True)
class Expr:
    """Base of all nodes; ``type`` is the element type of the value."""

    @property
    def type(self) -> Type:
        raise TypeError("Expr is abstract")

    def children(self) -> tuple[Expr, ...]:
        """Direct operands, in order."""
        found: list[Expr] = []
        names: tuple[str, ...] = self.__match_args__  # its fields
        for name in names:
            value = getattr(self, name)
            if isinstance(value, Expr):
                found.append(value)
            elif isinstance(value, tuple):
                found.extend(v for v in value if isinstance(v, Expr))
        return tuple(found)

    def rebuild(self, children: tuple[Expr, ...]) -> Expr:
        """The same node over other operands (as many as :meth:`children` gives)."""
        if not children:
            return self
        queue = iter(children)
        changes: dict[str, object] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Expr):
                changes[field.name] = next(queue)
            elif isinstance(value, tuple) and value and isinstance(value[0], Expr):
                changes[field.name] = tuple(next(queue) for _ in value)
        return replace(self, **changes) if changes else self

    def walk(self) -> Iterator[Expr]:
        """This node and everything below it, operands first."""
        order, stack = [], [self]
        while stack:
            order.append(node := stack.pop())
            stack.extend(node.children())
        return reversed(order)


@dataclass(frozen=True)
class Const(Expr):
    """A literal; floats are kept as Python floats (binary64) until printed."""

    value: bool | int | float

    def __post_init__(self) -> None:
        if isinstance(self.value, float) and self.value != self.value:
            raise SpecError(
                "nan is not a constant", where="expression", why="no comparison with nan is true", fix="remove it"
            )

    # 1, 1.0 and True are equal in Python but different constants here.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Const) and (type(self.value), self.value) == (type(other.value), other.value)

    def __hash__(self) -> int:
        return hash((type(self.value).__name__, self.value))

    @property
    def type(self) -> Type:
        return "bool" if isinstance(self.value, bool) else "i32" if isinstance(self.value, int) else "f32"


@dataclass(frozen=True)
class Coord(Expr):
    """A coordinate of the logit (``b h q k``), a length of its request, the score itself, or a tile corner."""

    name: str

    def __post_init__(self) -> None:
        if self.name not in COORDS:
            raise SpecError(
                f"unknown name {self.name!r}",
                where="expression",
                why="it is no coordinate",
                fix=f"use {', '.join(COORDS)}",
            )

    @property
    def type(self) -> Type:
        return COORDS[self.name]


@dataclass(frozen=True)
class Load(Expr):
    """Element ``indices`` of runtime parameter ``param``; any index out of range reads 0."""

    param: str
    indices: tuple[Expr, ...]
    dtype: Type

    @property
    def type(self) -> Type:
        return self.dtype


@dataclass(frozen=True)
class Size(Expr):
    """Elements of runtime parameter ``param`` along ``axis``."""

    param: str
    axis: int

    @property
    def type(self) -> Type:
        return "i32"

    @property
    def symbol(self) -> str:
        """Its name in kernels."""
        return f"param_{self.param}_dim{self.axis}"


@dataclass(frozen=True)
class Extent(Expr):
    """The least (``lo``) or greatest (``hi``) value that an i32 or bool load takes over the pairs of a tile, as an i32.

    A leaf: the kernel computes it before the loop over tiles and gives it a name. Elements outside the parameter read 0 and
    count, so an extent bounds whatever the mask itself may see.
    """

    load: Load
    end: Literal["lo", "hi"]

    @property
    def type(self) -> Type:
        return "i32"

    def children(self) -> tuple[Expr, ...]:
        return ()


@dataclass(frozen=True)
class Local(Expr):
    """A value that the kernel has computed before, under a name of the kernel's."""

    name: str
    local_type: Type

    @property
    def type(self) -> Type:
        return self.local_type


@dataclass(frozen=True)
class Unary(Expr):
    op: str
    x: Expr

    @property
    def type(self) -> Type:
        return "bool" if self.op == "not" else self.x.type if self.op in ("neg", "abs") else "f32"


@dataclass(frozen=True)
class Binary(Expr):
    op: str
    x: Expr
    y: Expr

    @property
    def type(self) -> Type:
        return "bool" if self.op in ("and", "or") else self.x.type


@dataclass(frozen=True)
class Compare(Expr):
    op: str
    x: Expr
    y: Expr

    @property
    def type(self) -> Type:
        return "bool"


@dataclass(frozen=True)
class Select(Expr):
    condition: Expr
    x: Expr
    y: Expr

    @property
    def type(self) -> Type:
        return self.x.type


@dataclass(frozen=True)
class Cast(Expr):
    x: Expr
    to: Type

    @property
    def type(self) -> Type:
        return self.to


ExprLike = Expr | bool | int | float

TRUE, FALSE = Const(True), Const(False)
B, H, Q, K, QO_LEN, KV_LEN, SCORE = (Coord(n) for n in ("b", "h", "q", "k", "qo_len", "kv_len", "score"))
Q0, Q1, K0, K1 = (Coord(n) for n in ("q0", "q1", "k0", "k1"))


def lift(value: ExprLike) -> Expr:
    """A node for a Python number; nodes pass through.

    Raises:
        SpecError: the value is neither.
    """
    if isinstance(value, Expr):
        return value
    if isinstance(value, (bool, int, float)):
        return Const(value)
    raise SpecError(
        f"cannot use a {type(value).__name__} in an expression",
        where="expression",
        why="only numbers, coordinates and declared parameters have a meaning in a kernel",
        fix="pass tensors as ag.Tensor(...) parameters or close over a torch.Tensor",
    )


def cast(x: ExprLike, to: Type) -> Expr:
    """``x`` as ``to``; constants convert at once.

    Raises:
        SpecError: a constant does not fit int32.
    """
    x = lift(x)
    if x.type == to:
        return x
    if isinstance(x, Const):
        if to == "i32" and not -(2.0**31) <= x.value < 2.0**31:
            raise SpecError(f"{x.value} does not fit int32", where="expression", fix="keep it a float")
        return Const({"bool": bool, "i32": int, "f32": float}[to](x.value))
    return Cast(x, to)


def _promote(*xs: ExprLike, at_least: Type = "bool") -> list[Expr]:
    nodes = [lift(x) for x in xs]
    widest = max((*(n.type for n in nodes), at_least), key=_RANK.__getitem__)
    return [cast(n, widest) for n in nodes]


def unary(op: str, x: ExprLike) -> Expr:
    """Apply one of :data:`UNARY`; float functions promote to f32, ``neg``/``abs`` keep the type (bool becomes i32)."""
    x = lift(x)
    if op == "not":
        return Unary("not", cast(x, "bool"))
    if op in ("neg", "abs"):
        return Unary(op, _promote(x, at_least="i32")[0])
    if op not in FLOAT_UNARY:
        raise SpecError(f"unknown function {op!r}", where="expression", fix=f"use one of {', '.join(UNARY)}")
    return Unary(op, cast(x, "f32"))


def binary(op: str, x: ExprLike, y: ExprLike) -> Expr:
    """Apply one of :data:`BINARY` after promotion.

    ``div`` and ``pow`` give f32, ``and``/``or`` need and give bool, :data:`BITWISE` i32.

    Raises:
        SpecError: an unknown operator, or bits of floats.
    """
    if op in ("and", "or"):
        return Binary(op, cast(x, "bool"), cast(y, "bool"))
    if op in BITWISE:
        left, right = _promote(x, y, at_least="i32")
        if left.type != "i32":
            raise SpecError("floats have no bits", where="expression", why=f"{op} is of i32", fix="use i32(...)")
        return Binary(op, left, right)
    if op not in ARITHMETIC:
        raise SpecError(f"unknown operator {op!r}", where="expression", fix=f"use one of {', '.join(BINARY)}")
    left, right = _promote(x, y, at_least="f32" if op in ("div", "pow") else "i32")
    return Binary(op, left, right)


def compare(op: str, x: ExprLike, y: ExprLike) -> Expr:
    """Compare after promotion; the result is bool."""
    if op not in COMPARE:
        raise SpecError(f"unknown comparison {op!r}", where="expression", fix=f"use one of {', '.join(COMPARE)}")
    left, right = _promote(x, y)
    return Compare(op, left, right)


def select(condition: ExprLike, x: ExprLike, y: ExprLike) -> Expr:
    """``x`` where ``condition`` holds, else ``y``."""
    left, right = _promote(x, y)
    return Select(cast(condition, "bool"), left, right)


def and_(x: ExprLike, y: ExprLike) -> Expr:
    """Logical and, without neutral, absorbing and repeated operands."""
    return _fold("and", cast(x, "bool"), cast(y, "bool"), neutral=TRUE, absorbing=FALSE)


def or_(x: ExprLike, y: ExprLike) -> Expr:
    """Logical or, without neutral, absorbing and repeated operands."""
    return _fold("or", cast(x, "bool"), cast(y, "bool"), neutral=FALSE, absorbing=TRUE)


def _fold(op: str, x: Expr, y: Expr, *, neutral: Expr, absorbing: Expr) -> Expr:
    terms = [term for term in dict.fromkeys((*operands(x, op), *operands(y, op))) if term != neutral]
    if absorbing in terms:
        return absorbing
    return reduce(lambda left, right: Binary(op, left, right), terms) if terms else neutral


def operands(expr: Expr, op: str) -> tuple[Expr, ...]:
    """The operands of a tree of one associative operator, in order."""
    if isinstance(expr, Binary) and expr.op == op:
        return (*operands(expr.x, op), *operands(expr.y, op))
    return (expr,)


def not_(x: ExprLike) -> Expr:
    """Logical not, folded for constants and double negation."""
    x = cast(x, "bool")
    if isinstance(x, Const):
        return Const(not x.value)
    return x.x if isinstance(x, Unary) and x.op == "not" else Unary("not", x)


def substitute(expr: Expr, replacements: dict[Expr, Expr]) -> Expr:
    """``expr`` with every occurrence of a key replaced by its value (keys are matched whole, top down)."""
    if expr in replacements:
        return replacements[expr]
    children = expr.children()
    return expr.rebuild(tuple(substitute(c, replacements) for c in children)) if children else expr


def coords(expr: Expr) -> frozenset[str]:
    """Names of the coordinates that ``expr`` depends on."""
    return frozenset(node.name for node in expr.walk() if isinstance(node, Coord))


def params(expr: Expr) -> frozenset[str]:
    """Names of the runtime parameters that ``expr``, or an extent in it, loads or measures."""
    nodes = list(expr.walk())
    direct = frozenset(node.param for node in nodes if isinstance(node, (Load, Size)))
    return direct.union(*(params(node.load) for node in nodes if isinstance(node, Extent)))
