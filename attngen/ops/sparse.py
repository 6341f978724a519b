"""Attention of each query to keys that a list names: top-k sparse attention (DeepSeek-V3.2, Native Sparse Attention).

A query token with its list becomes a request of its own over pages of one token, whose table is the list: gathering keys one by
one is what a paged kernel does. Lists are translated and closed up on the device, without reading them on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attngen.backends.call import Batch
from attngen.errors import ArgumentError, UnsupportedError
from attngen.ir.evaluate import evaluate
from attngen.ir.expr import Expr, coords
from attngen.masks import Full
from attngen.ops.batching import collect_inputs
from attngen.ops.calls import Rows
from attngen.ops.checks import check_tensor
from attngen.ops.storage import Cache, Extras, Query, unpack
from attngen.signature import Declaration, Signature
from attngen.spec import AttentionSpec, Paged
from attngen.variant import Variant

if TYPE_CHECKING:
    from attngen.ops.ops import Ops


# The position of a query that is none.
_PADDING = torch.iinfo(torch.int32).max


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
    if variant.rope is not None and variant.rope.keys != "append":
        refuse(
            "listed keys are not rotated on load",
            "spec.rope",
            "their positions are in the list",
            "keep rotated keys in the cache, and declare ag.Rope(keys='append')",
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
    key_indices: object,
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
    )
    top_k = index.shape[-1]
    index = index.reshape(lead.numel(), top_k)
    inputs = collect_inputs(signature, query, k, v, given, params)
    params, batch = inputs.params, inputs.batch
    request, qo_len, kv_len, q_pos, well_formed = _requests(signature.page_size, batch, device)
    env: dict[str, torch.Tensor | int | float] = {
        "b": request,
        "q": q_pos,
        "k": index,
        "qo_len": qo_len[request],
        "kv_len": kv_len[request],
    }
    kept = (index >= 0) & (index < kv_len[request]) & evaluate(mask, env, dict(params), torch.float32)
    kept = kept & well_formed & (q_pos != _PADDING)
    slots = _slots(signature.page_size, batch, k, torch.where(kept, index, 0), request)
    # Kept entries close up: each goes to its number among them, the others to a column that is cut off.
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
        kv_lens=torch.where(well_formed[:, 0], kept.sum(-1, dtype=torch.int32), -1),
        page_table=closed,
        q_scale=given.q_scale,
        k_scale=given.k_scale,
        v_scale=given.v_scale,
        q_pe=None if given.q_pe is None else _tokens(given.q_pe),
    )
    gathered = gathering.variant("decode")
    if gathered.rope is not None:
        single["q_offset"] = torch.where(q_pos == _PADDING, 0, q_pos)[:, 0]
    names = {param.name for param in gathered.params}
    own = {name: x for name, x in params.items() if name in names}
    if signature.gate is not None and inputs.gate is not None:
        own[signature.gate] = _tokens(inputs.gate)
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
    page_size: int, batch: Batch, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Request of each query ``[tokens, 1]``, lengths of requests ``[batch]``, positions of queries ``[tokens, 1]``, and whether
    the lengths of its request fit their storage, ``[tokens, 1]``."""
    kv_len, fits = _cached(page_size, batch)
    number = torch.arange(batch.num_tokens, device=device, dtype=torch.int32)
    if batch.qo_indptr is not None:
        indptr, qo_len = batch.qo_indptr, batch.qo_indptr.diff()
        if not batch.batch:  # rows of no request: of one that does not fit
            indptr, qo_len, kv_len, fits = (
                x.new_zeros(n) for x, n in ((indptr, 2), (qo_len, 1), (kv_len, 1), (fits, 1))
            )
        request = torch.searchsorted(indptr[1:].contiguous(), number, right=True).clamp(max=len(qo_len) - 1)
        row = number - indptr[request]
        fits = fits & (qo_len >= 0)
        owned = (row >= 0) & (row < qo_len[request])
    else:
        request, row = number.long() // max(batch.qo_len, 1), number % max(batch.qo_len, 1)
        qo_len = kv_len.new_full((batch.batch,), batch.qo_len) if batch.qo_lens is None else batch.qo_lens
        fits = fits & (qo_len >= 0) & (qo_len <= batch.qo_len)
        owned = torch.ones_like(row, dtype=torch.bool)
    first = (kv_len - qo_len)[request] if batch.q_offset is None or not batch.batch else batch.q_offset[request]
    # Padding stands behind the last key and sees nothing.
    q_pos = torch.where(row < qo_len[request], first + row, _PADDING)
    well_formed = fits[request] & owned
    return request[:, None], qo_len, kv_len, q_pos.to(torch.int32)[:, None], well_formed[:, None]


def _cached(page_size: int, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of each request ``[batch]``, and whether its page list has room for them: what kernels find for themselves."""
    assert batch.kv_lens is not None
    kv_len, fits = batch.kv_lens, torch.ones_like(batch.kv_lens, dtype=torch.bool)
    if batch.page_indptr is not None:
        first, num_pages = batch.page_indptr[:-1], batch.page_indptr.diff()
        fits = (kv_len >= 0) & (kv_len <= page_size) & (first >= 0) & (num_pages <= batch.kv_len // page_size - first)
        kv_len = torch.where(num_pages == 0, 0, (num_pages - 1) * page_size + kv_len)
    return kv_len, fits & (kv_len >= 0) & (kv_len <= batch.kv_len)


def _slots(size: int, batch: Batch, k: torch.Tensor, index: torch.Tensor, request: torch.Tensor) -> torch.Tensor:
    """Numbers of tokens in :func:`_by_token`'s view, int32, in the shape of ``index``; of entries that are not kept, any."""
    table = batch.page_table
    assert table is not None
    place = (index // size).long()
    if not table.numel():
        return torch.zeros_like(index)
    if batch.page_indptr is None:
        page = table[request, place]
    else:
        page = table[(batch.page_indptr[request] + place).clamp(0, len(table) - 1)]
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
