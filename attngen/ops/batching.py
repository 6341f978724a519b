"""User arguments -> :class:`Inputs`: where the requests of a call lie, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attngen.backends.call import Batch, Inputs
from attngen.errors import ArgumentError
from attngen.ir.params import DIM_NAMES, OR_ONE, is_broadcast
from attngen.ops.checks import check_index, check_indptr, check_lengths, check_strides, check_tensor
from attngen.ops.storage import Extras
from attngen.settings import Settings
from attngen.signature import Signature


def collect_inputs(
    variant: Signature,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    given: Extras,
    params: Mapping[str, torch.Tensor],
) -> Inputs:
    """Check every tensor of a forward call against the variant.

    Args:
        q, k, v, given: as :func:`attngen.ops.storage.unpack` returns them.

    Raises:
        ArgumentError: a tensor does not fit; nothing has been launched.
    """
    batch = _describe(variant, q, k, given, reads(q.device))
    gate = check_gate(variant, q, params)
    seed, offset = _random_stream(variant, given, q.device)
    return Inputs(
        q,
        k,
        v,
        batch,
        check_params(variant, batch, params, q.device),
        gate,
        seed,
        offset,
        given.q_scale,
        given.k_scale,
        given.v_scale,
        given.q_pe,
        given.k_pe,
        given.k_blocks,
        given.v_blocks,
        given.k_pe_blocks,
    )


def reads(device: torch.device) -> bool:
    """Whether checks look at the values of index tensors, which on a GPU waits for the stream."""
    return device.type == "cpu" or Settings.validates()


def check_gate(variant: Signature, q: torch.Tensor, params: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """What the results of ``q`` are multiplied by, before its sigmoid, if the variant has such a parameter."""
    if variant.gate is None:
        return None
    where, axes = f"params[{variant.gate!r}]", "[..., num_qo_heads, head_dim_vo]"
    shape = (*q.shape[:-1], variant.head_dim_vo)
    gate = check_tensor(
        where, params.get(variant.gate), dtype=variant.compute_dtype, shape=shape, axes=axes, device=q.device
    )
    return check_strides(where, gate)


def _random_stream(
    variant: Signature, given: Extras, device: torch.device
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


def _describe(variant: Signature, q: torch.Tensor, k: torch.Tensor, given: Extras, read: bool) -> Batch:
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
        same_batch("kv_indptr", len(indptr) - 1, batch)
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


def _page_table(variant: Signature, k: torch.Tensor, given: Extras, batch: int, read: bool) -> dict[str, Any]:
    pages = check_page_table(variant, given.page_table, batch, k.device)
    table, capacity = pages["page_table"], pages["kv_len"]
    why = f"page_table has {table.shape[1]} columns of {variant.page_size} tokens, room for"
    kv_lens = check_lengths("kv_lens", given.kv_lens, batch, capacity, k.device, read=read, why=why)
    if read:
        used = torch.arange(table.shape[1], device=k.device) * variant.page_size < kv_lens[:, None]
        _check_pages("page_table", table[used], k.shape[0])
    return pages | {"kv_lens": kv_lens}


def check_page_table(variant: Signature, table: object, batch: int | None, device: torch.device) -> dict[str, Any]:
    """A page table ``[batch, max_pages]``, its stride, and the tokens that a request has room for."""
    table = check_tensor(
        "page_table", table, dtype="i32", shape=(batch, None), axes="[batch, max_pages]", device=device
    )
    if table.numel() and (table.stride(1) != 1 or table.stride(0) < table.shape[1]):
        table = table.contiguous()  # rows of their own: a stride of 0, as of one expanded row, would mean CSR
    capacity = table.shape[1] * variant.page_size
    return {"kv_len": capacity, "page_table": table, "page_table_stride": max(table.stride(0), 1)}


def _csr_pages(variant: Signature, k: torch.Tensor, given: Extras, batch: int, read: bool) -> dict[str, Any]:
    if given.kv_indptr is None and given.kv_indices is None:
        raise ArgumentError(
            "no pages are given",
            where="page_table",
            why="a paged cache is addressed by page_table and kv_lens, or by kv_indptr, kv_indices and kv_last_page_len",
            fix="pass one of the two forms",
        )
    pages = check_page_lists(given.kv_indptr, given.kv_indices, k.device, read=read)
    indices, indptr = pages["page_table"], pages["page_indptr"]
    same_batch("kv_indptr", len(indptr) - 1, batch)
    why = "a page holds"
    last = check_lengths(
        "kv_last_page_len", given.kv_last_page_len, batch, variant.page_size, k.device, read=read, why=why
    )
    if read:
        _check_pages("kv_indices", indices[: int(indptr[-1])], k.shape[0])
    return pages | {"kv_len": len(indices) * variant.page_size, "kv_lens": last}


def check_page_lists(
    indptr: object, indices: object, device: torch.device, *, read: bool, name: str = "kv_indptr"
) -> dict[str, Any]:
    """Page numbers of all requests, and where each one's begin; a table of stride 0.

    Args:
        name: what ``indptr`` is called in the call.
    """
    indices = check_tensor(
        "kv_indices", indices, dtype="i32", shape=(None,), axes="[number of pages]", device=device
    ).contiguous()
    indptr = check_indptr(name, indptr, None, device, read=read)
    if read and int(indptr[-1]) > len(indices):
        raise ArgumentError(
            f"{name} ends at {int(indptr[-1])}",
            where=name,
            why=f"kv_indices has {len(indices)} pages",
            fix=f"pass as many page numbers as {name} counts",
        )
    return {"page_table": indices, "page_table_stride": 0, "page_indptr": indptr}


def cached_lengths(page_size: int, given: Extras, batch: int, device: torch.device) -> torch.Tensor:
    """Keys of each request in a paged cache, int32 ``[batch]``, from either form of page lists."""
    if given.kv_indices is None:
        return check_index("kv_lens", given.kv_lens, batch, device)
    indptr = check_indptr("kv_indptr", given.kv_indptr, None, device, read=False)
    last = check_index("kv_last_page_len", given.kv_last_page_len, batch, device)
    num_pages = check_index("kv_indptr", indptr.diff(), batch, device)
    return torch.where(num_pages > 0, (num_pages - 1) * page_size + last, 0)


def _check_pages(name: str, used: torch.Tensor, num_pages: int) -> None:
    if used.numel() and not (int(used.min()) >= 0 and int(used.max()) < num_pages):
        bad = int(used.min()) if int(used.min()) < 0 else int(used.max())
        raise ArgumentError(
            f"{name} names page {bad}",
            where=name,
            why=f"the cache has pages 0 .. {num_pages - 1}",
            fix="correct the page number",
        )


def same_batch(name: str, got: int, batch: int) -> None:
    """Raise where index tensors are not of as many requests as the queries."""
    if got != batch:
        raise ArgumentError(
            f"{name} describes {got} requests",
            where=name,
            why=f"the queries are of {batch}",
            fix="pass batch + 1 elements",
        )


def check_params(
    variant: Signature, batch: Batch, given: Mapping[str, torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    """The run-time parameters of a variant, contiguous; their sizes must agree with the batch and with each other."""
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
