"""Score mods: one primitive a file, plus custom functions."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from attngen.score_mods.alibi import ALiBi
from attngen.score_mods.base import ScoreMod
from attngen.score_mods.custom import CustomScoreMod, score_mod
from attngen.score_mods.dense_bias import DenseBias
from attngen.score_mods.fire import Fire
from attngen.score_mods.forgetting import Forgetting
from attngen.score_mods.kerple import Kerple
from attngen.score_mods.relative_bias import RelativeBias
from attngen.score_mods.soft_cap import SoftCap
from attngen.score_mods.temperature import Temperature

AnyScoreMod = Annotated[
    SoftCap | ALiBi | RelativeBias | DenseBias | Forgetting | Temperature | Kerple | Fire | CustomScoreMod,
    Field(discriminator="kind"),
]

__all__ = [
    "ALiBi",
    "AnyScoreMod",
    "CustomScoreMod",
    "DenseBias",
    "Fire",
    "Forgetting",
    "Kerple",
    "RelativeBias",
    "ScoreMod",
    "SoftCap",
    "Temperature",
    "score_mod",
]
