"""Real processes for tests of the store: ``start(build, env=...)`` runs :func:`build` in one."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pwd
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch

import attngen
from attngen.settings import Settings
from attngen.store import Store, private
from tests.store.toolchains import KERNEL, CompilerToolchain, FakeToolchain, call, other_kernel

STRANGER = 12345
_REPOSITORY = Path(__file__).parents[2]


@dataclass
class Child:
    """A running process, the leader of its own process group."""

    process: ForkServerProcess
    reports: Connection

    def report(self, timeout: float = 60.0) -> dict[str, Any]:
        """Wait for the end and return what the action found; a crash fails the test."""
        if not self.reports.poll(timeout):
            self.kill_group()
            raise AssertionError(f"the child said nothing for {timeout} s")
        report: dict[str, Any] = self.reports.recv()
        self._join()
        assert self.process.exitcode == 0
        return report

    def kill_group(self) -> None:
        pid = self.process.pid
        assert pid is not None
        os.killpg(pid, signal.SIGKILL)
        self._join()
        assert self.process.exitcode == -signal.SIGKILL

    def _join(self) -> None:
        self.process.join(10)
        self.reports.close()


def start(action: Callable[..., dict[str, Any]], *, env: Mapping[str, str] | None = None, **arguments: Any) -> Child:
    """Run ``action`` in a new process with ``env`` for its environment, save ``PATH``."""
    receiver, sender = context().Pipe(duplex=False)
    environment = {"PATH": os.environ["PATH"], **(env or {})}
    process = context().Process(target=_lead, args=(action, environment, arguments, sender))
    process.start()
    sender.close()
    return Child(process, receiver)


@cache
def context() -> ForkServerContext:
    """Processes forked from a small server that has imported everything once."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload([__name__])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(attngen.__file__).parents[1]), str(_REPOSITORY)])
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return made


def _lead(
    action: Callable[..., dict[str, Any]], environment: Mapping[str, str], arguments: dict[str, Any], sender: Connection
) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    sender.send(action(**arguments))


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter and write to, as /tmp is; pytest's own are closed to others."""
    folder = Path(tempfile.mkdtemp(prefix="attngen-test-"))
    folder.chmod(0o1777)
    try:
        yield folder
    finally:
        for path in (folder, *folder.rglob("*")):
            if path.is_dir():
                path.chmod(0o700)
        shutil.rmtree(folder)


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))

    def starting(self, level: str, text: str) -> list[str]:
        return [message for name, message in self.lines if name == level and message.startswith(text)]


def build(
    *,
    delay: float = 0.0,
    linger: float = 0.0,
    marker: Path | None = None,
    compiler: bool = False,
    number: int = 7,
    stranger: bool = False,
    notice: float = private.WAIT_BEFORE_NOTICE,
) -> dict[str, Any]:
    """Build one kernel with the settings of the environment, and live on for ``linger`` seconds."""
    if stranger:
        become_stranger()
    private.WAIT_BEFORE_NOTICE = notice
    records = _listen()
    began = time.perf_counter()
    try:
        store = Store.from_settings(Settings.from_env())
        if compiler:
            artifact = store.get_or_build(other_kernel(number), CompilerToolchain(delay, marker), {})
            result: object = call(artifact)
        else:
            artifact = store.get_or_build(KERNEL, FakeToolchain(delay=delay, marker=marker), {})
            result = artifact.binary.read_bytes().decode()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        time.sleep(linger)
    return {
        "result": result,
        "folder": str(artifact.folder),
        "seconds": time.perf_counter() - began,
        "builds": len(records.starting("INFO", "attngen build ")),
        "warnings": records.starting("WARNING", ""),
    }


def decode(*, umask: int | None = None) -> dict[str, Any]:
    """Compile decode of causal GQA for this CPU, and call it on probe data: zero queries average the values 0 .. 8."""
    if umask is not None:
        os.umask(umask)
    records = _listen()
    torch.set_num_threads(1)
    spec = attngen.AttentionSpec(
        heads=attngen.GQA(num_qo_heads=4, num_kv_heads=2, head_dim=64), mask=attngen.Causal(), dtype="fp32"
    )
    ops = attngen.compile(spec, target="cpu", ops=("decode",), backend="cpp")
    k = torch.zeros(1, 9, 2, 64)
    v = torch.arange(9.0).reshape(1, 9, 1, 1).expand(1, 9, 2, 64).contiguous()
    out, lse = ops.decode(torch.zeros(1, 4, 64), k, v, return_lse=True)
    return {
        "mean position": out.unique().tolist(),
        "visible keys": lse.double().exp().round(decimals=3).unique().tolist(),
        "builds": records.starting("INFO", "attngen build "),
        "warnings": records.starting("WARNING", ""),
    }


DECODED = {"mean position": [4.0], "visible keys": [9.0]}
DECODE_KERNELS = 2  # decode and merge


def become_stranger() -> None:
    """Run as a user that no password file knows; without the right to change users, only seem to."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(STRANGER)
        os.setuid(STRANGER)
    else:

        def unknown(uid: int) -> Any:
            raise KeyError(f"getpwuid(): uid not found: {uid}")

        pwd.getpwuid = unknown


def _listen() -> _Records:
    records = _Records()
    log = logging.getLogger("attngen")
    log.setLevel(logging.INFO)
    log.addHandler(records)
    return records


def race(rounds: int, number: int, root: Path, barrier: Any, results: Any) -> None:
    """One of several racers: build cold and call, in step with the others, then again warm; once a round."""
    records = _listen()
    for turn in range(rounds):
        kernel = other_kernel(turn)
        store = Store.from_settings(Settings(cache_dir=str(root)))
        values = []
        for _ in range(2):
            barrier.wait(60)
            values.append(call(store.get_or_build(kernel, CompilerToolchain(), {})))
        results.put((number, turn, values))
    results.put((number, "builds", records.starting("INFO", "attngen build ")))
    results.put((number, "warnings", records.starting("WARNING", "")))
