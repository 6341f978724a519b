"""C01: rows whose every key is masked out come back NaN."""

from __future__ import annotations

import math

import pytest
import torch

import attngen as ag
from tests.acceptance.probes import Place, assert_state, attend, declare, probe


@ag.mask_mod
def corner(b, h, q, k):
    return (q < 4) & (k < 4)


@ag.mask_mod
def given(b, h, q, k, visible: ag.Tensor(8, 8, dtype="bool")):
    return visible[q, k]


VISIBLE = torch.zeros(8, 8, dtype=torch.bool)
VISIBLE[:4, :4] = True


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize(("mask", "params"), [(corner, {}), (given, {"visible": VISIBLE})], ids=["computed", "given"])
def test_c01_rows_without_a_key(place: Place, mask: ag.MaskMod, params: dict[str, torch.Tensor], dtype: str) -> None:
    spec = declare(mask=mask, dtype=dtype)
    (state,) = attend(place, spec, "prefill", [probe(spec, 8, 8)], params)
    assert_state(state, [1.5] * 4 + [0.0] * 4, [math.log(4)] * 4 + [-math.inf] * 4)
    assert torch.equal(state.out[4:], torch.zeros_like(state.out[4:]))
    assert state.out.isfinite().all()
