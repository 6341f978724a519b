"""Parts of expressions that need not be computed for every pair: once a program, a row, a column.

The expressions of a tile of pairs fall apart into *uniform* parts (of the request and the head), *rows* (of the query as well),
*columns* (of the key as well) and the rest, the *body*, which the score or both positions enter. Sums and products of f32 are
regrouped by these classes: ``score * 0.18 + slopes[h] * (k - q) + c[b, h, k]`` has one row term and one column term. Regrouping
changes rounding only: factors of a product and terms of a sum are the same, in another order. (Where an infinite term meets an
infinite term of the other sign, or a factor 0 an infinite one, the result is nan in every order.)

Row and column terms are added to each other before they meet the body, so that large ones cancel first.

Splitting: ``slope * (k - q)`` needs an integer difference, a conversion and a product a pair; ``slope * k`` and ``slope * q`` need
none. Positions up to 2^24 are exact in f32, but each product is rounded by up to ``2^-24 * slope * k``, where the product of the
difference would be small: at 64 thousand keys and a slope of 0.5 an error of 0.002 in a logit, half a unit of the last place of a
bf16 weight. The same holds of ``1.44 * (c[q] - c[k])``. So it is done where weights are rounded to 16 bits, and not for fp32.
Slopes must be finite.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from attngen.ir.affine import Affine
from attngen.ir.expr import Binary, Cast, Const, Coord, Expr, Extent, Load, Local, Size, Unary, binary, cast, coords
from attngen.ir.simplify import add_signed, signed_terms

Where = Literal["uniform", "rows", "columns", "body"]
_NAMES: dict[Where, str] = {"uniform": "uniform", "rows": "row", "columns": "column", "body": "shared"}
Terms = list[tuple[int, Expr]]


@dataclass(frozen=True)
class Hoisted:
    """Definitions in the order in which they are computed, and what is left for each pair.

    Attributes:
        uniform: once a program (once a row where the rows of a tile have different heads).
        rows: once a row, before the loop over keys; may use ``uniform``.
        columns: once a column, in each tile of keys; may use ``uniform``.
        shared: values that the bodies use more than once, in each pair; may use all of the above and earlier ones.
        bodies: the expressions, in the order given.
    """

    uniform: tuple[tuple[Local, Expr], ...]
    rows: tuple[tuple[Local, Expr], ...]
    columns: tuple[tuple[Local, Expr], ...]
    shared: tuple[tuple[Local, Expr], ...]
    bodies: tuple[Expr, ...]


def hoist(exprs: Sequence[Expr], *, split_positions: bool) -> Hoisted:
    """Take out of some expressions of one pair, the logit and its slope for example, what they share or pairs share.

    Args:
        exprs: any expressions over ``score b h q k qo_len kv_len``.
        split_positions: ``slope * (k - q)`` may become the difference of a column and a row, see above.
    """
    hoister = _Hoister(split_positions)
    bodies = [hoister.visit(expr) for expr in exprs]
    shared, bodies = _share(bodies)
    found = hoister.found
    return Hoisted(found["uniform"], found["rows"], found["columns"], shared, tuple(bodies))


def where(expr: Expr) -> Where:
    """How often an expression has to be computed."""
    names = coords(expr)
    if "score" in names or {"q", "k"} <= names:
        return "body"
    return "rows" if "q" in names else "columns" if "k" in names else "uniform"


class _Hoister:
    def __init__(self, split_positions: bool) -> None:
        self.split_positions = split_positions
        self.locals: dict[Where, dict[Expr, Local]] = {"uniform": {}, "rows": {}, "columns": {}}

    @property
    def found(self) -> dict[Where, tuple[tuple[Local, Expr], ...]]:
        return {place: tuple((local, expr) for expr, local in made.items()) for place, made in self.locals.items()}

    def visit(self, expr: Expr) -> Expr:
        """What is left for each pair."""
        place = where(expr)
        if place != "body":
            return self.local(place, expr)
        match expr:
            case Binary("add" | "sub", _, _) | Unary("neg", _) if expr.type == "f32":
                return self.sum(expr)
            case Binary("mul", _, _) | Cast(Binary("add" | "sub", _, _), "f32") if expr.type == "f32":
                return self.sum(expr) if self.split_positions and self.split(1, expr) else self.product(expr)
        return expr.rebuild(tuple(self.visit(x) for x in expr.children()))

    def local(self, place: Where, expr: Expr) -> Expr:
        """The name of a value; leaves stand for themselves."""
        if isinstance(expr, (Const, Coord, Local, Extent, Size)):
            return expr
        if place != "uniform":
            expr = self.without_uniform(expr)
        made = self.locals[place]
        if expr not in made:
            made[expr] = Local(f"{_NAMES[place]}_{len(made)}", expr.type)
        return made[expr]

    def without_uniform(self, expr: Expr) -> Expr:
        """A row or column over named uniform parts."""
        if where(expr) == "uniform":
            return self.local("uniform", expr)
        return expr.rebuild(tuple(self.without_uniform(x) for x in expr.children()))

    def sum(self, expr: Expr) -> Expr:
        """A sum by classes: the body, plus the difference or sum of the column term and the row term."""
        terms = signed_terms(expr)
        if self.split_positions:
            terms = [part for sign, term in terms for part in self.split(sign, term) or [(sign, term)]]
        groups: dict[Where, Terms] = {"uniform": [], "rows": [], "columns": [], "body": []}
        for sign, term in terms:
            groups[where(term)].append((sign, term))
        host: Where = "rows" if groups["rows"] else "columns" if groups["columns"] else "uniform"
        if host != "uniform":
            groups[host] += groups["uniform"]
            groups["uniform"] = []
        outside = [(sign, self.local(place, term)) for place in _OUTSIDE for sign, term in _one_term(groups[place])]
        return add_signed([(sign, self.visit(term)) for sign, term in groups["body"]] + _one_term(outside))

    def product(self, expr: Expr) -> Expr:
        """A product by classes: uniform factors join the row or the column; a constant alone stays with the body."""
        if not isinstance(expr, Binary):
            return expr.rebuild(tuple(self.visit(x) for x in expr.children()))
        groups: dict[Where, list[Expr]] = {"uniform": [], "rows": [], "columns": [], "body": []}
        for factor in _factors(expr):
            groups[where(factor)].append(factor)
        host: Where = "rows" if groups["rows"] else "columns" if groups["columns"] else "uniform"
        if host != "uniform":
            groups[host] = groups["uniform"] + groups[host]
            groups["uniform"] = []
        result = [self.visit(factor) for factor in groups["body"]]
        result += [self.local(place, _multiplied(groups[place])) for place in _OUTSIDE if groups[place]]
        return _multiplied(result)

    def split(self, sign: int, term: Expr) -> Terms:
        """``u * f32(k - q)`` as ``u * f32(k)`` and ``-u * f32(q)``; nothing where a term is not of this form."""
        factors = _factors(term)
        moving = [factor for factor in factors if where(factor) != "uniform"]
        if len(moving) != 1 or where(moving[0]) != "body":
            return []
        scale = [factor for factor in factors if factor is not moving[0]]
        parts = _separated(moving[0])
        return [(sign * s, _multiplied([*scale, part])) for s, part in parts]


def _separated(expr: Expr) -> Terms:
    """A difference or sum of rows and columns as these; nothing where it is none."""
    match expr:
        case Cast(Binary("add" | "sub", _, _) as distance, "f32") if distance.type == "i32":
            form = Affine.of(distance)
            if any(where(atom) == "body" for atom, _ in form.terms):
                return []
            column = Affine(tuple((atom, n) for atom, n in form.terms if where(atom) == "columns"), 0)
            parts = [part for part in (column, form - column) if part.terms or part.const]
            signs = [1 if part.const > 0 or any(n > 0 for _, n in part.terms) else -1 for part in parts]
            return [(sign, cast((part * sign).expr(), "f32")) for sign, part in zip(signs, parts, strict=True)]
        case Binary("add" | "sub", _, _):
            terms = signed_terms(expr)
            return [] if any(where(term) == "body" for _, term in terms) else terms
    return []


def _one_term(terms: Terms) -> Terms:
    """Terms as one: their sum, or, if all are subtracted, what is subtracted."""
    if not terms:
        return []
    sign = 1 if any(s > 0 for s, _ in terms) else -1
    return [(sign, add_signed([(s * sign, term) for s, term in terms]))]


_OUTSIDE: tuple[Where, ...] = ("columns", "rows", "uniform")


def _factors(expr: Expr) -> list[Expr]:
    if isinstance(expr, Binary) and expr.op == "mul" and expr.type == "f32":
        return [*_factors(expr.x), *_factors(expr.y)]
    return [expr]


def _multiplied(factors: Sequence[Expr]) -> Expr:
    product = factors[0]
    for factor in factors[1:]:
        product = binary("mul", product, factor)
    return product


def _share(bodies: Sequence[Expr]) -> tuple[tuple[tuple[Local, Expr], ...], list[Expr]]:
    """Names for whatever more than one place of the bodies uses, operands first."""
    uses = Counter(bodies)
    order: dict[Expr, None] = {}

    def count(expr: Expr) -> None:
        if expr in order:
            return
        for child in expr.children():
            count(child)
            uses[child] += 1
        order[expr] = None

    for body in bodies:
        count(body)
    done: dict[Expr, Expr] = {}
    shared: list[tuple[Local, Expr]] = []
    for expr in order:
        rest = expr.rebuild(tuple(done[x] for x in expr.children()))
        done[expr] = rest
        if uses[expr] > 1 and (isinstance(expr, Load) or any(x.children() for x in expr.children()) or _is_call(expr)):
            done[expr] = Local(f"{_NAMES['body']}_{len(shared)}", expr.type)
            shared.append((done[expr], rest))  # type: ignore[arg-type]
    return tuple(shared), [done[body] for body in bodies]


def _is_call(expr: Expr) -> bool:
    """Whether an operation of leaves is worth a name: a function or a division, no sum, product or comparison."""
    cheap = ("add", "sub", "mul", "min", "max", "and", "or", "shr")
    return (isinstance(expr, Unary) and expr.op not in ("neg", "not", "abs")) or (
        isinstance(expr, Binary) and expr.op not in cheap
    )
