"""C17: ``deterministic=True`` is accepted, but the backward pass still uses atomics.

The CPU runs two of the variants, on shorter sequences.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

import attngen as ag
from attngen.ops.checks import torch_dtype
from tests.acceptance.probes import CPP, REFERENCE, TRITON, Place, declare, name_place, on_gpu

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


def test_c17_gradients_of_parameters_are_repeatable(kernels: Place) -> None:
    """Every pair of every tile adds to one slope."""
    ops = kernels.compile(declare(4, 2, score_mods=(bias,), dtype="fp32"))
    length = 2048 if kernels.on_gpu else 300
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(2, length, heads, 64, generator=generator).to(kernels.device) for heads in (4, 2, 2, 4)
    )
    params = {"slopes": torch.rand(4, generator=generator).to(kernels.device) * 0.01}
    out, lse = ops.prefill(q, k, v, params=params, return_lse=True)
    exact = REFERENCE.compile(ops.spec).backward(
        *(t.cpu() for t in (dout, q, k, v, out, lse)), params={name: t.cpu() for name, t in params.items()}
    )[3]["slopes"]
    first = ops.backward(dout, q, k, v, out, lse, params=params, deterministic=True)[3]["slopes"]
    torch.testing.assert_close(first.cpu(), exact, rtol=1e-3, atol=1e-3)
    for run in range(20):
        if kernels.on_gpu and run >= 10:
            load_another_stream()
        again = ops.backward(dout, q, k, v, out, lse, params=params, deterministic=True)[3]["slopes"]
        assert torch.equal(first, again)
