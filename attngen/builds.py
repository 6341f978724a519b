"""Builds many ops ahead of time, and says what came of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from attngen.backends.registry import serving
from attngen.choice import tuning_key
from attngen.compiler import compile as compile_spec
from attngen.compiler import plan_op
from attngen.errors import AttngenError, UnsupportedError
from attngen.ops.op import BuiltKernel
from attngen.ops.parts import parts
from attngen.settings import Settings
from attngen.signature import CallName
from attngen.spec import AttentionSpec
from attngen.store import Store, Tuning, Tunings
from attngen.store.artifact import read
from attngen.target import Target
from attngen.terminal import progress_bar
from attngen.workers import Say, run_jobs


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
    op: CallName
    backend: str = ""
    required: bool = False

    def __str__(self) -> str:
        return f"{self.name}, {self.op} for {self.target}"


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
    tunings = [] if into is None else _tunings_of(jobs)
    with _building_into(into, tunings), progress_bar(console) as progress:
        task = progress.add_task("looking in the cache", total=len(jobs))

        def say(line: str) -> None:
            progress.update(task, description=f"building {line}")
            if not console.is_terminal:
                console.print(f"building {line}", soft_wrap=True)

        for job, outcome in run_jobs(_outcome, jobs, workers, say):
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


@contextmanager
def _building_into(folder: Path | None, tunings: Sequence[Tuning]) -> Iterator[None]:
    """Let builds of this process and its workers find and leave kernels in ``folder`` alone, tuned like these."""
    if folder is None:
        yield
        return
    before = dict(os.environ)
    for name in ("ATTNGEN_CACHE_PATH", "ATTNGEN_REQUIRE_CACHED"):
        os.environ.pop(name, None)
    os.environ["ATTNGEN_CACHE_DIR"] = str(folder.absolute())
    try:
        store = Store.from_settings(Settings.from_env())
        with store.shipping():
            for record in tunings:
                Tunings(store).put(record)
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _outcome(job: Job, say: Say) -> _Outcome:
    built: set[str] = set()

    def progress(line: str) -> None:
        built.add(line)
        say(line)

    try:
        ops = compile_spec(job.spec, target=job.target, ops=(job.op,), backend=job.backend or None, progress=progress)
        return [_report(job, kernel, built) for op in ops.ops_of(job.op) for kernel in op.kernels]
    except AttngenError as error:
        return error


def _tunings_of(jobs: Sequence[Job]) -> list[Tuning]:
    """What tunings of the jobs' ops have found, by every backend that may serve them."""
    tunings, found = Tunings(Store.from_settings(Settings.from_env())), []
    for job in jobs if tunings.any() else ():
        for name in (job.backend,) if job.backend else serving(job.target):
            with suppress(UnsupportedError):
                for spec, op in parts(job.spec, job.op):
                    plan = plan_op(spec, op, job.target, name)
                    found.append(tunings.find(tuning_key(plan)) if plan.kernels else None)
    return [record for record in found if record is not None]


def _report(job: Job, kernel: BuiltKernel, built: set[str]) -> KernelReport:
    kernel = kernel.present()
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
