"""The launcher on a GPU: streams, graphs, devices, errors, and what a launch costs the host."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import attngen as ag
from attngen.backends import launcher
from attngen.backends.base import Launch
from attngen.backends.triton import TritonBackend
from attngen.target import Target
from tests.backends.triton_kernels import PRODUCT, PRODUCT_ARGS, SCALE, SCALE_ARGS, build, make_plan

pytestmark = pytest.mark.gpu
TOKENS = 1000


def _target() -> str:
    return str(Target.from_cuda_capability(*torch.cuda.get_device_capability()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scale")
    build(SCALE, make_plan("scale", SCALE_ARGS, _target()), folder)
    return folder


def _load(folder: Path, device: str = "cuda:0", threads: int = 128) -> Launch:
    return launcher.load(
        folder / "scale.cubin",
        "scale",
        SCALE_ARGS,
        torch.device(device),
        threads=threads,
        shared=0,
        trailing_pointers=2,
    )


class Case:
    """Tensors of one call of ``scale``."""

    def __init__(self, device: str = "cuda:0") -> None:
        self.q = torch.randn(TOKENS, 64, device=device)
        self.lse = torch.randn(TOKENS, device=device)
        self.out = torch.full_like(self.q, float("nan"))
        self.values = (self.q, 0, 64, 0, self.out, 0, 64, 0, self.lse, TOKENS, 63)

    def check(self) -> None:
        torch.cuda.synchronize(self.q.device)
        assert torch.equal(self.out, 2 * self.q + self.lse[:, None])


def test_launches_on_the_current_stream(folder: Path) -> None:
    launch, case = _load(folder), Case()
    assert torch.isnan(case.out).all()  # loads what the check below needs: loading waits for all streams
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)
        launch(63, case.values)
    assert torch.isnan(case.out).all()  # on the default stream, while the other still sleeps
    stream.synchronize()
    case.check()


def test_a_graph_captures_and_replays_it(folder: Path) -> None:
    launch, case = _load(folder), Case()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(63, case.values)
    assert torch.isnan(case.out).all()
    graph.replay()
    case.check()
    case.q.normal_()
    graph.replay()
    case.check()


def test_loading_inside_a_capture_is_refused(folder: Path) -> None:
    case = Case()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        case.out.zero_()
        with pytest.raises(ag.UnsupportedError, match=r"call ops\.warmup\(\)"):
            _load(folder)
    launch = _load(folder)
    launch(63, case.values)
    case.check()


def test_too_many_threads_are_an_error_and_nothing_else_breaks(folder: Path) -> None:
    case = Case()
    with pytest.raises(RuntimeError, match=r"kernel scale on cuda:0: cuLaunchKernel\(grid 63, 4096 threads"):
        _load(folder, threads=4096)(63, case.values)
    _load(folder)(63, case.values)
    case.check()


def test_a_damaged_binary_is_an_error(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "scale.cubin").write_bytes(b"no machine code")
    with pytest.raises(RuntimeError, match="cuModuleLoadData failed: CUDA_ERROR"):
        _load(tmp_path)


def test_a_thread_that_never_touched_cuda_launches(folder: Path) -> None:
    launch, case = _load(folder), Case()
    thread = threading.Thread(target=launch, args=(63, case.values))
    thread.start()
    thread.join()
    case.check()


def test_the_backend_loads_a_kernel_with_much_shared_memory(tmp_path: Path) -> None:
    plan = make_plan("product", PRODUCT_ARGS, _target(), num_warps=8, num_stages=3)
    result = build(PRODUCT, plan, tmp_path)
    launch = TritonBackend().load(tmp_path / result.binary, result.metadata, plan, torch.device("cuda:0"))
    q, k = (torch.randn(7, 128, 64, device="cuda", dtype=torch.float16) for _ in range(2))
    out = torch.full((128, 128), float("nan"), device="cuda")
    launch(1, (q, q.stride(0), q.stride(1), 0, k, k.stride(0), k.stride(1), 0, out, 7))
    exact = (q.double() @ k.double().transpose(1, 2)).sum(0)
    assert result.metadata["shared"] > 48 << 10
    assert (out - exact).abs().max() < 1e-3


def test_the_current_device_stays(folder: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    launch, case = _load(folder, "cuda:1"), Case("cuda:1")
    assert torch.cuda.current_device() == 0
    launch(63, case.values)
    assert torch.cuda.current_device() == 0
    torch.zeros(1, device="cuda")
    case.check()


def _microseconds(call: Callable[[], object], repeats: int = 200) -> float:
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        best = min(best, (time.perf_counter() - start) / repeats)
    return best * 1e6


def test_a_launch_costs_the_host_little(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launch, case = _load(folder), Case()
    one = torch.zeros(1, device="cuda")
    ours, torchs = _microseconds(lambda: launch(63, case.values)), _microseconds(lambda: one.add_(1))
    with capsys.disabled():
        print(f"\nlaunch of 11 arguments: {ours:.1f} us of host time; torch add_: {torchs:.1f} us")
    assert ours < 20
