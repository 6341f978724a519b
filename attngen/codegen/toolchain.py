"""What a toolchain is to the store: something that turns a rendered kernel into files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from attngen.codegen.render import RenderedKernel
from attngen.target import Target


@dataclass(frozen=True)
class BuildResult:
    """What a build left in its folder.

    Attributes:
        binary: file name of the binary inside the folder.
        metadata: JSON-serializable facts the launcher needs (``num_warps``, ``shared``, ...) or a person wants
            (registers).
        log: the toolchain's output, kept as ``build.log``.
    """

    binary: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    log: str = ""


class Toolchain(Protocol):
    """Turns a rendered kernel into a binary."""

    def fingerprint(self, target: Target) -> str | None:
        """Identity of the toolchain, made without starting a process; ``None`` where it is absent."""

    def build(self, kernel: RenderedKernel, folder: Path) -> BuildResult:
        """Build into ``folder`` (private, empty but for the source ``<entry><suffix>``).

        Raises:
            BuildError: the toolchain is missing or failed; its ``log`` is what the toolchain printed.
        """
