"""C09: the returned LSE is base 2 in one backend and base e in another, so that merging partial results is wrong.

Also of latents, of 512 and 64 columns.
"""

from __future__ import annotations

import math

import pytest
import torch

import attngen as ag
from attngen.variant import OpName
from tests.acceptance.latents import declare_latents, decode_latents
from tests.acceptance.probes import STORAGES, Place, assert_near, assert_state, attend, declare, pack, probe

VALUES = torch.arange(1600) % 100
LN_1600 = 7.377759
EACH_OP = pytest.mark.parametrize("op", ["prefill", "decode"])
EACH_STORAGE = pytest.mark.parametrize("kv", STORAGES, ids=lambda kv: kv.kind)


@EACH_OP
@EACH_STORAGE
def test_c09_lse_is_natural_and_halves_merge(place: Place, kv: ag.Contiguous, op: OpName) -> None:
    spec = declare(kv=kv)
    request = probe(spec, 1, 1600, VALUES)
    halves = [request.part(slice(None), keys) for keys in (slice(800), slice(800, None))]
    (whole,) = attend(place, spec, op, [request])
    assert_state(whole, 49.5, LN_1600)

    parts = attend(place, spec, op, halves)
    for part in parts:
        assert_state(part, 49.5, math.log(800))
    out, lse = ag.merge_states([part.out for part in parts], [part.lse for part in parts])
    assert_near(out, whole.out.double(), atol=2e-3)
    assert_near(lse, whole.lse.double(), atol=2e-3)
    weights = torch.softmax(torch.stack([part.lse for part in parts]), 0)[..., None]
    merged = (weights * torch.stack([part.out for part in parts])).sum(0)
    assert_near(merged, whole.out.double(), atol=2e-3)


@EACH_OP
def test_c09_base_2_on_request(place: Place, op: OpName) -> None:
    spec = declare(kv=ag.Paged(page_size=16))
    call, ops = pack(spec, op, [probe(spec, 1, 1600, VALUES)], place.device), place.compile(spec)
    run = ops.prefill if op == "prefill" else ops.decode
    _, lse = run(call.q, *call.kv, **call.lengths, return_lse=True, lse_base="log2")
    assert_near(lse.cpu(), 10.643856, atol=1e-3)


def test_c09_lse_of_latents_is_natural_and_halves_merge(place: Place) -> None:
    spec = declare_latents()
    keys = torch.randn(1600, 576, generator=torch.Generator().manual_seed(9)).half()
    keys[:, :512] = VALUES[:, None]
    q = torch.zeros(1, 2, 576, dtype=torch.float16)
    whole, *parts = (decode_latents(place, spec, q, [rows]) for rows in (keys, keys[:800], keys[800:]))
    assert_state(whole, 49.5, LN_1600)
    out, lse = ag.merge_states([part.out for part in parts], [part.lse for part in parts])
    assert_near(out, whole.out.double(), atol=2e-3)
    assert_near(lse, whole.lse.double(), atol=1e-3)
