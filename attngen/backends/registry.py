"""Which backends exist, and which one serves a target by default."""

from __future__ import annotations

from functools import cache

from attngen.backends.base import Backend
from attngen.backends.cpp import CppBackend
from attngen.backends.cuda import CudaBackend
from attngen.backends.triton import TritonBackend
from attngen.errors import UnsupportedError
from attngen.target import Target

_CLASSES: tuple[type[Backend], ...] = (CppBackend, CudaBackend, TritonBackend)  # the faster ones of a target first
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


def builds_for(name: str, target: Target) -> bool:
    """Whether the backend called ``name`` makes kernels for the target."""
    toolchain = backend(name)
    return toolchain is not None and (target.kind in toolchain.kinds or str(target) in toolchain.kinds)


def serving(target: Target) -> tuple[str, ...]:
    """The backends that build for the target, the fastest first."""
    return tuple(name for name in NAMES if builds_for(name, target))


@cache
def default_backend(target: Target) -> str:
    """The fastest backend that builds for the target, of those whose toolchain is here if any is; caches may know better."""
    present = (name for name in serving(target) if (found := backend(name)) and found.fingerprint(target) is not None)
    return next(present, serving(target)[0])
