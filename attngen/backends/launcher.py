"""Loads and launches NVIDIA binaries through the driver API, with arguments packed by one precomputed layout.

Needs ``cuda.bindings`` and no compiler. A launch allocates no device memory and never synchronizes, so CUDA graphs can
capture it.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from attngen.backends.base import Launch
from attngen.errors import ArgumentError, BuildError, UnsupportedError
from attngen.schedule.plan import Arg

MAX_GRID = 2**31 - 1
_DEFAULT_SHARED = 48 << 10
_FORMATS = {"i32": "i", "i64": "q"}
_FOREIGN_BINARY = {
    "CUDA_ERROR_INVALID_IMAGE",
    "CUDA_ERROR_NO_BINARY_FOR_GPU",
    "CUDA_ERROR_INVALID_SOURCE",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
}


class ArgumentLayout:
    """Where each argument lies in the block of bytes that a launch hands over: each at the next multiple of its size.

    Attributes:
        args: the arguments.
        trailing: null pointers after them.
        offsets: of every argument and trailing pointer.
    """

    def __init__(self, args: Sequence[Arg], trailing: int) -> None:
        self.args, self.trailing = tuple(args), trailing
        codes = ["Q" if arg.is_pointer else _FORMATS[arg.type] for arg in args] + ["Q"] * trailing
        self.struct = struct.Struct("@" + "".join(codes))
        self.offsets = [
            struct.calcsize("@" + "".join(codes[: i + 1])) - struct.calcsize(c) for i, c in enumerate(codes)
        ]
        self._is_pointer = tuple(arg.is_pointer for arg in args)
        self._tail = (0,) * trailing

    def pack(self, buffer: Any, values: Sequence[torch.Tensor | int]) -> None:
        """Write ``values`` into ``buffer``.

        Raises:
            ArgumentError: their number or kinds differ from the arguments', or an integer is too large.
        """
        try:
            words = [v.data_ptr() if p else v for v, p in zip(values, self._is_pointer, strict=True)]  # type: ignore[union-attr]
            self.struct.pack_into(buffer, 0, *words, *self._tail)
        except (AttributeError, ValueError, struct.error) as error:
            raise self._mismatch(values) from error

    def _mismatch(self, values: Sequence[torch.Tensor | int]) -> ArgumentError:
        if len(values) != len(self.args):
            return ArgumentError(f"a kernel takes {len(self.args)} arguments, not {len(values)}", where="launch")
        for arg, value in zip(self.args, values, strict=True):
            fits = isinstance(value, torch.Tensor) if arg.is_pointer else isinstance(value, int) and _holds(arg, value)
            if not fits:
                shown = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
                return ArgumentError(
                    f"{shown} does not fit argument {arg.name}", where="launch", why=f"its type is {arg.type}"
                )
        return ArgumentError("the arguments cannot be packed", where="launch")


class _Buffers(threading.local):
    """One thread's packed arguments, and the addresses of each of them, as the driver wants them."""

    def __init__(self, layout: ArgumentLayout) -> None:
        self.block = ctypes.create_string_buffer(layout.struct.size)
        start = ctypes.addressof(self.block)
        self._pointers = (ctypes.c_void_p * len(layout.offsets))(*(start + offset for offset in layout.offsets))
        self.address = ctypes.addressof(self._pointers)


