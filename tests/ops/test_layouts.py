"""Paging is an address map: one set of numbers in every layout gives one result, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attngen as ag
from attngen.dtypes import Storage, quantize
from attngen.ops.checks import torch_dtype
from tests.acceptance.probes import Place
from tests.backends.triton_kernels import run_python

LENS = (300, 1, 77)
HEADS = ag.GQA(num_qo_heads=4, num_kv_heads=2, head_dim=64)
STORAGES = {
    "fp16": {},
    "e4m3-tokens": {"dtype": "fp8_e4m3", "scale": "token"},
    "int8": {"dtype": "int8"},
    "int4": {"dtype": "int4", "zero_point": True},
    "nvfp4": {"dtype": "nvfp4"},
}
# page size, layout, how both are passed, and whether pages lie in a wider tensor
LAYOUTS = (
    (1, "NHD", "split", False),
    (8, "HND", "split", False),
    (16, "NHD", "stacked", False),
    (32, "HND", "stacked", False),
    (64, "NHD", "stacked-first", False),
    (128, "NHD", "csr", False),
    (256, "HND", "stacked-first", False),
    (48, "NHD", "split", True),
    (7, "HND", "csr", True),
)


def i32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def rows_of(storage: Storage, seed: int) -> tuple[list[torch.Tensor], torch.Tensor | None, torch.Tensor | None]:
    """Data and block scales of all tokens, ``[tokens, heads, width]``, and factors."""
    x = torch.randn(sum(LENS), 2, 64, generator=torch.Generator().manual_seed(seed))
    given = {"head": torch.tensor([0.03, 0.04]), "tensor": torch.tensor(0.002)}.get(storage.scale)
    data, blocks, tokens = quantize(x, storage, given)
    return [data] if blocks is None else [data, blocks], tokens, given


def paged(
    rows: torch.Tensor, size: int, layout: str, order: torch.Tensor, apart: bool, lens: tuple[int, ...] = LENS
) -> torch.Tensor:
    """Rows of all requests in shuffled pages; what no request owns is NaN or 0xff."""
    width = rows.view(torch.uint8) if rows.element_size() == 1 else rows
    blank = 0xFF if width.dtype == torch.uint8 else float("nan")
    pool = torch.full((len(order) + 2, size, *rows.shape[1:]), blank, dtype=width.dtype)
    start = page = 0
    for n in lens:
        for first in range(0, n, size):
            count = min(size, n - first)
            pool[order[page], :count] = width[start + first : start + first + count]
            page += 1
        start += n
    if layout == "HND":
        pool = pool.transpose(1, 2).contiguous()
    if apart:
        pool = torch.stack([torch.full_like(pool, blank), pool, torch.full_like(pool, blank)], 1)[:, 1]
    return pool.view(rows.dtype)


def lists_of_pages(way: str, size: int, order: torch.Tensor, lens: tuple[int, ...] = LENS) -> dict[str, torch.Tensor]:
    """Where pages of requests lie, in CSR form or as a table."""
    counts = [-(-n // size) for n in lens]
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    if way == "csr":
        last = i32([(n - 1) % size + 1 for n in lens])
        return {"kv_indptr": i32(starts), "kv_indices": order.int(), "kv_last_page_len": last}
    table = torch.full((len(lens), max(counts)), -7, dtype=torch.int32)
    for b, count in enumerate(counts):
        table[b, :count] = order[starts[b] : starts[b] + count]
    return {"page_table": table, "kv_lens": i32(lens)}


def call(name: str, size: int, layout: str, way: str, apart: bool) -> tuple[ag.AttentionSpec, Any, dict[str, Any]]:
    """The spec, cache and lengths of one layout."""
    stack_dim = 0 if way == "stacked-first" else 1
    kv = ag.Paged(page_size=size, layout=layout, stack_dim=stack_dim, **STORAGES[name])
    spec = ag.AttentionSpec(heads=HEADS, mask=ag.Causal() & ag.SlidingWindow(left=200), dtype="fp16", kv=kv)
    counts = [-(-n // size) for n in LENS]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(size))
    caches, options = [], {}
    for index, storage in enumerate(kv.storages("fp16")):
        rows, tokens, given = rows_of(storage, index)
        caches.append([paged(part, size, layout, order, apart) for part in rows])
        if storage.scale:
            options["kv"[index] + "_scale"] = (
                given if tokens is None else paged(tokens[..., None], size, layout, order, False)[..., 0]
            )
    if way.startswith("stacked"):
        both = [
            torch.stack([x.view(torch.uint8) if x.element_size() == 1 else x for x in pair], stack_dim).view(
                pair[0].dtype
            )
            for pair in zip(*caches, strict=True)
        ]
        cache = both[0] if len(both) == 1 else tuple(both)
    else:
        cache = tuple(part[0] if len(part) == 1 else tuple(part) for part in caches)
    options |= lists_of_pages(way, size, order)
    return spec, cache, options


def moved(x: Any, device: str) -> Any:
    if isinstance(x, tuple):
        return tuple(moved(part, device) for part in x)
    whole = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return whole.to(device).as_strided(x.shape, x.stride(), x.storage_offset())  # the strides shall survive


@pytest.mark.parametrize("name", STORAGES)
def test_every_layout_gives_the_same_bits(kernels: Place, name: str) -> None:
    generator = torch.Generator().manual_seed(9)
    one, many = torch.randn(3, 4, 64, generator=generator).half(), torch.randn(24, 4, 64, generator=generator).half()
    indptr = i32([0, 20, 21, 24])
    results = []
    for layout in LAYOUTS:
        spec, cache, options = call(name, *layout)
        ops, device = kernels.compile(spec), kernels.device
        there = {key: moved(x, device) for key, x in options.items()}
        place = moved(cache, device)
        decoded = ops.decode(one.to(device), place, return_lse=True, **there)
        filled = ops.prefill(many.to(device), place, qo_indptr=indptr.to(device), return_lse=True, **there)
        results.append([x.cpu() for x in (*decoded, *filled)])
    for layout, found in zip(LAYOUTS[1:], results[1:], strict=True):
        for got, want in zip(found, results[0], strict=True):
            assert torch.equal(got, want), layout
    assert all(x.isfinite().all() for x in results[0])


# page size, whether both parts of a latent lie in one tensor, and how pages are passed
LATENT_LAYOUTS = (
    (64, True, "table"),
    (1, True, "table"),
    (1, False, "csr"),
    (16, True, "csr"),
    (16, False, "table"),
    (64, False, "csr"),
    (128, True, "csr"),
    (128, False, "table"),
    (256, True, "table"),
    (256, False, "csr"),
)
LATENTS: dict[str, tuple[str, dict[str, str], ag.Softmax]] = {
    "bf16": ("bf16", {}, ag.Softmax()),
    "fp16": ("fp16", {}, ag.Softmax()),
    "off-by-one": ("bf16", {}, ag.Softmax(off_by_one=True)),
    "e4m3": ("bf16", {"dtype": "fp8_e4m3"}, ag.Softmax()),
    "e4m3-tokens": ("fp16", {"dtype": "fp8_e4m3", "scale": "token"}, ag.Softmax()),
}


LATENT_LENS, CKV, KPE = (2300, 2, 77), 512, 64


def latents(name: str, size: int, joined: bool, way: str) -> tuple[ag.AttentionSpec, Any, dict[str, Any]]:
    """The spec, cache and lengths of one layout of latents."""
    dtype, fields, normalizer = LATENTS[name]
    spec = ag.AttentionSpec(
        heads=ag.MLA(num_qo_heads=5),
        mask=ag.Causal(),
        normalizer=normalizer,
        dtype=dtype,
        kv=ag.Paged(size, **fields),
    )
    storage = spec.kv.storages(dtype)[0]
    x = torch.randn(sum(LATENT_LENS), CKV + KPE, generator=torch.Generator().manual_seed(11))
    order = torch.randperm(sum(-(-n // size) for n in LATENT_LENS), generator=torch.Generator().manual_seed(size))
    options = lists_of_pages(way, size, order, LATENT_LENS)
    rows = x.to(torch_dtype(dtype))
    if storage.is_quantized:
        given = torch.tensor(0.01) if storage.scale == "tensor" else None
        rows, _, tokens = quantize(x, storage, given)
        options["k_scale"] = given if tokens is None else paged(tokens, size, "NHD", order, False, LATENT_LENS)
    pool = paged(rows, size, "NHD", order, False, LATENT_LENS)
    return spec, pool if joined else tuple(part.contiguous() for part in pool.split([CKV, KPE], -1)), options


def other_bits(name: str, compile_spec: Callable[[ag.AttentionSpec], ag.Ops], device: str) -> list[Any]:
    """Layouts of latents whose out, lse or largest logits differ from those of the first one."""
    q = torch.randn(3, 2, 5, CKV + KPE, generator=torch.Generator().manual_seed(9))
    results = []
    for layout in LATENT_LAYOUTS:
        spec, cache, options = latents(name, *layout)
        there = {key: x.to(device) for key, x in options.items()}
        query = q.to(device, torch_dtype(spec.dtype))
        results.append(
            compile_spec(spec).decode(query, moved(cache, device), return_lse=True, return_max=True, **there)
        )
    assert all(x.isfinite().all() for x in results[0])
    same = [all(torch.equal(*pair) for pair in zip(found, results[0], strict=True)) for found in results]
    return [layout for layout, equal in zip(LATENT_LAYOUTS, same, strict=True) if not equal]


@pytest.mark.parametrize("name", LATENTS)
def test_every_layout_of_latents_gives_the_same_bits(kernels: Place, name: str) -> None:
    """Large pages come by tensor maps on Hopper, small ones by addresses; one request is cut into parts."""
    assert other_bits(name, kernels.compile, kernels.device) == []


@pytest.mark.parametrize("name", ["fp16", "e4m3-tokens"])
def test_the_interpreter_gives_the_same_bits_for_latents(name: str) -> None:
    script = (
        "import sys, attngen as ag; from tests.ops.test_layouts import other_bits;"
        "print(other_bits(sys.argv[1], lambda spec: ag.compile(spec, target='interpret', backend='triton', ops=()), 'cpu'))"
    )
    assert run_python(script, name, TRITON_INTERPRET="1").strip() == "[]"


def test_pages_are_shared_by_requests(kernels: Place) -> None:
    spec = ag.AttentionSpec(heads=HEADS, mask=ag.Causal(), dtype="fp16", kv=ag.Paged(page_size=16, dtype="int8"))
    cache = tuple(
        torch.randint(-127, 128, (6, 16, 2, 64), dtype=torch.int8, generator=torch.Generator().manual_seed(i))
        for i in (0, 1)
    )
    q = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(2)).half()
    scales = {"k_scale": torch.full((2,), 0.02), "v_scale": torch.full((2,), 0.02)}
    shared = {"page_table": i32([[4, 1, 0], [4, 1, 3], [4, -1, -1]]), "kv_lens": i32([40, 33, 16])}
    own = tuple(torch.cat([x[[4, 1, 0]], x[[4, 1, 3]], x[[4, 2, 2]]]) for x in cache)
    apart = {"page_table": torch.arange(9, dtype=torch.int32).view(3, 3), "kv_lens": i32([40, 33, 16])}
    found = []
    for pages, options in ((cache, shared), (own, apart)):
        there = {key: x.to(kernels.device) for key, x in (options | scales).items()}
        found.append(kernels.compile(spec).decode(q.to(kernels.device), moved(pages, kernels.device), **there).cpu())
    assert torch.equal(*found)


def test_a_stacked_tensor_says_where_it_is_stacked() -> None:
    cache = torch.randn(5, 2, 16, 2, 64)
    q, table, lens = torch.randn(1, 4, 64), i32([[0]]), i32([16])
    for stack_dim, tensor in ((1, cache), (0, cache.transpose(0, 1))):
        spec = ag.AttentionSpec(heads=HEADS, dtype="fp32", kv=ag.Paged(page_size=16, stack_dim=stack_dim))
        ops = ag.compile(spec, backend="reference")
        ops.decode(q, tensor, page_table=table, kv_lens=lens)
        with pytest.raises(ag.ArgumentError, match="kv_cache has shape"):
            ops.decode(q, tensor.transpose(0, 1), page_table=table, kv_lens=lens)
