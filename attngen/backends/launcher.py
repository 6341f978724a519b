"""Loads and launches NVIDIA binaries through the driver API, with arguments packed by one precomputed layout.

Needs ``cuda.bindings`` and no compiler. A launch allocates no device memory and never synchronizes, so CUDA graphs can
capture it.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from attngen.backends.call import Launch
from attngen.dtypes import DTYPES
from attngen.errors import ArgumentError, BuildError, UnsupportedError
from attngen.schedule.launch import Arg

MAX_GRID = 2**31 - 1
_FREE_SHARED = 48 << 10  # bytes of shared memory that need no permission
_FORMATS = {"i32": "i", "i64": "q"}
_MAP_BYTES = 128
_MAP_ENTRIES = 256  # tensor maps that a kernel remembers
_FOREIGN_BINARY = {
    "CUDA_ERROR_INVALID_IMAGE",
    "CUDA_ERROR_NO_BINARY_FOR_GPU",
    "CUDA_ERROR_INVALID_SOURCE",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
}


class ArgumentLayout:
    """Where each parameter lies in the block of bytes that a launch hands over: each at the next multiple of its size.

    Attributes:
        args: the arguments; null pointers follow them. A tensor map makes one parameter, or several: the map, then sizes and
            strides (``sized_maps``, as Triton's kernels want it).
        struct: the block.
        offsets: of every parameter and null pointer.
    """

    def __init__(
        self, args: Sequence[Arg], trailing: int, encoders: Sequence[TensorMaps] = (), *, sized_maps: bool = True
    ) -> None:
        self.args = tuple(args)
        codes = [code for arg in args for code in _codes(arg, sized_maps)] + ["Q"] * trailing
        starts = (struct.calcsize("@" + "".join(codes[:i]) + f"0{code[-1]}") for i, code in enumerate(codes))
        self.struct, self.offsets = struct.Struct("@" + "".join(codes)), tuple(starts)
        self._is_pointer = tuple(arg.is_pointer for arg in args)
        self._nulls = (0,) * trailing
        self._maps = tuple(zip((i for i, arg in enumerate(args) if arg.is_map), encoders, strict=True))
        self._words = None if sized_maps else 1

    def pack(self, buffer: Any, values: Sequence[torch.Tensor | int]) -> None:
        """Write ``values`` into ``buffer``.

        Raises:
            ArgumentError: their number or kinds differ from the arguments', or an integer is too large.
        """
        try:
            words: list[Any] = [v.data_ptr() if p else v for v, p in zip(values, self._is_pointer, strict=True)]  # type: ignore[union-attr]
            for i, encoder in reversed(self._maps):
                words[i : i + 1] = encoder(words[i])[: self._words]
            self.struct.pack_into(buffer, 0, *words, *self._nulls)
        except (AttributeError, TypeError, ValueError, struct.error) as error:
            raise self._mismatch(values) from error

    def _mismatch(self, values: Sequence[torch.Tensor | int]) -> ArgumentError:
        if len(values) != len(self.args):
            return ArgumentError(f"the kernel takes {len(self.args)} arguments, not {len(values)}", where="launch")
        for arg, value in zip(self.args, values, strict=True):
            if not (isinstance(value, torch.Tensor) if arg.is_pointer or arg.is_map else _holds(arg, value)):
                shown = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
                return ArgumentError(f"{shown} is no {arg.type}", where=f"launch, argument {arg.name}")
        return ArgumentError("the arguments cannot be packed", where="launch")


class TensorMaps:
    """Encodes tensor maps of one argument, and remembers them: they depend on address, sizes and strides only."""

    def __init__(self, driver: Any, entry: str, dtype: str, box: Sequence[int], swizzle: int) -> None:
        self._driver, self._entry, self._box = driver, entry, tuple(box)
        kind = "uint8" if DTYPES[dtype].itemsize == 1 else DTYPES[dtype].torch_name
        name = f"CU_TENSOR_MAP_DATA_TYPE_{kind.upper()}"
        self._kind = getattr(driver.CUtensorMapDataType, name)
        self._swizzle = driver.CUtensorMapSwizzle(swizzle)
        self._known: dict[Any, list[Any]] = {}

    def __call__(self, tensor: torch.Tensor) -> list[Any]:
        """The parameters: bytes of the map, sizes, strides in elements."""
        key = tensor.data_ptr(), tensor.shape, tensor.stride()
        words = self._known.get(key)
        if words is None:
            if len(self._known) >= _MAP_ENTRIES:
                self._known.clear()
            words = self._known[key] = self._encode(tensor)
        return words

    def _encode(self, tensor: torch.Tensor) -> list[Any]:
        driver, rank, sizes, strides = self._driver, tensor.dim(), tuple(tensor.shape), tensor.stride()
        if not tensor.numel():  # no tile of it is ever loaded, and the driver encodes no empty tensor
            return [bytes(_MAP_BYTES), *sizes, *strides]
        # The stride of a single row matters to nobody, and need not be one that the hardware takes.
        pitches = [
            stride * tensor.element_size() if size > 1 else 16 for size, stride in zip(sizes, strides, strict=True)
        ]
        status, encoded = driver.cuTensorMapEncodeTiled(
            self._kind,
            rank,
            tensor.data_ptr(),
            [driver.cuuint64_t(size) for size in reversed(sizes)],
            [driver.cuuint64_t(pitch) for pitch in reversed(pitches[:-1])],
            [driver.cuuint32_t(size) for size in reversed(self._box)],
            [driver.cuuint32_t(1)] * rank,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            self._swizzle,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        if status != 0:
            raise RuntimeError(
                f"kernel {self._entry}: cuTensorMapEncodeTiled(sizes {sizes}, strides {strides}) failed: {status!r}"
            )
        return [ctypes.string_at(int(encoded.getPtr()), _MAP_BYTES), *sizes, *strides]


class _Buffers(threading.local):
    """One thread's packed arguments, and the table of their addresses that the driver wants."""

    def __init__(self, layout: ArgumentLayout) -> None:
        self.block = ctypes.create_string_buffer(layout.struct.size)
        start = ctypes.addressof(self.block)
        self._table = (ctypes.c_void_p * len(layout.offsets))(*(start + offset for offset in layout.offsets))
        self.table_address = ctypes.addressof(self._table)


class _Kernel:
    """A function on a device, launched on the device's current stream. It stays loaded as long as the process lives."""

    def __init__(
        self,
        binary: bytes,
        entry: str,
        layout: ArgumentLayout,
        device: torch.device,
        threads: int,
        shared: int,
        most: int = MAX_GRID,
    ) -> None:
        self._entry, self._device, self._threads, self._shared, self._most = entry, device, threads, shared, most
        self._layout, self._buffers = layout, _Buffers(layout)
        self._driver = driver = _driver(entry)
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._context = self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", device.index))
        self._context_address = int(self._context)
        with self._current():
            self._function = self._call("cuModuleGetFunction", self._call("cuModuleLoadData", binary), entry.encode())
            if shared > _FREE_SHARED:
                attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._call("cuFuncSetAttribute", self._function, attribute, shared)

    def __call__(self, grid: int, values: Sequence[torch.Tensor | int]) -> None:
        require_grid(grid, self._entry)
        if grid == 0:
            return
        grid = min(grid, self._most)
        buffers = self._buffers
        self._layout.pack(buffers.block, values)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        arguments = (self._function, grid, 1, 1, self._threads, 1, 1, self._shared, stream, buffers.table_address, 0)
        # A context is current to a thread: another device's, or none in a thread that has not used CUDA.
        status, current = self._driver.cuCtxGetCurrent()
        if status == 0 and int(current) == self._context_address:
            (status,) = self._driver.cuLaunchKernel(*arguments)
        else:
            with self._current():
                (status,) = self._driver.cuLaunchKernel(*arguments)
        if status != 0:
            shape = f"grid {grid}, {self._threads} threads, {self._shared} bytes shared"
            raise self._failure(f"cuLaunchKernel({shape})", status)

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make the device's context the thread's, then restore the one before."""
        self._call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self._driver.cuCtxPopCurrent()

    def _call(self, name: str, *arguments: Any) -> Any:
        """The value of a driver function.

        Raises:
            RuntimeError: it failed.
        """
        status, *values = getattr(self._driver, name)(*arguments)
        if status != 0:
            raise self._failure(name, status)
        return values[0] if values else None

    def _failure(self, call: str, status: Any) -> RuntimeError:
        words = (self._driver.cuGetErrorName(status)[1], self._driver.cuGetErrorString(status)[1])
        name, text = (word.decode() if isinstance(word, bytes) else str(word) for word in words)
        hint = "; the driver may be older than the toolkit that made the binary" if name in _FOREIGN_BINARY else ""
        return RuntimeError(f"kernel {self._entry} on {self._device}: {call} failed: {name}: {text}{hint}")


def load(
    binary: Path,
    entry: str,
    args: Sequence[Arg],
    device: torch.device,
    *,
    threads: int,
    shared: int,
    trailing_pointers: int,
    maps: Sequence[Mapping[str, Any]] = (),
    sized_maps: bool = True,
    resident: int = 0,
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
        maps: of each tensor map, ``block_size`` (what one copy takes) and ``swizzle``, as Triton names them.
        sized_maps: sizes and strides follow each map.
        resident: blocks a multiprocessor, at most, that share the programs of a launch among themselves; 0: a block a program.

    Raises:
        BuildError: ``cuda.bindings`` is not installed.
        UnsupportedError: a CUDA graph is being captured.
        RuntimeError: the driver refuses the binary.
    """
    if str(device) == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    require_no_capture(entry, device)
    driver, mapped = _driver(entry), [arg for arg in args if arg.is_map]
    encoders = [
        TensorMaps(driver, entry, arg.element, facts["block_size"], facts["swizzle"])
        for arg, facts in zip(mapped, maps, strict=True)
    ]
    layout = ArgumentLayout(args, trailing_pointers, encoders, sized_maps=sized_maps)
    most = resident * torch.cuda.get_device_properties(device).multi_processor_count if resident else MAX_GRID
    return _Kernel(binary.read_bytes(), entry, layout, device, threads, shared, most)


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


def _codes(arg: Arg, sized_maps: bool) -> list[str]:
    if arg.is_map:
        return [f"{_MAP_BYTES}s", *("iiiiqqqq" if sized_maps else "")]
    return ["Q" if arg.is_pointer else _FORMATS[arg.type]]


def _holds(arg: Arg, value: object) -> bool:
    half = 1 << (8 * struct.calcsize(_FORMATS[arg.type]) - 1)
    return isinstance(value, int) and -half <= value < half


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
            fix="pip install cuda-bindings",
        ) from error
