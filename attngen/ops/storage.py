"""Caches as users pass them -> tensors as kernels read them, without copies.

Whatever the form, keys and values become views ``[request or page, token, head, width]`` (ragged: ``[token, head, width]``), with
block scales and scales of tokens in views of the same leading dims.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch

from attngen.dtypes import DTYPES, Storage, alignment_of
from attngen.errors import ArgumentError
from attngen.ops.checks import check_strides, check_tensor, torch_dtype
from attngen.signature import Declaration, Signature

# q, or of absorbed MLA (q_nope, q_pe).
Query = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
# k or v, with block scales (data, scales); of a paged cache (k_cache, v_cache) or both stacked; of MLA (ckv, kpe) or both joined.
Cache = torch.Tensor | tuple[Any, ...]


# Positions and random streams have a meaning in every storage.
EVERYWHERE = frozenset({"q_offset", "kv_offset", "seed", "offset"})


@dataclass(frozen=True)
class Extras:
    """The optional tensors of a call beside q, k, v and parameters: lengths and indices, random stream, scales, and further parts
    of queries and caches, from ``q_pe`` on, which :func:`unpack` fills in."""

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
    page_indptr: torch.Tensor | None = None
    q_scale: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    q_pe: torch.Tensor | None = None
    k_pe: torch.Tensor | None = None
    k_blocks: torch.Tensor | None = None
    v_blocks: torch.Tensor | None = None
    k_pe_blocks: torch.Tensor | None = None

    def reject_other_than(self, allowed: set[str], storage: str, everywhere: frozenset[str] = EVERYWHERE) -> None:
        """Raise for a length, index or random stream that is neither ``allowed`` nor has a meaning ``everywhere``."""
        for field in fields(self)[:12]:
            if getattr(self, field.name) is not None and field.name not in allowed | everywhere:
                raise ArgumentError(
                    f"{field.name} has no meaning here",
                    where=field.name,
                    why=f"this op's storage is {storage}, described by {', '.join(sorted(allowed)) or 'shapes alone'}",
                    fix="leave it out, or declare another kv= in the spec",
                )


def unpack(
    variant: Signature, declared: Declaration, q: Query, k: Cache, v: Cache | None, given: Extras
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Extras]:
    """q, k and v as kernels read them, and everything else in ``given``.

    Args:
        k: keys; of a paged cache keys and values, of absorbed MLA latents.

    Raises:
        ArgumentError: a tensor does not fit the storage that the spec declares.
    """
    q, pe = _queries(variant, q)
    return q, *unpack_cache(variant, declared, q, k, v, _changed(given, q_pe=pe))


def unpack_cache(
    variant: Signature, declared: Declaration, q: torch.Tensor, k: Cache, v: Cache | None, given: Extras
) -> tuple[torch.Tensor, torch.Tensor, Extras]:
    """k and v as kernels read or write them, and everything else in ``given``.

    Args:
        q: rows of queries or of new tokens, on the cache's device.
    """
    form = _Form(variant, declared, q)
    if variant.value_source == "keys":
        found = form.latents(k, v, given)
    elif variant.kv_layout == "paged":
        found = form.pages(k, v, given)
    else:
        found = form.dense(k, v, given)
    keys, values = found.pop("k"), found.pop("v")
    assert keys is not None
    assert values is not None
    return keys, values, _changed(given, **found)


def _changed(given: Extras, **found: torch.Tensor | None) -> Extras:
    """``given`` with what is found; most calls find nothing new, and a copy takes longer than to see that."""
    new = {name: x for name, x in found.items() if x is not getattr(given, name)}
    return replace(given, **new) if new else given


def _queries(variant: Signature, q: Query) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q, and its last columns where they lie apart; checked."""
    padded = variant.q_layout == "padded"
    lead = (None, None, variant.num_qo_heads) if padded else (None, variant.num_qo_heads)
    names = "[batch, qo_len, num_qo_heads, " if padded else "[nnz_q, num_qo_heads, "
    pe, wide = variant.head_dim_pe, variant.head_dim_main
    if not pe:
        check_tensor("q", q, dtype=variant.dtype, shape=(*lead, wide), axes=f"{names}head_dim_qk]")
        assert isinstance(q, torch.Tensor)
        return check_strides("q", q, alignment_of(wide * q.element_size())), None
    if isinstance(q, torch.Tensor):
        check_tensor("q", q, dtype=variant.dtype, shape=(*lead, wide + pe), axes=f"{names}head_dim_ckv + head_dim_kpe]")
        q = q[..., :wide], q[..., wide:]
    nope, rope = members("q", q, "(q_nope, q_pe)")
    check_tensor("q[0]", nope, dtype=variant.dtype, shape=(*lead, wide), axes=f"{names}head_dim_ckv]")
    shape = (*nope.shape[:-1], pe)
    check_tensor("q[1]", rope, dtype=variant.dtype, shape=shape, axes=f"{names}head_dim_kpe]", device=nope.device)
    return check_strides("q[0]", nope), check_strides("q[1]", rope)


