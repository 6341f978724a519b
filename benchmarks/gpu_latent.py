"""Decode over latents of the ``triton`` backend on one GPU, beside FlashInfer where it is installed.

DeepSeek-V3's heads: 128 query heads over one latent of 512 and 64 columns, bf16, pages of 64 in random order, causal. Replays of a
CUDA graph, merge included, the L2 cache flushed, medians over rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import attngen as ag
from attngen.timing import as_graph, time_gpu
from benchmarks.measure import Row, relative_error, report, versions

HEADS, CKV, KPE, PAGE = 128, 512, 64, 64
SCALE = (128 + 64) ** -0.5
# Requests, keys of each, query tokens.
SIZES = ((64, 8192, 1), (16, 4096, 1), (1, 8192, 1), (64, 8192, 2), (1, 65536, 1))


@dataclass(frozen=True)
class Batch:
    """Random latents in pages, and queries of the last tokens of each request."""

    q: torch.Tensor
    pool: torch.Tensor
    table: torch.Tensor
    kv_lens: torch.Tensor

    @staticmethod
    def random(batch: int, kv_len: int, qo_len: int) -> Batch:
        pages = -(-kv_len // PAGE)
        return Batch(
            torch.randn(batch, qo_len, HEADS, CKV + KPE, device="cuda").bfloat16(),
            torch.randn(batch * pages, PAGE, CKV + KPE, device="cuda").bfloat16(),
            torch.randperm(batch * pages, device="cuda", dtype=torch.int32).view(batch, pages),
            torch.full((batch,), kv_len, device="cuda", dtype=torch.int32),
        )

    @property
    def work(self) -> float:
        """Floating-point operations, hidden pairs counted too."""
        batch, qo_len = self.q.shape[:2]
        return 2.0 * batch * qo_len * HEADS * int(self.kv_lens[0]) * (2 * CKV + KPE)

    def exact(self, requests: int) -> torch.Tensor:
        """out of the first requests, fp32."""
        kv_len, qo_len = int(self.kv_lens[0]), self.q.shape[1]
        keys = self.pool[self.table[:requests].long()].view(requests, -1, CKV + KPE)[:, :kv_len].float()
        score = torch.einsum("bqhd,bkd->bhqk", self.q[:requests].float(), keys) * SCALE
        last = torch.arange(qo_len, device="cuda")[:, None] + kv_len - qo_len
        score = score.masked_fill(torch.arange(kv_len, device="cuda") > last, float("-inf"))
        return torch.einsum("bhqk,bkd->bqhd", score.softmax(-1), keys[..., :CKV])


def declared() -> ag.AttentionSpec:
    """What is measured."""
    return ag.AttentionSpec(heads=ag.MLA(HEADS), mask=ag.Causal(), kv=ag.Paged(PAGE))


def attngen_call(ops: ag.Ops, batch: Batch) -> Callable[[], torch.Tensor]:
    """One decode."""
    return partial(ops.decode, batch.q, batch.pool, page_table=batch.table, kv_lens=batch.kv_lens)


def flashinfer_call(batch: Batch, backend: str) -> Callable[[], torch.Tensor] | None:
    """FlashInfer's decode over the same pages, planned."""
    try:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper
    except ImportError:
        return None
    requests, qo_len = batch.q.shape[:2]
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(256 << 20, device="cuda", dtype=torch.uint8), backend=backend)
    steps = torch.arange(requests + 1, device="cuda", dtype=torch.int32)
    kinds = (torch.bfloat16, torch.bfloat16)
    wrapper.plan(
        steps * qo_len,
        steps * batch.table.shape[1],
        batch.table.flatten(),
        batch.kv_lens,
        HEADS,
        CKV,
        KPE,
        PAGE,
        True,
        SCALE,
        *kinds,
    )
    q, pool = batch.q.flatten(0, 1), batch.pool
    run = partial(wrapper.run, q[..., :CKV], q[..., CKV:], pool[..., :CKV], pool[..., CKV:])
    return lambda: run().view(requests, qo_len, HEADS, CKV)


def measure(ops: ag.Ops, sizes: tuple[tuple[int, int, int], ...] = SIZES, **timing: int) -> list[Row]:
    """Every size, checked and timed."""
    rows: list[Row] = []
    for batch, kv_len, qo_len in sizes:
        torch.manual_seed(0)
        data = Batch.random(batch, kv_len, qo_len)
        exact = data.exact(min(batch, 2))
        calls = {"attngen": attngen_call(ops, data)}
        calls |= {f"flashinfer {name}": call for name in ("fa2", "fa3") if (call := flashinfer_call(data, name))}
        errors = {name: relative_error(call()[: len(exact)], exact) for name, call in calls.items()}
        graphs: dict[str, Callable[[], Any]] = {name: as_graph(call) for name, call in calls.items()}
        case = f"latents b{batch} kv{kv_len} q{qo_len}"
        rows += [
            Row(case, name, ms, data.work / ms / 1e9, "TFLOP/s", errors[name])
            for name, ms in time_gpu(graphs, calls=1, **timing).items()
        ]
    return rows


if __name__ == "__main__":
    compiled = ag.compile(declared(), backend="triton")
    compiled.warmup("decode")
    report("gpu-latent", measure(compiled), **versions())
