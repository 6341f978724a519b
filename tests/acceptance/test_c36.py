"""C36: the result changes with the page size.

The longest sequences and the middle page sizes run on a GPU only.
"""

from __future__ import annotations

import pytest
import torch

import attngen as ag
from tests.acceptance.probes import CPP, REFERENCE, TRITON, Place, attend, declare, name_place, noise, on_gpu

SIZES = (1, 2, 8, 16, 32, 48, 64, 128, 256, 512)
RUNS = [
    *((place, size) for place in (REFERENCE, CPP) for size in (1, 16, 48, 256)),
    *(on_gpu(TRITON, size) for size in SIZES),
]


def declare_pages(kv: ag.Paged | ag.Contiguous) -> ag.AttentionSpec:
    return declare(32, 2, 256, mask=ag.Causal(), dtype="bf16", kv=kv)


@pytest.mark.parametrize(("place", "page_size"), RUNS, ids=name_place)
def test_c36_paging_is_only_an_address_map(place: Place, page_size: int) -> None:
    spec = declare_pages(ag.Paged(page_size=page_size))
    plain = declare_pages(ag.Contiguous())
    lens = (17, 1024, 6144, 8864) if place.on_gpu else (17, 1024)
    for op, qo_len in (("decode", 1), ("decode", 64), ("prefill", 64)):
        requests = [noise(spec, qo_len, n) for n in lens]
        paged = attend(place, spec, op, requests)
        contiguous = attend(place, plain, op, requests)
        for got, want in zip(paged, contiguous, strict=True):
            x, y = got.out.double().flatten(), want.out.double().flatten()
            assert float((x - y).abs().max()) <= 2e-2
            assert float(torch.nn.functional.cosine_similarity(x, y, 0)) > 0.9999


@pytest.mark.parametrize("page_size", [0, -16, 65537])
def test_c36_impossible_sizes_are_refused(page_size: int) -> None:
    with pytest.raises(ag.SpecError, match="page_size"):
        ag.Paged(page_size=page_size)
