"""Many jobs at once, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.queues import SimpleQueue
from typing import Any, TypeVar

from attngen.errors import AttngenError, BuildError

Say = Callable[[str], None]
_Job = TypeVar("_Job")
_Outcome = TypeVar("_Outcome")


def run_jobs(
    function: Callable[[_Job, Say], _Outcome], jobs: Sequence[_Job], workers: int, say: Say
) -> Iterator[tuple[_Job, _Outcome | AttngenError]]:
    """The jobs in their order with what ``function`` makes of them, each as soon as it and those before it are done.

    Args:
        function: of a module, called with a job and a function that takes a line for people; it returns its errors.
        workers: processes; jobs run in this one where one is enough.
        say: takes the lines of all jobs.
    """
    if min(workers, len(jobs)) <= 1:
        for job in jobs:
            yield job, function(job, say)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__])
    lines = context.SimpleQueue()

    def listen() -> None:
        for line in iter(lines.get, None):
            say(line)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        with ProcessPoolExecutor(min(workers, len(jobs)), context, _start, (dict(os.environ), lines)) as pool:
            futures = [pool.submit(_run, function, job) for job in jobs]
            for job, future in zip(jobs, futures, strict=True):
                yield job, _result(job, future)
    finally:
        lines.put(None)
        listener.join()
        lines.close()


def _result(job: object, future: Future[Any]) -> Any:
    try:
        return future.result()
    except BrokenProcessPool as error:
        return BuildError(
            "a process that builds kernels has died",
            where=f"{job}, or one beside it",
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


def _run(function: Callable[[_Job, Say], _Outcome], job: _Job) -> _Outcome:
    assert _lines is not None
    return function(job, _lines.put)
