"""Bits packed into bytes, eight keys a byte."""

from __future__ import annotations

from attngen.ir.expr import Expr, binary, compare
from attngen.ir.loads import element
from attngen.ir.params import Param


def bit(param: Param, lead: tuple[Expr, ...], index: Expr) -> Expr:
    """Bit ``index % 8`` of byte ``index // 8`` of a row of a u8 parameter; false outside of it."""
    byte = element(param, *lead, binary("floordiv", index, 8))
    return compare("eq", binary("mod", binary("shr", byte, binary("mod", index, 8)), 2), 1)


def pack(rows: list[list[bool]]) -> list[list[int]]:
    """Rows of bools as rows of bytes, the first key in the lowest bit."""
    return [[sum(on << j for j, on in enumerate(row[i : i + 8])) for i in range(0, len(row), 8)] for row in rows]
