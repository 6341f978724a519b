"""C25: GQA ratios 3, 5, 6, 7, 12 are unsupported, or only fail in decode.

Values tell heads apart, so that any wrong mapping shows. The CPU runs each ratio with one of the two head dims.
"""

from __future__ import annotations

import pytest
import torch

import attngen as ag
from attngen.variant import OpName
from tests.acceptance.probes import CPP, REFERENCE, TRITON, Place, Request, attend, declare, name_place, on_gpu, probe

HEADS = ((9, 3), (40, 8), (12, 2), (28, 4), (24, 2), (64, 4))
RUNS = [
    *((place, *heads, (64, 128)[n % 2]) for place in (REFERENCE, CPP) for n, heads in enumerate(HEADS)),
    *(on_gpu(TRITON, *heads, dim) for heads in HEADS for dim in (64, 128)),
]
CALLS: dict[OpName, list[tuple[int, int]]] = {
    "prefill": [(5, 5), (5, 4096)],
    "decode": [(1, 4096), (5, 4096), (1, 5), (5, 5)],
}


@pytest.mark.parametrize(("place", "qo_heads", "kv_heads", "dim"), RUNS, ids=name_place)
@pytest.mark.parametrize("kv", [ag.Contiguous(), ag.Paged(page_size=16)], ids=["contiguous", "paged"])
def test_c25_every_query_head_reads_its_own_group(
    place: Place, qo_heads: int, kv_heads: int, dim: int, kv: ag.Contiguous | ag.Paged
) -> None:
    spec = declare(qo_heads, kv_heads, dim, kv=kv)
    want = torch.arange(qo_heads) // (qo_heads // kv_heads)
    for op, shapes in CALLS.items():
        if op == "prefill" and kv.kind == "paged":
            continue
        for shape in shapes:
            (state,) = attend(place, spec, op, [by_head(probe(spec, *shape))])
            assert torch.equal(state.out, want[:, None].expand(state.out.shape).to(state.out.dtype))


def by_head(request: Request) -> Request:
    return Request(
        request.q, request.k, torch.arange(request.v.shape[1])[:, None].expand(request.v.shape).to(request.v)
    )
