"""Several documents packed into one sequence do not see each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from attngen.ir.expr import B, Expr, K, Q, compare
from attngen.ir.loads import element
from attngen.ir.names import ParamName
from attngen.ir.params import Param
from attngen.masks.base import MaskMod


class Document(MaskMod):
    """Keep keys of the query's own document: ``doc_ids[b, q] == doc_ids[b, k]``.

    Used for packed training samples (OLMo, torchtitan, Llama 3, arXiv 2407.21783 section 3.2), as ``Causal() &
    Document("doc_ids")``. Documents may come in any order; where each is one run of tokens, tiles between two documents are
    skipped.

    Attributes:
        doc_ids: name of a run-time i32 parameter ``[batch, max_kv_len]``: the document of each position.
    """

    positional: ClassVar[tuple[str, ...]] = ("doc_ids",)
    kind: Literal["document"] = "document"
    doc_ids: ParamName

    def params(self) -> tuple[Param, ...]:
        return (Param(self.doc_ids, ("batch", "max_kv_len"), "i32"),)

    def expr(self) -> Expr:
        (doc_ids,) = self.params()
        return compare("eq", element(doc_ids, B, Q), element(doc_ids, B, K))

    def sample(self, dims: Mapping[str, int]) -> dict[str, Any]:
        """Documents of growing length."""
        length = dims["max_kv_len"]
        ids: list[int] = []
        document = 0
        while len(ids) < length:
            ids += [document] * max(1, length * (document + 2) // 16)
            document += 1
        return {self.doc_ids: [ids[:length]] * dims["batch"]}
