"""Tokens of one image see each other (Gemma 3, Transfusion)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from attngen.ir.expr import B, Expr, K, Q, and_, compare
from attngen.ir.loads import element
from attngen.ir.names import ParamName
from attngen.ir.params import Param
from attngen.masks.base import MaskMod


class ImageSpans(MaskMod):
    """Keep ``span_ids[b, q] == span_ids[b, k] >= 0``: pairs of tokens of one image.

    ``Causal() | ImageSpans("span_ids")`` is Gemma 3 (arXiv 2503.19786) and Transfusion (arXiv 2408.11039): text is causal,
    an image sees itself as a whole.

    Attributes:
        span_ids: name of a run-time i32 parameter ``[batch, max_kv_len]``: the image of each position, below 0 for text.
    """

    positional: ClassVar[tuple[str, ...]] = ("span_ids",)
    kind: Literal["image_spans"] = "image_spans"
    span_ids: ParamName

    def params(self) -> tuple[Param, ...]:
        return (Param(self.span_ids, ("batch", "max_kv_len"), "i32"),)

    def expr(self) -> Expr:
        (span_ids,) = self.params()
        own, other = element(span_ids, B, Q), element(span_ids, B, K)
        return and_(compare("ge", own, 0), compare("eq", own, other))

    def sample(self, dims: Mapping[str, int]) -> dict[str, Any]:
        """Two images between three stretches of text."""
        length = dims["max_kv_len"]
        fifths = [position * 5 // max(length, 1) for position in range(length)]
        return {self.span_ids: [[fifth // 2 if fifth % 2 else -1 for fifth in fifths]] * dims["batch"]}
