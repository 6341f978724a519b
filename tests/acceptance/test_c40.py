"""C40: a prefix that several requests share is computed wrongly as soon as a window cuts into it."""

from __future__ import annotations

import pytest
import torch

import attngen as ag
from attngen.variant import OpName
from tests.acceptance.probes import NAN, Place, State, assert_state, attend, declare, indptr, int32, probe

SPEC = declare(4, 2, mask=ag.Causal() & ag.SlidingWindow(left=39), kv=ag.Paged(page_size=16))
LENS = (60, 75)
TABLE = torch.tensor([[5, 2, 9, 0, -1], [5, 2, 9, 7, 3]], dtype=torch.int32)


@pytest.mark.parametrize(
    ("op", "qo_lens"), [("decode", (1, 1)), ("decode", (12, 27)), ("prefill", (1, 1)), ("prefill", (12, 27))]
)
def test_c40_shared_pages(place: Place, op: OpName, qo_lens: tuple[int, int]) -> None:
    keys = probe(SPEC, 27, 75)
    cache = tuple(torch.full((10, 16, 2, 64), NAN, dtype=torch.float16) for _ in "kv")
    for pages, kv_len in zip(TABLE.tolist(), LENS, strict=True):
        for pool, rows in zip(cache, (keys.k, keys.v), strict=True):
            for page, chunk in zip(pages, rows[:kv_len].split(16), strict=False):
                pool[page, : len(chunk)] = chunk
    cache = tuple(pool.to(place.device) for pool in cache)
    before = [pool.clone() for pool in cache]

    ops = place.compile(SPEC)
    where = {"page_table": TABLE.to(place.device), "kv_lens": int32(LENS).to(place.device)}
    if op == "prefill":
        q = keys.q[:1].expand(sum(qo_lens), -1, -1).contiguous().to(place.device)
        rows = indptr(qo_lens).to(place.device)
        out, lse = ops.prefill(q, cache, qo_indptr=rows, **where, return_lse=True)
        states = [State(*pair) for pair in zip(out.cpu().split(qo_lens), lse.cpu().split(qo_lens), strict=True)]
    else:
        q = keys.q[None, : max(qo_lens)].expand(2, -1, -1, -1).contiguous().to(place.device)
        out, lse = ops.decode(q, cache, qo_lens=int32(qo_lens).to(place.device), **where, return_lse=True)
        states = [State(out[b, :n].cpu(), lse[b, :n].cpu()) for b, n in enumerate(qo_lens)]

    for state, kv_len, want in zip(states, LENS, (39.5, 54.5), strict=True):
        position = torch.arange(kv_len - len(state.out), kv_len, dtype=torch.float64)
        count = (position + 1).clamp(max=40)
        assert_state(state, position - (count - 1) / 2, count.log())
        assert_state(State(state.out[-1:], state.lse[-1:]), want, 3.688879)
    unshared = attend(place, SPEC, op, [keys.part(slice(n), slice(m)) for n, m in zip(qo_lens, LENS, strict=True)])
    for state, other in zip(states, unshared, strict=True):
        assert torch.equal(state.out, other.out)
        assert torch.equal(state.lse, other.lse)
    for pool, old in zip(cache, before, strict=True):
        assert torch.equal(pool.view(torch.int16), old.view(torch.int16))
