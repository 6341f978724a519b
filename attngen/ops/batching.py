"""User arguments -> :class:`Inputs`: where the requests of a call lie, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from attngen.backends.base import Batch, Inputs
from attngen.errors import ArgumentError
from attngen.ir.params import DIM_NAMES, OR_ONE, is_broadcast
from attngen.ops.checks import check_index, check_indptr, check_lengths, check_strides, check_tensor
from attngen.settings import Settings
from attngen.spec.kv import Paged
from attngen.variant import Variant

Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


# What has a meaning in every storage.
_EVERYWHERE = {"q_offset", "kv_offset", "seed", "offset"}


@dataclass(frozen=True)
class Lengths:
    """The optional index tensors of a call, and its random stream, as the user passed them."""

    qo_indptr: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    qo_lens: torch.Tensor | None = None
    kv_lens: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    kv_last_page_len: torch.Tensor | None = None
    q_offset: torch.Tensor | None = None
    kv_offset: torch.Tensor | None = None
    seed: torch.Tensor | None = None
    offset: torch.Tensor | None = None

    def reject_other_than(self, allowed: set[str], storage: str) -> None:
        """Raise for an index tensor that has no meaning for this storage."""
        for field in fields(self):
            if getattr(self, field.name) is not None and field.name not in allowed | _EVERYWHERE:
                raise ArgumentError(
                    f"{field.name} has no meaning here",
                    where=field.name,
                    why=f"this op's storage is {storage}, described by {', '.join(sorted(allowed)) or 'shapes alone'}",
                    fix="leave it out, or declare another kv= in the spec",
                )


def collect_inputs(
    variant: Variant,
    kv_spec: object,
    q: torch.Tensor,
    k: Cache,
    v: torch.Tensor | None,
    lengths: Lengths,
    params: Mapping[str, torch.Tensor],
) -> Inputs:
    """Check every tensor of a forward call against the variant.

    Raises:
        ArgumentError: a tensor does not fit; nothing has been launched.
    """
    padded_q = variant.q_layout == "padded"
    shape = (
        (None, None, variant.num_qo_heads, variant.head_dim_qk)
        if padded_q
        else (None, variant.num_qo_heads, variant.head_dim_qk)
    )
    axes = "[batch, qo_len, num_qo_heads, head_dim_qk]" if padded_q else "[nnz_q, num_qo_heads, head_dim_qk]"
    check_strides("q", check_tensor("q", q, dtype=variant.dtype, shape=shape, axes=axes))
    read = q.device.type == "cpu" or Settings.from_env().validate
    if variant.kv_layout == "paged":
        assert isinstance(kv_spec, Paged)
        keys, values = _split_cache(variant, kv_spec, k, v, q.device)
    else:
        keys, values = _dense_kv(variant, q, k, v)
    batch = _describe(variant, q, keys, lengths, read)
    gate = None
    if variant.gate is not None:
        where, axes = f"params[{variant.gate!r}]", "[..., num_qo_heads, head_dim_vo]"
        wanted = (*q.shape[:-1], variant.head_dim_vo)
        given = params.get(variant.gate)
        gate = check_tensor(where, given, dtype=variant.dtype, shape=wanted, axes=axes, device=q.device)
        gate = check_strides(where, gate)
    seed, offset = _random_stream(variant, lengths, q.device)
    return Inputs(q, keys, values, batch, _check_params(variant, batch, params, q.device), gate, seed, offset)


def _random_stream(
    variant: Variant, given: Lengths, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Seed and offset of dropout, int64 ``[1]``; without an offset, 0."""
    streams = {"seed": given.seed, "offset": given.offset}
    if not variant.dropout:
        for name, tensor in streams.items():
            if tensor is not None:
                raise ArgumentError(
                    f"{name} has no meaning here",
                    where=name,
                    why="the spec has no dropout",
                    fix="leave it out, or declare dropout= in the spec",
                )
        return None, None
    if given.seed is None:
        raise ArgumentError(
            "seed is missing",
            where="seed",
            why=f"the spec drops weights with probability {variant.dropout:g}",
            fix="pass an int64 tensor of one element; another for every call, or the same with another offset",
        )
    if given.offset is None:
        streams["offset"] = torch.zeros(1, dtype=torch.int64, device=device)
    checked = []
    for name, tensor in streams.items():
        vector = tensor[None] if isinstance(tensor, torch.Tensor) and tensor.dim() == 0 else tensor
        checked.append(check_tensor(name, vector, dtype="i64", shape=(1,), axes="[1]", device=device))
    return checked[0], checked[1]


