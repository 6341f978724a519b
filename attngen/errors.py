"""Errors that say what failed, where, why, and what to do about it."""

from __future__ import annotations


class AttngenError(Exception):
    """Base of every error raised on purpose.

    Args:
        what: one sentence naming what failed.
        where: spec path, argument name or generated file and line.
        why: the rule that was broken, with the values that broke it.
        fix: what the caller can do.
    """

    def __init__(self, what: str, *, where: str = "", why: str = "", fix: str = "") -> None:
        self.what, self.where, self.why, self.fix = what, where, why, fix
        super().__init__(what, where, why, fix)

    def __reduce__(self) -> tuple[object, ...]:
        """Errors cross process pools."""
        return _restore, (type(self), self.what, self.where, self.why, self.fix), self.__dict__

    def __str__(self) -> str:
        parts = (("where", self.where), ("why", self.why), ("fix", self.fix))
        return "\n".join([self.what, *(f"  {label}: {text}" for label, text in parts if text)])


def _restore(kind: type[AttngenError], what: str, where: str, why: str, fix: str) -> AttngenError:
    return kind(what, where=where, why=why, fix=fix)


class SpecError(AttngenError, ValueError):
    """The declaration itself is wrong: a field, an expression, a custom mod."""


class UnsupportedError(AttngenError):
    """The declaration is valid, but the chosen backend, target or op cannot do it. Raised when an op is compiled."""


class ArgumentError(AttngenError, ValueError):
    """A tensor or option passed to an op does not fit the spec. Raised before anything is launched."""


class BuildError(AttngenError):
    """A toolchain failed or is missing.

    Attributes:
        log: what the toolchain printed; the store keeps it in a file and adds that file to ``where``.
    """

    log: str = ""


class SlowKernelError(BuildError):
    """Machine code was made, but not as fast as its tiles were chosen for: with other tiles it will be."""


class CacheMissError(AttngenError):
    """``ATTNGEN_REQUIRE_CACHED`` is set and a kernel is not in any cache."""