@dataclass(frozen=True)
class _Form:
    """What a cache of the variant looks like."""

    variant: Signature
    declared: Declaration
    q: torch.Tensor

    @property
    def batch(self) -> int | None:
        """Requests of a padded cache: those of padded q; new tokens of ``append`` do not tell."""
        return self.q.shape[0] if self.variant.q_layout == "padded" else None

    @property
    def heads_first(self) -> bool:
        return self.variant.kv_layout == "paged" and self.declared.layout == "HND"

    def lead(self) -> tuple[tuple[int | None, ...], str]:
        """Sizes and names of the dims before a head's numbers, without heads where the cache has none."""
        variant = self.variant
        headed = variant.value_source == "values"
        if variant.kv_layout == "paged":
            sizes = [(None, "num_pages"), (self.declared.page_size, "page_size")]
        elif variant.kv_layout == "padded":
            sizes = [(self.batch, "batch"), (None, "kv_len")]
        else:
            sizes = [(None, "nnz_kv")]
        if headed:
            sizes.insert(1 if self.heads_first else len(sizes), (variant.num_kv_heads, "num_kv_heads"))
        return tuple(size for size, _ in sizes), ", ".join(name for _, name in sizes)

    def dense(self, k: Cache, v: Cache | None, given: Extras) -> dict[str, torch.Tensor | None]:
        return self.keys_and_values(("k", k), ("v", v), given)

    def pages(self, cache: Cache, v: Cache | None, given: Extras) -> dict[str, torch.Tensor | None]:
        if v is not None:
            raise ArgumentError(
                "v is given beside a paged cache",
                where="v",
                why="the cache holds keys and values",
                fix="pass (k_cache, v_cache)",
            )
        blocks = self.variant.k_storage.block > 0 and isinstance(cache, (tuple, list))
        stacked = isinstance(cache, torch.Tensor) or (blocks and all(isinstance(x, torch.Tensor) for x in cache))
        k, v = self.unstacked(cache) if stacked else members("kv_cache", cache, "(k_cache, v_cache)")
        return self.keys_and_values(("k_cache", k), ("v_cache", v), given)

    def keys_and_values(
        self, k: tuple[str, Cache], v: tuple[str, Cache | None], given: Extras
    ) -> dict[str, torch.Tensor | None]:
        """Keys and values with their names, and scales."""
        variant = self.variant
        keys, k_blocks = self.member(*k, variant.k_storage, variant.head_dim_qk)
        values, v_blocks = self.member(*v, variant.v_storage, variant.head_dim_vo, beside=keys)
        scales = {
            "q_scale": self.query_scale(given),
            "k_scale": self.scale("k_scale", given.k_scale, variant.k_storage, keys),
            "v_scale": self.scale("v_scale", given.v_scale, variant.v_storage, values),
        }
        return scales | {"k": keys, "v": values, "k_blocks": k_blocks, "v_blocks": v_blocks}

    def unstacked(self, cache: Cache) -> tuple[Cache, Cache]:
        """Keys and values of one stacked tensor, or of a pair of them with block scales."""
        variant = self.variant
        if variant.head_dim_qk != variant.head_dim_vo or variant.k_storage != variant.v_storage:
            raise ArgumentError(
                "kv_cache is one stacked tensor",
                where="kv_cache",
                why="k and v have different head dims or element types and cannot be stacked",
                fix="pass (k_cache, v_cache)",
            )
        at = self.declared.stack_dim
        sizes, names = self.lead()
        if isinstance(cache, torch.Tensor):
            sizes = (*sizes[:at], 2, *sizes[at:])
            names = ", ".join((*names.split(", ")[:at], "2", *names.split(", ")[at:]))
            self.data("kv_cache", cache, variant.k_storage, variant.head_dim_qk, sizes, names)
            return cache.select(at, 0), cache.select(at, 1)
        parts = members("kv_cache", cache, "(data, block scales)")
        for index, x in enumerate(parts):
            if x.dim() <= at or x.shape[at] != 2:
                raise ArgumentError(
                    f"kv_cache[{index}] has shape {list(x.shape)}",
                    where=f"kv_cache[{index}]",
                    why=f"two tensors are data and block scales, each with keys and values stacked along dim {at}",
                    fix="pass them with size 2 there, or ((k_cache, k_blocks), (v_cache, v_blocks))",
                )
        keys, values = (tuple(x.select(at, index) for x in parts) for index in (0, 1))
        return keys, values

    def latents(self, cache: Cache, v: Cache | None, given: Extras) -> dict[str, torch.Tensor | None]:
        """ckv and kpe, separate or cut out of one joined tensor; all with a head dim of one."""
        variant, storage = self.variant, self.variant.k_storage
        for name, tensor in (("v", v), ("v_scale", given.v_scale)):
            if tensor is not None:
                raise ArgumentError(
                    f"{name} is given beside latents",
                    where=name,
                    why="the values of absorbed MLA are columns of its keys",
                    fix="leave it out",
                )
        pe, wide = variant.head_dim_pe, variant.head_dim_main
        blocks_beside = storage.block > 0 and isinstance(cache, (tuple, list))
        joined = isinstance(cache, torch.Tensor) or (blocks_beside and any(isinstance(x, torch.Tensor) for x in cache))
        if joined:
            data, blocks = self.member("kv_cache", cache, storage, variant.head_dim_qk)
            per_block = storage.block // (2 if storage.zero_point else 1) if storage.block else 1
            k, k_pe = data[..., : wide // storage.packed], data[..., wide // storage.packed :]
            k_blocks = None if blocks is None else blocks[..., : wide // per_block]
            k_pe_blocks = None if blocks is None else blocks[..., wide // per_block :]
        else:
            ckv, kpe = members("kv_cache", cache, "(ckv, kpe)")
            k, k_blocks = self.member("ckv", ckv, storage, wide)
            k_pe, k_pe_blocks = self.member("kpe", kpe, storage, pe, beside=k)
        scale = self.scale("k_scale", given.k_scale, storage, k)
        parts = {"k": k, "v": k, "k_pe": k_pe, "k_blocks": k_blocks, "v_blocks": k_blocks, "k_pe_blocks": k_pe_blocks}
        return parts | {"k_scale": scale, "v_scale": scale, "q_scale": self.query_scale(given)}

    def member(
        self, name: str, given: Cache | None, storage: Storage, width: int, beside: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Data and block scales of keys or values.

        Args:
            beside: keys; values have as many pages and tokens.
        """
        sizes, names = self.lead()
        blocks = None
        if storage.block:
            given, blocks = members(name, given, "(data, block scales)")
        data = self.data(name, given, storage, width, sizes, names)
        data = self.canonical(data)
        if beside is not None and data.shape[:-2] != beside.shape[:-2]:
            raise ArgumentError(
                f"{name} has shape {list(given.shape)}",  # type: ignore[union-attr]
                where=name,
                why=f"the keys beside it have {' x '.join(map(str, beside.shape[:-2]))} slots, and one position addresses both",
                fix="allocate both of one size",
            )
        if blocks is None:
            return data, None
        row = DTYPES[storage.row.block_scale]
        count = width // storage.block
        inner = (count, 2) if storage.zero_point else (count,)
        names += f", head_dim / {storage.block}{', 2' if storage.zero_point else ''}"
        blocks = check_tensor(
            f"{name}[1]",
            _as(blocks, row.name),
            dtype=row.name,
            shape=(*sizes, *inner),
            axes=f"[{names}]",
            device=self.q.device,
        )
        blocks = self.canonical(blocks.flatten(-2) if storage.zero_point else blocks)
        if blocks.shape[:-1] != data.shape[:-1]:
            raise ArgumentError(
                f"{name}[1] has shape {list(blocks.shape)} beside data of {list(data.shape)}",
                where=f"{name}[1]",
                why="every block has its scale",
                fix="pass scales of the same slots and heads",
            )
        return data, check_strides(f"{name}[1]", blocks, alignment=alignment_of(blocks.shape[-1] * row.itemsize))

    def data(
        self, name: str, tensor: Any, storage: Storage, width: int, sizes: tuple[int | None, ...], names: str
    ) -> torch.Tensor:
        """A tensor of the cache's elements; bytes are taken for fp8."""
        packed = storage.packed
        last = "head_dim" if packed == 1 else f"head_dim / {packed}"
        axes = f"[{names}, {last}]"
        tensor = _as(tensor, storage.dtype)
        check_tensor(
            name, tensor, dtype=storage.dtype, shape=(*sizes, width // packed), axes=axes, device=self.q.device
        )
        return check_strides(name, tensor, alignment=alignment_of(width // packed * storage.row.itemsize))

    def canonical(self, tensor: torch.Tensor) -> torch.Tensor:
        """``[..., token, head, width]``."""
        if self.variant.value_source == "keys":
            return tensor.unsqueeze(-2)
        return tensor.transpose(1, 2) if self.heads_first else tensor

    def query_scale(self, given: Extras) -> torch.Tensor | None:
        """The factor of fp8 queries, fp32 ``[1]``, 1 by default; ``None`` for others."""
        storage = Storage(self.variant.dtype, "tensor" if DTYPES[self.variant.dtype].largest else "")
        return self.scale("q_scale", given.q_scale, storage, self.q)

    def scale(self, name: str, given: Any, storage: Storage, data: torch.Tensor) -> torch.Tensor | None:
        """fp32 ``[1]``, ``[heads]``, or of tokens ``[..., token, head]``; that of a tensor is 1 by default."""
        device = self.q.device
        if not storage.scale:
            if given is not None:
                raise ArgumentError(
                    f"{name} has no meaning here",
                    where=name,
                    why=f"{storage.dtype} is stored without factors",
                    fix="leave it out, or declare scale= in the spec's kv",
                )
            return None
        if storage.scale == "tensor":
            if given is None:
                return _one_beside(self.q)
            if isinstance(given, (int, float)) and not isinstance(given, bool):
                return torch.full((1,), float(given), device=device)
            scalar = given.reshape(1) if isinstance(given, torch.Tensor) and given.numel() == 1 else given
            return check_tensor(name, scalar, dtype="fp32", shape=(1,), axes="a scalar", device=device)
        if storage.scale == "head":
            heads = data.shape[-2]
            return check_tensor(
                name, given, dtype="fp32", shape=(heads,), axes="[num_kv_heads]", device=device
            ).contiguous()
        sizes, names = self.lead()
        check_tensor(name, given, dtype="fp32", shape=sizes, axes=f"[{names}]", device=device)
        tokens = self.canonical(given.unsqueeze(-1)).squeeze(-1)
        if tokens.shape != data.shape[:-1]:
            raise ArgumentError(
                f"{name} has shape {list(given.shape)}",
                where=name,
                why=f"it has a factor for each token and head of {list(data.shape[:-1])}",
                fix="pass the cache's shape without head_dim",
            )
        return tokens


def _one_beside(q: torch.Tensor) -> torch.Tensor:
    """The factor 1 on the device of q: kept for each, but for calls that are traced or recorded, whose tensors are their own."""
    if torch.compiler.is_compiling() or type(q) is not torch.Tensor:
        return torch.ones(1, device=q.device)
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return torch.ones(1, device=q.device)
    return _kept_one(q.device)


@cache
def _kept_one(device: torch.device) -> torch.Tensor:
    """Never freed, so that graphs may read it; its copy from the host is complete before any stream does."""
    with torch.inference_mode(mode=False):
        return torch.ones(1).to(device)


def _as(tensor: Any, dtype: str) -> Any:
    """Bytes as the fp8 that they hold: engines keep such caches in uint8; exponents of mxfp4 the other way round."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    wanted = torch_dtype(dtype)
    bytes_of = {torch.uint8, getattr(torch, "float8_e8m0fnu", torch.uint8)}
    if (tensor.dtype == torch.uint8 and dtype.startswith("fp8")) or (
        wanted == torch.uint8 and tensor.dtype in bytes_of
    ):
        return tensor.view(wanted)
    return tensor


def members(name: str, given: Any, form: str) -> tuple[Any, Any]:
    """Both members of a pair."""
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        what = (
            f"{name} has {len(given)} members"
            if isinstance(given, (tuple, list))
            else f"{name} is a {type(given).__name__}"
        )
        raise ArgumentError(
            f"{name} is missing" if given is None else what, where=name, why=f"it is {form}", fix="pass both"
        )
    return given[0], given[1]