def _dense_kv(variant: Variant, q: torch.Tensor, k: Cache, v: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    padded = variant.kv_layout == "padded"
    lead: tuple[int | None, ...] = (q.shape[0], None) if padded else (None,)
    axes = "[batch, kv_len, num_kv_heads, " if padded else "[nnz_kv, num_kv_heads, "
    heads, dtype = variant.num_kv_heads, variant.kv_dtype
    if isinstance(k, tuple):
        raise ArgumentError(
            "k is a tuple",
            where="k",
            why="only a paged cache is passed as (k_cache, v_cache)",
            fix="pass k and v separately",
        )
    check_tensor(
        "k", k, dtype=dtype, shape=(*lead, heads, variant.head_dim_qk), axes=f"{axes}head_dim_qk]", device=q.device
    )
    rows = k.shape[: len(lead)]
    checked = check_tensor(
        "v", v, dtype=dtype, shape=(*rows, heads, variant.head_dim_vo), axes=f"{axes}head_dim_vo]", device=q.device
    )
    return check_strides("k", k), check_strides("v", checked)


def _split_cache(
    variant: Variant, kv_spec: Paged, cache: Cache, v: torch.Tensor | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a paged cache as ``[num_pages, page_size, num_kv_heads, dim]``, whatever its layout."""
    if v is not None:
        raise ArgumentError(
            "v is given beside a paged cache",
            where="v",
            why="the cache holds keys and values",
            fix="pass (k_cache, v_cache)",
        )
    nhd = kv_spec.layout == "NHD"
    inner = "page_size, num_kv_heads" if nhd else "num_kv_heads, page_size"
    sizes = (kv_spec.page_size, variant.num_kv_heads) if nhd else (variant.num_kv_heads, kv_spec.page_size)
    if isinstance(cache, (tuple, list)):
        if len(cache) != 2:
            raise ArgumentError(
                "kv_cache has not two members", where="kv_cache", why="it is (k_cache, v_cache)", fix="pass both"
            )
        keys, values = cache
    else:
        if variant.head_dim_qk != variant.head_dim_vo:
            raise ArgumentError(
                "kv_cache is one stacked tensor",
                where="kv_cache",
                why="k and v have different head dims and cannot be stacked",
                fix="pass (k_cache, v_cache)",
            )
        check_tensor(
            "kv_cache",
            cache,
            dtype=variant.kv_dtype,
            shape=(None, 2, *sizes, variant.head_dim_qk),
            axes=f"[num_pages, 2, {inner}, head_dim]",
            device=device,
        )
        keys, values = cache[:, 0], cache[:, 1]
    views = []
    for name, tensor, dim in (("k_cache", keys, variant.head_dim_qk), ("v_cache", values, variant.head_dim_vo)):
        axes = f"[num_pages, {inner}, head_dim]"
        check_tensor(name, tensor, dtype=variant.kv_dtype, shape=(None, *sizes, dim), axes=axes, device=device)
        views.append(check_strides(name, tensor if nhd else tensor.transpose(1, 2)))
    if views[0].shape[0] != views[1].shape[0]:
        raise ArgumentError(
            f"k_cache has {views[0].shape[0]} pages, v_cache {views[1].shape[0]}",
            where="kv_cache",
            why="one page number addresses both",
            fix="allocate both with the same number of pages",
        )
    return views[0], views[1]


def _describe(variant: Variant, q: torch.Tensor, k: torch.Tensor, given: Lengths, read: bool) -> Batch:
    device = q.device
    allowed = {"qo_lens"} if variant.q_layout == "padded" else {"qo_indptr"}
    storage: dict[str, Any]
    if variant.q_layout == "padded":
        batch, qo_len = q.shape[0], q.shape[1]
        storage = {"batch": batch, "qo_len": qo_len, "num_tokens": batch * qo_len}
        if given.qo_lens is not None:
            why = "q is padded to"
            storage["qo_lens"] = check_lengths("qo_lens", given.qo_lens, batch, qo_len, device, read=read, why=why)
    else:
        indptr = check_indptr("qo_indptr", given.qo_indptr, q.shape[0], device, read=read)
        batch = len(indptr) - 1
        storage = {"batch": batch, "qo_len": 0, "num_tokens": q.shape[0], "qo_indptr": indptr}
    if variant.kv_layout == "padded":
        allowed |= {"kv_lens"}
        storage |= {"kv_len": k.shape[1], "num_keys": k.shape[0] * k.shape[1]}
        if given.kv_lens is not None:
            why = "k is padded to"
            storage["kv_lens"] = check_lengths("kv_lens", given.kv_lens, batch, k.shape[1], device, read=read, why=why)
    elif variant.kv_layout == "ragged":
        allowed |= {"kv_indptr"}
        indptr = check_indptr("kv_indptr", given.kv_indptr, k.shape[0], device, read=read)
        _same_batch("kv_indptr", len(indptr) - 1, batch)
        storage |= {"kv_len": 0, "num_keys": k.shape[0], "kv_indptr": indptr}
    else:
        csr = given.page_table is None
        allowed |= {"kv_indptr", "kv_indices", "kv_last_page_len"} if csr else {"page_table", "kv_lens"}
        storage |= _csr_pages(variant, k, given, batch, read) if csr else _page_table(variant, k, given, batch, read)
    given.reject_other_than(allowed, f"{variant.q_layout} queries and {variant.kv_layout} keys")
    for name in ("q_offset", "kv_offset"):
        if getattr(given, name) is not None:
            storage[name] = check_index(name, getattr(given, name), batch, device)
    return Batch(**storage)


def _page_table(variant: Variant, k: torch.Tensor, given: Lengths, batch: int, read: bool) -> dict[str, Any]:
    table = check_tensor(
        "page_table", given.page_table, dtype="i32", shape=(batch, None), axes="[batch, max_pages]", device=k.device
    )
    if table.numel() and (table.stride(1) != 1 or table.stride(0) < table.shape[1]):
        table = table.contiguous()  # rows of their own: a stride of 0, as of one expanded row, would mean CSR
    capacity = table.shape[1] * variant.page_size
    why = f"page_table has {table.shape[1]} columns of {variant.page_size} tokens, room for"
    kv_lens = check_lengths("kv_lens", given.kv_lens, batch, capacity, k.device, read=read, why=why)
    if read:
        used = torch.arange(table.shape[1], device=k.device) * variant.page_size < kv_lens[:, None]
        _check_pages("page_table", table[used], k.shape[0])
    return {"kv_len": capacity, "kv_lens": kv_lens, "page_table": table, "page_table_stride": max(table.stride(0), 1)}


def _csr_pages(variant: Variant, k: torch.Tensor, given: Lengths, batch: int, read: bool) -> dict[str, Any]:
    if given.kv_indptr is None and given.kv_indices is None:
        raise ArgumentError(
            "no pages are given",
            where="page_table",
            why="a paged cache is addressed by page_table and kv_lens, or by kv_indptr, kv_indices and kv_last_page_len",
            fix="pass one of the two forms",
        )
    indices = check_tensor(
        "kv_indices", given.kv_indices, dtype="i32", shape=(None,), axes="[number of pages]", device=k.device
    ).contiguous()
    indptr = check_indptr("kv_indptr", given.kv_indptr, None, k.device, read=read)
    _same_batch("kv_indptr", len(indptr) - 1, batch)
    why = "a page holds"
    last = check_lengths(
        "kv_last_page_len", given.kv_last_page_len, batch, variant.page_size, k.device, read=read, why=why
    )
    if read:
        if int(indptr[-1]) > len(indices):
            raise ArgumentError(
                f"kv_indptr ends at {int(indptr[-1])}",
                where="kv_indptr",
                why=f"kv_indices has {len(indices)} pages",
                fix="pass as many page numbers as kv_indptr counts",
            )
        _check_pages("kv_indices", indices[: int(indptr[-1])], k.shape[0])
    capacity = len(indices) * variant.page_size
    return {"kv_len": capacity, "kv_lens": last, "page_table": indices, "page_table_stride": 0, "page_indptr": indptr}


def _check_pages(name: str, used: torch.Tensor, num_pages: int) -> None:
    if used.numel() and not (int(used.min()) >= 0 and int(used.max()) < num_pages):
        bad = int(used.min()) if int(used.min()) < 0 else int(used.max())
        raise ArgumentError(
            f"{name} names page {bad}",
            where=name,
            why=f"the cache has pages 0 .. {num_pages - 1}",
            fix="correct the page number",
        )


def _same_batch(name: str, got: int, batch: int) -> None:
    if got != batch:
        raise ArgumentError(
            f"{name} describes {got} requests",
            where=name,
            why=f"the queries are of {batch}",
            fix="pass batch + 1 elements",
        )


def _check_params(
    variant: Variant, batch: Batch, given: Mapping[str, torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    names = [param.name for param in variant.params]
    declared = [*names, variant.gate] if variant.gate else names
    for name in given:
        if name not in declared:
            raise ArgumentError(
                f"params holds {name!r}",
                where=f"params[{name!r}]",
                why=f"the spec declares {', '.join(map(repr, declared)) or 'no parameter'}",
                fix="remove or rename it",
            )
    moved = batch.q_offset is not None or batch.kv_offset is not None  # positions reach beyond the keys of the call
    sizes: dict[str, int | None] = {
        "batch": batch.batch,
        "num_qo_heads": variant.num_qo_heads,
        "num_kv_heads": variant.num_kv_heads,
        "max_qo_len": batch.qo_len or None,
        "max_kv_len": batch.kv_len if variant.kv_layout == "padded" and not moved else None,
    }
    checked = {}
    for param in variant.params:
        where = f"params[{param.name!r}]"
        if batch.q_offset is not None and any(dim in ("max_qo_len", f"max_qo_len{OR_ONE}") for dim in param.dims):
            raise ArgumentError(
                f"{param.name} has a row for each query of the call",
                where="q_offset",
                why="the row of a query is told by its distance from the last key, which q_offset changes",
                fix="leave q_offset out, or index a parameter of your own by position",
            )
        axes = f"[{', '.join(str(dim) for dim in param.dims)}]"
        tensor = given.get(param.name)
        fits = isinstance(tensor, torch.Tensor) and tensor.dim() == len(param.dims)
        sizes_here = tensor.shape if fits and tensor is not None else [None] * len(param.dims)
        shape = [_expected(dim, size, sizes) for dim, size in zip(param.dims, sizes_here, strict=True)]
        checked[param.name] = check_tensor(
            where, tensor, dtype=param.dtype, shape=shape, axes=axes, device=device
        ).contiguous()
    return checked


def _expected(dim: str | int, given: int | None, sizes: dict[str, int | None]) -> int | None:
    """The size that a parameter must have along an axis; None where any will do. Free names have the size first seen."""
    if isinstance(dim, int):
        return dim
    if given == 1 and is_broadcast(dim):
        return 1
    name = dim.removesuffix(OR_ONE)
    return sizes.setdefault(name, given) if name not in DIM_NAMES else sizes[name]