class _Kernel:
    """A function of a loaded module, launched on the current stream of its device."""

    def __init__(self, entry: str, layout: ArgumentLayout, device: torch.device, threads: int, shared: int) -> None:
        self.entry, self.device, self.threads, self.shared = entry, device, threads, shared
        self.layout, self._buffers = layout, _Buffers(layout)
        self._driver = _driver(entry)
        self.context: Any = None
        self.function: Any = None

    def load(self, binary: bytes) -> None:
        """Put the binary on the device. It stays there as long as the process lives."""
        torch.cuda.init()  # type: ignore[no-untyped-call]
        device = self._check(self._driver.cuDeviceGet(self.device.index), "cuDeviceGet")
        self.context = self._check(self._driver.cuDevicePrimaryCtxRetain(device), "cuDevicePrimaryCtxRetain")
        with _Current(self):
            module = self._check(self._driver.cuModuleLoadData(binary), "cuModuleLoadData")
            self.function = self._check(
                self._driver.cuModuleGetFunction(module, self.entry.encode()), "cuModuleGetFunction"
            )
            if self.shared > _DEFAULT_SHARED:
                attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                result = self._driver.cuFuncSetAttribute(self.function, attribute, self.shared)
                self._check(result, f"cuFuncSetAttribute(shared memory, {self.shared})")

    def __call__(self, grid: int, values: Sequence[torch.Tensor | int]) -> None:
        require_grid(grid, self.entry)
        if grid == 0:
            return
        buffers = self._buffers
        self.layout.pack(buffers.block, values)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        arguments = (self.function, grid, 1, 1, self.threads, 1, 1, self.shared, stream, buffers.address, 0)
        status, current = self._driver.cuCtxGetCurrent()
        if status == 0 and int(current) == int(self.context):
            result = self._driver.cuLaunchKernel(*arguments)
        else:
            with _Current(self):
                result = self._driver.cuLaunchKernel(*arguments)
        if result[0] != 0:
            self._check(result, f"cuLaunchKernel(grid {grid}, {self.threads} threads, {self.shared} bytes shared)")

    def _check(self, result: tuple[Any, ...], call: str) -> Any:
        """The value of a driver call.

        Raises:
            RuntimeError: it failed.
        """
        status = result[0]
        if status == 0:
            return result[1] if len(result) > 1 else None
        name, text = (self._driver.cuGetErrorName(status)[1], self._driver.cuGetErrorString(status)[1])
        name, text = (part.decode() if isinstance(part, bytes) else str(part) for part in (name, text))
        hint = (
            "; the driver may be older than CUDA 13, which the binary was made for" if name in _FOREIGN_BINARY else ""
        )
        raise RuntimeError(f"kernel {self.entry} on {self.device}: {call} failed: {name}: {text}{hint}")


class _Current:
    """Makes a kernel's context the calling thread's, then restores the one before."""

    def __init__(self, kernel: _Kernel) -> None:
        self._kernel = kernel

    def __enter__(self) -> None:
        self._kernel._check(self._kernel._driver.cuCtxPushCurrent(self._kernel.context), "cuCtxPushCurrent")

    def __exit__(self, *error: object) -> None:
        self._kernel._driver.cuCtxPopCurrent()


def load(
    binary: Path,
    entry: str,
    args: Sequence[Arg],
    device: torch.device,
    *,
    threads: int,
    shared: int,
    trailing_pointers: int,
) -> Launch:
    """Load ``entry`` of a cubin for one device.

    Args:
        binary: file of the cubin.
        entry: symbol of the kernel.
        args: its arguments in order.
        device: an NVIDIA device of torch.
        threads: threads a block.
        shared: bytes of dynamic shared memory a block.
        trailing_pointers: null pointers that the kernel takes after its arguments.

    Raises:
        BuildError: ``cuda.bindings`` is not installed.
        UnsupportedError: a CUDA graph is being captured.
        RuntimeError: the driver refuses the binary.
    """
    if str(device) == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    require_no_capture(entry, device)
    kernel = _Kernel(entry, ArgumentLayout(args, trailing_pointers), device, threads, shared)
    kernel.load(binary.read_bytes())
    return kernel


def require_grid(grid: int, entry: str) -> None:
    """Check the number of programs.

    Raises:
        ArgumentError: it is beyond what a device can launch.
    """
    if not 0 <= grid <= MAX_GRID:
        raise ArgumentError(
            f"{entry} cannot be launched with {grid} programs",
            where="launch",
            why=f"a grid has at most {MAX_GRID}",
            fix="split the batch into several calls",
        )


def require_no_capture(entry: str, device: torch.device) -> None:
    """Check that loading, which synchronizes, does not happen inside a CUDA graph.

    Raises:
        UnsupportedError: a capture is under way.
    """
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                f"{entry} cannot be loaded now",
                where="first call of this op on this device",
                why="a CUDA graph is being captured, and loading a kernel is no part of one",
                fix="call ops.warmup(), or the op itself once, before the capture",
            )


def _holds(arg: Arg, value: int) -> bool:
    bits = 8 * struct.calcsize(_FORMATS[arg.type])
    return -(1 << (bits - 1)) <= value < 1 << (bits - 1)


@cache
def _bindings() -> Any:
    from cuda.bindings import driver  # noqa: PLC0415  # absent where no NVIDIA device is used

    return driver


def _driver(entry: str) -> Any:
    try:
        return _bindings()
    except ImportError as error:
        raise BuildError(
            f"{entry} cannot be loaded: there is no cuda.bindings",
            where="NVIDIA driver",
            why=str(error),
            fix="pip install attngen[cuda]",
        ) from error
