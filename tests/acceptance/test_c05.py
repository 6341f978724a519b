"""C05: NaN where a sliding window hides a whole first key tile from a row."""

from __future__ import annotations

import math

import pytest
import torch

import attngen as ag
from tests.acceptance.probes import Place, assert_near, assert_state, attend, band, declare, exact, noise, probe

SPEC = declare(mask=ag.Causal() & ag.SlidingWindow(left=31))
SHAPES = pytest.mark.parametrize("qo_len", [300, 100], ids=["300", "200+100"])


@SHAPES
def test_c05_window_over_many_tiles(place: Place, qo_len: int) -> None:
    (state,) = attend(place, SPEC, "prefill", [probe(SPEC, qo_len, 300)])
    row = torch.arange(300 - qo_len, 300, dtype=torch.float64)
    count = (row + 1).clamp(max=32)
    assert_state(state, torch.where(row >= 31, row - 15.5, row / 2), count.log())
    assert math.isclose(float(state.lse[-1, 0]), 3.465736, abs_tol=1e-3)


@SHAPES
def test_c05_window_on_random_data(place: Place, qo_len: int) -> None:
    request = noise(SPEC, qo_len, 300)
    (state,) = attend(place, SPEC, "prefill", [request])
    want = exact(request, band(qo_len, 300, 31))
    assert_near(state.out, want.out)
    assert_near(state.lse, want.lse, atol=1e-3)
