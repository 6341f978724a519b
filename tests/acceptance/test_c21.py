"""C21: causal with more queries than keys: rows above the diagonal come back garbage, or with a finite LSE."""

from __future__ import annotations

import math

import pytest
import torch

import attngen as ag
from tests.acceptance.probes import (
    STORAGES,
    Place,
    assert_near,
    assert_state,
    attend,
    band,
    declare,
    exact,
    exact_gradients,
    gradients,
    noise,
    probe,
)

SHAPES = [(5, 2), (3, 128), (129, 1)]


def values(kv_len: int) -> torch.Tensor:
    return torch.arange(1, kv_len + 1)


@pytest.mark.parametrize("kv", STORAGES, ids=lambda kv: kv.kind)
def test_c21_forward(place: Place, kv: ag.Contiguous) -> None:
    spec = declare(mask=ag.Causal(), kv=kv)
    requests = [probe(spec, n, m, values(m)) for n, m in SHAPES]
    (alone,) = attend(place, spec, "prefill", requests[:1])
    states = attend(place, spec, "prefill", requests)
    for state in (alone, states[0]):
        assert_state(state, [0, 0, 0, 1, 1.5], [-math.inf, -math.inf, -math.inf, 0, 0.693147])
        assert torch.equal(state.out[:3], torch.zeros_like(state.out[:3]))
    for state, request, shape in zip(states, requests, SHAPES, strict=True):
        want = exact(request, band(*shape))
        assert_state(state, want.out, want.lse)


@pytest.mark.parametrize("kv", STORAGES[:2], ids=lambda kv: kv.kind)
def test_c21_backward(place: Place, kv: ag.Contiguous) -> None:
    spec = declare(mask=ag.Causal(), kv=kv)
    requests = [noise(spec, n, m) for n, m in SHAPES]
    douts = [noise(spec, len(request.q), 1, seed=1).q for request in requests]
    found = gradients(place, spec, requests, douts)
    for got, request, dout, shape in zip(found, requests, douts, SHAPES, strict=True):
        want = exact_gradients(request, dout, band(*shape))
        for name in ("dq", "dk", "dv"):
            assert_near(getattr(got, name), getattr(want, name))
    assert torch.equal(found[0].dq[:3], torch.zeros_like(found[0].dq[:3]))
    assert torch.equal(found[2].dq[:128], torch.zeros_like(found[2].dq[:128]))
