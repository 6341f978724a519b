"""C50: a tree mask is ignored for tiles that lie fully below the causal diagonal."""

from __future__ import annotations

import pytest
import torch

import attngen as ag
from attngen.variant import OpName
from tests.acceptance.probes import Place, Request, assert_near, attend, declare, probe

PREFIX, PARENTS = 300, (None, 0, 0, 1, 2)


@ag.mask_mod
def tree(b, h, q, k, prefix: ag.Tensor("batch", dtype="i32"), ancestors: ag.Tensor("batch", 5, 5, dtype="bool")):
    return (k < prefix[b]) | ancestors[b, q - prefix[b], k - prefix[b]]


def ancestry() -> torch.Tensor:
    """``[1, 5, 5]``: whether a draft token descends from another, or is it."""
    found = torch.zeros(1, 5, 5, dtype=torch.bool)
    for token in range(5):
        step: int | None = token
        while step is not None:
            found[0, token, step] = True
            step = PARENTS[step]
    return found


@pytest.mark.parametrize("op", ["prefill", "decode"])
@pytest.mark.parametrize(
    "mask",
    [ag.Tree("ancestors"), ag.Causal() & ag.Tree("ancestors"), ag.Tree("ancestors", packed=True), ag.Causal() & tree],
    ids=["tree", "causal and tree", "packed", "by hand"],
)
def test_c50_siblings_do_not_see_each_other(place: Place, mask: ag.MaskMod, op: OpName) -> None:
    spec = declare(8, 1, mask=mask, kv=ag.Paged(page_size=16))
    request = probe(spec, 5, PREFIX + 5)
    v = torch.zeros_like(request.v)
    v[PREFIX:, 0, :5] = torch.eye(5)
    given = {"prefix": torch.tensor([PREFIX], dtype=torch.int32), "ancestors": ancestry()}
    if mask == ag.Tree("ancestors", packed=True):
        given["ancestors"] = (ancestry() << torch.arange(5)).sum(-1, keepdim=True).to(torch.uint8)
    params = {param.name: given[param.name] for param in mask.params()}
    (state,) = attend(place, spec, op, [Request(request.q, request.k, v)], params)
    visible = {0: (0,), 1: (0, 1), 2: (0, 2), 3: (0, 1, 3), 4: (0, 2, 4)}
    want = torch.zeros(5, 1, 64, dtype=torch.float64)
    for token, seen in visible.items():
        want[token, 0, list(seen)] = 1 / (PREFIX + len(seen))
    assert_near(state.out, want.expand(state.out.shape), atol=1e-6)
    assert_near(state.out[3, :, [0, 1, 3]], 0.00330033, atol=1e-6)
    assert_near(state.out[0, :, 0], 0.00332226, atol=1e-6)
    counts = torch.tensor([float(PREFIX + len(seen)) for seen in visible.values()]).double()
    assert_near(state.lse, counts.log()[:, None].expand(5, 8), atol=1e-3)
