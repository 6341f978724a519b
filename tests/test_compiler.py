"""The path of a compile: what it shows, replaces and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import attngen as ag
from attngen.compiler import plan_op, render_kernel
from attngen.target import Target

SPEC = ag.AttentionSpec(heads=ag.MHA(2, 16), mask=ag.Causal(), score_mods=(ag.SoftCap(20.0),), dtype="fp32")


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(folder))
    return folder


def test_debug_levels_add_up(cold: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for level in range(6):
        monkeypatch.setenv("ATTNGEN_DEBUG", str(level))
        ag.compile(SPEC, target="cpu", ops=("prefill",))
        shown.append(capsys.readouterr().err)
    assert shown[0] == ""
    assert "prefill_causal_softcap20_fp32_d16 for cpu:" in shown[1]
    assert "Tiles(q=" in shown[2]
    assert "Tiles(q=" not in shown[1]
    assert "mask:  k <= q\nlogit: 20.0 * tanh(score * 0.05)" in shown[3]
    assert 'extern "C" void prefill_causal_softcap20_fp32_d16(' in shown[4]
    assert 'extern "C"' not in shown[3]


def test_an_override_replaces_the_source_and_gets_its_own_entry(cold: Path, monkeypatch, tmp_path: Path) -> None:
    kernel = render_kernel(plan_op(SPEC, "prefill", Target.parse("cpu"), "cpp").kernels[0])
    q, k, v = (torch.randn(1, 4, 2, 16) for _ in range(3))
    plain = ag.compile(SPEC, backend="cpp").prefill(q, k, v)
    edited = kernel.source.replace("HEAD_DIM_VO = 16;", "HEAD_DIM_VO = 16;  // edited")
    assert edited != kernel.source
    (tmp_path / f"{kernel.entry}.cpp").write_text(edited)
    monkeypatch.setenv("ATTNGEN_OVERRIDE_DIR", str(tmp_path))
    ops = ag.compile(SPEC, backend="cpp")
    assert torch.equal(ops.prefill(q, k, v), plain)
    assert "// edited" in (ops.op("prefill").kernels[0].folder / f"{kernel.entry}.cpp").read_text()


def test_require_cached_refuses_to_build(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNGEN_REQUIRE_CACHED", "1")
    with pytest.raises(ag.CacheMissError, match="prefill_causal_softcap20_fp32_d16"):
        ag.compile(SPEC, target="cpu", ops=("prefill",))
    monkeypatch.setenv("ATTNGEN_REQUIRE_CACHED", "0")
    ag.compile(SPEC, target="cpu", ops=("prefill",))
    monkeypatch.setenv("ATTNGEN_REQUIRE_CACHED", "1")
    artifacts = ag.compile(SPEC, target="cpu", ops=("prefill",)).artifacts
    assert {op: len(folders) for op, folders in artifacts.items()} == {"prefill": 1}


def test_the_environment_forces_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNGEN_BACKEND", "reference")
    assert ag.compile(SPEC).op("prefill", torch.device("cpu")).plan.backend == "reference"
    monkeypatch.setenv("ATTNGEN_BACKEND", "nonesuch")
    with pytest.raises(ag.UnsupportedError, match="no backend 'nonesuch'"):
        ag.compile(SPEC)


def test_a_second_object_loads_what_the_first_built(cold: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="attngen")
    ag.compile(SPEC, target="cpu", ops=("prefill", "decode"))
    built = [r.message for r in caplog.records if r.message.startswith("attngen build ")]
    assert len(built) == 3
    ag.compile(SPEC, target="cpu", ops=("prefill", "decode"))
    assert len([r for r in caplog.records if r.message.startswith("attngen build ")]) == 3
