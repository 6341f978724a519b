"""C34: NaN or Inf in the unused tail of the last page reaches the output as 0 * NaN.

The MLA layout of the case does not exist here. The CPU runs one variant a page size.
"""

from __future__ import annotations

import math

import pytest
import torch

import attngen as ag
from tests.acceptance.probes import (
    CPP,
    REFERENCE,
    TRITON,
    Place,
    State,
    assert_state,
    attend,
    band,
    declare,
    name_place,
    on_gpu,
    probe,
)

FIRST = ((4, "causal", 64, "fp16"), (16, "full", 128, "bf16"), (64, "causal", 64, "bf16"))
SECOND = ((4, "full", 128, "bf16"), (16, "causal", 64, "fp16"), (64, "full", 128, "fp16"))
RUNS = [
    *((place, *variant) for place in (REFERENCE, CPP) for variant in FIRST),
    *(on_gpu(TRITON, *variant) for variant in FIRST + SECOND),
]


@pytest.mark.parametrize(("place", "page_size", "mask", "dim", "dtype"), RUNS, ids=name_place)
@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_c34_unused_slots_never_count(place: Place, page_size: int, mask: str, dim: int, dtype: str, op: str) -> None:
    kv = ag.Paged(page_size=page_size)
    spec = declare(2, 1, dim, mask=ag.Causal() if mask == "causal" else ag.Full(), dtype=dtype, kv=kv)
    lens = [13, 1, page_size, page_size + 1]
    requests = [probe(spec, 1 if op == "decode" else n, n) for n in lens]
    clean = attend(place, spec, op, requests, filler=0.0)
    for filler in (math.nan, math.inf):
        dirty = attend(place, spec, op, requests, filler=filler)
        for x, y in zip(dirty, clean, strict=True):
            assert torch.equal(x.out, y.out)
            assert torch.equal(x.lse, y.lse)
    for state, request, n in zip(clean, requests, lens, strict=True):
        count = (band(len(request.q), n) if mask == "causal" else torch.ones(len(request.q), n)).sum(-1).double()
        assert_state(state, (count - 1) / 2, count.log())
    assert_state(State(clean[0].out[-1:], clean[0].lse[-1:]), 6.0, 2.564949)
