"""Tuning on a GPU: candidates are built, checked and timed; the winner is what later calls run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import attngen as ag
from attngen import tuner
from attngen.backends.devices import device_target
from attngen.tuning import tiles_text
from attngen.variant import OpName
from attngen.workload import random_call

pytestmark = pytest.mark.gpu
HEADS = ag.GQA(32, 8, 128)
CASES = {
    "prefill": (ag.AttentionSpec(heads=HEADS, mask=ag.Causal()), "prefill", "batch=2,kv_len=2048"),
    "short": (ag.AttentionSpec(heads=HEADS, mask=ag.Causal()), "prefill", "batch=8,kv_len=2048,qo_len=4"),
    "decode": (
        ag.AttentionSpec(heads=HEADS, mask=ag.Causal(), kv=ag.Paged(page_size=16)),
        "decode",
        "batch=16,kv_len=4096",
    ),
    "int4": (
        ag.AttentionSpec(heads=HEADS, mask=ag.Causal(), kv=ag.Paged(page_size=16, dtype="int4")),
        "decode",
        "batch=16,kv_len=4096",
    ),
    "latents": (
        ag.AttentionSpec(heads=ag.MLA(num_qo_heads=16), mask=ag.Causal(), kv=ag.Paged(page_size=64)),
        "decode",
        "batch=16,kv_len=4096",
    ),
    "append": (
        ag.AttentionSpec(heads=HEADS, kv=ag.Paged(page_size=16, dtype="int8", scale="token")),
        "append",
        "batch=64,kv_len=512",
    ),
    "backward": (ag.AttentionSpec(heads=ag.MHA(16, 64), mask=ag.Causal()), "backward", "batch=2,kv_len=1024"),
}


@pytest.mark.parametrize("backend", [None, "triton"])
@pytest.mark.parametrize("case", CASES)
def test_an_op_is_tuned_and_its_result_stays(
    case: str, backend: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "cache"))
    spec, name, shape = CASES[case]
    op: OpName = name  # type: ignore[assignment]
    device = torch.device("cuda", torch.cuda.current_device())
    (found,) = ag.tune(spec, shapes=[shape], ops=[op], backend=backend)
    with capsys.disabled():
        print(f"\n{case} by {found.backend}: x {found.speedup:.3f} with {found.chosen or 'the table'}")
        for measured in sorted(found.measured, key=lambda measured: -measured.speedup):
            what = "; ".join(f"{role} {tiles_text(tiles)}" for role, tiles in measured.changed) or "the table's"
            print(f"  {what:64} {' '.join(f'{ms:.4f}' for ms in measured.times):10} {measured.dropped}")
    assert found.target == device_target(device)
    assert len([m for m in found.measured if m.times]) > 1
    wrong = [m for m in found.measured if "its result" in m.dropped or "other bytes" in m.dropped]
    assert wrong == []
    chosen = ag.compile(spec, backend=backend).op(op, device)
    for role, tiles in found.chosen.items():
        assert chosen.plan.kernel(role).tiles == tiles
    oracle = ag.compile(spec, backend="reference")
    forward = oracle.op("prefill", device) if op == "backward" else None
    call = random_call(spec, chosen.variant, op, ag.Shape.parse(shape), device, forward)
    assert tuner.difference(call.results(chosen), call.results(oracle.op(op, device)), 0.05) == ""
