"""Score mods: one primitive a file, plus custom functions."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from attngen.score_mods.alibi import ALiBi
from attngen.score_mods.base import ScoreMod
from attngen.score_mods.custom import CustomScoreMod, score_mod
from attngen.score_mods.soft_cap import SoftCap

AnyScoreMod = Annotated[SoftCap | ALiBi | CustomScoreMod, Field(discriminator="kind")]

__all__ = ["ALiBi", "AnyScoreMod", "CustomScoreMod", "ScoreMod", "SoftCap", "score_mod"]
