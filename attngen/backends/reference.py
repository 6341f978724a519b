"""The oracle: eager torch, straight from the Variant, one request at a time, O(S^2) memory, any float dtype.

Gradients come from torch's autograd of this forward pass, so they do not share the compiler's own differentiation.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from attngen.backends.base import Batch, Inputs
from attngen.ir.evaluate import evaluate
from attngen.variant import Variant


@dataclass(frozen=True)
class Request:
    """One request's rows: query tokens ``rows`` of the flat batch, and its keys by flat index."""

    index: int
    rows: range
    qo_len: int
    keys: torch.Tensor
    q_offset: int
    kv_offset: int


def forward(variant: Variant, inputs: Inputs, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every request, in ``dtype`` throughout.

    Returns:
        ``out [num_tokens, num_qo_heads, head_dim_vo]`` and ``lse [num_tokens, num_qo_heads]`` (natural logarithm), both of
        ``dtype``; rows without a key, and padding, give 0 and -inf.
    """
    q, k, v = (flat(t).to(dtype) for t in (inputs.q, inputs.k, inputs.v))
    params = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.params.items()}
    out = q.new_zeros(inputs.batch.num_tokens, variant.num_qo_heads, variant.head_dim_vo)
    lse = q.new_full((inputs.batch.num_tokens, variant.num_qo_heads), float("-inf"))
    outs, lses, rows = [], [], []
    for request in requests(variant, inputs.batch):
        if request.qo_len:
            own = slice(request.rows.start, request.rows.start + request.qo_len)
            rows.append(torch.arange(own.start, own.stop, device=q.device))
            part = _attend(variant, request, q[own], k[request.keys], v[request.keys], params, dtype)
            outs.append(part[0])
            lses.append(part[1])
    if rows:
        index = torch.cat(rows)
        out, lse = out.index_copy(0, index, torch.cat(outs)), lse.index_copy(0, index, torch.cat(lses))
    return out, lse


def backward(
    variant: Variant, inputs: Inputs, dout: torch.Tensor, dlse: torch.Tensor | None, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Gradients of ``sum(out * dout) + sum(lse * dlse)`` in ``dtype``: dq, dk, dv in the shapes of q, k, v, and by parameter."""
    # Inside a registered op or inference mode torch records nothing in this thread, and gradients would all be zero.
    with ThreadPoolExecutor(max_workers=1) as recording:
        return recording.submit(_differentiated, variant, inputs, dout, dlse, dtype).result()


def _differentiated(
    variant: Variant, inputs: Inputs, dout: torch.Tensor, dlse: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    leaves = {
        name: t.detach().to(dtype).requires_grad_() for name, t in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v))
    }
    wanted = {p.name for p in variant.gradient_params}
    params = {
        name: value.detach().to(dtype).requires_grad_() if name in wanted else value
        for name, value in inputs.params.items()
    }
    leaf = replace(inputs, q=leaves["q"], k=leaves["k"], v=leaves["v"], params=params)
    out, lse = forward(variant, leaf, dtype)
    total = (out * flat(dout).to(dtype)).sum()
    if dlse is not None:
        total = total + torch.where(lse.isinf(), 0.0, lse * dlse.reshape(lse.shape).to(dtype)).sum()
    targets = [*leaves.values(), *(params[name] for name in sorted(wanted))]
    grads = torch.autograd.grad(total, targets, allow_unused=True) if total.requires_grad else [None] * len(targets)
    filled = [torch.zeros_like(t) if g is None else g for t, g in zip(targets, grads, strict=True)]
    return filled[0], filled[1], filled[2], dict(zip(sorted(wanted), filled[3:], strict=True))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Rows of all requests (or slots of all pages) on one axis: ``[rows, heads, dim]``."""
    return tensor.reshape(-1, *tensor.shape[-2:]) if tensor.dim() == 4 else tensor


def requests(variant: Variant, batch: Batch) -> Iterator[Request]:
    """Every request of a batch, with its lengths read to the host."""
    qo_indptr, kv_indptr, qo_lens, kv_lens, q_offset, kv_offset, page_indptr = (
        None if t is None else t.tolist()
        for t in (
            batch.qo_indptr,
            batch.kv_indptr,
            batch.qo_lens,
            batch.kv_lens,
            batch.q_offset,
            batch.kv_offset,
            batch.page_indptr,
        )
    )
    for b in range(batch.batch):
        if variant.q_layout == "ragged":
            assert qo_indptr is not None
            rows = range(qo_indptr[b], qo_indptr[b + 1])
        else:
            rows = range(b * batch.qo_len, (b + 1) * batch.qo_len)
        qo_len = qo_lens[b] if qo_lens else len(rows)
        if variant.kv_layout == "ragged":
            assert kv_indptr is not None
            keys = torch.arange(kv_indptr[b], kv_indptr[b + 1])
        elif variant.kv_layout == "padded":
            keys = torch.arange(kv_lens[b] if kv_lens else batch.kv_len) + b * batch.kv_len
        else:
            assert kv_lens is not None
            keys = _page_slots(variant, batch, b, kv_lens[b], page_indptr)
        yield Request(
            index=b,
            rows=rows,
            qo_len=qo_len,
            keys=keys,
            q_offset=q_offset[b] if q_offset else len(keys) - qo_len,
            kv_offset=kv_offset[b] if kv_offset else 0,
        )


def _page_slots(variant: Variant, batch: Batch, b: int, kv_len: int, page_indptr: list[int] | None) -> torch.Tensor:
    assert batch.page_table is not None
    start, table = 0, batch.page_table[b] if page_indptr is None else batch.page_table
    if page_indptr is not None:
        start, stop = page_indptr[b], page_indptr[b + 1]
        kv_len = (stop - start - 1) * variant.page_size + kv_len if stop > start else 0
    position = torch.arange(kv_len)
    pages = table.cpu()[start + position // variant.page_size]
    return pages.long() * variant.page_size + position % variant.page_size


def _attend(
    variant: Variant,
    request: Request,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    params: dict[str, torch.Tensor],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    device = q.device
    k, v = (t.repeat_interleave(variant.group_size, dim=1) for t in (k, v))
    score = torch.einsum("qhd,khd->hqk", q, k) * variant.sm_scale
    env: dict[str, torch.Tensor | int | float] = {
        "score": score,
        "b": request.index,
        "h": torch.arange(variant.num_qo_heads, device=device)[:, None, None],
        "q": (request.q_offset + torch.arange(q.shape[0], device=device))[:, None],
        "k": request.kv_offset + torch.arange(k.shape[0], device=device),
        "qo_len": request.qo_len,
        "kv_len": k.shape[0],
    }
    visible = evaluate(variant.mask, env, params, dtype).expand(score.shape)
    # The score mod is evaluated at visible pairs only: elsewhere it may be undefined, also in its gradient.
    pairs = visible.nonzero(as_tuple=True)
    at_pairs = {name: x.expand(visible.shape)[pairs] if isinstance(x, torch.Tensor) else x for name, x in env.items()}
    seen_logits = evaluate(variant.score, at_pairs, params, dtype).expand(len(pairs[0]))
    logits = torch.full_like(score, float("-inf")).index_put(pairs, seen_logits)
    seen = (logits != float("-inf")).any(-1)
    logits = torch.where(seen[..., None], logits, 0.0)
    lse = torch.where(seen, torch.logsumexp(logits, -1), float("-inf"))
    # Not exp(logits - lse): next to logits of -1e30 the number of keys vanishes in lse.
    near = logits - torch.where(seen, lse, 0.0).detach()[..., None]
    weights = torch.where(seen[..., None], torch.exp(near - torch.logsumexp(near, -1, keepdim=True)), 0.0)
    return torch.einsum("hqk,khd->qhd", weights, v), lse.transpose(0, 1)
