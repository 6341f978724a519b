"""Interleaved timing of contenders, and results written with the machine they came from."""

from __future__ import annotations

import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Row:
    """One contender on one case: median milliseconds over rounds, and the rate that follows from it."""

    case: str
    contender: str
    ms: float
    rate: float
    unit: str
    error: float


def time_cpu(contenders: dict[str, Callable[[], Any]], *, rounds: int = 15, seconds: float = 0.1) -> dict[str, float]:
    """Median milliseconds of each, run in turn in a random order."""
    calls = {}
    for name, fn in contenders.items():
        fn(), fn()
        began = time.perf_counter()
        fn()
        calls[name] = max(1, int(seconds / max(time.perf_counter() - began, 1e-6)))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name in random.sample(list(contenders), len(contenders)):
            began = time.perf_counter()
            for _ in range(calls[name]):
                contenders[name]()
            samples[name].append((time.perf_counter() - began) / calls[name] * 1e3)
    return {name: statistics.median(values) for name, values in samples.items()}


def time_gpu(contenders: dict[str, Callable[[], Any]], *, rounds: int = 12, calls: int = 5) -> dict[str, float]:
    """Median milliseconds of each by events, in turn in a random order, the L2 cache flushed before each sample."""
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    for fn in contenders.values():
        for _ in range(3):
            fn()
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name in random.sample(list(contenders), len(contenders)):
            flush.zero_()
            torch.cuda._sleep(1_000_000)  # the device waits half a millisecond, in which the host gets ahead of it
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(calls):
                contenders[name]()
            stop.record()
            torch.cuda.synchronize()
            samples[name].append(start.elapsed_time(stop) / calls)
    return {name: statistics.median(values) for name, values in samples.items()}


def as_graph(fn: Callable[[], Any]) -> Callable[[], Any]:
    """``fn`` captured in a CUDA graph, so that launch overhead stays out of the time."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        fn(), fn()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return graph.replay


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of ``exact``."""
    got, exact = got.double(), exact.double()
    return float((got - exact).norm() / exact.norm())


def versions() -> dict[str, str]:
    """Of the installed systems that take part on a GPU."""
    names = ("triton", "fa3-fwd", "flash-attn-4", "nvidia-cutlass-dsl", "flashinfer-python")
    found = {name: [d.version for d in distributions(name=name)] for name in names}
    return {name: numbers[0] for name, numbers in found.items() if numbers}


def report(name: str, rows: list[Row], **notes: Any) -> None:
    """Print a table and write ``results/<name>-<machine>.json``."""
    for row in rows:
        print(f"{row.case:44s} {row.contender:16s} {row.ms:10.4f} ms {row.rate:9.2f} {row.unit:8s} err {row.error:.1e}")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    machine = gpu or platform.processor() or platform.machine()
    record = {
        "machine": machine,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": date.today().isoformat(),
        **notes,
        "rows": [asdict(row) for row in rows],
    }
    RESULTS.mkdir(exist_ok=True)
    slug = "".join(c if c.isalnum() else "-" for c in machine.lower()).strip("-")
    (RESULTS / f"{name}-{slug}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
