"""C16: the output is accumulated in half precision: it overflows on long contexts, or stops growing.

fp8 KV of the case does not exist here.
"""

from __future__ import annotations

import math

import pytest
import torch

from attngen.variant import OpName
from tests.acceptance.probes import (
    CPP,
    REFERENCE,
    TRITON,
    Place,
    assert_near,
    assert_state,
    attend,
    declare,
    gradients,
    name_place,
    on_gpu,
    probe,
)

EACH_OP = pytest.mark.parametrize("op", ["prefill", "decode"])
EACH_DTYPE = pytest.mark.parametrize("dtype", ["fp16", "bf16"])


@EACH_OP
@EACH_DTYPE
@pytest.mark.parametrize("qo_len", [1, 16])
def test_c16_sum_of_values(place: Place, qo_len: int, dtype: str, op: OpName) -> None:
    spec = declare(8, 2, dtype=dtype)
    (state,) = attend(place, spec, op, [probe(spec, qo_len, 65536, torch.full((65536,), 2.0))])
    assert_state(state, 2.0, 11.090355)
    (state,) = attend(place, spec, op, [probe(spec, qo_len, 4096, torch.ones(4096))])
    assert torch.equal(state.out, torch.ones_like(state.out))
    assert_near(state.lse, math.log(4096), atol=1e-3)


GRADIENTS = (((1, 1), "fp32", 65536.0), ((8, 2), "bf16", 4 * 65536.0), ((8, 2), "fp16", math.inf))
RUNS = [
    (REFERENCE, *GRADIENTS[0]),
    *((CPP, *variant) for variant in GRADIENTS),
    *(on_gpu(TRITON, *variant) for variant in GRADIENTS),
]


@pytest.mark.parametrize(("place", "heads", "dtype", "want"), RUNS, ids=name_place)
def test_c16_sum_of_gradients(place: Place, heads: tuple[int, int], dtype: str, want: float) -> None:
    spec = declare(*heads, dtype=dtype)
    request = probe(spec, 65536, 1)
    (got,) = gradients(place, spec, [request], [torch.ones_like(request.q)])
    assert torch.equal(got.dv, torch.full_like(got.dv, want))
    assert torch.equal(got.dq, torch.zeros_like(got.dq))
    assert torch.equal(got.dk, torch.zeros_like(got.dk))
