"""Any mask, given as a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from attngen.ir.expr import KV_LEN, QO_LEN, B, Expr, H, K, Q, binary
from attngen.ir.loads import element
from attngen.ir.names import ParamName
from attngen.ir.params import Param
from attngen.masks.base import MaskMod
from attngen.masks.bits import bit, pack


class Dense(MaskMod):
    """Keep ``mask[b, h, row, k]``, where ``row`` counts the queries of the call: ``q - (kv_len - qo_len)``.

    Axes of size 1 for the batch or the heads serve every request or head. Read once a pair, so it costs memory traffic that an
    expression does not: for masks that have no formula (SDPA's ``attn_mask``, FlashInfer's ``custom_mask``).

    Attributes:
        mask: name of a run-time bool parameter ``[batch or 1, num_qo_heads or 1, max_qo_len, max_kv_len]``; true keeps.
        packed: it is u8 with ``ceil(max_kv_len / 8)`` bytes a row; bit ``j`` of byte ``i`` stands for key ``8 i + j``.
    """

    positional: ClassVar[tuple[str, ...]] = ("mask",)
    kind: Literal["dense"] = "dense"
    mask: ParamName
    packed: bool = False

    def params(self) -> tuple[Param, ...]:
        lead = ("batch or 1", "num_qo_heads or 1", "max_qo_len")
        if self.packed:
            return (Param(self.mask, (*lead, "kv_bytes"), "u8"),)
        return (Param(self.mask, (*lead, "max_kv_len"), "bool"),)

    def expr(self) -> Expr:
        (mask,) = self.params()
        row = binary("sub", Q, binary("sub", KV_LEN, QO_LEN))
        return bit(mask, (B, H, row), K) if self.packed else element(mask, B, H, row, K)

    def sample(self, dims: Mapping[str, int]) -> dict[str, Any]:
        """A pattern without a rule that tiles could use, the same for every request and head."""
        side = max(1, dims["max_kv_len"] // 16)
        rows = [
            [(row * row // side + k * k // side) % 3 != 1 for k in range(dims["max_kv_len"])]
            for row in range(dims["max_qo_len"])
        ]
        return {self.mask: [[pack(rows) if self.packed else rows]]}
