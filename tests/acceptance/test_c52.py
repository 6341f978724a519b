"""C52: several processes compile the same kernel into a cold cache."""

from __future__ import annotations

import time
from pathlib import Path

from attngen.settings import Settings
from attngen.store import Store
from tests.store.children import DECODE_KERNELS, DECODED, context, decode, race, start

PROCESSES = 16
ROUNDS = 20


def test_c52_racers_agree_and_every_key_is_built_once(tmp_path: Path) -> None:
    barrier = context().Barrier(PROCESSES)
    results = context().Queue()
    racers = [
        context().Process(target=race, args=(ROUNDS, number, tmp_path / "cache", barrier, results))
        for number in range(PROCESSES)
    ]
    for racer in racers:
        racer.start()

    values: dict[tuple[int, int], list[int]] = {}
    logs: dict[str, list[str]] = {"builds": [], "warnings": []}

    def receive() -> None:
        while not results.empty():
            number, turn, value = results.get()
            if turn in logs:
                logs[turn] += value
            else:
                values[number, turn] = value

    # Whatever has a final name is complete, at every moment of the race.
    watcher = Store.from_settings(Settings(cache_dir=str(tmp_path / "cache")))
    while any(racer.is_alive() for racer in racers):
        assert watcher.verify() == {}
        receive()
        time.sleep(0.01)
    receive()

    assert [racer.exitcode for racer in racers] == [0] * PROCESSES
    assert values == {(number, turn): [turn, turn] for number in range(PROCESSES) for turn in range(ROUNDS)}
    assert logs["warnings"] == []
    assert len(logs["builds"]) == ROUNDS
    assert len(set(logs["builds"])) == ROUNDS
    assert len(list(watcher.entries())) == ROUNDS
    assert list((tmp_path / "cache" / "building").iterdir()) == []


def test_c52_first_call_in_many_processes(tmp_path: Path) -> None:
    env = {"ATTNGEN_CACHE_DIR": str(tmp_path / "cache")}
    for kernels_built in (DECODE_KERNELS, 0):
        children = [start(decode, env=env) for _ in range(2 * PROCESSES)]
        reports = [child.report() for child in children]
        assert all(report.items() >= DECODED.items() for report in reports)
        assert sum(len(report["builds"]) for report in reports) == kernels_built
        # On a busy machine a build takes so long that those who wait for it say so, once for each kernel.
        waits = [warning for report in reports for warning in report["warnings"]]
        assert all("waits up to" in warning for warning in waits)
        assert all(len(report["warnings"]) <= kernels_built for report in reports)
        assert list((tmp_path / "cache" / "building").iterdir()) == []
