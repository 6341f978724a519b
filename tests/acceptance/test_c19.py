"""C19: a ragged batch with an empty request fails when the longest query is 1."""

from __future__ import annotations

import pytest
import torch

import attngen as ag
from attngen.variant import OpName
from tests.acceptance.probes import Place, assert_near, assert_state, attend, declare, probe

EACH_OP = pytest.mark.parametrize("op", ["prefill", "decode"])


@EACH_OP
@pytest.mark.parametrize("kv", [ag.Ragged(), ag.Paged(page_size=16)], ids=["ragged", "paged"])
def test_c19_a_empty_request_in_the_middle(place: Place, kv: ag.Ragged | ag.Paged, op: OpName) -> None:
    spec = declare(9, 3, mask=ag.Causal(), dtype="bf16", kv=kv)
    first, empty, last = attend(place, spec, op, [probe(spec, n, m) for n, m in ((1, 3), (0, 0), (1, 5))])
    assert_near(first.out, 1.0)
    assert len(empty.out) == len(empty.lse) == 0
    assert_near(last.out, 2.0)


@EACH_OP
def test_c19_b_only_the_last_has_tokens(place: Place, op: OpName) -> None:
    spec = declare(21, 7, 120, mask=ag.Causal(), dtype="bf16", kv=ag.Ragged())
    requests = [probe(spec, n, n, torch.full((n,), 3.0)) for n in (0, 0, 0, 1)]
    *empty, last = attend(place, spec, op, requests)
    assert_state(last, 3.0, 0.0)
    assert [len(state.out) for state in empty] == [0, 0, 0]
    assert torch.equal(last.out, torch.full_like(last.out, 3.0))
