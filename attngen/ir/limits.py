"""How large an expression may be, so that its text can be read back."""

from __future__ import annotations

from attngen.errors import SpecError
from attngen.ir.expr import Expr

MAX_TEXT, MAX_DEPTH, MAX_NODES = 20_000, 150, 8_000  # Python's own parser gives up at about 170 levels


def check_size(expr: Expr) -> None:
    """Refuse expressions whose text would exceed the limits of :func:`parse`; shared operands count once a use.

    Raises:
        SpecError: too many nodes or too deep.
    """
    seen: dict[int, tuple[int, int]] = {}
    stack = [expr]
    while stack:
        node = stack[-1]
        children = node.children()
        waiting = [c for c in children if id(c) not in seen]
        if waiting and id(node) not in seen:
            stack.extend(waiting)
            continue
        stack.pop()
        sizes = [seen[id(c)] for c in children]
        seen[id(node)] = 1 + sum(s[0] for s in sizes), 1 + max((s[1] for s in sizes), default=0)
    nodes, depth = seen[id(expr)]
    if nodes > MAX_NODES or depth > MAX_DEPTH:
        raise too_large(f"{nodes} nodes nested {depth} deep, limits {MAX_NODES} and {MAX_DEPTH}")


def too_large(why: str) -> SpecError:
    """The error of an expression beyond the limits."""
    return SpecError(
        "the expression is too large",
        where="expression",
        why=why,
        fix="move data into a parameter (a table that the expression indexes) instead of unrolling it",
    )
