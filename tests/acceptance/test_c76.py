"""C76: two threads make the first call of a variant: a crash in half-made state, or everything compiled twice."""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import attngen as ag
from attngen.backends.registry import backend as get_backend
from attngen.codegen.render import RenderedKernel
from attngen.codegen.toolchain import BuildResult
from tests.acceptance.probes import Place, assert_near, declare, pack, probe

THREADS = 16
SPEC = declare(2, 1, mask=ag.Causal(), kv=ag.Paged(page_size=16))
Build = Callable[[Any, RenderedKernel, Path], BuildResult]


@pytest.fixture(autouse=True)
def _cold_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "cache"))


def watch_builds(monkeypatch: pytest.MonkeyPatch, place: Place, failures: int = 0) -> Counter[str]:
    """Count builds by kernel; the first ``failures`` of each take a while and fail."""
    toolchain = type(get_backend(place.backend))
    build: Build = toolchain.build
    counts: Counter[str] = Counter()

    def counted(self: Any, kernel: RenderedKernel, folder: Path) -> BuildResult:
        counts[kernel.entry] += 1
        if counts[kernel.entry] <= failures:
            time.sleep(1.0)
            raise ag.BuildError("the compiler fell over")
        return build(self, kernel, folder)

    monkeypatch.setattr(toolchain, "build", counted)
    return counts


def on_a_barrier(work: Callable[[int], Any]) -> list[Any]:
    """What ``work(thread)`` gives or raises in each of the threads, which start it together."""
    barrier = threading.Barrier(THREADS)

    def run(thread: int) -> Any:
        barrier.wait()
        try:
            return work(thread)
        except Exception as error:
            return error

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(THREADS)))


def call(place: Place, ops: ag.Ops, thread: int) -> torch.Tensor:
    """Decode over values that are offset by the thread's number, in a stream of its own."""
    packed = pack(SPEC, "decode", [probe(SPEC, 1, 40, torch.arange(40) + thread)], place.device)
    if not place.on_gpu:
        return ops.decode(packed.q, *packed.kv, **packed.lengths)
    torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        out = ops.decode(packed.q, *packed.kv, **packed.lengths)
        torch.cuda.current_stream().synchronize()
    return out.cpu()


def check(results: list[Any]) -> None:
    for thread, result in enumerate(results):
        assert isinstance(result, torch.Tensor), result
        assert_near(result, 19.5 + thread)


@pytest.mark.parametrize("shared", [True, False], ids=["one Ops", "an Ops each"])
def test_c76_first_calls_together(kernels: Place, monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    counts = watch_builds(monkeypatch, kernels)
    ops = ag.compile(SPEC, backend=kernels.backend)
    check(
        on_a_barrier(lambda thread: call(kernels, ops if shared else ag.compile(SPEC, backend=kernels.backend), thread))
    )
    assert len(counts) == len(ops.op("decode", torch.device(kernels.device)).kernels)
    assert set(counts.values()) == {1}


def test_c76_while_another_thread_clears_caches(kernels: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = watch_builds(monkeypatch, kernels)
    is_cache = functools._lru_cache_wrapper
    caches = [x for x in gc.get_objects() if type(x) is is_cache and x.__module__.startswith("attngen.")]
    assert caches
    done = threading.Event()

    def clear() -> None:
        while not done.wait(0.001):
            for cache in caches:
                cache.cache_clear()

    clearing = threading.Thread(target=clear)
    clearing.start()
    try:
        check(on_a_barrier(lambda thread: call(kernels, ag.compile(SPEC, backend=kernels.backend), thread)))
    finally:
        done.set()
        clearing.join()
    assert set(counts.values()) == {1}


def test_c76_a_failure_reaches_every_waiter(kernels: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = watch_builds(monkeypatch, kernels, failures=1)
    ops = ag.compile(SPEC, backend=kernels.backend)
    results = on_a_barrier(lambda thread: call(kernels, ops, thread))
    assert [type(result) for result in results] == [ag.BuildError] * THREADS
    assert all("the compiler fell over" in str(result) for result in results)
    check(on_a_barrier(lambda thread: call(kernels, ops, thread)))
    assert set(counts.values()) == {2}
