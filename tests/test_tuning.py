"""Tuning: what is tried, how it is judged, what is stored, and who uses it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import attngen as ag
from attngen import tuner
from attngen.choice import chosen_plan, plan_op, table_plan, tuning_key
from attngen.cli import app
from attngen.compiler import build_kernels
from attngen.errors import ArgumentError, UnsupportedError
from attngen.schedule import Tiles, tile_candidates, with_tiles
from attngen.settings import Settings
from attngen.store import Store, Tuning, Tunings
from attngen.target import Target
from attngen.tuning import forget
from attngen.variant import normalize
from attngen.workload import Shape, random_call

SPEC = ag.AttentionSpec(name="tuned", heads=ag.MHA(2, 32), mask=ag.Causal(), dtype="fp32")
CPU, H200 = Target.parse("cpu"), Target.parse("cuda:sm90a")
SHAPE = "batch=1,kv_len=100"
WINNER = Tiles(64, 64)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds every candidate of SPEC's prefill, and no tuning."""
    folder = tmp_path_factory.mktemp("built") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNGEN_CACHE_DIR", str(folder))
        plan = plan_op(SPEC, "prefill", CPU, "cpp")
        for tiles in (WINNER, *tile_candidates(plan.kernel("forward"))):
            build_kernels(SPEC, with_tiles(plan, "forward", tiles))
        build_kernels(SPEC, plan)
    return folder


