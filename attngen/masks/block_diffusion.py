"""Training of block diffusion language models (BD3-LM)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from attngen.ir.expr import KV_LEN, Expr, K, Q, and_, binary, compare, not_, or_, select
from attngen.masks.base import MaskMod


class BlockDiffusion(MaskMod):
    """The mask of BD3-LM over a noised sequence followed by the clean one (Arriola et al., arXiv 2503.09573, section 3.1).

    Of ``kv_len = 2 L`` tokens the first ``L`` are noised, the rest clean. With ``block(x)`` the block of a token in its half,
    keep ``block(q) == block(k)`` within a half; clean keys of earlier blocks for noised and clean queries alike. Clean queries
    see no noised key.

    This is the layout of training, and the meaning is the same in every op: a decode call asks for the last, clean, token. A model
    generates from clean tokens alone, the block being denoised at the end of the keys: that is ``Causal() | Chunked(block_size)``.

    Attributes:
        block_size: tokens of a block.
    """

    positional: ClassVar[tuple[str, ...]] = ("block_size",)
    kind: Literal["block_diffusion"] = "block_diffusion"
    block_size: int = Field(ge=1, lt=2**30)

    def expr(self) -> Expr:
        half = binary("floordiv", KV_LEN, 2)
        q_noised, k_noised = compare("lt", Q, half), compare("lt", K, half)
        q_block, k_block = (
            binary("floordiv", select(noised, x, binary("sub", x, half)), self.block_size)
            for noised, x in ((q_noised, Q), (k_noised, K))
        )
        own = and_(compare("eq", q_noised, k_noised), compare("eq", q_block, k_block))
        return or_(own, and_(not_(k_noised), compare("lt", k_block, q_block)))
