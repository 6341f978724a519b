"""Interleaved timing of contenders, on the CPU and on a GPU."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch


def time_cpu(
    contenders: Mapping[str, Callable[[], Any]], *, rounds: int = 15, seconds: float = 0.1
) -> dict[str, float]:
    """Median milliseconds of each, run in turn in a random order."""
    calls = {}
    for name, fn in contenders.items():
        fn(), fn()
        began = time.perf_counter()
        fn()
        calls[name] = max(1, int(seconds / max(time.perf_counter() - began, 1e-6)))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    order = random.Random()
    for _ in range(rounds):
        for name in order.sample(list(contenders), len(contenders)):
            began = time.perf_counter()
            for _ in range(calls[name]):
                contenders[name]()
            samples[name].append((time.perf_counter() - began) / calls[name] * 1e3)
    return {name: statistics.median(values) for name, values in samples.items()}


def time_gpu(contenders: Mapping[str, Callable[[], Any]], *, rounds: int = 12, calls: int = 5) -> dict[str, float]:
    """Median milliseconds of each by events, in turn in a random order, the L2 cache flushed before each sample."""
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    for fn in contenders.values():
        for _ in range(3):
            fn()
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    order = random.Random()
    for _ in range(rounds):
        for name in order.sample(list(contenders), len(contenders)):
            flush.zero_()
            # The device waits half a millisecond, in which the host gets ahead of it.
            torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            for _ in range(calls):
                contenders[name]()
            stop.record()
            torch.cuda.synchronize()
            samples[name].append(start.elapsed_time(stop) / calls)
    return {name: statistics.median(values) for name, values in samples.items()}


def as_graph(fn: Callable[[], Any]) -> Callable[[], Any]:
    """``fn`` captured in a CUDA graph, so that launch overhead stays out of the time."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        fn(), fn()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return graph.replay
