"""What a call is to a backend: checked tensors, and where requests lie in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from attngen.signature import Layout

# A loaded kernel: call it with the number of programs and the arguments in the plan's order (tensors and ints).
Launch = Callable[[int, Sequence["torch.Tensor | int"]], None]


@dataclass(frozen=True)
class Batch:
    """Where the requests of one call lie. Index tensors are int32 and contiguous, on the device of q.

    Attributes:
        batch: requests.
        qo_len: padded query length; 0 where queries are ragged.
        kv_len: padded key length, or the keys a page table can hold; 0 where keys are ragged.
        num_tokens: query rows over all requests (padded ones counted).
        num_keys: key rows over all requests; 0 where the cache is paged.
        page_table_stride: elements between requests in ``page_table``; 0 for CSR, whose rows start at ``page_indptr``; then
            ``kv_lens`` holds the tokens of each last page.
    """

    batch: int
    qo_len: int
    kv_len: int
    num_tokens: int
    num_keys: int = 0
    qo_indptr: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    qo_lens: torch.Tensor | None = None
    kv_lens: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    page_table_stride: int = 0
    page_indptr: torch.Tensor | None = None
    q_offset: torch.Tensor | None = None
    kv_offset: torch.Tensor | None = None


@dataclass(frozen=True)
class NewTokens:
    """The checked tensors of one call that writes into a cache. Index tensors are contiguous, on the device of the cache.

    Attributes:
        new_k, new_v, new_k_pe: ``[tokens, num_kv_heads, dim]``; ``new_v`` is ``None`` where values are columns of the keys.
        k, v, k_pe, k_blocks, v_blocks, k_pe_blocks, k_scale, v_scale: the cache, as in :class:`Inputs`.
        num_slots: tokens that the cache has room for.
        slot_mapping: int64 ``[tokens]``, slots counted over all pages or requests, negative where a token is not written; or
            ``None``, and tokens go where ``batch_indices`` and ``positions`` say.
        positions, batch_indices: int32 ``[tokens]``.
        batch: requests; 0 where slots tell everything.
        kv_len: padded length of a request, or the tokens that a page table can hold.
        page_table, page_table_stride, page_indptr, kv_indptr: as in :class:`Batch`.
        params: the rotation's table by name.
    """

    new_k: torch.Tensor
    new_v: torch.Tensor | None
    new_k_pe: torch.Tensor | None
    k: torch.Tensor
    v: torch.Tensor | None
    k_pe: torch.Tensor | None
    k_blocks: torch.Tensor | None
    v_blocks: torch.Tensor | None
    k_pe_blocks: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    num_slots: int
    slot_mapping: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    batch_indices: torch.Tensor | None = None
    batch: int = 0
    kv_len: int = 0
    page_table: torch.Tensor | None = None
    page_table_stride: int = 0
    page_indptr: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    params: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Inputs:
    """The checked tensors of one call.

    Attributes:
        q: ``[batch, qo_len, num_qo_heads, head_dim_qk]`` or ``[nnz, num_qo_heads, head_dim_qk]``.
        k, v: ``[batch, kv_len, num_kv_heads, dim]``, ``[nnz, num_kv_heads, dim]`` or pages
            ``[num_pages, page_size, num_kv_heads, dim]``.
        batch: where requests lie.
        params: run-time tensors by name, contiguous.
        gate: in the shape of out, unit last stride; ``None`` where the variant has none.
        seed, offset: int64 ``[1]`` of dropout; ``None`` where the variant has none.
        q_scale, k_scale, v_scale: fp32 factors: ``[1]``, of heads ``[num_kv_heads]``, of tokens in the shape of k without its last
            dim, any strides; ``None`` where the storage has none.
        q_pe, k_pe: the last columns of q and k, where the variant keeps them apart.
        k_blocks, v_blocks, k_pe_blocks: block scales ``[..., blocks]``, with zero points ``[..., 2 * blocks]`` in pairs, unit last
            stride; ``None`` where the storage has none.

    Packed data have a last dim of ``dim / 2`` bytes.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    batch: Batch
    params: Mapping[str, torch.Tensor] = field(default_factory=dict)
    gate: torch.Tensor | None = None
    seed: torch.Tensor | None = None
    offset: torch.Tensor | None = None
    q_scale: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    q_pe: torch.Tensor | None = None
    k_pe: torch.Tensor | None = None
    k_blocks: torch.Tensor | None = None
    v_blocks: torch.Tensor | None = None
    k_pe_blocks: torch.Tensor | None = None


def append_slots(kv_layout: Layout, page_size: int, tokens: NewTokens) -> torch.Tensor:
    """The slot of each new token, int64; negative where it has none."""
    if tokens.slot_mapping is not None:
        return tokens.slot_mapping
    assert tokens.positions is not None
    assert tokens.batch_indices is not None
    position, request = tokens.positions.long(), tokens.batch_indices.long()
    found = (position >= 0) & (request >= 0) & (request < tokens.batch)
    request = torch.where(found, request, 0)
    if not tokens.batch:
        return torch.full_like(position, -1)
    if kv_layout == "padded":
        slot = torch.where(position < tokens.kv_len, request * tokens.kv_len + position, -1)
    elif kv_layout == "ragged":
        assert tokens.kv_indptr is not None
        slot = tokens.kv_indptr[request] + position
        slot = torch.where(slot < tokens.kv_indptr[request + 1], slot, -1)
    else:
        assert tokens.page_table is not None
        index = position // page_size
        table = tokens.page_table.flatten()
        if not table.numel():
            return torch.full_like(position, -1)
        if tokens.page_indptr is None:
            width = tokens.page_table.shape[1]
            start, stop = request * width, (request + 1) * width
        else:
            start, stop = tokens.page_indptr[request], tokens.page_indptr[request + 1]
        inside = found & (start >= 0) & (start + index < stop.clamp(max=len(table)))
        page = table[torch.where(inside, start + index, 0)].long()
        slot = torch.where(inside, page * page_size + position % page_size, -1)
    return torch.where(found, slot, -1)
