"""Where ``templates/`` and ``specs/`` lie: beside the package in a working copy, inside it when installed."""

from __future__ import annotations

from pathlib import Path

from attngen.errors import AttngenError


def resource_folder(name: str) -> Path:
    """The folder ``templates`` or ``specs``.

    Raises:
        AttngenError: the installation is incomplete.
    """
    package = Path(__file__).resolve().parent
    for candidate in (package / "_data" / name, package.parent / name):
        if candidate.is_dir():
            return candidate
    raise AttngenError(
        f"folder {name!r} is missing", where=str(package), why="the installation is incomplete", fix="reinstall attngen"
    )
