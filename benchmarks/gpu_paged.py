"""Causal prefill over pages by attngen's backends and FlashInfer, where installed: ``python -m benchmarks.gpu_paged [size ...]``.

32/8 heads, d 128, bf16; 4 requests of 8,192 tokens, and 16 requests of 512 to 8,192 keys whose last halves are new. Medians over
rounds; TFLOP/s of visible pairs. Adjacent keys of the same requests stand beside them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch

import attngen as ag
from benchmarks.measure import Row, relative_error, report, versions
from benchmarks.passes import timed

QO_HEADS, KV_HEADS, DIM = 32, 8, 128
CHECKED = 64  # last queries of each request
REQUESTS = {
    "4 of 8192": ([8192] * 4, [8192] * 4),
    "16 ragged": ([n // 2 for n in range(512, 8193, 512)], list(range(512, 8193, 512))),
}


def indptr(lens: Sequence[int]) -> torch.Tensor:
    """Where each request starts."""
    return torch.tensor([0, *torch.tensor(lens).cumsum(0)], dtype=torch.int32, device="cuda")


def exact_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qo_lens: list[int], kv_lens: list[int]) -> Any:
    """The last rows of each request, in fp32."""
    rows = []
    for queries, keys, values in zip(q.split(qo_lens), k.split(kv_lens), v.split(kv_lens), strict=True):
        wide_k, wide_v = (x.float().repeat_interleave(QO_HEADS // KV_HEADS, 1) for x in (keys, values))
        logits = torch.einsum("qhd,khd->hqk", queries[-CHECKED:].float(), wide_k) * DIM**-0.5
        hidden = torch.ones(logits.shape[1:], dtype=torch.bool, device="cuda").triu(len(keys) - CHECKED + 1)
        rows.append(torch.einsum("hqk,khd->qhd", logits.masked_fill(hidden, float("-inf")).softmax(-1), wide_v))
    return torch.cat(rows)


def prefill(name: str, page: int) -> list[Row]:
    """One set of requests in pages of one size."""
    qo_lens, kv_lens = REQUESTS[name]
    q = torch.randn(sum(qo_lens), QO_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    counts = [-(-n // page) for n in kv_lens]
    pools = torch.randn(2, sum(counts), page, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    order = torch.randperm(sum(counts), device="cuda", dtype=torch.int32)
    rows = [pages.long() for pages in order.split(counts)]
    adjacent = [torch.cat([x[pages].flatten(0, 1)[:n] for pages, n in zip(rows, kv_lens, strict=True)]) for x in pools]
    wanted = exact_rows(q, *adjacent, qo_lens, kv_lens)
    csr = {
        "kv_indptr": indptr(counts),
        "kv_indices": order,
        "kv_last_page_len": torch.tensor([(n - 1) % page + 1 for n in kv_lens], dtype=torch.int32, device="cuda"),
    }

    def run(kv: Any, backend: str, *tensors: Any, **lengths: torch.Tensor) -> Callable[[], torch.Tensor]:
        heads = ag.GQA(num_qo_heads=QO_HEADS, num_kv_heads=KV_HEADS, head_dim=DIM)
        ops = ag.compile(ag.AttentionSpec(heads=heads, mask=ag.Causal(), kv=kv), backend=backend, ops=())
        return partial(ops.prefill, q, *tensors, qo_indptr=indptr(qo_lens), **lengths)

    calls = {backend: run(ag.Paged(page), backend, tuple(pools), **csr) for backend in ("cuda", "triton")}
    calls["cuda, adjacent"] = run(ag.Ragged(), "cuda", *adjacent, kv_indptr=indptr(kv_lens))
    for backend in ("fa2", "fa3"):
        try:
            calls[f"flashinfer {backend}"] = _flashinfer(backend, q, tuple(pools), indptr(qo_lens), page, **csr)
        except Exception as failure:  # not installed, or not for this GPU
            print(f"flashinfer {backend} cannot run: {str(failure).splitlines()[0][:120]}", flush=True)

    def error(out: torch.Tensor) -> float:
        return relative_error(torch.cat([part[-CHECKED:] for part in out.split(qo_lens)]), wanted)

    pairs = sum(m * (n - m) + m * (m + 1) // 2 for m, n in zip(qo_lens, kv_lens, strict=True))
    return timed(f"prefill 32/8 d128 causal, {name}, page {page}", calls, error, 4.0 * QO_HEADS * DIM * pairs)


def _flashinfer(
    backend: str, q: torch.Tensor, pools: tuple[torch.Tensor, ...], qo_indptr: torch.Tensor, page: int, **csr: Any
) -> Callable[[], torch.Tensor]:
    flashinfer = import_module("flashinfer")
    workspace = torch.empty(256 << 20, device="cuda", dtype=torch.uint8)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
    sizes = (csr["kv_indptr"], csr["kv_indices"], csr["kv_last_page_len"], QO_HEADS, KV_HEADS, DIM, page)
    wrapper.plan(qo_indptr, *sizes, causal=True, q_data_type=q.dtype, kv_data_type=q.dtype)
    return partial(wrapper.run, q, pools)


if __name__ == "__main__":
    torch.manual_seed(0)
    sizes = [int(size) for size in sys.argv[1:]] or [16, 64]
    report("gpu-paged", [row for name in REQUESTS for size in sizes for row in prefill(name, size)], **versions())
