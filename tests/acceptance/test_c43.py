"""C43: a window is off by one: some count the own token, some do not, and prefill and decode disagree."""

from __future__ import annotations

import math

import pytest
import torch

import attngen as ag
from tests.acceptance.probes import (
    Place,
    assert_near,
    assert_state,
    attend,
    band,
    declare,
    exact_gradients,
    gradients,
    probe,
)

EACH_STORAGE = pytest.mark.parametrize("kv", [ag.Contiguous(), ag.Paged(page_size=16)], ids=["contiguous", "paged"])


def declare_window(left: int, kv: ag.Contiguous | ag.Paged) -> ag.AttentionSpec:
    return declare(mask=ag.Causal() & ag.SlidingWindow(left=left), kv=kv)


@EACH_STORAGE
def test_c43_window_of_seven_before_the_own_key(place: Place, kv: ag.Contiguous | ag.Paged) -> None:
    spec = declare_window(7, kv)
    (whole,) = attend(place, spec, "prefill", [probe(spec, 16, 16)])
    row = torch.arange(16, dtype=torch.float64)
    count = (row + 1).clamp(max=8)
    assert_state(whole, row - (count - 1) / 2, count.log())
    (last,) = attend(place, spec, "decode", [probe(spec, 1, 16)])
    assert_state(last, 11.5, 2.079442)
    assert torch.equal(last.out, whole.out[-1:])


@EACH_STORAGE
def test_c43_window_of_the_own_key_only(place: Place, kv: ag.Contiguous | ag.Paged) -> None:
    spec = declare_window(0, kv)
    (whole,) = attend(place, spec, "prefill", [probe(spec, 16, 16)])
    assert_state(whole, torch.arange(16), 0.0)
    (last,) = attend(place, spec, "decode", [probe(spec, 1, 16)])
    assert_state(last, 15.0, 0.0)


def test_c43_backward(place: Place) -> None:
    spec = declare_window(7, ag.Contiguous())
    request = probe(spec, 16, 16)
    dout = torch.ones_like(request.q)
    (got,), want = gradients(place, spec, [request], [dout]), exact_gradients(request, dout, band(16, 16, 7))
    assert_near(got.dv, want.dv, atol=1e-3)
    assert_near(got.dv[0], sum(1 / (i + 1) for i in range(8)), atol=2e-3)
    assert_near(got.dq, want.dq)
    assert_near(got.dk, want.dk)


def test_c43_the_unit_is_documented() -> None:
    assert "left: keys before the query's own position" in ag.SlidingWindow.__doc__
    assert math.isclose(math.exp(2.079442), 8, rel_tol=1e-5)
