"""What a backend is to the rest of the compiler."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from attngen.backends.call import Batch, Inputs, Launch, NewTokens
from attngen.codegen.printer import Dialect
from attngen.codegen.toolchain import Toolchain
from attngen.schedule.plan import KernelPlan
from attngen.target import Target
from attngen.variant import OpName, Variant


class Backend(Toolchain, Protocol):
    """One toolchain and its template folder.

    Attributes:
        name: also the folder's name under ``templates/``.
        suffix: of source files.
        dialect: spelling of expressions.
        kinds: target kinds, or single targets, that it builds for.
    """

    name: str
    suffix: str
    dialect: Dialect
    kinds: tuple[str, ...]

    def check(self, variant: Variant, op: OpName, target: Target) -> None:
        """Capabilities.

        Raises:
            UnsupportedError: this backend cannot run ``op`` of the variant on the target; names what would work.
        """

    def flags(self, plan: KernelPlan) -> tuple[str, ...]:
        """Build options of a kernel, explicit and in a fixed order; part of the cache key."""

    def load(self, binary: Path, metadata: Mapping[str, Any], plan: KernelPlan, device: torch.device) -> Launch:
        """Load a built kernel into this process, for one device."""

    def launch_options(self, metadata: Mapping[str, Any], plan: KernelPlan) -> dict[str, Any]:
        """Options, fit for JSON, by which :mod:`attngen.backends.launcher` runs a kernel without this backend; none for a CPU.

        Raises:
            UnsupportedError: it cannot.
        """


__all__ = ["Backend", "Batch", "Inputs", "Launch", "NewTokens"]
