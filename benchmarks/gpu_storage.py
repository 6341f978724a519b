"""Decode over caches of every storage on one GPU, in one process: ``python -m benchmarks.gpu_storage``.

32/8 heads, d 128, 64 requests of 8,192 keys, bf16 queries; replays of a CUDA graph, medians over rounds. Rates count
the bytes of numbers and scales.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import attngen as ag
from attngen.dtypes import DTYPES, Storage, dequantize
from attngen.ops.checks import torch_dtype
from attngen.timing import as_graph, time_gpu
from attngen.variant import normalize
from benchmarks.measure import Row, relative_error, report, versions

BATCH, KEYS, HEADS, DIM = 64, 8192, 8, 128
STORAGES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8_e4m3": {"dtype": "fp8_e4m3"},
    "fp8_e5m2": {"dtype": "fp8_e5m2"},
    "int8": {"dtype": "int8"},
    "int8 token": {"dtype": "int8", "scale": "token"},
    "int4": {"dtype": "int4"},
    "int4 zero": {"dtype": "int4", "zero_point": True},
    "nvfp4": {"dtype": "nvfp4"},
    "mxfp4": {"dtype": "mxfp4"},
}


def stored(storage: Storage, page: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Random finite numbers of a paged cache, and scales of their blocks."""
    lead = (BATCH * KEYS // page, page, HEADS)
    if not storage.is_quantized:
        return torch.randn(*lead, DIM, device="cuda").to(torch_dtype(storage.dtype)), None
    data = torch.randint(0, 256, (*lead, DIM // storage.packed), device="cuda", dtype=torch.uint8)
    if storage.dtype.startswith("fp8"):
        data &= 0xBF  # sizes below 2
    data = data.view(torch_dtype(storage.dtype))
    if not storage.block:
        return data, None
    shape = (*lead, DIM // storage.block, *((2,) if storage.zero_point else ()))
    if storage.dtype == "mxfp4":
        return data, torch.randint(124, 128, shape, device="cuda", dtype=torch.uint8)
    return data, (torch.rand(shape, device="cuda") / 4 + 0.05).to(torch_dtype(DTYPES[storage.row.block_scale].name))


def numbers(given: tuple[torch.Tensor, torch.Tensor | None], storage: Storage, pages: torch.Tensor) -> torch.Tensor:
    """What two requests' pages hold, fp32 ``[2, heads, keys, dim]`` for 32 query heads."""
    data, blocks = (None if x is None else x[pages].flatten(1, 2) for x in given)
    assert data is not None
    x = dequantize(data, storage, blocks) if storage.is_quantized else data.float()
    return x.bfloat16().float().transpose(1, 2).repeat_interleave(4, 1)


def decode(name: str, page: int) -> list[Row]:
    """One storage by both backends, checked on two requests and timed in turn."""
    heads = ag.GQA(num_qo_heads=32, num_kv_heads=HEADS, head_dim=DIM)
    spec = ag.AttentionSpec(heads=heads, mask=ag.Causal(), kv=ag.Paged(page_size=page, **STORAGES[name]))
    variant = normalize(spec, "decode")
    k, v = stored(variant.k_storage, page), stored(variant.v_storage, page)
    table = torch.randperm(BATCH * KEYS // page, device="cuda", dtype=torch.int32).view(BATCH, -1)
    q = torch.randn(BATCH, 32, DIM, device="cuda", dtype=torch.bfloat16)
    factor = 0.02 if variant.k_storage.dtype == "int8" else 1.0
    shape = {"": None, "tensor": (), "head": (HEADS,), "token": (table.numel(), page, HEADS)}[variant.k_storage.scale]
    scales = {} if shape is None else {n: torch.full(shape, factor, device="cuda") for n in ("k_scale", "v_scale")}
    cache = tuple(data if blocks is None else (data, blocks) for data, blocks in (k, v))
    lens = torch.full((BATCH,), KEYS, device="cuda").int()
    runs = {
        backend: partial(
            ag.compile(spec, backend=backend, ops=()).decode, q, cache, page_table=table, kv_lens=lens, **scales
        )
        for backend in ("cuda", "triton")
    }
    pages = table[:2].long()
    keys, values = (numbers(x, s, pages) for x, s in ((k, variant.k_storage), (v, variant.v_storage)))
    exact = F.scaled_dot_product_attention(q[:2, :, None].float(), keys * factor, values * factor)[:, :, 0]
    errors = {backend: relative_error(run()[:2], exact) for backend, run in runs.items()}
    times = time_gpu({backend: as_graph(run) for backend, run in runs.items()}, calls=1)
    moved = BATCH * KEYS * HEADS * sum(s.bytes_per_token(DIM) for s in (variant.k_storage, variant.v_storage))
    case = f"decode 32/8 d128 b64 kv8192 page{page} {name}"
    return [Row(case, backend, ms, moved / ms / 1e9, "TB/s", errors[backend]) for backend, ms in times.items()]


if __name__ == "__main__":
    torch.manual_seed(0)
    report("gpu-storage", [row for page in (16, 64) for name in STORAGES for row in decode(name, page)], **versions())
