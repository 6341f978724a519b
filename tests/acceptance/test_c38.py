"""C38: page number times page stride in int32: foreign data once the pool passes 2^31 elements.

Latents, as in the case, and a stacked cache of the same size.
"""

from __future__ import annotations

import pytest
import torch

import attngen as ag
from tests.acceptance.latents import declare_latents, exact_latents
from tests.acceptance.probes import TRITON, Place, assert_near, declare, exact, int32, noise

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


def test_c38_last_pages_of_a_large_pool_of_bytes_are_written_and_read(kernels: Place) -> None:
    """On the CPU only the pages that are touched take memory."""
    spec = declare(16, 8, 128, dtype="bf16", kv=ag.Paged(page_size=PAGE, dtype="fp8_e4m3"))
    request, device = noise(spec, 1, 200), kernels.device
    pool = torch.zeros(PAGES, 2, PAGE, 8, 128, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    table = torch.tensor([[0, 1, 2, 3], [PAGES - 4, PAGES - 3, PAGES - 2, PAGES - 1]], dtype=torch.int32)
    ops = kernels.compile(spec)
    token = torch.arange(200)
    for pages in table.long():
        slots = pages[token // PAGE] * PAGE + token % PAGE
        ops.append(request.k.to(device), request.v.to(device), pool, slot_mapping=slots.to(device))
    q = request.q.expand(2, -1, -1).contiguous().to(device)
    out = ops.decode(q, pool, page_table=table.to(device), kv_lens=int32([200, 200]).to(device))
    assert torch.equal(out[0], out[1])
    assert_near(out[:1].cpu(), exact(request).out, atol=3e-2)


@pytest.mark.gpu
def test_c38_last_pages_of_a_large_pool_of_latents() -> None:
    """One joined tensor of 576 columns, 36864 elements a page."""
    pages, spec = 58300, declare_latents(16, dtype="bf16", mask=ag.Causal(), kv=ag.Paged(PAGE))
    generator = torch.Generator().manual_seed(38)
    keys = torch.randn(200, 576, generator=generator).bfloat16()
    q = torch.randn(1, 16, 576, generator=generator).bfloat16()
    pool = torch.full((pages, PAGE, 576), float("nan"), dtype=torch.bfloat16, device="cuda")
    table = int32([[0, 1, 2, 3], [58256, 58257, 58258, 58259]])
    assert 58255 * PAGE * 576 > 2**31
    for own in table.tolist():
        for page, chunk in zip(own, keys.split(PAGE), strict=True):
            pool[page, : len(chunk)] = chunk.cuda()
    where = {"page_table": table.cuda(), "kv_lens": int32([200, 200]).cuda()}
    out = TRITON.compile(spec).decode(q.expand(2, -1, -1).contiguous().cuda(), pool, **where)
    assert torch.equal(out[0], out[1])
    assert_near(out[:1].cpu(), exact_latents(spec, q, keys).out)
