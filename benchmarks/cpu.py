"""attngen's ``cpp`` backend beside torch on the CPU, in one process: ``python -m benchmarks.cpu``."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attngen as ag
from attngen.timing import time_cpu
from benchmarks.measure import Row, relative_error, report

flex = torch.compile(flex_attention)


def rows_of(case: str, contenders: dict, exact: torch.Tensor, work: float, unit: str) -> list[Row]:
    """Time the contenders and compute each one's rate from ``work`` (operations, or bytes read)."""
    errors = {name: relative_error(fn(), exact) for name, fn in contenders.items()}
    times = time_cpu(contenders)
    return [Row(case, name, ms, work / ms / 1e6, unit, errors[name]) for name, ms in times.items()]


def exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: ag.MaskMod, mods: tuple = ()
) -> torch.Tensor:
    """The float64 oracle on fp32 inputs ``[batch, tokens, heads, dim]``."""
    heads = ag.GQA(num_qo_heads=q.shape[2], num_kv_heads=k.shape[2], head_dim=q.shape[3])
    spec = ag.AttentionSpec(heads=heads, mask=mask, score_mods=mods, dtype="fp32")
    return ag.compile(spec, backend="reference").prefill(q, k, v)


def prefill() -> list[Row]:
    """fp32, causal, 8 heads x 2048 x 64."""
    q, k, v = (torch.randn(1, 2048, 8, 64) for _ in range(3))
    qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
    spec = ag.AttentionSpec(heads=ag.MHA(num_heads=8, head_dim=64), mask=ag.Causal(), dtype="fp32")
    ops = ag.compile(spec, backend="cpp")
    contenders = {
        "attngen": partial(ops.prefill, q, k, v),
        "sdpa": lambda: F.scaled_dot_product_attention(qt, kt, vt, is_causal=True).transpose(1, 2),
    }
    return rows_of(
        "prefill causal 8x2048x64", contenders, exact_attention(q, k, v, spec.mask), 2 * 8 * 2048**2 * 64, "GFLOP/s"
    )


def window_softcap() -> list[Row]:
    """fp32, window 256 and soft cap 50, against compiled FlexAttention."""
    q, k, v = (torch.randn(1, 2048, 8, 64) for _ in range(3))
    qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
    spec = ag.AttentionSpec(
        heads=ag.MHA(num_heads=8, head_dim=64),
        mask=ag.Causal() & ag.SlidingWindow(left=255),
        score_mods=(ag.SoftCap(cap=50.0),),
        dtype="fp32",
    )
    ops = ag.compile(spec, backend="cpp")
    block_mask = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j <= 255), None, None, 2048, 2048, device="cpu")

    def peer() -> torch.Tensor:
        return flex(
            qt, kt, vt, score_mod=lambda s, b, h, i, j: 50 * torch.tanh(s / 50), block_mask=block_mask
        ).transpose(1, 2)

    contenders = {"attngen": partial(ops.prefill, q, k, v), "flex": peer}
    exact = exact_attention(q, k, v, spec.mask, spec.score_mods)
    return rows_of(
        "prefill window 256 softcap 8x2048x64", contenders, exact, 4 * 8 * 64 * (2048 * 256 - 256**2 / 2), "GFLOP/s"
    )


def decode() -> list[Row]:
    """fp32, one token, 8192 keys."""
    rows = []
    for qo, kv, dim in ((8, 8, 64), (32, 8, 128)):
        q, k, v = torch.randn(1, 1, qo, dim), torch.randn(1, 8192, kv, dim), torch.randn(1, 8192, kv, dim)
        qt = q.transpose(1, 2)
        kt, vt = (x.transpose(1, 2).contiguous() for x in (k, v))
        ops = ag.compile(
            ag.AttentionSpec(heads=ag.GQA(num_qo_heads=qo, num_kv_heads=kv, head_dim=dim), dtype="fp32"), backend="cpp"
        )
        nhd = {"k": kt.transpose(1, 2), "v": vt.transpose(1, 2)}
        contenders = {
            "attngen": partial(ops.decode, q, k, v),
            "attngen heads-first": partial(ops.decode, q, nhd["k"], nhd["v"]),
            "sdpa": lambda qt=qt, kt=kt, vt=vt: F.scaled_dot_product_attention(qt, kt, vt, enable_gqa=True).transpose(
                1, 2
            ),
        }
        rows += rows_of(
            f"decode {qo}/{kv} kv 8192 d{dim}",
            contenders,
            exact_attention(q, k, v, ag.Full()),
            8 * 8192 * kv * dim,
            "GB/s",
        )
    return rows


def backward() -> list[Row]:
    """fp32, causal, 8 heads x 1024 x 64."""
    q, k, v, dout = (torch.randn(1, 1024, 8, 64) for _ in range(4))
    spec = ag.AttentionSpec(heads=ag.MHA(num_heads=8, head_dim=64), mask=ag.Causal(), dtype="fp32")
    ops, oracle = ag.compile(spec, backend="cpp"), ag.compile(spec, backend="reference")
    out, lse = ops.prefill(q, k, v, return_lse=True)
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    result = F.scaled_dot_product_attention(*leaves, is_causal=True)

    def peer() -> torch.Tensor:
        return torch.autograd.grad(result, leaves, dout.transpose(1, 2), retain_graph=True)[0].transpose(1, 2)

    contenders = {"attngen": lambda: ops.backward(dout, q, k, v, out, lse)[0], "sdpa": peer}
    exact = oracle.backward(dout, q, k, v, out, lse)[0]
    return rows_of("backward causal 8x1024x64", contenders, exact, 5 * 8 * 1024**2 * 64, "GFLOP/s")


if __name__ == "__main__":
    torch.manual_seed(0)
    report("cpu", [*prefill(), *window_softcap(), *decode(), *backward()])
