"""Requests over paged latents, for cases of absorbed decode."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import attngen as ag
from tests.acceptance.probes import NAN, Place, State, int32, page_table


def declare_latents(num_qo_heads: int = 2, page_size: int = 16, **fields: object) -> ag.AttentionSpec:
    """512 + 64 columns, fp16 unless ``fields`` say otherwise."""
    return ag.AttentionSpec(**{"heads": ag.MLA(num_qo_heads), "dtype": "fp16", "kv": ag.Paged(page_size), **fields})


def paged_latents(
    tokens: Sequence[torch.Tensor], page_size: int, filler: float = NAN
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pool ``[num_pages, page_size, head_dim]`` and page table of requests ``[kv_len, head_dim]``; others hold ``filler``."""
    table = page_table([len(rows) for rows in tokens], page_size)
    pool = torch.full((int((table >= 0).sum()) + 2, page_size, tokens[0].shape[-1]), filler, dtype=tokens[0].dtype)
    for rows, pages in zip(tokens, table.tolist(), strict=True):
        for page, chunk in zip(pages, rows.split(page_size), strict=False):
            pool[page, : len(chunk)] = chunk
    return pool, table


def decode_latents(
    place: Place,
    spec: ag.AttentionSpec,
    q: torch.Tensor,
    tokens: Sequence[torch.Tensor],
    *,
    qo_lens: Sequence[int] | None = None,
    apart: bool = False,
    filler: float = NAN,
) -> State:
    """Decode ``q [batch, (qo_len,) num_qo_heads, head_dim]`` over one joined tensor, or its two parts lying ``apart``."""
    pool, table = (x.to(place.device) for x in paged_latents(tokens, spec.kv.page_size, filler))
    ckv, query = spec.heads.head_dim_ckv, q.to(place.device)
    lens = {"page_table": table, "kv_lens": int32([len(rows) for rows in tokens]).to(place.device)}
    if qo_lens is not None:
        lens["qo_lens"] = int32(qo_lens).to(place.device)
    given = (query, pool)
    if apart:
        given = ((query[..., :ckv], query[..., ckv:]), (pool[..., :ckv].contiguous(), pool[..., ckv:].contiguous()))
    buffer = query.new_full((*q.shape[:-1], ckv), NAN)
    out, lse = place.compile(spec).decode(*given, **lens, out=buffer, return_lse=True)
    return State(out.cpu(), lse.cpu())


def exact_latents(spec: ag.AttentionSpec, q: torch.Tensor, tokens: torch.Tensor) -> State:
    """Causal attention of one request ``q [qo_len, heads, head_dim]``, in float64."""
    keys, (qo_len, kv_len) = tokens.double(), (len(q), len(tokens))
    logits = torch.einsum("qhd,kd->qhk", q.double(), keys) * spec.heads.head_dim_qk**-0.5
    last = torch.arange(qo_len)[:, None, None] + kv_len - qo_len
    logits = logits.masked_fill(torch.arange(kv_len) > last, -torch.inf)
    lse = logits.logsumexp(-1)
    weights = torch.exp(logits - torch.where(lse.isinf(), 0.0, lse)[..., None])
    return State(weights @ keys[:, : spec.heads.head_dim_ckv], lse)
