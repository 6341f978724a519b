"""What a kernel is compiled for: a device kind and an explicit architecture."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from attngen.errors import UnsupportedError

Kind = Literal["cpu", "cuda", "hip", "interpret"]

CUDA_ARCHS = ("sm80", "sm86", "sm89", "sm90a", "sm100")
HIP_ARCHS = ("gfx942", "gfx950")
CPU_ARCHS = ("x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4", "armv8-a")

_X86_LEVELS = (
    ("x86-64-v4", {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma", "f16c", "bmi2"}),
    ("x86-64-v3", {"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"}),
    ("x86-64-v2", {"sse4_2", "ssse3", "popcnt", "cx16"}),
)


@dataclass(frozen=True, order=True)
class Target:
    """``kind:arch``, always explicit: ``cpu:native`` is resolved to a feature level when parsed."""

    kind: Kind
    arch: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.arch}" if self.arch else self.kind

    @property
    def capability(self) -> int:
        """CUDA compute capability as Triton counts it (``90`` for ``sm90a``)."""
        return int(self.arch.removeprefix("sm").rstrip("a"))

    @property
    def warp_size(self) -> int:
        return 64 if self.kind == "hip" else 32

    @staticmethod
    def parse(text: str | Target) -> Target:
        """Read ``cpu``, ``cpu:x86-64-v3``, ``cuda:sm90a``, ``hip:gfx942`` or ``interpret``.

        Raises:
            UnsupportedError: unknown kind or architecture; the message lists the known ones.
        """
        if isinstance(text, Target):
            return text
        kind, _, arch = text.strip().partition(":")
        arch = arch.replace("sm_", "sm")
        if kind == "interpret" and not arch:
            return Target("interpret", "")
        if kind == "cpu":
            arch = native_cpu_arch() if arch in ("", "native") else arch
        if kind == "cuda" and arch == "sm90":
            arch = "sm90a"
        known = {"cpu": CPU_ARCHS, "cuda": CUDA_ARCHS, "hip": HIP_ARCHS}
        if kind not in known or arch not in known[kind]:
            choices = ", ".join([f"{k}:{a}" for k, archs in known.items() for a in archs] + ["interpret"])
            raise UnsupportedError(
                f"unknown target {text!r}", where="target", why="no backend builds for it", fix=f"use one of {choices}"
            )
        return Target(kind, arch)  # type: ignore[arg-type]

    @staticmethod
    def from_cuda_capability(major: int, minor: int) -> Target:
        """The target of an NVIDIA device; a newer minor revision runs what its family's base was built for."""
        exact = f"sm{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")
        if exact in CUDA_ARCHS:
            return Target("cuda", exact)
        family = {8: "sm80" if minor < 6 else "sm86" if minor < 9 else "sm89", 10: "sm100"}
        if major not in family:
            raise UnsupportedError(
                f"compute capability {major}.{minor} is not supported",
                where="target",
                why=f"kernels are built for {', '.join(CUDA_ARCHS)}",
                fix="use backend='cpp' on the CPU, or a supported GPU",
            )
        return Target("cuda", family[major])


@cache
def native_cpu_arch() -> str:
    """The highest feature level of the CPU this process runs on, by the flags the kernel reports."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        return "armv8-a"
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        flags = set(next(line for line in lines if line.startswith("flags")).split(":", 1)[1].split())
    except (OSError, StopIteration):
        return "x86-64"
    return next((level for level, needed in _X86_LEVELS if needed <= flags), "x86-64")


def runs_on_cpu(target: Target, native: str) -> bool:
    """Whether a CPU of the feature level ``native`` runs what was built for ``target``."""
    if native == target.arch:
        return True
    same_family = native.startswith("x86-64") and target.arch.startswith("x86-64")
    return same_family and CPU_ARCHS.index(target.arch) <= CPU_ARCHS.index(native)
