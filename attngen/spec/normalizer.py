"""How logits become weights."""

from __future__ import annotations

from typing import Literal

from attngen.model import SpecModel


class Softmax(SpecModel):
    """``exp(logit) / sum of exp(logit)`` over the visible keys; a row that sees none gives 0."""

    kind: Literal["softmax"] = "softmax"


Normalizer = Softmax
