"""Builds many ops ahead of time, and says what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from attngen.compiler import compile as compile_spec
from attngen.errors import AttngenError, UnsupportedError
from attngen.ops.op import BuiltKernel
from attngen.spec import AttentionSpec
from attngen.store.artifact import read
from attngen.target import Target
from attngen.variant import OpName


@dataclass(frozen=True)
class Job:
    """One op to build.

    Attributes:
        name: of the spec, for people.
        spec, target, op, backend: as for :func:`attngen.compile`.
    """

    name: str
    spec: AttentionSpec
    target: Target
    op: OpName
    backend: str


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


def build_all(jobs: Sequence[Job], console: Console, workers: int, *, every_op: bool) -> BuildReport:
    """Build, or find, the kernels of every job; a failure does not stop the others.

    Args:
        jobs: what to build.
        console: shows the progress; without a terminal, a line a build.
        workers: jobs at once.
        every_op: whether an op that cannot be is a failure; else only a spec with no op at all on a target is.
    """
    report, start = BuildReport(), time.perf_counter()
    ready: set[tuple[str, Target]] = set()
    missing: list[tuple[Job, UnsupportedError]] = []
    with _progress(console) as progress, ThreadPoolExecutor(max_workers=workers) as pool:
        task = progress.add_task("looking in the cache", total=len(jobs))

        def say(line: str) -> None:
            progress.update(task, description=f"building {line}")
            if not console.is_terminal:
                console.print(f"building {line}", soft_wrap=True)

        def run(job: Job) -> list[KernelReport] | AttngenError:
            try:
                return _build(job, say)
            except AttngenError as error:
                return error
            finally:
                progress.advance(task)

        for job, outcome in zip(jobs, pool.map(run, jobs), strict=True):
            if isinstance(outcome, list):
                ready.add((job.name, job.target))
                report.kernels += outcome
            elif isinstance(outcome, UnsupportedError) and not every_op:
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


def _build(job: Job, say: Callable[[str], None]) -> list[KernelReport]:
    built: set[str] = set()

    def progress(line: str) -> None:
        built.add(line)
        say(line)

    ops = compile_spec(job.spec, target=job.target, ops=(job.op,), backend=job.backend, progress=progress)
    return [_report(job, kernel, built) for kernel in ops.op(job.op).kernels]


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
