"""Declarations of run-time tensor parameters of masks and score mods."""

from __future__ import annotations

import re
from dataclasses import dataclass

from attngen.dtypes import DTYPES
from attngen.errors import SpecError

DIM_NAMES = ("batch", "num_qo_heads", "num_kv_heads", "max_qo_len", "max_kv_len")
OR_ONE = " or 1"
_IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
PARAM_DTYPES = ("fp32", "bf16", "fp16", "i32", "u8", "bool")


@dataclass(frozen=True)
class Param:
    """A named tensor read by an expression.

    Attributes:
        name: identifier; the key in ``params={name: tensor}``.
        dims: one entry an axis: a size, a name of :data:`DIM_NAMES` (checked against the call), one of these followed by
            `` or 1`` (a tensor with one element there serves every index), or any other name (free).
        dtype: ``fp32``, ``bf16``, ``fp16``, ``i32``, ``u8`` (loaded as i32) or ``bool``; floating ones have gradients.
    """

    name: str
    dims: tuple[str | int, ...]
    dtype: str = "fp32"

    def __post_init__(self) -> None:
        if not _IDENTIFIER.fullmatch(self.name) or self.name.startswith("attngen"):
            raise SpecError(
                f"{self.name!r} cannot name a parameter",
                where="parameter",
                why="it is no plain identifier",
                fix="rename it",
            )
        if self.dtype not in PARAM_DTYPES or self.dtype not in DTYPES:
            raise SpecError(
                f"parameter {self.name!r} has dtype {self.dtype!r}",
                where="parameter",
                fix=f"use {', '.join(PARAM_DTYPES)}",
            )

    @property
    def symbol(self) -> str:
        """Its name inside kernels, which cannot collide with theirs."""
        return f"param_{self.name}"

    @property
    def expr_type(self) -> str:
        """Type of a load: ``f32``, ``i32`` or ``bool``."""
        return {"i32": "i32", "u8": "i32", "bool": "bool"}.get(self.dtype, "f32")


def is_broadcast(dim: str | int) -> bool:
    """Whether an axis may have one element that serves every index."""
    return isinstance(dim, str) and dim.removesuffix(OR_ONE) in DIM_NAMES and dim.endswith(OR_ONE)
