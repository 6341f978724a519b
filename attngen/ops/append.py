"""Writing new tokens into a cache: arguments are checked, one kernel is launched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from attngen.backends.call import Batch, NewTokens, append_slots
from attngen.errors import ArgumentError
from attngen.ops.batching import check_page_lists, check_page_table, check_params
from attngen.ops.checks import check_indptr, check_owned, check_tensor, readable
from attngen.ops.kernels import KernelOp
from attngen.ops.storage import Cache, Extras, members, unpack_cache
from attngen.settings import Settings
from attngen.signature import Declaration, Signature

_PARTS = ("k_pe", "k_blocks", "v_blocks", "k_pe_blocks", "k_scale", "v_scale")


@dataclass(frozen=True)
class Places:
    """Where new tokens go: ``slot_mapping``, or ``positions`` of requests ``batch_indices``."""

    slot_mapping: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    batch_indices: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None

    def flat(self) -> list[torch.Tensor | None]:
        """In the order of the fields."""
        return [getattr(self, field.name) for field in fields(self)]


@dataclass(frozen=True)
class Rows:
    """New tokens ``[tokens, num_kv_heads, dim]``, fit for kernels to read; ``v`` is ``None`` where values are columns of keys."""

    k: torch.Tensor
    k_pe: torch.Tensor | None
    v: torch.Tensor | None


@dataclass(frozen=True)
class Slots:
    """The cache as kernels write it: members as in :class:`attngen.backends.base.Inputs`."""

    k: torch.Tensor
    v: torch.Tensor | None
    k_pe: torch.Tensor | None = None
    k_blocks: torch.Tensor | None = None
    v_blocks: torch.Tensor | None = None
    k_pe_blocks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


def unpack_new(variant: Signature, k: Any, v: Any) -> Rows:
    """New keys and values as the user passes them.

    Raises:
        ArgumentError: a tensor does not fit the spec.
    """
    heads, main, pe = variant.num_kv_heads, variant.head_dim_main, variant.head_dim_pe
    if variant.value_source == "values":
        keys = _new("k", k, variant, (None, heads, main), "[tokens, num_kv_heads, head_dim_qk]")
        shape = (len(keys), heads, variant.head_dim_vo)
        return Rows(keys, None, _new("v", v, variant, shape, "[tokens, num_kv_heads, head_dim_vo]"))
    if v is not None:
        raise ArgumentError(
            "v is given beside latents",
            where="v",
            why="the values of absorbed MLA are columns of its keys",
            fix="pass None",
        )
    if isinstance(k, torch.Tensor):
        joined = _new("k", k, variant, (None, main + pe), "[tokens, head_dim_ckv + head_dim_kpe]")
        k = joined[:, :main], joined[:, main:]
    ckv, kpe = members("k", k, "(ckv, kpe)")
    ckv = _new("k[0]", ckv, variant, (None, main), "[tokens, head_dim_ckv]")
    kpe = _new("k[1]", kpe, variant, (len(ckv), pe), "[tokens, head_dim_kpe]")
    return Rows(ckv.unsqueeze(1), kpe.unsqueeze(1), None)


def _new(name: str, tensor: Any, variant: Signature, shape: tuple[int | None, ...], axes: str) -> torch.Tensor:
    return readable(check_tensor(name, tensor, dtype=variant.dtype, shape=shape, axes=axes))


def unpack_slots(
    variant: Signature, declared: Declaration, new: Rows, cache: Cache, k_scale: Any, v_scale: Any
) -> Slots:
    """The cache as the user passes it to decode, checked to be one that may be written.

    Raises:
        ArgumentError: a tensor does not fit the storage that the spec declares.
    """
    _check_devices(new, (cache, k_scale, v_scale))
    given = Extras(k_scale=k_scale, v_scale=v_scale)
    if variant.value_source == "values" and variant.kv_layout != "paged":
        keys, values = members("kv_cache", cache, "(k, v)")
        k, v, found = unpack_cache(variant, declared, new.k, keys, values, given)
    else:
        k, v, found = unpack_cache(variant, declared, new.k, cache, None, given)
    parts = {name: getattr(found, name) for name in _PARTS}
    shared = variant.value_source == "keys"
    if shared:
        parts |= {"v_blocks": None, "v_scale": None}
    slots = Slots(k, None if shared else v, **parts)
    for name, tensor in written(variant, slots).items():
        check_owned(f"kv_cache ({name})", tensor)
    return slots


def written(variant: Signature, slots: Slots) -> dict[str, torch.Tensor]:
    """The tensors that append writes, by name; factors of tensors and heads are only read."""
    scales = {"k_scale": variant.k_storage, "v_scale": variant.v_storage}
    every = {field.name: getattr(slots, field.name) for field in fields(slots)}
    return {
        name: tensor
        for name, tensor in every.items()
        if tensor is not None and (name not in scales or scales[name].scale == "token")
    }


def _check_devices(new: Rows, others: Any) -> None:
    """Raise for a tensor that is not where the new tokens are."""
    for other in others:
        if isinstance(other, (tuple, list)):
            _check_devices(new, other)
        elif isinstance(other, torch.Tensor) and other.device != new.k.device and other.numel() != 1:
            raise ArgumentError(
                f"the cache is on {other.device}",
                where="kv_cache",
                why=f"k is on {new.k.device}",
                fix=f"pass k.to({str(other.device)!r})",
            )


def run(op: KernelOp, new: Rows, slots: Slots, places: Places, params: Mapping[str, torch.Tensor]) -> None:
    """Check where tokens go, and write them.

    Raises:
        ArgumentError: an index tensor does not fit; nothing has been written.
    """
    variant, device = op.signature, new.k.device
    tokens = _collect(variant, new, slots, places, params)
    if device.type == "cpu" or Settings.validates():
        _check_places(variant, tokens)
    if not new.k.numel() or not tokens.num_slots:
        return
    op.append(tokens)


def _collect(
    variant: Signature, new: Rows, slots: Slots, places: Places, params: Mapping[str, torch.Tensor]
) -> NewTokens:
    count, device = len(new.k), new.k.device
    cache = {field.name: getattr(slots, field.name) for field in fields(slots)}
    num_slots = slots.k.shape[:-2].numel()
    where: dict[str, Any] = {"kv_len": slots.k.shape[1] if variant.kv_layout == "padded" else 0}
    by_position = {"padded": (), "ragged": ("kv_indptr",), "paged": ("page_table", "kv_indptr", "kv_indices")}
    slot: torch.Tensor | None = places.slot_mapping
    allowed = {"slot_mapping"} if slot is not None else {"positions", "batch_indices", *by_position[variant.kv_layout]}
    allowed |= {"positions"} if variant.rotates else set()
    _reject_others(places, allowed, by_slot=slot is not None)
    if slot is None and places.batch_indices is None and places.positions is None:
        raise ArgumentError(
            "nothing tells where the tokens go",
            where="slot_mapping",
            why="each has a slot, or a request and a position in it",
            fix="pass slot_mapping, or positions and batch_indices",
        )
    if slot is None or variant.rotates:
        where["positions"] = _vector("positions", places.positions, count, device)
    if slot is not None:
        slot = slot.long() if getattr(slot, "dtype", None) == torch.int32 else slot
        shape = (count,)
        slot = check_tensor("slot_mapping", slot, dtype="i64", shape=shape, axes="[tokens]", device=device)
        where["slot_mapping"] = slot.contiguous()
    else:
        where["batch_indices"] = _vector("batch_indices", places.batch_indices, count, device)
        where |= _requests(variant, slots, places, device)
    tables = check_params(variant, Batch(0, 0, 0, count), params, device)
    return NewTokens(new_k=new.k, new_v=new.v, new_k_pe=new.k_pe, **cache, num_slots=num_slots, **where, params=tables)


def _vector(name: str, tensor: Any, count: int, device: torch.device) -> torch.Tensor:
    return check_tensor(name, tensor, dtype="i32", shape=(count,), axes="[tokens]", device=device).contiguous()


def _reject_others(places: Places, allowed: set[str], *, by_slot: bool) -> None:
    for field in fields(places):
        if field.name not in allowed and getattr(places, field.name) is not None:
            raise ArgumentError(
                f"{field.name} has no meaning here",
                where=field.name,
                why="slot_mapping tells where tokens go" if by_slot else "the spec's storage has none",
                fix="leave it out, or leave slot_mapping out" if by_slot else "leave it out",
            )


def _requests(variant: Signature, slots: Slots, places: Places, device: torch.device) -> dict[str, Any]:
    """Where the slots of each request lie."""
    read = device.type == "cpu" or Settings.validates()
    if variant.kv_layout == "padded":
        return {"batch": slots.k.shape[0]}
    if variant.kv_layout == "ragged":
        indptr = check_indptr("kv_indptr", places.kv_indptr, slots.k.shape[0], device, read=read)
        return {"batch": len(indptr) - 1, "kv_indptr": indptr}
    if places.page_table is not None:
        _reject_others(places, {"positions", "batch_indices", "page_table"}, by_slot=False)
        pages = check_page_table(variant, places.page_table, None, device)
        return pages | {"batch": len(pages["page_table"])}
    if places.kv_indptr is None and places.kv_indices is None:
        raise ArgumentError(
            "no pages are given",
            where="page_table",
            why="positions in a paged cache are found by page_table, or by kv_indptr and kv_indices",
            fix="pass one of the two forms, or slot_mapping",
        )
    pages = check_page_lists(places.kv_indptr, places.kv_indices, device, read=read)
    room = len(pages["page_table"]) * variant.page_size
    return pages | {"batch": len(pages["page_indptr"]) - 1, "kv_len": room}


def _check_places(variant: Signature, tokens: NewTokens) -> None:
    """Raise for a token that is to be written but has no slot in the cache."""
    slot = append_slots(variant.kv_layout, variant.page_size, tokens)
    asked = slot if tokens.slot_mapping is not None else tokens.positions
    assert asked is not None
    bad = ((asked >= 0) & ((slot < 0) | (slot >= tokens.num_slots))).nonzero()
    if not len(bad):
        return
    token = int(bad[0])
    if tokens.slot_mapping is not None:
        raise ArgumentError(
            f"slot_mapping[{token}] is {int(slot[token])}",
            where="slot_mapping",
            why=f"the cache has slots 0 .. {tokens.num_slots - 1}",
            fix="correct it, or pass -1 to skip the token",
        )
    assert tokens.positions is not None
    assert tokens.batch_indices is not None
    raise ArgumentError(
        f"position {int(tokens.positions[token])} of request {int(tokens.batch_indices[token])} has no slot",
        where=f"positions[{token}]",
        why=f"it lies beyond the room of one of {tokens.batch} requests, or its page is not one of the cache",
        fix="give the request more room, or pass -1 to skip the token",
    )
