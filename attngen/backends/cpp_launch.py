"""Loads libraries of CPU kernels, and calls them through ctypes. Needs no compiler."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from attngen.backends.call import Launch
from attngen.errors import BuildError, UnsupportedError
from attngen.schedule.launch import Arg, KernelLaunch
from attngen.target import native_cpu_arch, runs_on_cpu

_PAUSE_HARD = 2  # omp_pause_hard


def load_library(binary: Path, kernel: KernelLaunch) -> Launch:
    """The library's entry point as a function of the kernel's arguments.

    Raises:
        UnsupportedError: this CPU lacks features the kernel was built for.
        BuildError: the library cannot be loaded.
    """
    if not runs_on_cpu(kernel.target, native_cpu_arch()):
        raise UnsupportedError(
            f"{kernel.entry} was built for {kernel.target}",
            where="target",
            why=f"this CPU is {native_cpu_arch()}",
            fix="compile for target='cpu'",
        )
    try:
        library = ctypes.CDLL(str(binary))
        function = getattr(library, kernel.entry)
    except (OSError, AttributeError) as error:
        raise BuildError(
            f"cannot load {kernel.entry}",
            where=str(binary),
            why=str(error),
            fix="remove this cache entry, or install the package that it lies in again",
        ) from error
    _end_threads_before_forks(library)
    function.argtypes = [_ctype(arg) for arg in kernel.args]
    function.restype = None
    return _launcher(function)


_runtimes: set[int] = set()


def _end_threads_before_forks(library: ctypes.CDLL) -> None:
    """Let the OpenMP runtime of a library end a thread's helpers before it forks.

    A fork has none of them, but GCC's runtime would wait for them there. The next parallel loop starts new ones.
    """
    pause = getattr(library, "omp_pause_resource_all", None)  # absent where it is not linked, or before OpenMP 5
    if pause is None:
        return
    address = ctypes.cast(pause, ctypes.c_void_p).value or 0
    if address not in _runtimes:
        _runtimes.add(address)
        os.register_at_fork(before=lambda: pause(_PAUSE_HARD))


def _ctype(arg: Arg) -> type[Any]:
    if arg.is_pointer:
        return ctypes.c_void_p
    return {"i32": ctypes.c_int32, "i64": ctypes.c_int64}[arg.type]


def _launcher(function: Callable[..., None]) -> Launch:
    def launch(programs: int, values: Sequence[torch.Tensor | int]) -> None:
        if programs:
            function(*[value.data_ptr() if isinstance(value, torch.Tensor) else value for value in values])

    return launch
