"""C04: a soft cap is accepted but not applied."""

from __future__ import annotations

import pytest
import torch

import attngen as ag
from attngen.variant import OpName
from tests.acceptance.probes import Place, Request, assert_near, attend, declare, probe

CAPPED = declare(sm_scale=1.0, score_mods=(ag.SoftCap(cap=1.0),))
PLAIN = declare(sm_scale=1.0)


def two_logits() -> Request:
    """Logits 0 and 2 of values 0 and 1."""
    request = probe(PLAIN, 1, 2)
    q, k = torch.zeros_like(request.q), torch.zeros_like(request.k)
    q[..., 0], k[1, :, 0] = 2.0, 1.0
    return Request(q, k, request.v)


@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_c04_cap_changes_the_result(place: Place, op: OpName) -> None:
    for spec, want in ((PLAIN, 0.880797), (CAPPED, 0.723935)):
        (state,) = attend(place, spec, op, [two_logits()])
        assert_near(state.out, want, atol=1e-3)


def test_c04_cap_at_call_time_is_refused(place: Place) -> None:
    ops, request = place.compile(PLAIN), two_logits()
    tensors = [t[None].to(place.device) for t in (request.q, request.k, request.v)]
    with pytest.raises(TypeError, match="softcap"):
        ops.prefill(*tensors, softcap=1.0)
    with pytest.raises(ag.ArgumentError, match=r"params holds 'cap'\n.*\n.*declares no parameter"):
        ops.prefill(*tensors, params={"cap": torch.ones((), device=place.device)})
