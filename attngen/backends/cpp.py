"""Kernels for the CPU: C++17 with OpenMP, built by the system compiler, called through ctypes."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from attngen.backends.call import Launch
from attngen.backends.cpp_launch import load_library
from attngen.codegen.dialects import CppDialect
from attngen.codegen.printer import Dialect
from attngen.codegen.render import RenderedKernel
from attngen.codegen.toolchain import BuildResult
from attngen.errors import BuildError, UnsupportedError
from attngen.schedule.plan import KernelPlan
from attngen.settings import Settings
from attngen.target import Target
from attngen.variant import OpName, Variant

HEAD_DIMS = range(16, 257, 8)
LATENT_DIMS = range(16, 513, 8)
COMPILERS = ("g++", "c++", "clang++")

# No -ffast-math: it breaks the rounding that exponentials rely on, and flushes subnormals to zero in the whole process. The
# math flags say only that nobody reads errno or floating-point traps; otherwise loops with a choice in them do not vectorize.
# Without -fno-ivopts GCC 12 loses stores: it rewrites their addresses to sums that its alias analysis takes for other objects.
_FLAGS = (
    "-O3",
    "-std=c++17",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fno-ivopts",
)
_ARCH_FLAGS = {"x86-64-v4": ("-mprefer-vector-width=512",)}
_KILLED = (-9, 137)


class CppBackend:
    """The system C++ compiler, or the one that ``CXX`` names."""

    name = "cpp"
    suffix = ".cpp"
    dialect: Dialect = CppDialect()
    kinds: tuple[str, ...] = ("cpu",)

    def check(self, variant: Variant, op: OpName, target: Target) -> None:
        """Capabilities; see :meth:`attngen.backends.base.Backend.check`."""
        if target.kind not in self.kinds:
            raise UnsupportedError(
                f"backend cpp does not build for {target}",
                where="backend",
                why="it makes CPU kernels",
                fix="leave backend out, or use target='cpu'",
            )
        # Columns that lie apart leave the rest as wide as latents are.
        dims = LATENT_DIMS if variant.head_dim_pe else HEAD_DIMS
        for field, dim in (("head_dim_qk", variant.head_dim_main), ("head_dim_vo", variant.head_dim_vo)):
            if dim not in dims:
                raise UnsupportedError(
                    f"backend cpp does not serve {field} {dim}",
                    where="spec.heads",
                    why=f"head dims are multiples of {dims.step} from {dims[0]} to {dims[-1]}",
                    fix="pad the head dim with zeros, or use backend='reference'",
                )

    def flags(self, plan: KernelPlan) -> tuple[str, ...]:
        """Compiler flags with the CPU's feature level spelled out."""
        arch = plan.target.arch
        return (*_FLAGS, f"-march={arch}", *_ARCH_FLAGS.get(arch, ()))

    def fingerprint(self, target: Target) -> str | None:
        """Path, size and time of change of every program that the compiler's command line names."""
        command = compiler()
        if command is None:
            return None
        programs = [Path(found).resolve() for word in command if (found := shutil.which(word)) is not None]
        parts = [f"{path.name} {path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in programs]
        return "; ".join([*parts, *(word for word in command if word.startswith("-"))])

    def build(self, kernel: RenderedKernel, folder: Path) -> BuildResult:
        """Compile the source in ``folder`` to a shared library beside it."""
        command = compiler()
        if command is None:
            raise BuildError(
                "there is no C++ compiler",
                where=f"environment variable CXX, target {kernel.target}",
                why=f"CXX is {_setting()!r}"
                if _setting()
                else f"CXX is not set, and none of {', '.join(COMPILERS)} is on PATH",
                fix="install g++ or point CXX at a compiler",
            )
        binary = f"{kernel.entry}.so"
        line = [*command, *kernel.flags, f"{kernel.entry}{kernel.suffix}", "-o", binary]
        environment = os.environ | {"LC_ALL": "C", "TMPDIR": str(folder)}
        result = subprocess.run(
            line,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        log = f"{shlex.join(line)}\n{result.stdout}{result.stderr}"
        if result.returncode != 0:
            raise _failure(kernel, command, result.returncode, log)
        return BuildResult(binary=binary, log=log)

    def load(self, binary: Path, metadata: Mapping[str, Any], plan: KernelPlan, device: torch.device) -> Launch:
        """The library's entry point as a function of the plan's arguments."""
        return load_library(binary, plan)

    def launch_options(self, metadata: Mapping[str, Any], plan: KernelPlan) -> dict[str, Any]:
        """None: libraries are called as they are."""
        return {}


def compiler() -> list[str] | None:
    """The compiler's command line: ``CXX``, which may hold a wrapper and options, or the first of :data:`COMPILERS` there is."""
    if setting := _setting():
        try:
            words = shlex.split(setting)
        except ValueError:  # an open quotation mark
            return None
        return words if words and shutil.which(words[0]) else None
    return next(([name] for name in COMPILERS if shutil.which(name)), None)


def _setting() -> str | None:
    return Settings.from_env().cxx


def _failure(kernel: RenderedKernel, command: Sequence[str], returncode: int, log: str) -> BuildError:
    first = next((line.strip() for line in log.splitlines() if "error:" in line), "")
    killed = returncode in _KILLED or "Killed signal" in log
    error = BuildError(
        f"{kernel.entry} does not compile for {kernel.target}",
        where=f"compiler {shlex.join(command)} (environment variable CXX), exit status {returncode}",
        why=first or ("the compiler was killed" if killed else "the compiler gives no reason"),
        fix="free some memory and try again: the system killed the compiler"
        if killed
        else "see the build log; try another CXX",
    )
    error.log = log
    return error
