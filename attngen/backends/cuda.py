"""CUDA C++ for Hopper: rendered source without headers, built by NVRTC in the process, launched through the driver API."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from attngen.backends import launcher
from attngen.backends.base import Launch
from attngen.backends.triton import TritonBackend
from attngen.backends.triton_compile import SHARED_LIMITS
from attngen.codegen.dialects import CudaDialect
from attngen.codegen.printer import Dialect
from attngen.codegen.render import RenderedKernel
from attngen.codegen.toolchain import BuildResult
from attngen.errors import BuildError, SlowKernelError, UnsupportedError
from attngen.schedule.hopper import ARCH, launch_shape, map_boxes
from attngen.schedule.plan import KernelPlan
from attngen.target import Target
from attngen.variant import OpName, Variant

# 177: templates declare coordinates that not every variant reads.
_FLAGS = ("--std=c++17", "--device-as-default-execution-space", "--diag-suppress=177", "--ptxas-options=-v")
MOST_SPILLS = 256  # bytes; warps that only start copies have few registers, and may spill some
SWIZZLE_128 = 3  # of a tensor map, in the driver's numbers
_DISTRIBUTIONS = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu13", "nvidia-cuda-nvrtc-cu12")


class CudaBackend:
    """NVRTC. Kernels of an op that have no template here are Triton's: :func:`attngen.schedule.hopper.serves` tells which."""

    name = "cuda"
    suffix = ".cu"
    dialect: Dialect = CudaDialect()
    kinds: tuple[str, ...] = (f"cuda:{ARCH}",)

    def check(self, variant: Variant, op: OpName, target: Target) -> None:
        """Capabilities; see :meth:`attngen.backends.base.Backend.check`."""
        if str(target) not in self.kinds:
            raise UnsupportedError(
                f"backend cuda does not build for {target}",
                where="backend",
                why=f"its kernels are written for cuda:{ARCH}",
                fix="leave backend out, or use backend='triton'",
            )
        TritonBackend().check(variant, op, target)

    def flags(self, plan: KernelPlan) -> tuple[str, ...]:
        """Options of NVRTC, then ``launch:threads=`` and ``launch:shared=``, the bytes of dynamic shared memory."""
        threads, shared = launch_shape(plan)
        return (
            f"--gpu-architecture=sm_{plan.target.arch[2:]}",
            *_FLAGS,
            f"launch:threads={threads}",
            f"launch:shared={shared}",
        )

    def fingerprint(self, target: Target) -> str | None:
        """Version of NVRTC."""
        return nvrtc_version()

    def build(self, kernel: RenderedKernel, folder: Path) -> BuildResult:
        """Compile the source to a cubin; ``ptxas -v`` tells registers and spills."""
        options = [flag for flag in kernel.flags if not flag.startswith("launch:")]
        sizes = (flag.removeprefix("launch:").split("=") for flag in kernel.flags if flag.startswith("launch:"))
        launch = {name: int(number) for name, number in sizes}
        _require_shared(kernel, launch["shared"])
        cubin, log = compile_cubin(kernel, options)
        facts = resources(log)
        if "serialized" in facts or facts.get("spills", 0) > MOST_SPILLS:
            raise _slow(kernel, facts, log)
        binary = f"{kernel.entry}.cubin"
        (folder / binary).write_bytes(cubin)
        return BuildResult(binary=binary, metadata=launch | facts, log=log)

    def load(self, binary: Path, metadata: Mapping[str, Any], plan: KernelPlan, device: torch.device) -> Launch:
        """A function that launches the kernel on the device's current stream."""
        return launcher.load(binary, plan.entry, plan.args, device, **self.launch_options(metadata, plan))

    def launch_options(self, metadata: Mapping[str, Any], plan: KernelPlan) -> dict[str, Any]:
        """See :meth:`attngen.backends.base.Backend.launch_options`."""
        return {
            "threads": metadata["threads"],
            "shared": metadata["shared"],
            "trailing_pointers": 0,
            "maps": [{"block_size": list(box), "swizzle": SWIZZLE_128} for box in map_boxes(plan)],
            "sized_maps": False,
            "resident": plan.tiles.blocks if plan.is_resident else 0,
        }


