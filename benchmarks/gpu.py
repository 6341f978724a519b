"""attngen's ``triton`` backend beside its peers on one GPU, in one process: ``python -m benchmarks.gpu [group ...]``.

Peers: compiled FlexAttention with default options, torch SDPA (cuDNN and flash), and FlashInfer for decode where it is installed.
bf16, random data, contenders interleaved in random order, L2 flushed, medians over rounds. Causal work counts half.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attngen as ag
from benchmarks.measure import Row, as_graph, relative_error, report, time_gpu

TOKENS, HIDDEN = 16384, 2048
flex = torch.compile(flex_attention, dynamic=False)


def causal_blocks(length: int) -> Any:
    """FlexAttention's block mask of causal attention."""
    return create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cuda")


def timed(
    case: str, contenders: dict[str, Callable[[], torch.Tensor]], exact: torch.Tensor, work: float, unit: str
) -> list[Row]:
    """Check every contender against ``exact``, then time them in turn."""
    errors = {}
    for name in list(contenders):
        try:
            errors[name] = relative_error(contenders[name](), exact)
        except Exception as failure:
            print(f"{case}: {name} cannot run: {str(failure).splitlines()[0][:120]}", flush=True)
            del contenders[name]
    times = time_gpu(contenders)
    return [Row(case, name, ms, work / ms / 1e9, unit, errors[name]) for name, ms in times.items()]


def _sdpa(backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def _cells() -> list[tuple[int, int, bool]]:
    return [(dim, length, causal) for dim in (64, 128) for length in (2048, 16384) for causal in (False, True)]


def prefill() -> list[Row]:
    """16,384 tokens, hidden 2,048."""
    rows = []
    for dim, length, causal in _cells():
        heads, batch = HIDDEN // dim, TOKENS // length
        q, k, v = (torch.randn(batch, length, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
        spec = ag.AttentionSpec(heads=ag.MHA(num_heads=heads, head_dim=dim), mask=ag.Causal() if causal else ag.Full())
        blocks = causal_blocks(length) if causal else None
        contenders = {
            "attngen": partial(ag.compile(spec, backend="triton").prefill, q, k, v),
            "flex": lambda qt=qt, kt=kt, vt=vt, blocks=blocks: flex(qt, kt, vt, block_mask=blocks).transpose(1, 2),
            "cudnn": partial(_sdpa, SDPBackend.CUDNN_ATTENTION, qt, kt, vt, causal),
        }
        exact = _sdpa(SDPBackend.FLASH_ATTENTION, qt, kt, vt, causal)
        case = f"prefill d{dim} h{heads} s{length} b{batch} {'causal' if causal else 'full'}"
        rows += timed(case, contenders, exact, 4 * batch * heads * length**2 * dim * (0.5 if causal else 1), "TFLOP/s")
    return rows


def backward() -> list[Row]:
    """16,384 tokens, hidden 2,048; five products where forward has two."""
    rows = []
    for dim, length, causal in _cells():
        heads, batch = HIDDEN // dim, TOKENS // length
        q, k, v, dout = (torch.randn(batch, length, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
        dout_t = dout.transpose(1, 2)
        spec = ag.AttentionSpec(heads=ag.MHA(num_heads=heads, head_dim=dim), mask=ag.Causal() if causal else ag.Full())
        ops = ag.compile(spec, backend="triton")
        out, lse = ops.prefill(q, k, v, return_lse=True)
        flexed = flex(*leaves, block_mask=causal_blocks(length) if causal else None)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            cudnn = F.scaled_dot_product_attention(*leaves, is_causal=causal)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            flash = F.scaled_dot_product_attention(*leaves, is_causal=causal)

        def grads(result: torch.Tensor, leaves: Any = leaves, dout_t: torch.Tensor = dout_t) -> torch.Tensor:
            return torch.cat([g.flatten() for g in torch.autograd.grad(result, leaves, dout_t, retain_graph=True)])

        def ours(ops: ag.Ops = ops, call: Any = (dout, q, k, v, out, lse)) -> torch.Tensor:
            return torch.cat([g.transpose(1, 2).flatten() for g in ops.backward(*call)[:3]])

        case = f"backward d{dim} h{heads} s{length} b{batch} {'causal' if causal else 'full'}"
        exact = grads(flash)
        errors = {"attngen": relative_error(ours(), exact), "flex": relative_error(grads(flexed), exact)}
        errors["cudnn"] = relative_error(grads(cudnn), exact)

        def only(result: torch.Tensor, leaves: Any = leaves, dout_t: torch.Tensor = dout_t) -> Any:
            return torch.autograd.grad(result, leaves, dout_t, retain_graph=True)

        contenders = {
            "attngen": partial(ops.backward, dout, q, k, v, out, lse),
            "flex": partial(only, flexed),
            "cudnn": partial(only, cudnn),
        }
        work = 10 * batch * heads * length**2 * dim * (0.5 if causal else 1)
        rows += [Row(case, n, ms, work / ms / 1e9, "TFLOP/s", errors[n]) for n, ms in time_gpu(contenders).items()]
    return rows


def _paged(batch: int, length: int, heads: int, dim: int, page: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pages = length // page
    caches = [torch.randn(batch * pages, page, heads, dim, device="cuda").bfloat16() for _ in range(2)]
    return caches[0], caches[1], torch.randperm(batch * pages, device="cuda", dtype=torch.int32).view(batch, pages)


def decode() -> list[Row]:
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
        ops = ag.compile(spec, backend="triton")
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


def overhead() -> list[Row]:
    """Host time of one small call, launches included."""
    k, v, table = _paged(1, 1024, 8, 128, 16)
    q = torch.randn(1, 32, 128, device="cuda", dtype=torch.bfloat16)
    lens = torch.full((1,), 1024, device="cuda", dtype=torch.int32)
    heads = ag.GQA(num_qo_heads=32, num_kv_heads=8, head_dim=128)
    ops = ag.compile(ag.AttentionSpec(heads=heads, kv=ag.Paged(page_size=16)), backend="triton")
    for _ in range(20):
        ops.decode(q, (k, v), page_table=table, kv_lens=lens)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(500):
        ops.decode(q, (k, v), page_table=table, kv_lens=lens)
    ms = (time.perf_counter() - began) * 2
    torch.cuda.synchronize()
    return [Row("host time of a decode call", "attngen", ms, 0.0, "", 0.0)]


GROUPS = {"prefill": prefill, "backward": backward, "decode": decode, "overhead": overhead}

if __name__ == "__main__":
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 200
    chosen = sys.argv[1:] or list(GROUPS)
    results: list[Row] = []
    for group in chosen:
        began = time.perf_counter()
        results += GROUPS[group]()
        print(f"{group}: {time.perf_counter() - began:.0f} s", flush=True)
    report(
        "gpu" if chosen == list(GROUPS) else "gpu-" + "-".join(chosen), results, triton=__import__("triton").__version__
    )
