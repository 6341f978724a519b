"""Builds many ops ahead of time, and says what came of it."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from attngen.compiler import compile as compile_spec
from attngen.errors import AttngenError, BuildError, UnsupportedError
from attngen.ops.op import BuiltKernel
from attngen.settings import Settings
from attngen.spec import AttentionSpec
from attngen.store import Store
from attngen.store.artifact import read
from attngen.target import Target
from attngen.variant import OpName


@dataclass(frozen=True)
class Job:
    """One op to build.

    Attributes:
        name: of the spec, for people.
        spec, target, op: as for :func:`attngen.compile`.
        backend: likewise; empty for the fastest.
        required: whether it is a failure if there is no such op; else only a spec with no op at all on a target is.
    """

    name: str
    spec: AttentionSpec
    target: Target
    op: OpName
    backend: str = ""
    required: bool = False


@dataclass(frozen=True)
class KernelReport:
    """A kernel that is ready.

    Attributes:
        spec: name of the spec it was wanted for.
        entry, target: what it is.
        built: whether it was built now, not found in a cache.
        seconds: how long it took to build, now or then.
        size: bytes of its files.
        metadata: what its toolchain says of it.
    """

    spec: str
    entry: str
    target: Target
    built: bool
    seconds: float
    size: int
    metadata: Mapping[str, Any]


@dataclass
class BuildReport:
    """What came of many jobs.

    Attributes:
        kernels: those that are ready, in the order of the jobs.
        notes: ops that do not exist for a spec or target, in words.
        failures: in the order of the jobs.
        seconds: for everything.
    """

    kernels: list[KernelReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[AttngenError] = field(default_factory=list)
    seconds: float = 0.0


def build_all(jobs: Sequence[Job], console: Console, workers: int, into: Path | None = None) -> BuildReport:
    """Build, or find, the kernels of every job; a failure does not stop the others.

    Args:
        jobs: what to build.
        console: shows the progress; without a terminal, a line a build.
        workers: jobs at once, each in a process of its own.
        into: build into this folder, whatever the caches hold, and make it fit to be shipped.

    Raises:
        AttngenError: ``into`` cannot be written.
    """
    report, start = BuildReport(), time.perf_counter()
    ready: set[tuple[str, Target]] = set()
    missing: list[tuple[Job, UnsupportedError]] = []
    with _building_into(into), _progress(console) as progress:
        task = progress.add_task("looking in the cache", total=len(jobs))

        def say(line: str) -> None:
            progress.update(task, description=f"building {line}")
            if not console.is_terminal:
                console.print(f"building {line}", soft_wrap=True)

        run = _run_here if min(workers, len(jobs)) <= 1 else partial(_run_in_processes, workers)
        for job, outcome in run(jobs, say):
            progress.advance(task)
            if isinstance(outcome, list):
                ready.add((job.name, job.target))
                report.kernels += outcome
            elif isinstance(outcome, UnsupportedError) and not job.required:
                missing.append((job, outcome))
            else:
                report.failures.append(outcome)
    for job, error in missing:
        if (job.name, job.target) in ready:
            report.notes.append(f"{job.name} has no {job.op} for {job.target}: {error.what}")
        else:
            report.failures.append(error)
    report.failures = list({str(error): error for error in report.failures}.values())
    report.seconds = time.perf_counter() - start
    return report


_Outcome = list["KernelReport"] | AttngenError
_Say = Callable[[str], None]


@contextmanager
def _building_into(folder: Path | None) -> Iterator[None]:
    """Let builds of this process and its workers find and leave kernels in ``folder`` alone."""
    if folder is None:
        yield
        return
    before = dict(os.environ)
    for name in ("ATTNGEN_CACHE_PATH", "ATTNGEN_REQUIRE_CACHED"):
        os.environ.pop(name, None)
    os.environ["ATTNGEN_CACHE_DIR"] = str(folder.absolute())
    try:
        with Store.from_settings(Settings.from_env()).shipping():
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run_here(jobs: Sequence[Job], say: _Say) -> Iterator[tuple[Job, _Outcome]]:
    return ((job, _outcome(job, say)) for job in jobs)


def _run_in_processes(workers: int, jobs: Sequence[Job], say: _Say) -> Iterator[tuple[Job, _Outcome]]:
    """The jobs in their order, each as soon as it and those before it are done."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    lines = context.SimpleQueue()

    def listen() -> None:
        for line in iter(lines.get, None):
            say(line)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        with ProcessPoolExecutor(min(workers, len(jobs)), context, _start, (dict(os.environ), lines)) as pool:
            futures = [pool.submit(_run, job) for job in jobs]
            for job, future in zip(jobs, futures, strict=True):
                yield job, _result(job, future)
    finally:
        lines.put(None)
        listener.join()
        lines.close()


def _result(job: Job, future: Future[_Outcome]) -> _Outcome:
    try:
        return future.result()
    except BrokenProcessPool as error:
        return BuildError(
            "a process that builds kernels has died",
            where=f"{job.name}, {job.op} for {job.target}, or one beside it",
            why=str(error),
            fix="free some memory, or build less at once: --jobs 1",
        )


_lines: SimpleQueue[str | None] | None = None


def _start(environment: Mapping[str, str], lines: SimpleQueue[str | None]) -> None:
    """Make this process a worker, in the environment of the one that asks."""
    global _lines  # noqa: PLW0603  # what a worker knows of its pool
    os.environ.clear()
    os.environ.update(environment)
    _lines = lines


def _run(job: Job) -> _Outcome:
    assert _lines is not None
    return _outcome(job, _lines.put)


def _outcome(job: Job, say: _Say) -> _Outcome:
    built: set[str] = set()

    def progress(line: str) -> None:
        built.add(line)
        say(line)

    try:
        ops = compile_spec(job.spec, target=job.target, ops=(job.op,), backend=job.backend or None, progress=progress)
        return [_report(job, kernel, built) for kernel in ops.op(job.op).kernels]
    except AttngenError as error:
        return error


def _report(job: Job, kernel: BuiltKernel, built: set[str]) -> KernelReport:
    artifact = read(kernel.folder)
    return KernelReport(
        spec=job.name,
        entry=kernel.plan.entry,
        target=job.target,
        built=f"{kernel.plan.entry} for {kernel.plan.target}" in built,
        seconds=artifact.manifest.build_seconds,
        size=artifact.size,
        metadata=kernel.metadata,
    )


def _progress(console: Console) -> Progress:
    columns = (
        SpinnerColumn(),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
