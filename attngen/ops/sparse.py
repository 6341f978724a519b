"""Attention of each query to keys that a list names: top-k sparse attention (DeepSeek-V3.2, Native Sparse Attention).

A query token with its list becomes a request of its own over pages of one token, whose table is the list: gathering keys one by
one is what a paged kernel does. Lists are translated and closed up on the device, without reading them on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attngen.errors import ArgumentError, UnsupportedError
from attngen.ir.evaluate import evaluate
from attngen.ir.expr import Expr, coords
from attngen.masks import Full
from attngen.ops.batching import cached_lengths, check_page_lists
from attngen.ops.calls import Rows
from attngen.ops.checks import check_index, check_indptr, check_tensor
from attngen.ops.storage import Cache, Extras, Query, unpack
from attngen.signature import Declaration, Signature
from attngen.spec import AttentionSpec, Paged
from attngen.variant import Variant

if TYPE_CHECKING:
    from attngen.ops.ops import Ops


def gathering_spec(spec: AttentionSpec, variant: Variant) -> AttentionSpec:
    """The spec of the requests that query tokens become.

    Raises:
        UnsupportedError: the spec asks for positions of keys where only the list knows them.
    """

    def refuse(what: str, where: str, why: str, fix: str) -> None:
        raise UnsupportedError(what, where=where, why=why, fix=fix)

    if not isinstance(spec.kv, Paged):
        refuse(
            f"key_indices need a paged cache, this one is {spec.kv.kind}",
            "key_indices",
            "listed keys are gathered through a page table",
            "declare kv=ag.Paged(page_size=...)",
        )
    if coords(variant.score) & {"q", "k", "b", "kv_len", "qo_len"}:
        refuse(
            "a score mod reads positions",
            "spec.score_mods",
            "gathered keys have no neighbours, and kernels count them in the order of the list",
            "leave it out, or write the list as a mask (ag.Dense)",
        )
    if variant.rope is not None:
        refuse(
            "listed keys are not rotated on load",
            "spec.rope",
            "their positions are in the list",
            "keep rotated keys in the cache, and leave rope out",
        )
    if "h" in coords(variant.mask):
        refuse(
            "the mask differs by head",
            "spec.mask",
            "the heads of a token share its list",
            "declare one mask for all heads",
        )
    return spec.model_copy(update={"mask": Full(), "kv": spec.kv.model_copy(update={"page_size": 1, "layout": "NHD"})})


def attend_listed(
    gathering: Ops,
    mask: Expr,
    signature: Signature,
    declared: Declaration,
    q: Query,
    cache: Cache,
    v: Cache | None,
    key_indices: torch.Tensor,
    given: Extras,
    params: Mapping[str, torch.Tensor],
    *,
    want_max: bool,
    partial: bool,
) -> Rows:
    """out, lse and largest logits, in the shape of q.

    Args:
        gathering: ops of :func:`gathering_spec`.
        mask: still holds: a key must be listed and visible.
        signature: of decode, with the layout of q.
        q: ``[batch, qo_len, heads, dim]``, or ragged with ``given.qo_indptr``.
        key_indices: int32 ``[batch, qo_len, top_k]`` or ``[nnz_q, top_k]``: positions of keys in the request, each once; negative
            ones, and those beyond its keys, are skipped.
    """
    query, k, v, given = unpack(signature, declared, q, cache, v, given)
    lead, device = query.shape[:-2], query.device
    pages = {"page_table", "kv_lens"} if given.kv_indices is None else {"kv_indptr", "kv_indices", "kv_last_page_len"}
    allowed = {*pages, "q_offset", "qo_lens" if len(lead) > 1 else "qo_indptr"}
    given.reject_other_than(allowed, "listed keys of a paged cache", frozenset())
    index = check_tensor(
        "key_indices", key_indices, dtype="i32", shape=(*lead, None), axes="[..., top_k]", device=device
    ).reshape(lead.numel(), -1)
    request, qo_len, kv_len, q_pos = _requests(signature.page_size, given, lead, device)
    env: dict[str, torch.Tensor | int | float] = {
        "b": request,
        "q": q_pos,
        "k": index,
        "qo_len": qo_len[request],
        "kv_len": kv_len[request],
    }
    kept = (index >= 0) & (index < kv_len[request]) & evaluate(mask, env, dict(params), torch.float32)
    kept = kept & (q_pos != torch.iinfo(torch.int32).max)
    slots = _slots(signature.page_size, given, k, torch.where(kept, index, 0), request)
    # Kept entries close up: each goes to its number among them, the others to a column that is cut off.
    top_k = index.shape[1]
    place = torch.where(kept, kept.cumsum(-1) - 1, top_k)
    closed = slots.new_zeros(lead.numel(), top_k + 1).scatter_(1, place, slots)[:, :top_k].contiguous()
    single = {
        name: _by_token(name, x, k)
        for name in ("k_pe", "k_blocks", "v_blocks", "k_pe_blocks")
        if (x := getattr(given, name)) is not None
    }
    scales = {"k_scale": signature.k_storage, "v_scale": signature.v_storage}
    for name, storage in scales.items():
        scale = getattr(given, name)
        if storage.scale == "token":
            single[name] = _by_token(name, scale.unsqueeze(-1), k).squeeze(-1)
    extras = Extras(
        kv_lens=kept.sum(-1, dtype=torch.int32),
        page_table=closed,
        q_scale=given.q_scale,
        k_scale=given.k_scale,
        v_scale=given.v_scale,
        q_pe=None if given.q_pe is None else _tokens(given.q_pe),
    )
    names = {param.name for param in gathering.variant("decode").params}
    own = {name: x for name, x in params.items() if name in names}
    if signature.gate is not None:
        own[signature.gate] = _tokens(params[signature.gate])
    out, *rows = gathering.run_forward(
        "decode",
        _tokens(query),
        _by_token("k", k, k),
        _by_token("v", v, k),
        replace(extras, **single),
        own,
        want_max=want_max,
        partial=partial,
    )
    lse, largest = (x.reshape(*lead, -1) if x.numel() else x for x in rows)
    return out.reshape(*lead, *out.shape[-2:]), lse, largest


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """Rows of all requests as requests of one token: ``[tokens, 1, heads, dim]``."""
    return x.reshape(-1, 1, *x.shape[-2:])


def _requests(
    page_size: int, given: Extras, lead: torch.Size, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Request of each query ``[tokens, 1]``, lengths of requests ``[batch]``, and positions of queries ``[tokens, 1]``."""
    batch = lead[0]
    if len(lead) == 1:
        indptr = check_indptr("qo_indptr", given.qo_indptr, lead[0], device, read=False)
        batch, qo_len = len(indptr) - 1, indptr.diff()
        number = torch.arange(lead[0], device=device, dtype=torch.int32)
        request = torch.searchsorted(indptr[1:].contiguous(), number, right=True).clamp(max=batch - 1)
        row = number - indptr[request]
    else:
        request = torch.arange(batch, device=device).repeat_interleave(lead[1])
        row = torch.arange(lead[1], device=device).repeat(batch)
        qo_len = torch.full((batch,), lead[1], device=device, dtype=torch.int32)
        if given.qo_lens is not None:
            qo_len = check_index("qo_lens", given.qo_lens, batch, device)
    kv_len = cached_lengths(page_size, given, batch, device)
    first = kv_len - qo_len if given.q_offset is None else check_index("q_offset", given.q_offset, batch, device)
    # Padding stands behind the last key and sees nothing.
    q_pos = torch.where(row < qo_len[request], first[request] + row, torch.iinfo(torch.int32).max)
    return request[:, None], qo_len, kv_len, q_pos.to(torch.int32)[:, None]


