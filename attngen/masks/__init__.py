"""Masks: one primitive a file, plus their algebra and custom functions."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from attngen.masks.base import And, MaskMod, Not, Or
from attngen.masks.causal import Causal
from attngen.masks.custom import CustomMask, mask_mod
from attngen.masks.full import Full
from attngen.masks.sliding_window import SlidingWindow

Mask = Annotated[
    Full | Causal | SlidingWindow | And | Or | Not | CustomMask,
    Field(discriminator="kind"),
]

for _model in (And, Or, Not):
    _model.model_rebuild(_types_namespace={"Mask": Mask})

__all__ = ["And", "Causal", "CustomMask", "Full", "Mask", "MaskMod", "Not", "Or", "SlidingWindow", "mask_mod"]
