"""C26: more than 65535 sequences, or batch times heads, overflow a grid dimension: a silent no-op.

The sequences of the ragged prefill hold 16 tokens on a GPU and 2 on the CPU.
"""

from __future__ import annotations

import pytest
import torch

import attngen as ag
from tests.acceptance.probes import Place, assert_near, declare

UNTOUCHED = 7.0


def by_request(count: int, tokens: int, device: str) -> torch.Tensor:
    """Values ``[count * tokens, 1, 64]``, equal within a request and never 7."""
    value = torch.arange(count) % 1000 + 8
    return value.repeat_interleave(tokens)[:, None, None].expand(-1, 1, 64).to(torch.float16).to(device).contiguous()


@pytest.mark.parametrize(("batch", "qo_heads"), [(65535, 8), (65536, 8), (131073, 8), (10923, 6)])
def test_c26_decode_and_prefill_of_many_requests(kernels: Place, batch: int, qo_heads: int) -> None:
    ops = kernels.compile(declare(qo_heads, 1, mask=ag.Causal()))
    v = by_request(batch, 1, kernels.device)[:, None]
    q = torch.zeros(batch, 1, qo_heads, 64, dtype=torch.float16, device=kernels.device)
    for run in (ops.decode, ops.prefill):
        out = torch.full_like(q, UNTOUCHED)
        run(q, v, v, out=out)
        assert torch.equal(out, v.expand(out.shape))


def test_c26_ragged_prefill_and_backward_of_many_requests(kernels: Place) -> None:
    count, tokens = 80000, 16 if kernels.on_gpu else 2
    ops = kernels.compile(declare(8, 1, mask=ag.Causal(), kv=ag.Ragged()))
    v = by_request(count, tokens, kernels.device)
    q = torch.zeros(count * tokens, 8, 64, dtype=torch.float16, device=kernels.device)
    indptr = torch.arange(0, count * tokens + 1, tokens, dtype=torch.int32).to(kernels.device)
    lengths = {"qo_indptr": indptr, "kv_indptr": indptr}
    out, lse = ops.prefill(q, v, v, **lengths, out=torch.full_like(q, UNTOUCHED), return_lse=True)
    assert torch.equal(out, v.expand(out.shape))

    dq, dk, dv, _ = ops.backward(torch.ones_like(q), q, v, v, out, lse, **lengths)
    # Row i gives 1 / (i + 1) to each key up to its own; 8 heads add up.
    want = (8 / torch.arange(1.0, tokens + 1)).flip(0).cumsum(0).flip(0)
    assert_near(dv.view(count, tokens, 64).cpu(), want[:, None].double())
    for grad in (dq, dk):
        assert torch.equal(grad, torch.zeros_like(grad))
