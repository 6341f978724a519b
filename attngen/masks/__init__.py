"""Masks: one primitive a file, plus their algebra and custom functions."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from attngen.masks.base import And, MaskMod, Not, Or
from attngen.masks.block_diffusion import BlockDiffusion
from attngen.masks.block_sparse import BlockSparse
from attngen.masks.causal import Causal
from attngen.masks.chunked import Chunked
from attngen.masks.custom import CustomMask, mask_mod
from attngen.masks.dense import Dense
from attngen.masks.dilated import Dilated
from attngen.masks.document import Document
from attngen.masks.full import Full
from attngen.masks.global_tokens import GlobalTokens
from attngen.masks.image_spans import ImageSpans
from attngen.masks.neighborhood import Neighborhood
from attngen.masks.prefix_lm import PrefixLM
from attngen.masks.sliding_window import SlidingWindow
from attngen.masks.tree import Tree

Mask = Annotated[
    Full
    | Causal
    | SlidingWindow
    | PrefixLM
    | Document
    | Chunked
    | Dilated
    | GlobalTokens
    | Tree
    | Dense
    | BlockSparse
    | ImageSpans
    | BlockDiffusion
    | Neighborhood
    | And
    | Or
    | Not
    | CustomMask,
    Field(discriminator="kind"),
]

for _model in (And, Or, Not):
    _model.model_rebuild(_types_namespace={"Mask": Mask})

__all__ = [
    "And",
    "BlockDiffusion",
    "BlockSparse",
    "Causal",
    "Chunked",
    "CustomMask",
    "Dense",
    "Dilated",
    "Document",
    "Full",
    "GlobalTokens",
    "ImageSpans",
    "Mask",
    "MaskMod",
    "Neighborhood",
    "Not",
    "Or",
    "PrefixLM",
    "SlidingWindow",
    "Tree",
    "mask_mod",
]
