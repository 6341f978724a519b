"""C17: ``deterministic=True`` is accepted, but the backward pass still uses atomics.

The CPU runs two of the variants, on shorter sequences.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

import attngen as ag
from attngen.ops.checks import torch_dtype
from tests.acceptance.probes import CPP, TRITON, Place, declare, name_place, on_gpu

MASKS = {"causal": ag.Causal(), "full": ag.Full()}
RUNS = [
    (CPP, "causal", 64, "bf16"),
    (CPP, "full", 128, "fp16"),
    *(on_gpu(TRITON, *variant) for variant in product(MASKS, (64, 128), ("bf16", "fp16"))),
]


@ag.score_mod
def bias(score, b, h, q, k, slopes: ag.Tensor("num_qo_heads")):
    return score + slopes[h] * (k - q)


@pytest.mark.parametrize(("place", "mask", "dim", "dtype"), RUNS, ids=name_place)
def test_c17_gradients_are_repeatable(place: Place, mask: str, dim: int, dtype: str) -> None:
    ops = place.compile(declare(16, 2, dim, mask=MASKS[mask], dtype=dtype))
    length = 2048 if place.on_gpu else 256
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(2, length, heads, dim, generator=generator).to(torch_dtype(dtype)).to(place.device)
        for heads in (16, 2, 2, 16)
    )
    out, lse = ops.prefill(q, k, v, return_lse=True)
    first = ops.backward(dout, q, k, v, out, lse, deterministic=True)[:3]
    for run in range(30):
        if place.on_gpu and run >= 15:
            load_another_stream()
        again = ops.backward(dout, q, k, v, out, lse, deterministic=True)[:3]
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def load_another_stream() -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        busy = torch.ones(1 << 26, device="cuda")
        for _ in range(20):
            busy.mul_(1.0001)


def test_c17_refused_where_sums_have_no_order(kernels: Place) -> None:
    ops = kernels.compile(declare(2, 1, score_mods=(bias,)))
    q, kv = (torch.ones(1, 4, heads, 64, dtype=torch.float16, device=kernels.device) for heads in (2, 1))
    params = {"slopes": torch.ones(2, device=kernels.device)}
    out, lse = ops.prefill(q, kv, kv, params=params, return_lse=True)
    with pytest.raises(ag.UnsupportedError, match="the gradient of slopes is not deterministic"):
        ops.backward(out, q, kv, kv, out, lse, params=params, deterministic=True)
