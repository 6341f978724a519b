"""A prefix that everybody sees, then causal (T5's prefix LM, UL2, PaliGemma)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from attngen.ir.expr import B, Expr, K, Q, compare, or_
from attngen.ir.loads import element
from attngen.ir.names import ParamName
from attngen.ir.params import Param
from attngen.masks.base import MaskMod


class PrefixLM(MaskMod):
    """Keep ``k < prefix_len[b] or k <= q`` (Raffel et al., arXiv 1910.10683, section 3.2; PaliGemma, arXiv 2407.07726).

    Attributes:
        prefix_len: name of a run-time i32 parameter ``[batch]``: tokens of each request's prefix.
    """

    positional: ClassVar[tuple[str, ...]] = ("prefix_len",)
    kind: Literal["prefix_lm"] = "prefix_lm"
    prefix_len: ParamName

    def params(self) -> tuple[Param, ...]:
        return (Param(self.prefix_len, ("batch",), "i32"),)

    def expr(self) -> Expr:
        (prefix_len,) = self.params()
        return or_(compare("lt", K, element(prefix_len, B)), compare("le", K, Q))

    def sample(self, dims: Mapping[str, int]) -> dict[str, Any]:
        longest = dims["max_kv_len"]
        return {self.prefix_len: [(b + 1) * longest // (dims["batch"] + 2) for b in range(dims["batch"])]}
