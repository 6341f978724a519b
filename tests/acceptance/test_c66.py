"""C66: a graph captured with short sequences and replayed with long ones uses a stale plan."""

from __future__ import annotations

import pytest
import torch

import attngen as ag
from tests.acceptance.probes import TRITON, assert_near, declare, int32

SPEC = declare(32, 8, 128, mask=ag.Causal(), kv=ag.Paged(page_size=16))
LONGEST = 100_000
LENS = (
    (2,) * 8,
    (8192, 1, LONGEST, 17, 300, 16, 15, 4097),
    (1, 2, 3, 4, 5, 6, 7, 8),
    (0, 1, 0, 512, 513, 1024, 1025, 31),
    (2,) * 8,
)


@pytest.mark.gpu
def test_c66_replay_with_other_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = TRITON.compile(SPEC)
    ops.warmup("decode", device="cuda")
    columns = -(-LONGEST // 16)
    pages = sum(-(-n // 16) for n in LENS[1]) + 8
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(8, 32, 128, generator=generator).half().cuda()
    cache = tuple(torch.randn(pages, 16, 8, 128, generator=generator).half().cuda() for _ in "kv")
    table, kv_lens = torch.zeros(8, columns, dtype=torch.int32, device="cuda"), int32(LENS[0]).cuda()

    def decode() -> tuple[torch.Tensor, torch.Tensor]:
        return ops.decode(q, cache, page_table=table, kv_lens=kv_lens, return_lse=True)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = decode()
    for turn, lens in enumerate(LENS):
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(turn)).to(torch.int32)
        host, start = torch.zeros(8, columns, dtype=torch.int32), 0
        for b, n in enumerate(lens):
            count = -(-n // 16)
            host[b, :count] = order[start : start + count]
            start += count
        table.copy_(host)
        kv_lens.copy_(int32(lens))
        q.copy_(torch.randn(8, 32, 128, generator=generator).half())
        graph.replay()
        eager_out, eager_lse = decode()
        assert_near(out.cpu(), eager_out.cpu().double(), atol=2e-3)
        assert_near(lse.cpu(), eager_lse.cpu().double(), atol=2e-3)

    kv_lens.fill_(columns * 16 + 1)
    monkeypatch.setenv("ATTNGEN_VALIDATE", "1")
    with pytest.raises(ag.ArgumentError, match=f"kv_lens holds {columns * 16 + 1}"):
        decode()


def test_c66_what_precedes_a_capture_is_documented() -> None:
    assert "CUDA graph" in ag.Ops.warmup.__doc__
