"""C13: GQA backward divides heads wrongly when the group size differs from the number of KV heads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.acceptance.probes import Place, assert_near, declare, exact_gradients, gradients, noise

SHARED = {(12, 3): [10, 26, 42], (6, 2): [6, 15], (20, 4): [15, 40, 65, 90], (5, 1): [15]}
SPECS = [
    *(declare(*heads, dtype="fp32") for heads in SHARED),
    *(declare(*heads, dtype="bf16") for heads in ((12, 3), (5, 1))),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.heads.num_qo_heads}-{s.heads.num_kv_heads}-{s.dtype}")
def test_c13_each_group_sums_its_own_heads(place: Place, spec) -> None:
    heads = (spec.heads.num_qo_heads, spec.heads.num_kv_heads)
    request = noise(spec, 4, 4)
    request = replace(request, q=torch.zeros_like(request.q))
    dout = torch.arange(1.0, heads[0] + 1)[:, None].expand(request.q.shape)
    (got,) = gradients(place, spec, [request], [dout])
    want = exact_gradients(request, dout)
    assert_near(got.dv, torch.tensor(SHARED[heads], dtype=torch.float64)[:, None])
    assert_near(got.dv, want.dv)
    assert_near(got.dk, want.dk)
    # dq sums over keys what dout of up to 12 makes large: bf16 rounds that, fp32 does not.
    assert_near(got.dq, want.dq, atol=2e-2 * float(want.dq.abs().max()) if spec.dtype == "bf16" else 2e-2)
    assert all(grad.isfinite().all() for grad in (got.dq, got.dk, got.dv))


def test_c13_keys_on_random_queries(place: Place) -> None:
    spec = declare(12, 3, dtype="fp32")
    request = noise(spec, 4, 4)
    dout = torch.arange(1.0, 13)[:, None].expand(request.q.shape)
    (got,), want = gradients(place, spec, [request], [dout]), exact_gradients(request, dout)
    assert_near(got.dk, want.dk, atol=1e-4)
    assert_near(got.dq, want.dq, atol=1e-4)
