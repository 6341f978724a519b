"""The launcher without a GPU: where arguments are written, and what is asked of a driver that only takes notes."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import attngen as ag
from attngen.backends import launcher
from attngen.backends.base import Launch
from attngen.backends.launcher import MAX_GRID, ArgumentLayout
from attngen.schedule.plan import Arg

ARGS = (Arg("q", "*bf16"), Arg("num_tokens", "i32"), Arg("q_stride_t", "i64"), Arg("batch", "i32"), Arg("lse", "*fp32"))
OFFSETS = (0, 8, 16, 24, 32, 40, 48)
THREADS, SHARED = 128, 60 << 10
OUT_OF_RESOURCES = 701


class NotingDriver:
    """The part of ``cuda.bindings.driver`` that the launcher uses, on one device whose context is 7."""

    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared")

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.current, self.status = 7, 0

    def launches(self) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == "launch"]

    def cuDeviceGet(self, index: int) -> tuple[int, int]:
        return 0, index

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, int]:
        return 0, 7 + device

    def cuCtxGetCurrent(self) -> tuple[int, int]:
        return 0, self.current

    def cuCtxPushCurrent(self, context: int) -> tuple[int]:
        self.calls.append(("push", context))
        return (0,)

    def cuCtxPopCurrent(self) -> tuple[int, int]:
        self.calls.append(("pop",))
        return 0, 0

    def cuModuleLoadData(self, image: bytes) -> tuple[int, bytes]:
        return self.status, image

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> tuple[int, bytes]:
        return 0, module + b"." + name

    def cuFuncSetAttribute(self, function: bytes, attribute: str, value: int) -> tuple[int]:
        self.calls.append((attribute, value))
        return (0,)

    def cuLaunchKernel(self, function: bytes, *rest: int) -> tuple[int]:
        *shape, parameters, extra = rest
        assert extra == 0
        pointers = (ctypes.c_void_p * len(OFFSETS)).from_address(parameters)
        kinds = (ctypes.c_uint64, ctypes.c_int32, ctypes.c_int64, ctypes.c_int32, *[ctypes.c_uint64] * 3)
        values = tuple(kind.from_address(pointer).value for kind, pointer in zip(kinds, pointers, strict=True))
        self.calls.append(("launch", function, *shape, values))
        return (self.status,)

    def cuGetErrorName(self, status: int) -> tuple[int, bytes]:
        return 0, b"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES" if status == OUT_OF_RESOURCES else b"CUDA_ERROR_INVALID_IMAGE"

    def cuGetErrorString(self, status: int) -> tuple[int, bytes]:
        return 0, b"too many resources requested for launch" if status == OUT_OF_RESOURCES else b"invalid image"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[NotingDriver]:
    noting = NotingDriver()
    monkeypatch.setattr(launcher, "_bindings", lambda: noting)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=100 + device.index))
    return noting


def _load(folder: Path, device: str = "cuda:0", shared: int = SHARED, resident: int = 0) -> Launch:
    binary = folder / "attend.cubin"
    binary.write_bytes(b"image")
    return launcher.load(
        binary,
        "attend",
        ARGS,
        torch.device(device),
        threads=THREADS,
        shared=shared,
        trailing_pointers=2,
        resident=resident,
    )


def _values() -> Sequence[torch.Tensor | int]:
    return (torch.zeros(4), 5, -(2**40), -6, torch.zeros(2))


def test_arguments_lie_as_c_would_lay_them_out() -> None:
    pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    fields = list(zip("qnsblxy", (pointer, i32, i64, i32, pointer, pointer, pointer), strict=True))
    c_layout = type("CLayout", (ctypes.Structure,), {"_fields_": fields})
    layout = ArgumentLayout(ARGS, trailing=2)
    assert layout.offsets == tuple(getattr(c_layout, name).offset for name, _ in fields) == OFFSETS
    assert layout.struct.size == ctypes.sizeof(c_layout)
    buffer, values = ctypes.create_string_buffer(b"\xff" * layout.struct.size, layout.struct.size), _values()
    layout.pack(buffer, values)
    packed = c_layout.from_buffer(buffer)
    assert (packed.q, packed.l) == (values[0].data_ptr(), values[4].data_ptr())
    assert (packed.n, packed.s, packed.b, packed.x, packed.y) == (5, -(2**40), -6, None, None)


def test_a_tensor_map_lies_before_its_sizes_and_strides() -> None:
    tensor, args = torch.zeros(2, 3, 5, 16), (Arg("n", "i32"), Arg("k_tiles", "tiles<fp16>"))
    driver = MapDriver()
    layout = ArgumentLayout(args, 1, [launcher.TensorMaps(driver, "attend", "fp16", [1, 1, 64, 64], 3)])
    buffer = ctypes.create_string_buffer(layout.struct.size)
    layout.pack(buffer, [9, tensor])
    block, at = bytes(buffer), layout.offsets
    assert len(at) == 1 + (1 + 4 + 4) + 1
    assert block[at[1] : at[1] + 128] == bytes(range(128))
    assert [int.from_bytes(block[o : o + 4], "little") for o in at[:1] + at[2:6]] == [9, 2, 3, 5, 16]
    assert [int.from_bytes(block[o : o + 8], "little") for o in at[6:]] == [240, 80, 16, 1, 0]
    with pytest.raises(ag.ArgumentError, match=r"7 is no tiles<fp16>"):
        layout.pack(buffer, [9, 7])


def test_a_tensor_map_may_stand_alone() -> None:
    args = (Arg("k_tiles", "tiles<fp16>"), Arg("n", "i32"))
    encoder = launcher.TensorMaps(MapDriver(), "attend", "fp16", [1, 1, 64, 64], 3)
    layout = ArgumentLayout(args, 0, [encoder], sized_maps=False)
    buffer = ctypes.create_string_buffer(layout.struct.size)
    layout.pack(buffer, [torch.zeros(2, 3, 5, 16), 9])
    assert layout.offsets == (0, 128)
    assert bytes(buffer) == bytes(range(128)) + (9).to_bytes(4, "little")


class MapDriver:
    """Notes what is to be encoded; refuses strides of 0."""

    def __init__(self) -> None:
        self.encoded: list[Any] = []
        self.CUtensorMapDataType = SimpleNamespace(
            CU_TENSOR_MAP_DATA_TYPE_BFLOAT16="bf16", CU_TENSOR_MAP_DATA_TYPE_FLOAT16="fp16"
        )
        self.CUtensorMapInterleave = SimpleNamespace(CU_TENSOR_MAP_INTERLEAVE_NONE=0)
        self.CUtensorMapL2promotion = SimpleNamespace(CU_TENSOR_MAP_L2_PROMOTION_L2_128B=2)
        self.CUtensorMapFloatOOBfill = SimpleNamespace(CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE=0)
        self.CUtensorMapSwizzle = self.cuuint32_t = self.cuuint64_t = int
        self._map = ctypes.create_string_buffer(bytes(range(128)), 128)

    def cuTensorMapEncodeTiled(self, *arguments: Any) -> tuple[int, Any]:
        self.encoded.append(arguments)
        return int(0 in arguments[4]), SimpleNamespace(getPtr=lambda: ctypes.addressof(self._map))


def test_tensor_maps_are_encoded_once_for_each_place_and_shape() -> None:
    driver = MapDriver()
    maps = launcher.TensorMaps(driver, "attend", "bf16", [1, 1, 64, 64], 3)
    tensor = torch.zeros(1, 10, 3, 128, dtype=torch.bfloat16).transpose(1, 2)
    assert maps(tensor) == maps(tensor) == [bytes(range(128)), 1, 3, 10, 128, 3840, 128, 384, 1]
    # Innermost first; strides in bytes, without the innermost, and 16 for a single row.
    sizes, strides, box = [128, 10, 3, 1], [768, 256, 16], [64, 64, 1, 1]
    assert driver.encoded == [("bf16", 4, tensor.data_ptr(), sizes, strides, box, [1] * 4, 0, 3, 2, 0)]
    maps(tensor[:, :2])
    assert len(driver.encoded) == 2
    assert maps(tensor[:0])[0] == bytes(128)
    assert len(driver.encoded) == 2
    with pytest.raises(RuntimeError, match=r"kernel attend: cuTensorMapEncodeTiled\(.*failed"):
        maps(torch.zeros(1, 3, 1, 128, dtype=torch.bfloat16).expand(2, 3, 10, 128))


def test_a_launch_passes_shape_stream_and_arguments(driver: NotingDriver, tmp_path: Path) -> None:
    launch, values = _load(tmp_path), _values()
    assert driver.calls == [("push", 7), ("shared", SHARED), ("pop",)]
    launch(12, values)
    words = (values[0].data_ptr(), 5, -(2**40), -6, values[4].data_ptr(), 0, 0)
    assert driver.calls[3:] == [("launch", b"image.attend", 12, 1, 1, THREADS, 1, 1, SHARED, 100, words)]


def test_little_shared_memory_needs_no_leave(driver: NotingDriver, tmp_path: Path) -> None:
    _load(tmp_path, shared=48 << 10)
    assert driver.calls == [("push", 7), ("pop",)]


def test_another_current_device_is_restored(driver: NotingDriver, tmp_path: Path) -> None:
    launch = _load(tmp_path, "cuda:1")
    driver.calls.clear()
    launch(1, _values())
    assert [call[0] for call in driver.calls] == ["push", "launch", "pop"]
    assert driver.calls[0] == ("push", 8)
    assert driver.launches()[0][8] == 101
    driver.calls.clear()
    driver.status = OUT_OF_RESOURCES
    with pytest.raises(RuntimeError):
        launch(1, _values())
    assert [call[0] for call in driver.calls] == ["push", "launch", "pop"]


def test_an_error_names_kernel_device_call_and_reason(driver: NotingDriver, tmp_path: Path) -> None:
    launch = _load(tmp_path)
    driver.status = OUT_OF_RESOURCES
    with pytest.raises(RuntimeError) as error:
        launch(3, _values())
    assert str(error.value) == (
        "kernel attend on cuda:0: cuLaunchKernel(grid 3, 128 threads, 61440 bytes shared) failed: "
        "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: too many resources requested for launch"
    )
    driver.status = 200
    with pytest.raises(RuntimeError, match="the driver may be older than the toolkit"):
        _load(tmp_path)


def test_the_grid_is_checked(driver: NotingDriver, tmp_path: Path) -> None:
    launch = _load(tmp_path)
    launch(0, _values())
    assert not driver.launches()
    launch(MAX_GRID, _values())
    assert driver.launches()[0][1] == MAX_GRID
    for grid in (-1, MAX_GRID + 1):
        with pytest.raises(ag.ArgumentError, match=f"attend cannot be launched with {grid} programs"):
            launch(grid, _values())
    assert len(driver.launches()) == 1


def test_resident_blocks_are_as_many_as_fit_the_device(
    driver: NotingDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    launch = _load(tmp_path, resident=2)
    launch(1000, _values())
    launch(7, _values())
    assert [call[1] for call in driver.launches()] == [264, 7]


def test_values_that_do_not_fit_are_named(driver: NotingDriver, tmp_path: Path) -> None:
    launch, (q, tokens, stride, batch, lse) = _load(tmp_path), _values()
    with pytest.raises(ag.ArgumentError, match="2147483648 is no i32") as error:
        launch(1, (q, 2**31, stride, batch, lse))
    assert error.value.where == "launch, argument num_tokens"
    with pytest.raises(ag.ArgumentError, match=r"5 is no \*fp32"):
        launch(1, (q, tokens, stride, batch, 5))
    with pytest.raises(ag.ArgumentError, match="a tensor is no i64"):
        launch(1, (q, tokens, lse, batch, lse))
    with pytest.raises(ag.ArgumentError, match="the kernel takes 5 arguments, not 4"):
        launch(1, (q, tokens, stride, batch))
    assert not driver.launches()


def test_threads_do_not_share_packed_arguments(driver: NotingDriver, tmp_path: Path) -> None:
    launch, (q, _, stride, batch, lse) = _load(tmp_path), _values()
    together = threading.Barrier(4)
    pack = launch._layout.pack  # type: ignore[attr-defined]

    def pack_then_wait(buffer: Any, values: Sequence[torch.Tensor | int]) -> None:
        pack(buffer, values)
        together.wait()

    launch._layout.pack = pack_then_wait  # type: ignore[attr-defined]
    threads = [threading.Thread(target=launch, args=(1, (q, i, stride, batch, lse))) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(call[-1][1] for call in driver.launches()) == [0, 1, 2, 3]


def test_loading_inside_a_capture_says_to_warm_up(
    driver: NotingDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ag.UnsupportedError, match="attend cannot be loaded now") as error:
        _load(tmp_path)
    assert "call ops.warmup()" in error.value.fix
    assert not driver.calls


def test_missing_bindings_say_what_to_install(
    driver: NotingDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'cuda'")

    monkeypatch.setattr(launcher, "_bindings", missing)
    with pytest.raises(ag.BuildError, match=r"there is no cuda\.bindings") as error:
        _load(tmp_path)
    assert error.value.fix == "pip install cuda-bindings"
