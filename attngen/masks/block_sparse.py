"""A matrix of blocks that are kept or dropped whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from attngen.ir.expr import B, Expr, H, K, Q, binary
from attngen.ir.loads import element
from attngen.ir.names import ParamName
from attngen.ir.params import Param
from attngen.masks.base import MaskMod


class BlockSparse(MaskMod):
    """Keep ``blocks[h, q // block_q, k // block_kv]``.

    For block lists found before the call: BigBird (arXiv 2007.14062), MInference (2407.02490), XAttention (2503.16428),
    MoBA (2502.13189), VSA (2505.13389). :func:`attngen.block_matrix` makes the matrix from lists of block numbers, those of
    a FlexAttention ``BlockMask`` too.

    Attributes:
        blocks: name of a run-time bool parameter ``[num_qo_heads or 1, q blocks, kv blocks]``; a first axis of size 1 serves every
            head. Blocks outside of it are dropped.
        block_q, block_kv: positions of a block; blocks count from position 0 of the request.
        per_request: the parameter has one more axis before, ``[batch or 1, num_qo_heads or 1, q blocks, kv blocks]``.
    """

    positional: ClassVar[tuple[str, ...]] = ("blocks", "block_q", "block_kv")
    kind: Literal["block_sparse"] = "block_sparse"
    blocks: ParamName
    block_q: int = Field(ge=1, lt=2**30)
    block_kv: int = Field(ge=1, lt=2**30)
    per_request: bool = False

    def params(self) -> tuple[Param, ...]:
        dims = ("num_qo_heads or 1", "q_blocks", "kv_blocks")
        return (Param(self.blocks, ("batch or 1", *dims) if self.per_request else dims, "bool"),)

    def expr(self) -> Expr:
        (blocks,) = self.params()
        lead = (B, H) if self.per_request else (H,)
        return element(blocks, *lead, binary("floordiv", Q, self.block_q), binary("floordiv", K, self.block_kv))

    def sample(self, dims: Mapping[str, int]) -> dict[str, Any]:
        """BigBird's shape: the first blocks, the neighbours, and one block far away; heads differ in the latter."""
        rows, columns = (-(-dims["max_kv_len"] // size) for size in (self.block_q, self.block_kv))

        def keeps(head: int, row: int, column: int) -> bool:
            place = row * self.block_q // self.block_kv
            return column == 0 or abs(column - place) <= 1 or column == (5 * row + 3 * head + 2) % max(columns, 1)

        heads = [
            [[keeps(head, row, column) for column in range(columns)] for row in range(rows)]
            for head in range(dims["num_qo_heads"])
        ]
        return {self.blocks: [heads] * dims["batch"] if self.per_request else heads}
