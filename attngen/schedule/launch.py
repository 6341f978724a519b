"""What launching a kernel takes, as data: its arguments, and how a call becomes programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from attngen.target import Target

ROW_BYTES = 128  # of a tile in shared memory
_SWIZZLED_ROWS = 8  # in which chunks are exchanged there: what a tensor map copies starts at a multiple of them


def maps_fit(page_size: int) -> bool:
    """Whether tensor maps can copy what lies in one page; 0 tells that there are no pages."""
    return page_size % _SWIZZLED_ROWS == 0


def in_pieces(columns: int, itemsize: int = 2) -> int:
    """Columns that so many take in shared memory, where wide tiles lie in pieces of one row."""
    piece = ROW_BYTES // itemsize
    return -(-columns // piece) * piece


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
        by_product: warpgroups that multiply divide the products of a tile among them, instead of its keys.
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
    by_product: bool = False


@dataclass(frozen=True, kw_only=True)
class KernelLaunch:
    """The part of a kernel's plan that outlives its build.

    Attributes:
        schedule: which algorithm: ``forward``, ``merge``, ``delta``, ``dkdv``, ``dq``, ``dqkv``, ``dq_cast``, ``dparams``,
            ``key_lists``, ``query_lists``, ``append``; also the template's file name.
        entry: kernel name, made from the variant.
        target, backend: for which device, by which toolchain.
        tiles: tile sizes.
        block_qk: head dim of queries and keys as the kernel tiles it (padded where the backend needs powers of two), without the
            columns in tensors of their own.
        packed: the query heads of a group share a tile: row = token * group_size + head in group.
        split: keys are divided among programs that write partial results.
        min_split, max_splits: a request of n keys is cut into ``clamp(n // min_split, 1, max_splits)`` parts.
        args: kernel arguments in order.
        lists: which tiles to visit is read from lists that another kernel has made, because only the mask's data tell.
        list_heads: lists a tile: 1 if the mask is the same for all heads, else one a query head.
        gradients: how parameter gradients are summed: ``added`` by fp32 additions in any order, ``exact`` as integers; empty: they
            are not.
        serves: requests by their number of queries: ``all``; ``short``, those of at most ``short_queries``; ``long``, the others.
        short_queries: see ``serves``.
    """

    schedule: str
    entry: str
    target: Target
    backend: str
    tiles: Tiles
    block_qk: int
    packed: bool
    split: bool
    min_split: int
    max_splits: int
    args: tuple[Arg, ...]
    lists: bool = False
    list_heads: int = 1
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

    @property
    def dq_sums(self) -> int:
        """Numbers in a tile of the sums of dq."""
        return self.tiles.q * in_pieces(self.block_qk)

    @property
    def dq_columns(self) -> int:
        """Queries of a part of the sums of dq: parts have 64 dims, and two warpgroups that divide keys make one each."""
        shared = in_pieces(self.block_qk) == 64 and not self.tiles.by_product
        return self.tiles.q // 2 if shared else self.tiles.q

    def to_json(self) -> dict[str, Any]:
        """Of a plan, only this part."""
        data = {field.name: getattr(self, field.name) for field in fields(KernelLaunch)}
        args = [[arg.name, arg.type] for arg in self.args]
        return data | {"target": str(self.target), "tiles": asdict(self.tiles), "args": args}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> KernelLaunch:
        """What :meth:`to_json` was called on."""
        made = {"target": Target.parse(data["target"]), "tiles": Tiles(**data["tiles"])}
        return KernelLaunch(**{**data, **made, "args": tuple(Arg(*arg) for arg in data["args"])})
