"""C53: a process killed during a compile leaves a lock behind, and every later process hangs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from attngen.settings import Settings
from attngen.store import Store
from tests.store.children import DECODE_KERNELS, DECODED, Child, build, decode, start

SLOW = 0.5


def started(child: Child, marker: Path) -> Child:
    deadline = time.monotonic() + 30
    while not marker.exists():
        assert time.monotonic() < deadline
        assert child.process.is_alive()
        time.sleep(0.005)
    return child


@pytest.mark.parametrize("moment", [0.0, 0.1, SLOW, SLOW + 0.05, SLOW + 0.1, SLOW + 0.15])
def test_c53_kill_during_compile_does_not_block_the_next_build(tmp_path: Path, moment: float) -> None:
    env = {"ATTNGEN_CACHE_DIR": str(tmp_path / "cache")}
    marker = tmp_path / "marker"
    victim = started(start(build, env=env, compiler=True, delay=SLOW, linger=60, marker=marker), marker)
    time.sleep(moment)
    victim.kill_group()

    survivor = start(build, env=env, compiler=True).report(timeout=30)
    assert survivor["result"] == 7
    assert survivor["seconds"] < 15.0
    assert survivor["warnings"] == []
    if survivor["builds"] == 0:  # the victim had just published: the next build cleans up, or collect()
        Store.from_settings(Settings(cache_dir=env["ATTNGEN_CACHE_DIR"])).collect()
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
    assert time.monotonic() - died < 15.0
    assert report["result"] == 7
    assert report["builds"] == 1
    (lock,) = (tmp_path / "cache" / "locks").iterdir()
    assert report["warnings"] == [f"attngen waits up to 120 s for another build, which holds {lock}"]
    assert list((tmp_path / "cache" / "building").iterdir()) == []


def test_c53_kill_during_the_first_call(tmp_path: Path) -> None:
    env = {"ATTNGEN_CACHE_DIR": str(tmp_path / "cache")}
    victim = start(decode, env=env)
    building = tmp_path / "cache" / "building"
    while not list(building.glob("*/*.cpp")):
        assert victim.process.is_alive()
        time.sleep(0.005)
    victim.kill_group()
    assert list(building.iterdir()) != []

    report = start(decode, env=env).report()
    assert report.items() >= DECODED.items()
    assert len(report["builds"]) == DECODE_KERNELS
    assert report["warnings"] == []
    assert list(building.iterdir()) == []
