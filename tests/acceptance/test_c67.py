"""C67: a first call inside a capture compiles or loads a module, which ruins the capture with an obscure error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import attngen as ag
from tests.acceptance.probes import State, assert_state, declare, int32, pack, probe

SPEC = declare(4, 2, mask=ag.Causal(), kv=ag.Paged(page_size=16))


@pytest.mark.gpu
@pytest.mark.parametrize("disk", ["cold", "warm"])
def test_c67_first_call_inside_a_capture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, disk: str) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "cache"))
    if disk == "warm":
        ag.compile(SPEC, backend="triton").op("decode", torch.device("cuda"))
    ops = ag.compile(SPEC, backend="triton")
    call = pack(SPEC, "decode", [probe(SPEC, 1, n) for n in (5, 1000)], "cuda")
    counter = torch.zeros(1, device="cuda")

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter.add_(1)
        with pytest.raises(ag.UnsupportedError, match=r"cannot be loaded now\n(.*\n)*.*call ops\.warmup\(\)"):
            ops.decode(call.q, *call.kv, **call.lengths)
    graph.replay()
    assert counter.item() == 1

    def check(out: torch.Tensor, lse: torch.Tensor, lens: tuple[int, ...]) -> None:
        for b, n in enumerate(lens):
            expected = torch.tensor(float(n)).log()
            assert_state(State(out[b : b + 1].cpu(), lse[b : b + 1].cpu()), (n - 1) / 2, float(expected))

    check(*ops.decode(call.q, *call.kv, **call.lengths, return_lse=True), call.kv_lens)
    fresh = ag.compile(SPEC, backend="triton")
    fresh.warmup("decode", device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fresh.decode(call.q, *call.kv, **call.lengths, return_lse=True)
    for lens in ((5, 1000), (1, 999), (5, 16)):
        call.lengths["kv_lens"].copy_(int32(lens))
        graph.replay()
        check(out, lse, lens)