@pytest.fixture
def cache(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, which is this test's own."""
    folder = tmp_path / "cache"
    shutil.copytree(built, folder)
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Milliseconds by the queries of a tile: calls are made, and timed by this; other tiles take 3."""
    times = {128: 2.0, WINNER.q: 1.0}

    def time_cpu(runs, **_):
        found = {}
        for name, run in runs.items():
            run()
            tiles = run.args[0].plan.kernel("forward").tiles
            found[name] = times.get(tiles.q, 3.0) if tiles.kv == 64 else 3.0
        return found

    monkeypatch.setattr(tuner, "time_cpu", time_cpu)
    return times


def store() -> Store:
    return Store.from_settings(Settings.from_env())


def tune(**options) -> ag.tuning.TunedOp:
    return ag.tune(SPEC, shapes=[SHAPE], ops=["prefill"], jobs=2, **options)[0]


def record_of(cache: Path) -> Path:
    (path,) = (cache / "tuned").glob("*/*.json")
    return path


def test_real_candidates_are_built_timed_and_judged(cache: Path) -> None:
    """Nothing is replaced here: whichever tiles win, the record says so, and results stay what they were."""
    steps: list[tuple[str, int, int]] = []
    q, k, v = (torch.randn(1, 100, 2, 32) for _ in range(3))
    before = ag.compile(SPEC, backend="cpp").prefill(q, k, v)
    found = tune(progress=lambda *step: steps.append(step))
    plan = plan_op(SPEC, "prefill", CPU, "cpp").kernel("forward")
    tried = [measured.changed[0][1] for measured in found.measured if measured.changed]
    assert set(tried) == set(tile_candidates(plan))
    assert [m.dropped for m in found.measured] == [""] * 5
    assert all(len(m.times) == 1 and m.times[0] > 0 for m in found.measured)
    assert [done for _, done, _ in steps] == sorted(done for _, done, _ in steps)
    assert steps[-1][1] == steps[-1][2]
    assert (found.record is not None) == bool(found.chosen) == (found.speedup >= tuner.LEAST_GAIN)
    chosen = chosen_plan(SPEC, "prefill", CPU).kernel("forward").tiles
    assert chosen == found.chosen.get("forward", plan.tiles)
    torch.testing.assert_close(ag.compile(SPEC, backend="cpp").prefill(q, k, v), before, rtol=0, atol=2e-6)


_NEXT = """
import logging, sys, torch, attngen as ag
logging.basicConfig(level="INFO", stream=sys.stdout)
spec = ag.AttentionSpec(name="tuned", heads=ag.MHA(2, 32), mask=ag.Causal(), dtype="fp32")
ops = ag.compile(spec, backend=sys.argv[1] if len(sys.argv) > 1 else None)
ops.prefill(*(torch.randn(1, 100, 2, 32) for _ in range(3)))
print("tiles", ops.op("prefill", torch.device("cpu")).plan.kernel("forward").tiles.q)
"""


def next_process(*arguments: str, **environment: str) -> str:
    command = [sys.executable, "-c", _NEXT, *arguments]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def test_the_next_process_runs_the_winner_and_builds_nothing(cache: Path, clock) -> None:
    found = tune()
    assert (found.chosen, found.speedup) == ({"forward": WINNER}, 2.0)
    assert found.record == record_of(cache)
    for extra in ({}, {"ATTNGEN_REQUIRE_CACHED": "1"}, {"CXX": "no-such-compiler"}):
        said = next_process(**extra)
        assert "tiles 64" in said
        assert "build" not in said
    shipped = next_process(ATTNGEN_CACHE_PATH=str(cache), ATTNGEN_CACHE_DIR=f"{cache}-empty")
    assert "tiles 64" in shipped
    assert "build" not in shipped
    assert not Path(f"{cache}-empty").exists()


def test_forgetting_returns_to_the_table(cache: Path, clock) -> None:
    tune()
    assert forget(SPEC) == 1
    assert forget(SPEC) == 0
    assert "tiles 128" in next_process()
    tune()
    store().clear()
    assert not (cache / "tuned").exists()
    assert chosen_plan(SPEC, "prefill", CPU).kernel("forward").tiles.q == 128


def test_a_later_tuning_decides(cache: Path, clock) -> None:
    tune()
    clock[64], clock[256] = 3.0, 1.0
    assert tune().chosen == {"forward": Tiles(256, 64)}
    assert json.loads(record_of(cache).read_text())["tiles"]["forward"]["q"] == 256
    clock[256] = 1.99  # faster, but by less than is measured again
    assert tune().chosen == {}
    assert not list((cache / "tuned").glob("*"))


def test_nothing_is_tuned_without_being_asked(cache: Path) -> None:
    before = len(list(store().entries()))
    ops = ag.compile(SPEC, target="cpu")
    ops.prefill(*(torch.randn(1, 100, 2, 32) for _ in range(3)))
    assert not (cache / "tuned").exists()
    assert ops.op("prefill").plan == plan_op(SPEC, "prefill", CPU, "cpp")
    assert len(list(store().entries())) == before + 6  # decode, merge, delta, dkdv, dq, append


@pytest.mark.parametrize(
    "harm", ["flipped", "truncated", "other digest", "foreign tiles", "unknown role", "open to all"]
)
def test_a_damaged_record_is_passed_over_loudly(
    cache: Path, clock, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    tune()
    path = record_of(cache)
    text = path.read_text()
    record = next(iter(Tunings(store()).all()))[1]
    if harm == "flipped":
        path.write_text(text.replace('"q": 64', '"q": 32'))
    elif harm == "truncated":
        path.write_text(text[:100])
    elif harm == "other digest":
        Tunings(store()).put(replace(record, digest="0" * 64))
        (path.parents[1] / ("0" * 64) / path.name).replace(path)
    elif harm == "foreign tiles":
        Tunings(store()).put(replace(record, tiles={"forward": Tiles(48, 64)}))
    elif harm == "unknown role":
        Tunings(store()).put(replace(record, tiles={"dkdv": WINNER}))
    else:
        path.chmod(0o666)
    assert chosen_plan(SPEC, "prefill", CPU).kernel("forward").tiles.q == 128
    assert "attngen does not use the tuning in" in caplog.text
    assert "tiles of its table" in caplog.text


def test_a_record_ends_with_what_it_was_made_from(cache: Path, clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another declaration, another toolchain, or other text of the table's kernels has another key."""
    tune()
    assert chosen_plan(SPEC, "prefill", CPU).kernel("forward").tiles == WINNER
    wider = SPEC.model_copy(update={"heads": ag.MHA(4, 32)})
    assert chosen_plan(wider, "prefill", CPU).kernel("forward").tiles.q == 128
    assert chosen_plan(SPEC, "prefill", Target.parse("cpu:x86-64")).kernel("forward").tiles.q == 128
    renamed = SPEC.model_copy(update={"name": "other"})  # a name is no meaning
    assert chosen_plan(renamed, "prefill", CPU).kernel("forward").tiles == WINNER
    key = tuning_key(table_plan(SPEC, "prefill", CPU))
    assert Tunings(store()).find(replace(key, fingerprint="another compiler")) is None
    assert Tunings(store()).find(replace(key, fingerprint=None)) is not None  # where none is, any will do


def test_another_result_is_dropped(cache: Path, clock, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = tuner.Op.forward

    def wrong(self, inputs, out, lse, max_logit=None, *, partial=False):
        forward(self, inputs, out, lse, max_logit, partial=partial)
        if self.plan.kernel("forward").tiles == WINNER:
            out[0, 7] *= 1.001

    monkeypatch.setattr(tuner.Op, "forward", wrong)
    found = tune()
    (dropped,) = [m for m in found.measured if m.dropped]
    assert dropped.changed == (("forward", WINNER),)
    assert "apart from that of the table's plan" in dropped.dropped
    assert found.chosen == {}


def test_what_spills_fails_or_comes_out_slow_is_dropped(cache: Path, clock, monkeypatch: pytest.MonkeyPatch) -> None:
    build = tuner.build_kernels

    def spilling(spec, plan, progress=None):
        op, rejected = build(spec, plan, progress)
        tiles = plan.kernel("forward").tiles
        if tiles == WINNER:
            op.kernels = tuple(replace(kernel, metadata={"spills": 8}) for kernel in op.kernels)
        if tiles.q == 256:
            raise ag.BuildError("no", why="it does not fit")
        return op, rejected | ({"forward": "products wait for each other"} if tiles.kv == 32 else {})

    monkeypatch.setattr(tuner, "build_kernels", spilling)
    found = ag.tune(SPEC, shapes=[SHAPE], ops=["prefill"], jobs=1)[0]
    assert {m.changed[0][1]: m.dropped for m in found.measured if m.dropped} == {
        WINNER: "spills 8 bytes",
        Tiles(256, 64): "does not build: it does not fit",
        Tiles(128, 32): "products wait for each other",
    }


def test_kernels_of_an_op_are_tried_alone_and_together(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cost = {("dkdv", 128): 1.0, ("dkdv", 64): 2.0, ("dq", 64): 1.0, ("dq", 32): 0.5}

    def milliseconds(op: tuner.Op) -> float:
        tiles = {role: op.plan.kernel(role).tiles for role in ("dkdv", "dq")}
        return sum(cost.get((role, x.kv), 3.0) + (x.q not in (64, 128)) for role, x in tiles.items())

    def time_cpu(runs, **_):
        return {name: milliseconds(run.args[0]) for name, run in runs.items()}

    monkeypatch.setattr(tuner, "time_cpu", time_cpu)
    cost["dkdv", 256] = 0.5
    (found,) = ag.tune(SPEC, shapes=[SHAPE], ops=["backward"])
    assert found.chosen == {"dkdv": Tiles(64, 256), "dq": Tiles(128, 32)}
    assert found.speedup == 2.0
    assert ag.compile(SPEC, target="cpu", ops=["backward"]).op("backward").plan.kernel("dq").tiles == Tiles(128, 32)
    ops = ag.compile(SPEC)
    assert ops.op("backward", torch.device("cpu"), deterministic=True) is ops.op("backward", torch.device("cpu"))


def test_only_kernels_that_the_shapes_need_are_tried(cache: Path, clock) -> None:
    spec = SPEC.model_copy(update={"heads": ag.GQA(4, 2, 32)})
    clock.clear()
    (found,) = ag.tune(spec, shapes=["batch=2,kv_len=50,qo_len=3"], ops=["prefill"])
    assert {m.changed[0][0] for m in found.measured if m.changed} == {"forward_short"}


@pytest.mark.parametrize(
    "kv", [ag.Contiguous(), ag.Ragged(), ag.Paged(page_size=16, layout="HND", dtype="int8", scale="token")]
)
@pytest.mark.parametrize("op", ["prefill", "decode", "append"])
def test_calls_of_a_tuning_are_those_of_the_oracle(kv: ag.Contiguous, op: str) -> None:
    spec = ag.AttentionSpec(heads=ag.GQA(4, 2, 32), mask=ag.Causal(), dtype="fp32", kv=kv)
    call = random_call(spec, normalize(spec, op), op, Shape(3, 50, 4), torch.device("cpu"))
    cpp, reference = (ag.compile(spec, backend=name).op(op, torch.device("cpu")) for name in ("cpp", "reference"))
    got, wanted = call.results(cpp), call.results(reference)
    assert len(got) == len(wanted) >= 2
    assert any(x.float().abs().sum() > 0 for x in wanted)
    assert tuner.difference(got, wanted, 1e-5) == ""


def test_difference_sees_one_bad_row_and_one_bad_byte() -> None:
    x = torch.randn(4, 8)
    assert tuner.difference((x,), (x + 1e-7,), 1e-5) == ""
    bad = x.clone()
    bad[2] *= 1.01
    assert "apart" in tuner.difference((bad,), (x,), 1e-3)
    bad[2] = float("nan")
    assert "finite" in tuner.difference((bad,), (x,), 1e-3)
    assert tuner.difference((bad,), (bad,), 1e-3) == ""
    infinite = torch.full((4, 8), float("inf"))
    assert "finite" in tuner.difference((infinite,), (-infinite,), 1e-3)
    packed = torch.zeros(4, dtype=torch.uint8)
    assert "bytes" in tuner.difference((packed + 1,), (packed,), 1e-3)


def test_kernels_that_go_together_keep_their_tiles_together() -> None:
    spec = ag.AttentionSpec(
        heads=ag.MHA(2, 64), mask=ag.Document("ids") & ag.Causal(), score_mods=(ag.ALiBi("slopes"),)
    )
    plan = plan_op(spec, "backward", H200, "triton", deterministic=True)
    other = with_tiles(plan, "dq", Tiles(32, 32, 4, 2))
    assert [other.kernel(role).tiles.q for role in ("dq", "dparams", "key_lists")] == [32, 32, 32]
    assert other.kernel("dkdv") == plan.kernel("dkdv")
    prefill = plan_op(ag.AttentionSpec(heads=ag.MHA(2, 128)), "prefill", H200, "triton")
    maps = prefill.kernel("forward")
    assert maps.tiles.maps
    plain = with_tiles(prefill, "forward", replace(maps.tiles, maps=False)).kernel("forward")
    assert not any(arg.is_map for arg in plain.args)
    assert with_tiles(replace(prefill, kernels=(plain,)), "forward", maps.tiles).kernel("forward") == maps


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("name", ["llama3-8b", "llama3-70b-int4", "mistral-7b"])
def test_candidates_for_hopper_are_other_plans_of_the_same_op(name: str, backend: str) -> None:
    spec = ag.load_spec(name)
    for op in ("prefill", "decode"):
        plan = plan_op(spec, op, H200, backend)
        for kernel in plan.kernels:
            for tiles in tile_candidates(kernel):
                other = with_tiles(plan, kernel.role, tiles)
                assert [k.entry for k in other.kernels] == [k.entry for k in plan.kernels]
                assert [k.role for k, old in zip(other.kernels, plan.kernels, strict=True) if k != old] == [kernel.role]


@pytest.mark.parametrize("text", ["", "batch=2", "batch=2,kv_len=x", "batch=0,kv_len=3", "batch=1,kv_len=3,heads=2"])
def test_a_wrong_shape_is_an_error(text: str) -> None:
    with pytest.raises(ArgumentError, match="is no shape"):
        Shape.parse(text)


def test_a_target_that_is_not_here_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="cuda:sm80 cannot be tuned here"):
        ag.tune(SPEC, shapes=[SHAPE], target="cuda:sm80")
    with pytest.raises(ArgumentError, match="no shape is given"):
        ag.tune(SPEC, shapes=[])
    with pytest.raises(UnsupportedError, match="reference has no tiles"):
        ag.tune(SPEC, shapes=[SHAPE], backend="reference")
    with pytest.raises(ArgumentError, match="params holds 'slopes'"):
        ag.tune(SPEC, shapes=[SHAPE], params={"slopes": torch.ones(2)})
    with pytest.raises(ArgumentError, match="9 new tokens have no room"):
        random_call(SPEC, normalize(SPEC, "append"), "append", Shape(1, 8, 9), torch.device("cpu"))


def test_nothing_is_tuned_where_nothing_may_be_built(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNGEN_REQUIRE_CACHED", "1")
    assert len(tune().measured) == 5  # all are there
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", f"{cache}-of-the-table")
    monkeypatch.delenv("ATTNGEN_REQUIRE_CACHED")
    ag.compile(SPEC, target="cpu", ops=["prefill"])
    monkeypatch.setenv("ATTNGEN_REQUIRE_CACHED", "1")
    with pytest.raises(ag.CacheMissError):
        tune()


def test_the_command_tells_what_it_found_and_others_that_it_did(cache: Path, clock, tmp_path: Path) -> None:
    path = tmp_path / "tuned.toml"
    path.write_text(SPEC.to_toml())

    def run(*words: str) -> str:
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == 0, done.output
        return done.stdout

    shown = run("tune", str(path), "--shapes", SHAPE, "--ops", "prefill", "--jobs", "1")
    assert "prefill for cpu" in shown
    assert "x 2.00" in shown
    assert "stored: forward 64 x 64; measured again, x 2.00" in shown
    gain = f"2.00 times as fast as the table's tiles, for {SHAPE}"
    assert f"tuned: forward: {gain}" in run("explain", str(path), "--op", "prefill")
    assert "TILE_Q = 64;" in run("explain", str(path), "--op", "prefill", "--stage", "source")
    assert "tuned spec" in run("cache", "ls")
    assert gain in run("doctor")
    shipped = tmp_path / "shipped"
    run("compile", str(path), "--ops", "prefill", "--into", str(shipped))
    assert "tiles 64" in next_process(ATTNGEN_CACHE_PATH=str(shipped), ATTNGEN_CACHE_DIR=f"{cache}-empty", CXX="none")
    assert "in use" in run("cache", "ls")
    assert "removed 0 leftovers" in run("cache", "gc")
    Tunings(store()).put(replace(next(iter(Tunings(store()).all()))[1], fingerprint="an older compiler"))
    assert "not in use" in run("cache", "ls")
    assert "prefill for cpu:x86-64" in run("doctor")
    assert "not in use" in run("doctor")
    assert "removed 1 tuning out of date" in run("cache", "gc")
    record_of(cache).write_text("{}")
    assert "is not used" in run("doctor")
    assert "removed 1 tuning" in run("tune", str(path), "--forget")
    assert "tuned" not in run("explain", str(path), "--op", "prefill")


def test_records_cannot_be_written(cache: Path, clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self, record: Tuning) -> Path:
        with self._store.changing(cache):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Tunings, "put", full)
    with pytest.raises(ag.AttngenError, match="cannot be changed"):
        tune()
