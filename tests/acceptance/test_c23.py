"""C23: head dims that are no powers of two do not compile for decode, or read padding lanes of uninitialized memory.

The CPU runs each head dim with one of the two kinds of heads, masks and dtypes.
"""

from __future__ import annotations

import pytest
import torch

import attngen as ag
from tests.acceptance.probes import (
    CPP,
    NAN,
    REFERENCE,
    TRITON,
    Place,
    assert_near,
    attend,
    band,
    declare,
    exact,
    exact_gradients,
    gradients,
    name_place,
    noise,
    on_gpu,
)

DIMS = (40, 72, 80, 96, 112, 120, 160, 192, 256)
KINDS = ((16, "causal", "fp16"), (4, "full", "bf16"))
RUNS = [
    *((place, dim, *KINDS[n % 2]) for place in (REFERENCE, CPP) for n, dim in enumerate(DIMS)),
    *(on_gpu(TRITON, dim, *kind) for dim in DIMS for kind in KINDS),
]
EACH = pytest.mark.parametrize(("place", "dim", "kv_heads", "mask", "dtype"), RUNS, ids=name_place)


def declare_dim(dim: int, kv_heads: int, mask: str, dtype: str) -> ag.AttentionSpec:
    return declare(16, kv_heads, dim, mask=ag.Causal() if mask == "causal" else ag.Full(), dtype=dtype, kv=ag.Ragged())


def poison_freed_memory(place: Place) -> None:
    if place.on_gpu:
        torch.full((1 << 28,), NAN, device=place.device)


@EACH
def test_c23_forward(place: Place, dim: int, kv_heads: int, mask: str, dtype: str) -> None:
    spec = declare_dim(dim, kv_heads, mask, dtype)
    for op, shapes in (("prefill", [(512, 512), (77, 130)]), ("decode", [(1, 1000), (1, 331)])):
        requests = [noise(spec, *shape) for shape in shapes]
        runs = []
        for _ in range(1 if place is REFERENCE else 4):
            poison_freed_memory(place)
            runs.append(attend(place, spec, op, requests))
        for states in runs[1:]:
            for state, first in zip(states, runs[0], strict=True):
                assert torch.equal(state.out, first.out)
                assert torch.equal(state.lse, first.lse)
        for state, request, shape in zip(runs[0], requests, shapes, strict=True):
            want = exact(request, band(*shape) if mask == "causal" else None)
            assert_near(state.out, want.out)
            assert_near(state.lse, want.lse, atol=1e-3)


@EACH
def test_c23_backward(place: Place, dim: int, kv_heads: int, mask: str, dtype: str) -> None:
    spec = declare_dim(dim, kv_heads, mask, dtype)
    request = noise(spec, 131, 131)
    dout = noise(spec, 131, 1, seed=1).q
    poison_freed_memory(place)
    (got,) = gradients(place, spec, [request], [dout])
    want = exact_gradients(request, dout, band(131, 131) if mask == "causal" else None)
    for name in ("dq", "dk", "dv"):
        assert_near(getattr(got, name), getattr(want, name))


@pytest.mark.parametrize(("dim", "why"), [(20, "multiple of 8"), (264, "less than or equal to 256")])
def test_c23_other_sizes_are_refused(dim: int, why: str) -> None:
    with pytest.raises(ag.SpecError, match=f"GQA.head_dim\n.*{why}"):
        declare(16, 16, dim)
