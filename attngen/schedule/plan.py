"""The decisions of a compile, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attngen.ir.expr import Expr, H
from attngen.ir.intervals import Span, TileClass
from attngen.schedule.reading import Reading, Side, reading
from attngen.schedule.rotation import Turns, turns
from attngen.target import Target
from attngen.variant import OpName, Variant


@dataclass(frozen=True)
class Arg:
    """One kernel argument: ``type`` is ``i32``, ``i64``, ``*<dtype>`` for a pointer, or ``tiles<dtype>`` for a tensor map."""

    name: str
    type: str

    @property
    def is_pointer(self) -> bool:
        return self.type.startswith("*")

    @property
    def is_map(self) -> bool:
        """Whether it is a tensor map, by which the hardware copies whole tiles."""
        return self.type.startswith("tiles<")

    @property
    def element(self) -> str:
        """Element dtype of a pointer, or the scalar's own type."""
        return self.type.removeprefix("*").removeprefix("tiles<").removesuffix(">")


@dataclass(frozen=True)
class Tiles:
    """Tile sizes and resources of one kernel; a row of a backend's tile table.

    Attributes:
        q: rows (query tokens, or tokens times packed heads) a tile.
        kv: keys a tile.
        num_warps, num_stages: warps of a block, and tiles of keys in flight; 0 where a backend has no such thing.
        max_registers: most registers a thread may have; 0 leaves them to the assembler.
        maps: keys and values come by tensor maps.
        keys_first: products are of keys with queries and of values with weights, in this order: then a tile may have 8 rows.
        q_stages: tiles of queries in shared memory.
        in_turns: warpgroups that multiply take turns to issue products, so that the exponentials of one run under the products
            of another.
        blocks: blocks that share a multiprocessor, at least; bounds the registers of CUDA kernels.
    """

    q: int
    kv: int
    num_warps: int = 0
    num_stages: int = 0
    max_registers: int = 0
    maps: bool = False
    keys_first: bool = False
    q_stages: int = 1
    in_turns: bool = False
    blocks: int = 1


@dataclass(frozen=True)
class KernelPlan:
    """Everything a template may ask.

    Attributes:
        schedule: which algorithm: ``forward``, ``merge``, ``delta``, ``dkdv``, ``dq``, ``dqkv``, ``dq_cast``, ``dparams``,
            ``key_lists``, ``query_lists``, ``append``; also the template's file name.
        entry: kernel name, made from the variant.
        op: the op it serves.
        variant, target, backend: what, for which device, by which toolchain.
        tiles: tile sizes.
        block_qk, block_vo: head dims as the kernel tiles them (padded where the backend needs powers of two); ``block_qk`` without
            the columns in tensors of their own.
        block_pe: the same of those columns; 0 where there are none.
        packed: the query heads of a group share a tile: row = token * group_size + head in group.
        split: keys are divided among programs that write partial results.
        min_split, max_splits: a request of n keys is cut into ``clamp(n // min_split, 1, max_splits)`` parts.
        args: kernel arguments in order.
        keys: keys that a query tile ``[q0, q1]`` can see.
        queries: queries that see a key tile ``[k0, k1]``.
        tile: none/some/all of one tile; with ``lists``, by the extents of ``tile.loads`` too.
        lists: which tiles to visit is read from lists that another kernel has made, because only the mask's data tell.
        list_heads: lists a tile: 1 if the mask is the same for all heads, else one a query head.
        list_head: the head whose list serves head ``h``; the lists of other heads need not be made.
        serves: requests by their number of queries: ``all``; ``short``, those of at most ``short_queries``; ``long``, the others.
        short_queries: see ``serves``.
        gradients: how parameter gradients are summed: ``added`` by fp32 additions in any order, ``exact`` as integers; empty: they
            are not.
    """

    schedule: str
    entry: str
    op: OpName
    variant: Variant
    target: Target
    backend: str
    tiles: Tiles
    block_qk: int
    block_vo: int
    block_pe: int
    packed: bool
    split: bool
    min_split: int
    max_splits: int
    args: tuple[Arg, ...]
    keys: Span
    queries: Span
    tile: TileClass
    lists: bool = False
    list_heads: int = 1
    list_head: Expr = H
    gradients: Literal["", "added", "exact"] = ""
    serves: Literal["all", "short", "long"] = "all"
    short_queries: int = 0

    @property
    def role(self) -> str:
        """The schedule, and which requests it serves: unique in an op."""
        return f"{self.schedule}_short" if self.serves == "short" else self.schedule

    @property
    def is_resident(self) -> bool:
        """Whether blocks stay on their multiprocessor and take one program after the other."""
        return any(arg.name == "next_item" for arg in self.args)

    @property
    def by_key(self) -> bool:
        """Whether a program takes a tile of keys and walks queries, instead of the reverse."""
        return self.schedule in ("dkdv", "dqkv")

    def reading(self, side: Side) -> Reading:
        """How the kernel reads queries, keys or values."""
        return reading(self.variant, side, self.target)

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
