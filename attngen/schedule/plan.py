"""The decisions of a compile, as data."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from attngen.dtypes import DTYPES
from attngen.ir.expr import Expr, H
from attngen.ir.intervals import Span, TileClass
from attngen.schedule import one_walk
from attngen.schedule.launch import Arg, KernelLaunch, Tiles, maps_fit
from attngen.schedule.reading import Reading, Side, reading
from attngen.schedule.rotation import Turns, turns
from attngen.target import Target
from attngen.variant import OpName, Variant


@dataclass(frozen=True, kw_only=True)
class KernelPlan(KernelLaunch):
    """Everything a template may ask.

    Attributes:
        op: the op it serves.
        variant: what it computes.
        block_vo: head dim of values as the kernel tiles it, like ``block_qk``.
        block_pe: the same of columns in tensors of their own; 0 where there are none.
        keys: keys that a query tile ``[q0, q1]`` can see.
        queries: queries that see a key tile ``[k0, k1]``.
        tile: none/some/all of one tile; with ``lists``, by the extents of ``tile.loads`` too.
        list_head: the head whose list serves head ``h``; the lists of other heads need not be made.
    """

    op: OpName
    variant: Variant
    block_vo: int
    block_pe: int
    keys: Span
    queries: Span
    tile: TileClass
    list_head: Expr = H

    def reading(self, side: Side) -> Reading:
        """How the kernel reads queries, keys or values."""
        return reading(self.variant, side, self.target)

    @property
    def box_rows(self) -> int:
        """Keys that one copy by a tensor map takes: a tile, or as many of it as surely lie in one page."""
        return gcd(self.tiles.kv, self.variant.page_size)

    @property
    def copies_rows(self) -> bool:
        """Whether warps copy keys and values row by row: where pages are too small for tensor maps."""
        return not maps_fit(self.variant.page_size)

    @property
    def orders_copies(self) -> bool:
        """Whether two warps copy keys and values as they are told: rows, or parts of a tile that lie in pages of their own.

        Stored numbers of 8 bits, which these warps turn or widen, leave no warp for that: one thread starts all copies.
        """
        in_parts = self.variant.kv_layout == "paged" and self.box_rows < self.tiles.kv
        return in_parts and DTYPES[self.variant.k_storage.dtype].itemsize > 1

    @property
    def warpgroup_registers(self) -> tuple[int, ...]:
        """Of a thread of each warpgroup of one walk of backward: the one that loads, then those that multiply."""
        return one_walk.registers(self.variant, self.tiles)

    @property
    def turns(self) -> Turns | None:
        """Frequencies of the rotation; ``None`` where there is none, or a table has them."""
        rope = self.variant.rope
        return None if rope is None or rope.table is not None else turns(rope)


@dataclass(frozen=True)
class OpPlan:
    """The kernels of one op, in launch order."""

    op: OpName
    backend: str
    target: Target
    variant: Variant
    kernels: tuple[KernelPlan, ...]

    def kernel(self, schedule: str) -> KernelPlan:
        """The kernel that runs ``schedule``, for requests of any length or long ones."""
        return next(k for k in self.kernels if k.role == schedule)

    @property
    def deterministic(self) -> bool:
        """Whether every result is bitwise repeatable."""
        return not any(kernel.gradients == "added" or kernel.schedule == "dqkv" for kernel in self.kernels)


__all__ = ["Arg", "KernelPlan", "OpPlan", "Tiles"]
