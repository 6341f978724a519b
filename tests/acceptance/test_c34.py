"""C34: NaN or Inf in the unused tail of the last page reaches the output as 0 * NaN.

The CPU runs one variant a page size; latents are in pages for decode only.
"""

from __future__ import annotations

import math

import pytest
import torch

import attngen as ag
from tests.acceptance.latents import declare_latents, decode_latents
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


LATENTS = [
    *((place, 16, mask, "fp16") for place in (REFERENCE, CPP) for mask in ("causal", "full")),
    *(
        on_gpu(TRITON, page, mask, dtype)
        for page in (4, 16, 64)
        for mask in ("causal", "full")
        for dtype in ("fp16", "bf16")
    ),
]


@pytest.mark.parametrize(("place", "page_size", "mask", "dtype"), LATENTS, ids=name_place)
def test_c34_unused_slots_of_latents_never_count(place: Place, page_size: int, mask: str, dtype: str) -> None:
    spec = declare_latents(
        page_size=page_size, mask=ag.Causal() if mask == "causal" else ag.Full(), dtype=dtype, kv=ag.Paged(page_size)
    )
    lens = [13, 1, page_size, page_size + 1]
    generator = torch.Generator().manual_seed(page_size)
    requests = [
        torch.randn(n, 576, generator=generator).to(getattr(torch, {"fp16": "float16", "bf16": "bfloat16"}[dtype]))
        for n in lens
    ]
    for own in requests:
        own[:, :512] = torch.arange(len(own))[:, None]
    q = torch.zeros(len(lens), 2, 576, dtype=requests[0].dtype)
    clean = decode_latents(place, spec, q, requests, filler=0.0)
    for filler in (math.nan, math.inf):
        dirty = decode_latents(place, spec, q, requests, filler=filler)
        assert torch.equal(dirty.out, clean.out)
        assert torch.equal(dirty.lse, clean.lse)
    count = torch.tensor(lens).double()
    assert_state(clean, (count - 1) / 2, count.log())
    assert_state(State(clean.out[:1], clean.lse[:1]), 6.0, 2.564949)
