"""Specs from files and from the shipped collection."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from attngen.errors import SpecError
from attngen.resources import resource_folder
from attngen.spec.attention import AttentionSpec

MAX_BYTES = 1 << 18  # of a spec file: far more than any declaration needs
# tomllib takes time quadratic in the parts of a dotted key; no spec has one of more than a few.
_LONG_KEY = re.compile(r"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){64}""")


def shipped_specs() -> dict[str, Path]:
    """Files of ``specs/`` by name, sorted."""
    return {path.stem: path for path in sorted(resource_folder("specs").glob("*.toml"))}


def load_spec(source: str | Path) -> AttentionSpec:
    """Read a spec from a ``.toml`` or ``.json`` file, or by the name of a shipped one (``"llama3-8b"``).

    Raises:
        SpecError: no such file or name, text that is no TOML/JSON, or a field that is not valid.
    """
    path = Path(source)
    if (
        not path.suffix
        and path.name == str(source)
        and (shipped := resource_folder("specs") / f"{source}.toml").is_file()
    ):
        path = shipped
    if not path.is_file():
        raise SpecError(
            f"no spec {str(source)!r}",
            where="load_spec",
            why="it is neither a file nor a shipped name",
            fix=f"pass a .toml or .json file, or one of {', '.join(shipped_specs())}",
        )
    if path.suffix == ".json":
        return AttentionSpec.model_validate_json(_read_text(path))
    return AttentionSpec.model_validate(read_toml(path), strict=False)


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a small TOML file, in bounded time and memory.

    Raises:
        SpecError: it cannot be read.
    """
    text = _read_text(path)
    if _LONG_KEY.search(text):
        raise _too_deep(path, "a key has more than 64 parts")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{path} is no TOML", where=str(path), why=str(error), fix="correct the file") from None
    except RecursionError:
        raise _too_deep(path, "Python's reader gives up") from None


def _read_text(path: Path) -> str:
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise SpecError(
                f"{path} has {size} bytes",
                where=str(path),
                why=f"a spec file has at most {MAX_BYTES}",
                fix="pass tables as tensors, when the op is called",
            )
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"cannot read {path}", where=str(path), why=str(error), fix="pass a UTF-8 text file") from None


def _too_deep(path: Path, why: str) -> SpecError:
    return SpecError(f"{path} is nested too deeply", where=str(path), why=why, fix="simplify it")
