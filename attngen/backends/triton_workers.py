"""Worker processes that compile with Triton, started on demand and kept for the next kernel.

A worker serves one kernel at a time, and as many run as kernels are built at once. An idle one soon ends by itself.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import cache
from typing import Any

from attngen.backends import triton_worker

Process = subprocess.Popen[bytes]


def run_in_worker(environment: Mapping[str, str], request: Mapping[str, Any]) -> dict[str, Any]:
    """What a worker answers to ``request``, see :func:`attngen.backends.triton_worker.compile_kernel`.

    Args:
        environment: all that the worker sees of the environment.
        request: JSON-serializable.
    """
    return _pool().run(dict(environment), request)


class _Workers:
    """The idle workers of this process, each with the environment it was started in."""

    def __init__(self) -> None:
        self._idle: list[tuple[dict[str, str], Process]] = []
        self._lock = threading.Lock()

    def run(self, environment: dict[str, str], request: Mapping[str, Any]) -> dict[str, Any]:
        """Ask an idle worker; ask a fresh one where there is none, or where it has ended."""
        worker = self._take(environment)
        answer = _ask(worker, request) if worker is not None else None
        if worker is None or answer is None:
            worker = _start(environment)
            answer = _ask(worker, request)
        if answer is None:
            status = worker.returncode
            end = f"signal {-status}" if status < 0 else f"exit status {status}"
            return {"error": f"Triton's compiler crashed: {end}"}
        with self._lock:
            self._idle.append((environment, worker))
        return answer

    def _take(self, environment: dict[str, str]) -> Process | None:
        with self._lock:
            for index, (theirs, worker) in enumerate(self._idle):
                if theirs == environment:
                    del self._idle[index]
                    return worker
        return None

    def close(self) -> None:
        """End the idle workers."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, worker in idle:
            _close(worker)

    def forget(self) -> None:
        """Leave the workers to the parent, in a process that was forked from it."""
        idle = self._idle
        self.__init__()  # type: ignore[misc]
        for _, worker in idle:
            worker.returncode = 0
            _close(worker)


@cache
def _pool() -> _Workers:
    workers = _Workers()
    atexit.register(workers.close)
    os.register_at_fork(after_in_child=workers.forget)
    return workers


def _start(environment: dict[str, str]) -> Process:
    # -P: the script's own folder holds a module called triton.
    return subprocess.Popen(
        [sys.executable, "-P", "-B", triton_worker.__file__],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def _ask(worker: Process, request: Mapping[str, Any]) -> dict[str, Any] | None:
    """The answer; ``None`` if the worker has ended."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(json.dumps(request).encode() + b"\n")
        worker.stdin.flush()
        line = worker.stdout.readline()
    except BrokenPipeError:
        line = b""
    except BaseException:
        worker.kill()  # else its answer would be taken for the next one's
        _close(worker)
        raise
    if line:
        answer: dict[str, Any] = json.loads(line)
        return answer
    _close(worker)
    return None


def _close(worker: Process) -> None:
    """Close the pipes, which ends an idle worker, and wait for the end."""
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:  # what a dead worker has not read
                continue
    worker.wait()
