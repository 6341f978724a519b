"""attngen beside its peers on one GPU, in one process: ``python -m benchmarks.gpu [group ...] [--backend NAME]``.

Peers: those of :mod:`benchmarks.peers`, and FlashInfer for decode where it is installed. bf16, random data, contenders interleaved
in random order, L2 flushed, medians over rounds. Causal work counts half.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import attngen as ag
from attngen.timing import as_graph, time_gpu
from benchmarks import passes
from benchmarks.measure import Row, relative_error, report, versions
from benchmarks.passes import Cell
from benchmarks.settings import CAUSAL, FULL

TOKENS, HIDDEN = 16384, 2048


def _cells(backend: str | None) -> list[Cell]:
    sizes = [(dim, length) for dim in (64, 128, 256) for length in (2048, TOKENS)]
    return [
        Cell(setting, TOKENS // length, length, HIDDEN // dim, dim, backend)
        for dim, length in sizes
        for setting in (FULL, CAUSAL)
    ]


def prefill(backend: str | None) -> list[Row]:
    """16,384 tokens, hidden 2,048."""
    return [row for cell in _cells(backend) for row in passes.forward(cell)]


def backward(backend: str | None) -> list[Row]:
    """16,384 tokens, hidden 2,048."""
    return [row for cell in _cells(backend) for row in passes.backward(cell)]


def fp8(backend: str | None) -> list[Row]:
    """16,384 tokens of 16 heads of 128 in fp8_e4m3, beside FlashAttention-3."""
    cells = [Cell(setting, 1, TOKENS, HIDDEN // 128, 128, backend, dtype="fp8_e4m3") for setting in (FULL, CAUSAL)]
    return [row for cell in cells for row in passes.forward(cell)]


def _paged(batch: int, length: int, heads: int, dim: int, page: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pages = length // page
    caches = [torch.randn(batch * pages, page, heads, dim, device="cuda").bfloat16() for _ in range(2)]
    return caches[0], caches[1], torch.randperm(batch * pages, device="cuda", dtype=torch.int32).view(batch, pages)


def decode(backend: str | None) -> list[Row]:
    """32/8 heads, d 128, paged; replays of a CUDA graph; bytes of keys and values read."""
    rows = []
    for batch, length, page in (
        (64, 8192, 16),
        (64, 1024, 16),
        (16, 2048, 16),
        (1, 8192, 16),
        (1, 131072, 16),
        (64, 8192, 64),
    ):
        k, v, table = _paged(batch, length, 8, 128, page)
        q = torch.randn(batch, 32, 128, device="cuda", dtype=torch.bfloat16)
        lens = torch.full((batch,), length, device="cuda", dtype=torch.int32)
        heads = ag.GQA(num_qo_heads=32, num_kv_heads=8, head_dim=128)
        spec = ag.AttentionSpec(heads=heads, mask=ag.Causal(), kv=ag.Paged(page_size=page))
        ops = ag.compile(spec, backend=backend)
        ops.warmup("decode")
        run = partial(ops.decode, q, (k, v), page_table=table, kv_lens=lens)
        dense = (
            (x[table[:2].long().flatten()].view(-1, length, 8, 128)[:2] for x in (k, v))
            if batch > 1
            else (x[table.long().flatten()].view(1, length, 8, 128) for x in (k, v))
        )
        keys, values = (x.transpose(1, 2).repeat_interleave(4, 1).float() for x in dense)
        some = q[: keys.shape[0]].unsqueeze(2).float()
        exact = F.scaled_dot_product_attention(some, keys, values)[:, :, 0]
        error = relative_error(run()[: keys.shape[0]], exact)
        contenders: dict[str, Callable[[], Any]] = {"attngen": as_graph(run)}
        peer = _flashinfer(q, k, v, table, length, page)
        if peer is not None:
            contenders["flashinfer-tc"] = as_graph(peer)
        case = f"decode 32/8 d128 b{batch} kv{length} page{page}"
        moved = 2 * batch * length * 8 * 128 * 2
        times = time_gpu(contenders, calls=1)
        rows += [
            Row(case, n, ms, moved / ms / 1e9, "TB/s", error if n == "attngen" else 0.0) for n, ms in times.items()
        ]
        del k, v, keys, values
    return rows


def _flashinfer(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, length: int, page: int
) -> Callable[[], Any] | None:
    try:
        import flashinfer
    except ImportError:
        return None
    batch, pages = table.shape
    workspace = torch.empty(256 << 20, device="cuda", dtype=torch.uint8)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    indptr = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * pages
    last = torch.full((batch,), (length - 1) % page + 1, device="cuda", dtype=torch.int32)
    kinds = {"q_data_type": q.dtype, "kv_data_type": q.dtype}
    wrapper.plan(indptr, table.flatten(), last, 32, 8, 128, page, **kinds)
    return partial(wrapper.run, q, (k, v))


def overhead(backend: str | None) -> list[Row]:
    """Host time of one small call, launches included."""
    k, v, table = _paged(1, 1024, 8, 128, 16)
    q = torch.randn(1, 32, 128, device="cuda", dtype=torch.bfloat16)
    lens = torch.full((1,), 1024, device="cuda", dtype=torch.int32)
    heads = ag.GQA(num_qo_heads=32, num_kv_heads=8, head_dim=128)
    ops = ag.compile(ag.AttentionSpec(heads=heads, kv=ag.Paged(page_size=16)), backend=backend)
    for _ in range(20):
        ops.decode(q, (k, v), page_table=table, kv_lens=lens)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(500):
        ops.decode(q, (k, v), page_table=table, kv_lens=lens)
    ms = (time.perf_counter() - began) * 2
    torch.cuda.synchronize()
    return [Row("host time of a decode call", "attngen", ms, 0.0, "", 0.0)]


GROUPS = {"prefill": prefill, "fp8": fp8, "backward": backward, "decode": decode, "overhead": overhead}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("groups", nargs="*", choices=GROUPS)
    parser.add_argument("--backend", choices=("triton", "cuda"), help="attngen's; its own choice where not given")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 200
    results: list[Row] = []
    for group in options.groups or GROUPS:
        began = time.perf_counter()
        results += GROUPS[group](options.backend)
        print(f"{group}: {time.perf_counter() - began:.0f} s", flush=True)
    name = "-".join(["gpu", *options.groups, *([options.backend] if options.backend else [])])
    report(name, results, **versions())
