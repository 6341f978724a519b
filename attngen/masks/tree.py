"""Draft tokens of a tree see their ancestors (speculative decoding)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from attngen.ir.expr import KV_LEN, B, Expr, K, Q, binary, compare, or_
from attngen.ir.loads import element, size_of
from attngen.ir.names import ParamName
from attngen.ir.params import Param
from attngen.masks.base import MaskMod
from attngen.masks.bits import bit, pack


class Tree(MaskMod):
    """The last ``n`` keys are a tree: keep all keys before them, and of them the ancestors of the query.

    ``k < kv_len - n or ancestors[b, q - (kv_len - n), k - (kv_len - n)]``. Used to verify drafts: SpecInfer (arXiv 2305.09781),
    Medusa (2401.10774), EAGLE-2 (2406.16858). ``n`` is the size of the tensor that is passed, whatever ``qo_len`` is: verify
    the whole tree in one call, or its last rows. In a batch every request has ``n`` tree tokens; one with fewer gives its
    tokens the last rows and columns, and makes the columns before them all true (they are its prefix). Queries before the tree
    see the whole prefix, so combine with :class:`Causal` where there are any.

    Attributes:
        ancestors: name of a run-time bool parameter ``[batch, n, n]``: row ``i`` marks the ancestors of token ``i`` and itself.
        packed: it is u8 ``[batch, n, ceil(n / 8)]``; bit ``j`` of byte ``i`` stands for column ``8 i + j``.
    """

    positional: ClassVar[tuple[str, ...]] = ("ancestors",)
    kind: Literal["tree"] = "tree"
    ancestors: ParamName
    packed: bool = False

    def params(self) -> tuple[Param, ...]:
        if self.packed:
            return (Param(self.ancestors, ("batch", "tree", "tree_bytes"), "u8"),)
        return (Param(self.ancestors, ("batch", "tree", "tree"), "bool"),)

    def expr(self) -> Expr:
        (ancestors,) = self.params()
        first = binary("sub", KV_LEN, size_of(ancestors, 1))
        row, column = binary("sub", Q, first), binary("sub", K, first)
        drawn = bit(ancestors, (B, row), column) if self.packed else element(ancestors, B, row, column)
        return or_(compare("lt", K, first), drawn)

    def sample(self, dims: Mapping[str, int]) -> dict[str, Any]:
        """A binary tree, level by level."""
        n = max(1, dims["max_kv_len"] // 4)
        rows = []
        for node in range(n):
            path = {node}
            while (node := (node - 1) // 2) >= 0:
                path.add(node)
            rows.append([column in path for column in range(n)])
        return {self.ancestors: [pack(rows) if self.packed else rows] * dims["batch"]}
