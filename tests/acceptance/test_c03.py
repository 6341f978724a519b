"""C03: rows come back zero when every logit is hugely negative, because "minus infinity" was a finite number."""

from __future__ import annotations

import math

import pytest
import torch

import attngen as ag
from attngen.variant import OpName
from tests.acceptance.probes import Place, Request, assert_near, attend, declare, probe


@pytest.mark.parametrize("op", ["prefill", "decode"])
@pytest.mark.parametrize("kv", [ag.Contiguous(), ag.Paged(page_size=16)], ids=["contiguous", "paged"])
def test_c03_hugely_negative_logits(place: Place, kv: ag.Contiguous | ag.Paged, op: OpName) -> None:
    spec = declare(head_dim=128, dtype="bf16", kv=kv)
    shape = probe(spec, 1, 64)
    request = Request(torch.full_like(shape.q, -16.0), torch.full_like(shape.k, 120.0), shape.v)
    (state,) = attend(place, spec, op, [request])
    assert_near(state.out, 31.5)
    assert_near(state.lse, math.log(64) - 245760 / math.sqrt(128), atol=0.05)
    assert_near(state.lse, -21718.17, atol=0.05)