def _slots(size: int, given: Extras, k: torch.Tensor, index: torch.Tensor, request: torch.Tensor) -> torch.Tensor:
    """Numbers of tokens in :func:`_by_token`'s view, int32, in the shape of ``index``, which a request without keys has at 0."""
    if given.kv_indices is None:
        table = check_tensor(
            "page_table", given.page_table, dtype="i32", shape=(None, None), axes="[batch, max_pages]", device=k.device
        )
        page = table[request, (index // size).long()]
    else:
        pages = check_page_lists(given.kv_indptr, given.kv_indices, k.device, read=False)
        place = pages["page_indptr"][request].long() + index // size
        listed = pages["page_table"]
        page = listed[place.clamp(max=len(listed) - 1)] if len(listed) else torch.zeros_like(index)
    return page * _tokens_between_pages(k) + index % size


def _tokens_between_pages(k: torch.Tensor) -> int:
    """Rows of one token's stride from page to page."""
    return k.stride(0) // k.stride(1) if k.shape[1] > 1 else 1


def _by_token(name: str, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """``[page, token, ...]`` as pages of one token, of which some may be no tokens of the cache and are in no list."""
    pages, size = x.shape[:2]
    between = _tokens_between_pages(k)
    stride = x.stride(1) if size > 1 else x.stride(0)
    if size > 1 and x.stride(0) != between * stride:
        raise ArgumentError(
            f"{name} has strides {x.stride(0)} and {x.stride(1)} of pages and tokens",
            where="kv_cache",
            why="for listed keys the pages of every part of the cache must be equally far apart, in tokens",
            fix="pass the cache in one dense layout",
        )
    count = (pages - 1) * between + size if pages else 0
    return x.as_strided((count, 1, *x.shape[2:]), (stride, stride, *x.stride()[2:]))
