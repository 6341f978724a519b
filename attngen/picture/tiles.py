"""What a mask does to the tiles of a kernel: skipped, evaluated pair by pair, or taken whole.

The classes are those of the plan's own bound expressions, which are printed into the kernel; the pairs come from the
predicate itself. So a picture shows both, and a wrong bound would be seen.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch

from attngen.errors import ArgumentError
from attngen.ir.evaluate import evaluate, extents
from attngen.ir.expr import Binary, Const, Expr, Load, Size, Unary, and_, not_, or_, params
from attngen.ir.intervals import position_axes
from attngen.ir.scalar import Number, evaluate_scalar
from attngen.schedule import KernelPlan
from attngen.variant import Variant

ClassName = Literal["none", "some", "all"]
CLASSES: tuple[ClassName, ...] = ("none", "some", "all")
SHORTEST, LONGEST = 512, 16384
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Counts:
    """Pairs (query, key) in each rectangle of a grid, int64 ``[rows, columns]``.

    Attributes:
        visible: pairs that the mask keeps.
        undecided: pairs that depend on a parameter whose values are not known.
        total: all pairs.
    """

    visible: torch.Tensor
    undecided: torch.Tensor
    total: torch.Tensor


@dataclass(frozen=True)
class TileMap:
    """One request's mask, cut into the tiles of one kernel; the last tile of an axis may be shorter.

    Attributes:
        plan: the kernel.
        qo_len, kv_len: lengths of the request.
        tile_q, tile_kv: sizes of a tile.
        head: query head; counts for masks that depend on it.
        request: index ``b`` of the request; counts for masks with parameters.
        params: values of the mask's parameters; where one is missing, whatever depends on it is undecided.
    """

    plan: KernelPlan
    qo_len: int
    kv_len: int
    tile_q: int
    tile_kv: int
    head: int = 0
    request: int = 0
    params: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in (("qo_len", self.qo_len), ("kv_len", self.kv_len)):
            if not 1 <= value <= LONGEST:
                why = f"a picture has 1 to {LONGEST} positions an axis"
                raise ArgumentError(f"{name} is {value}", where=name, why=why, fix="pass a length in this range")
        for name, value in (("tile_q", self.tile_q), ("tile_kv", self.tile_kv)):
            if value < 1:
                raise ArgumentError(f"{name} is {value}", where=name, why="a tile has positions", fix="pass at least 1")
        heads = self.plan.variant.num_qo_heads
        if not 0 <= self.head < heads:
            raise ArgumentError(
                f"there is no head {self.head}", where="head", why=f"the spec has {heads}", fix=f"pass 0 to {heads - 1}"
            )
        declared = {param.name: param for param in self.plan.variant.params}
        for name, tensor in self.params.items():
            if name not in declared:
                known = ", ".join(declared) or "none"
                raise ArgumentError(
                    f"no parameter {name!r}", where="params", why=f"the spec has {known}", fix="remove it"
                )
            if tensor.dim() != len(declared[name].dims):
                why = f"it has shape {tuple(tensor.shape)}, declared are {declared[name].dims}"
                raise ArgumentError(
                    f"parameter {name!r} does not fit", where="params", why=why, fix="pass another tensor"
                )

    @property
    def variant(self) -> Variant:
        return self.plan.variant

    @property
    def first_q_pos(self) -> int:
        """Position of the first query row: the last row is at the last key."""
        return self.kv_len - self.qo_len

    @property
    def missing(self) -> tuple[str, ...]:
        """Parameters that the mask reads and whose values are not known."""
        return tuple(sorted(params(self.variant.mask) - set(self.params)))

    @cached_property
    def classes(self) -> tuple[tuple[ClassName, ...], ...]:
        """Class of each tile, row by row: what the kernel does with it."""
        return tuple(self._row(start) for start in range(0, self.qo_len, self.tile_q))

    def number(self, name: ClassName) -> int:
        """How many tiles have this class."""
        return sum(row.count(name) for row in self.classes)

    @property
    def tiles(self) -> int:
        """How many tiles there are."""
        return len(self.classes) * len(self.classes[0])

    @cached_property
    def pairs(self) -> Counts:
        """The whole mask as one rectangle."""
        return self.count((0, self.qo_len), (0, self.kv_len))

    @cached_property
    def visited_pairs(self) -> int:
        """Pairs in the tiles that are not skipped: what the kernel computes."""
        heights, widths = _sizes(self.qo_len, self.tile_q), _sizes(self.kv_len, self.tile_kv)
        return sum(
            height * width
            for height, row in zip(heights, self.classes, strict=True)
            for width, name in zip(widths, row, strict=True)
            if name != "none"
        )

    def count(self, row_edges: Sequence[int], column_edges: Sequence[int]) -> Counts:
        """Pairs between successive edges, by the predicate itself.

        Args:
            row_edges: ascending, from 0 to ``qo_len``.
            column_edges: ascending, from 0 to ``kv_len``.
        """
        rows, columns = torch.tensor(row_edges), torch.tensor(column_edges)
        row_of = torch.bucketize(torch.arange(self.qo_len), rows[1:], right=True)
        sums = torch.zeros(2, len(rows) - 1, len(columns) - 1, dtype=torch.int64)
        step = max(1, _CHUNK // self.kv_len)
        for start in range(0, self.qo_len, step):
            stop = min(start + step, self.qo_len)
            for number, outcome in enumerate((False, True) if self.missing else (False,)):
                running = torch.nn.functional.pad(self._visible(start, stop, outcome).cumsum(1), (1, 0))
                sums[number].index_add_(0, row_of[start:stop], running[:, columns].diff(dim=1))
        visible, possible = sums[0], sums[1] if self.missing else sums[0]
        return Counts(visible, possible - visible, rows.diff()[:, None] * columns.diff())

    def _visible(self, start: int, stop: int, outcome: bool) -> torch.Tensor:
        """Rows of the mask, bool; what is undecided reads ``outcome``."""
        env: dict[str, torch.Tensor | int | float] = {
            "b": self.request,
            "h": self.head,
            "q": self.first_q_pos + torch.arange(start, stop)[:, None],
            "k": torch.arange(self.kv_len)[None],
            "qo_len": self.qo_len,
            "kv_len": self.kv_len,
        }
        mask = assume(self.variant.mask, self.params, outcome)
        return evaluate(mask, env, self.params).expand(stop - start, self.kv_len)

    def _row(self, start: int) -> tuple[ClassName, ...]:
        """Classes of the tiles of the query rows that begin at ``start``, as the kernel's loops find them."""
        span = self.plan.keys
        first = self.first_q_pos + start
        last = self.first_q_pos + min(start + self.tile_q, self.qo_len) - 1
        env: dict[object, int] = {"b": self.request, "h": self.head, "q0": first, "q1": last}
        env |= {"qo_len": self.qo_len, "kv_len": self.kv_len, **self._sizes}
        lo, hi = self._bound(span.lo, 0, env), self._bound(span.hi, self.kv_len - 1, env)
        full_lo, full_hi = self._bound(span.full_lo, 0, env), self._bound(span.full_hi, self.kv_len - 1, env)
        has_full = span.has_full and not self._unknown(span.full_lo) and not self._unknown(span.full_hi)
        tile = self.plan.tile
        any_visible, all_visible = assume(tile.any, self.params, True), assume(tile.all, self.params, False)

        def name(k0: int) -> ClassName:
            k1 = min(k0 + self.tile_kv, self.kv_len) - 1
            if lo > hi or k1 < lo or k0 > hi:
                return "none"
            if has_full and full_lo <= k0 and k1 <= full_hi:
                return "all"
            corners: dict[object, int] = {**env, "k0": k0, "k1": k1, **self._extents((first, last), (k0, k1))}
            if not span.solid and not evaluate_scalar(any_visible, corners, self._load):
                return "none"
            return "all" if self.plan.lists and evaluate_scalar(all_visible, corners, self._load) else "some"

        return tuple(name(k0) for k0 in range(0, self.kv_len, self.tile_kv))

    def _extents(self, queries: tuple[int, int], keys: tuple[int, int]) -> dict[object, int]:
        """What the loads of known parameters that tell tiles apart give in one tile; each tile of either side is read once."""
        found: dict[object, int] = {}
        for load in self._loads:
            axes = position_axes(load)
            tile = (load, queries if "q" in axes else None, keys if "k" in axes else None)
            if tile not in self._read:
                q, k = (torch.arange(first, last + 1) for first, last in (queries, keys))
                env: dict[str, torch.Tensor | int | float] = {
                    "b": self.request,
                    "h": self.head,
                    "q": q[:, None],
                    "k": k,
                }
                env |= {"qo_len": self.qo_len, "kv_len": self.kv_len}
                self._read[tile] = dict(extents((load,), env, self.params).items())
            found |= self._read[tile]
        return found

    @cached_property
    def _loads(self) -> tuple[Load, ...]:
        return tuple(load for load in self.plan.tile.loads if params(load) <= set(self.params))

    @cached_property
    def _read(self) -> dict[object, dict[object, int]]:
        return {}

    @cached_property
    def _sizes(self) -> dict[object, int]:
        return {Size(name, axis): n for name, tensor in self.params.items() for axis, n in enumerate(tensor.shape)}

    def _bound(self, bound: Expr | None, unbounded: int, env: Mapping[object, int]) -> int:
        if bound is None or self._unknown(bound):
            return unbounded
        return int(evaluate_scalar(bound, env, self._load))

    def _unknown(self, bound: Expr | None) -> bool:
        return bound is not None and not params(bound) <= set(self.params)

    def _load(self, name: str, indices: tuple[int, ...]) -> Number:
        tensor = self.params[name]
        if any(not 0 <= index < size for index, size in zip(indices, tensor.shape, strict=True)):
            return 0
        return tensor[indices].item()


def assume(expr: Expr, known: Collection[str], outcome: bool) -> Expr:
    """An upper (``True``) or lower bound of a bool expression that reads no parameters but ``known``."""
    if params(expr) <= set(known):
        return expr
    match expr:
        case Binary("and", x, y):
            return and_(assume(x, known, outcome), assume(y, known, outcome))
        case Binary("or", x, y):
            return or_(assume(x, known, outcome), assume(y, known, outcome))
        case Unary("not", x):
            return not_(assume(x, known, not outcome))
    return Const(outcome)


def telling_length(mask: Expr) -> int:
    """A length at which the mask shows what it does: half as long again as its largest constant, within limits."""
    sizes = [abs(node.value) for node in mask.walk() if isinstance(node, Const) and type(node.value) is int]
    length = SHORTEST
    while length < 1.5 * max(sizes, default=0) and length < LONGEST // 2:
        length *= 2
    return length


def _sizes(length: int, tile: int) -> list[int]:
    return [min(tile, length - start) for start in range(0, length, tile)]
