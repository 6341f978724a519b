"""Every environment variable attngen reads, typed, in one place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from attngen.errors import ArgumentError

_TRUE = frozenset({"1", "true", "yes", "on"})


@dataclass(frozen=True)
class Settings:
    """A snapshot of the environment.

    Attributes:
        cache_dir: ``ATTNGEN_CACHE_DIR``: writable cache root; ``None`` means the platform's user cache folder.
            Its content is executed: it must belong to the user or root, and nobody else may write to it.
        cache_path: ``ATTNGEN_CACHE_PATH``: read-only roots searched first, separated by ``os.pathsep``.
        backend: ``ATTNGEN_BACKEND``: forces one backend.
        debug: ``ATTNGEN_DEBUG=1..5``: compile lines, plan, expressions, source, assembly.
        require_cached: ``ATTNGEN_REQUIRE_CACHED=1``: a build raises :class:`attngen.errors.CacheMissError`.
        override_dir: ``ATTNGEN_OVERRIDE_DIR``: sources found here under ``<entry>.<suffix>`` replace rendered ones.
        validate: ``ATTNGEN_VALIDATE=1``: index tensors on a GPU are read back and checked too (costs a synchronization).
        cxx: ``CXX``: the C++ compiler of the ``cpp`` backend.
        ptxas: ``ATTNGEN_PTXAS``: the ptxas that assembles Triton's PTX.
        lock_timeout: ``ATTNGEN_LOCK_TIMEOUT``: seconds to wait for another process's build before building too.
    """

    cache_dir: str | None = None
    cache_path: tuple[str, ...] = ()
    backend: str | None = None
    debug: int = 0
    require_cached: bool = False
    override_dir: str | None = None
    validate: bool = False
    cxx: str | None = None
    ptxas: str | None = None
    lock_timeout: float = 120.0

    @staticmethod
    def validates(env: Mapping[str, str] = os.environ) -> bool:
        """:attr:`validate` alone, which every call asks for."""
        return _flag(env.get("ATTNGEN_VALIDATE"))

    @staticmethod
    def from_env(env: Mapping[str, str] = os.environ) -> Settings:
        """Read the settings that ``env`` holds now; nothing is memorized."""
        return Settings(
            cache_dir=env.get("ATTNGEN_CACHE_DIR") or None,
            cache_path=tuple(p for p in env.get("ATTNGEN_CACHE_PATH", "").split(os.pathsep) if p),
            backend=env.get("ATTNGEN_BACKEND") or None,
            debug=_integer(env.get("ATTNGEN_DEBUG")),
            require_cached=_flag(env.get("ATTNGEN_REQUIRE_CACHED")),
            override_dir=env.get("ATTNGEN_OVERRIDE_DIR") or None,
            validate=Settings.validates(env),
            cxx=env.get("CXX") or None,
            ptxas=env.get("ATTNGEN_PTXAS") or None,
            lock_timeout=_seconds("ATTNGEN_LOCK_TIMEOUT", env.get("ATTNGEN_LOCK_TIMEOUT"), 120.0),
        )


def _flag(text: str | None) -> bool:
    return (text or "").strip().lower() in _TRUE


def _seconds(name: str, text: str | None, default: float) -> float:
    try:
        return float(text) if text else default
    except ValueError:
        raise ArgumentError(f"{name} is {text!r}", where=name, why="it is a number of seconds", fix="set 120") from None


def _integer(text: str | None) -> int:
    return int(text) if text and text.strip().isdigit() else 0
