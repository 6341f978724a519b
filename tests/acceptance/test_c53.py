"""C53: a process killed during a compile leaves a lock behind, and every later process hangs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.store.children import Child, build, start

SLOW = 1.5


def started(child: Child, marker: Path) -> Child:
    deadline = time.monotonic() + 30
    while not marker.exists():
        assert time.monotonic() < deadline
        assert child.process.is_alive()
        time.sleep(0.005)
    return child


@pytest.mark.parametrize("moment", [0.0, 0.1, SLOW, SLOW + 0.1, SLOW + 0.2])
def test_c53_kill_during_compile_does_not_block_the_next_build(tmp_path: Path, moment: float) -> None:
    env = {"ATTNGEN_CACHE_DIR": str(tmp_path / "cache")}
    marker = tmp_path / "marker"
    victim = started(start(build, env=env, compiler=True, delay=SLOW, marker=marker), marker)
    time.sleep(moment)
    if victim.process.is_alive():
        victim.kill_group()
    else:
        victim.report()  # it was faster than the last moments

    survivor = start(build, env=env, compiler=True).report(timeout=30)
    assert survivor["result"] == 7
    assert survivor["seconds"] < 5.0
    assert survivor["warnings"] == []
    assert list((tmp_path / "cache" / "building").iterdir()) == []


def test_c53_waiter_takes_over_and_says_where_it_waits(tmp_path: Path) -> None:
    env = {"ATTNGEN_CACHE_DIR": str(tmp_path / "cache")}
    marker = tmp_path / "marker"
    victim = started(start(build, env=env, compiler=True, delay=60, marker=marker), marker)
    waiter = start(build, env=env, compiler=True, notice=0.2)
    time.sleep(1.5)
    assert waiter.process.is_alive()
    victim.kill_group()
    died = time.monotonic()

    report = waiter.report(timeout=30)
    assert time.monotonic() - died < 5.0
    assert report["result"] == 7
    assert report["builds"] == 1
    (lock,) = (tmp_path / "cache" / "locks").iterdir()
    assert report["warnings"] == [f"attngen waits for another build, which holds {lock}"]
    assert list((tmp_path / "cache" / "building").iterdir()) == []
