"""Names of parameters as fields of primitives."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from attngen.ir.params import Param
from attngen.ir.text import check_param_name


def _checked(name: str) -> str:
    Param(name, ())
    check_param_name(name)
    return name


ParamName = Annotated[str, AfterValidator(_checked)]
