"""Which backends exist, and which one serves a target by default."""

from __future__ import annotations

from functools import cache

from attngen.backends.base import Backend
from attngen.backends.cpp import CppBackend
from attngen.backends.triton import TritonBackend
from attngen.errors import UnsupportedError
from attngen.target import Target

_CLASSES = (CppBackend, TritonBackend)
NAMES = ("reference", *(cls.name for cls in _CLASSES))


@cache
def backend(name: str) -> Backend | None:
    """The backend called ``name``; ``None`` for ``reference``, which builds nothing.

    Raises:
        UnsupportedError: there is none of that name.
    """
    if name == "reference":
        return None
    for cls in _CLASSES:
        if cls.name == name:
            return cls()
    raise UnsupportedError(
        f"no backend {name!r}", where="backend", why="it is not registered", fix=f"use one of {', '.join(NAMES)}"
    )


def default_backend(target: Target) -> str:
    """The fastest backend that builds for the target's kind."""
    return next(cls.name for cls in _CLASSES if target.kind in cls.kinds)
