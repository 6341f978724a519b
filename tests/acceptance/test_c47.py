"""C47: chunked local attention is wrong after the first chunk boundary, in decode, and with padding."""

from __future__ import annotations

import math

import pytest
import torch

import attngen as ag
from tests.acceptance.probes import STORAGES, Place, State, assert_state, attend, declare, probe

CHUNK = 8


def declare_chunks(kv: ag.Contiguous) -> ag.AttentionSpec:
    return declare(mask=ag.Causal() & ag.Chunked(CHUNK), kv=kv)


@pytest.mark.parametrize("kv", STORAGES, ids=lambda kv: kv.kind)
def test_c47_decode(place: Place, kv: ag.Contiguous) -> None:
    spec = declare_chunks(kv)
    wanted = {20: (17.5, 1.386294), 17: (16, 0), 16: (11.5, math.log(8)), 13: (10, 1.609438)}
    together = attend(place, spec, "decode", [probe(spec, 1, n) for n in wanted])
    for state, (n, want) in zip(together, wanted.items(), strict=True):
        assert_state(state, *want)
        (alone,) = attend(place, spec, "decode", [probe(spec, 1, n)])
        assert torch.equal(alone.out, state.out)


@pytest.mark.parametrize("kv", STORAGES[:2], ids=lambda kv: kv.kind)
def test_c47_prefill(place: Place, kv: ag.Contiguous) -> None:
    spec = declare_chunks(kv)
    states = attend(place, spec, "prefill", [probe(spec, n, n) for n in (20, 13)])
    for state, want in zip(states, ((17.5, 1.386294), (10, 1.609438)), strict=True):
        row = torch.arange(len(state.out), dtype=torch.float64)
        start = row // CHUNK * CHUNK
        assert_state(state, (row + start) / 2, (row - start + 1).log())
        assert_state(State(state.out[-1:], state.lse[-1:]), *want)