def _require_shared(kernel: RenderedKernel, shared: int) -> None:
    if shared > (limit := SHARED_LIMITS[kernel.target.arch]):
        raise BuildError(
            f"{kernel.entry} does not fit {kernel.target}",
            where="launch:shared",
            why=f"it needs {shared} bytes of shared memory, and a block on {kernel.target.arch} has {limit}",
            fix="give the kernel smaller tiles or fewer stages in attngen/schedule/tables.py",
        )


def resources(log: str) -> dict[str, int]:
    """What ``ptxas -v`` reports: registers a thread, bytes spilled, and a warning by which products wait for each other."""
    found = {
        "registers": r"Used (\d+) registers",
        "spills": r"(\d+) bytes spill stores",
        "serialized": r"\(C(751[0-5])\)",
    }
    return {name: int(match[1]) for name, pattern in found.items() if (match := re.search(pattern, log))}


def compile_cubin(kernel: RenderedKernel, options: list[str]) -> tuple[bytes, str]:
    """Machine code of the source, and what the compiler printed.

    Raises:
        BuildError: NVRTC is missing, or refuses the source.
    """
    nvrtc = _nvrtc(kernel)
    status, program = nvrtc.nvrtcCreateProgram(
        kernel.source.encode(), f"{kernel.entry}{kernel.suffix}".encode(), 0, None, None
    )
    if status != 0:
        raise _failure(kernel, f"nvrtcCreateProgram failed: {status!r}", "")
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = (
            _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode(errors="replace").strip("\0")
        )
        if status != 0:
            raise _failure(kernel, f"{status!r}", log)
        return _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _text(size_of: Any, read: Any, program: Any) -> bytes:
    _, size = size_of(program)
    buffer = bytes(size)
    read(program, buffer)
    return buffer


def _slow(kernel: RenderedKernel, facts: Mapping[str, int], log: str) -> SlowKernelError:
    spills = f"{facts['spills']} bytes of registers spill"
    error = SlowKernelError(
        f"{kernel.entry} is slow",
        where="ptxas",
        why=f"products wait for each other (C{facts['serialized']})" if "serialized" in facts else spills,
        fix="choose smaller tiles",
    )
    error.log = log
    return error


def _failure(kernel: RenderedKernel, status: str, log: str) -> BuildError:
    first = next((line.strip() for line in log.splitlines() if "error" in line), status)
    error = BuildError(
        f"{kernel.entry} does not compile for {kernel.target}",
        where="NVRTC",
        why=first,
        fix="see the build log; report it, with the source from `attngen explain`",
    )
    error.log = log
    return error


def _nvrtc(kernel: RenderedKernel) -> Any:
    try:
        from cuda.bindings import nvrtc  # noqa: PLC0415  # absent where nothing is built for NVIDIA

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise BuildError(
            f"{kernel.entry} cannot be built: there is no NVRTC",
            where=f"target {kernel.target}",
            why=str(error),
            fix="pip install attngen[cuda]",
        ) from error
    return nvrtc


@cache
def nvrtc_version() -> str | None:
    """Which NVRTC there is, without loading it where it is an installed package; ``None`` where it is absent."""
    try:
        bindings = version("cuda-bindings")
    except PackageNotFoundError:
        return None
    for name in _DISTRIBUTIONS:
        try:
            return f"nvrtc-{version(name)}"
        except PackageNotFoundError:
            continue
    # NVRTC of a CUDA toolkit: found by the dynamic linker, so its own version is asked for.
    try:
        from cuda.bindings import nvrtc  # noqa: PLC0415

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError):
        return None
    return f"nvrtc-{major}.{minor} cuda-bindings-{bindings}"
