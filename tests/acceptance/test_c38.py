"""C38: page number times page stride in int32: foreign data once the pool passes 2^31 elements.

The MLA layout of the case does not exist here; a stacked GQA cache of the same size takes its place.
"""

from __future__ import annotations

import pytest
import torch

import attngen as ag
from tests.acceptance.probes import TRITON, assert_near, declare, exact, int32, noise

PAGE, PAGES = 64, 16500  # a page of keys and values holds 131072 elements


@pytest.mark.gpu
def test_c38_last_pages_of_a_large_pool() -> None:
    spec = declare(16, 8, 128, dtype="bf16", kv=ag.Paged(page_size=PAGE))
    request = noise(spec, 1, 200)
    pool = torch.zeros(PAGES, 2, PAGE, 8, 128, dtype=torch.bfloat16, device="cuda")
    assert pool[: PAGES - 4].numel() > 2**31
    table = torch.tensor([[0, 1, 2, 3], [PAGES - 4, PAGES - 3, PAGES - 2, PAGES - 1]], dtype=torch.int32)
    for pages in table.tolist():
        for slot, rows in enumerate((request.k, request.v)):
            for page, chunk in zip(pages, rows.split(PAGE), strict=True):
                pool[page, slot, : len(chunk)] = chunk.cuda()
    ops, q = TRITON.compile(spec), request.q.expand(2, -1, -1).contiguous().cuda()
    where = {"page_table": table.cuda(), "kv_lens": int32([200, 200]).cuda()}
    for out in (ops.decode(q, pool, **where), ops.prefill(q, pool, qo_indptr=int32([0, 1, 2]).cuda(), **where)):
        assert torch.equal(out[0], out[1])
        assert_near(out[:1].cpu(), exact(request).out)
