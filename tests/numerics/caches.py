"""Random keys and values in every storage; every slot that no request may read holds NaN, or where there is none, other numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attngen.dtypes import Storage, quantize
from attngen.ops.checks import torch_dtype
from attngen.variant import Variant

Part = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def stored(x: torch.Tensor, storage: Storage, scale: torch.Tensor | None = None) -> tuple[Part, torch.Tensor | None]:
    """``x [..., heads, dim]`` as a cache holds it, and its factors; slots of NaN become what may lie in unused memory.

    Args:
        scale: factors to use; made from the largest magnitude when omitted.
    """
    if not storage.is_quantized:
        return x.to(torch_dtype(storage.dtype)), None
    unused = x[..., :1].isnan()
    numbers = x.nan_to_num()
    if storage.scale in ("tensor", "head") and scale is None:
        top = numbers.abs().amax() if storage.scale == "tensor" else numbers.abs().flatten(0, -3).amax((0, -1))
        largest = storage.row.largest * (448.0 if storage.dtype == "nvfp4" else 1.0)
        scale = (top / largest).clamp(min=1e-6) * (3.0 if storage.dtype in ("int4", "mxfp4") else 1.0)
    data, blocks, tokens = quantize(numbers, storage, scale)
    spoiled = _spoiled(data, unused)
    if tokens is not None:
        scale = torch.where(unused[..., 0], float("nan"), tokens)
    if blocks is None:
        return spoiled, scale
    used = unused if not storage.zero_point else unused[..., None]
    return (spoiled, _spoiled(blocks, used)), scale


def _spoiled(data: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
    """NaN of the dtype where unused; integers of few bits have none and get all bits set but the sign."""
    if data.dtype in (torch.int8, torch.uint8):
        return torch.where(unused, 0x7F if data.dtype == torch.int8 else 0xF7, data)
    width = {1: torch.uint8, 2: torch.int16}[data.element_size()]
    return (
        torch.where(unused, 0x7F, data.view(width)).to(width).view(data.dtype)
        if width == torch.uint8
        else torch.where(unused, float("nan"), data)
    )


def dense(
    x: Sequence[torch.Tensor], variant: Variant, scales: dict[str, torch.Tensor], joined: bool
) -> tuple[Any, ...]:
    """Positional arguments of padded or ragged keys and values ``[..., heads, dim]``, or of latents."""
    if variant.value_source == "keys":
        return (_latents(x[0], variant, scales, joined),)
    parts = []
    for name, tensor, storage in zip("kv", x, (variant.k_storage, variant.v_storage), strict=True):
        part, scale = stored(tensor, storage)
        parts.append(part)
        if scale is not None:
            scales[f"{name}_scale"] = scale
    return tuple(parts)


def pages(
    x: Sequence[torch.Tensor], variant: Variant, kv_spec: Any, scales: dict[str, torch.Tensor], stacked: bool
) -> tuple[Any, ...]:
    """Positional arguments of a pool ``[num_pages, page_size, heads, dim]`` of keys and one of values, in the spec's layout."""
    if variant.value_source == "keys":
        return (_latents(x[0], variant, scales, stacked),)
    parts = []
    for name, tensor, storage in zip("kv", x, (variant.k_storage, variant.v_storage), strict=True):
        part, scale = stored(tensor, storage)
        if kv_spec.layout == "HND":
            part = tuple(_heads_first(t) for t in part) if isinstance(part, tuple) else _heads_first(part)
            scale = _heads_first(scale) if scale is not None and scale.dim() > 1 else scale
        parts.append(part)
        if scale is not None:
            scales[f"{name}_scale"] = scale
    if not stacked:
        return (tuple(parts),)
    at = kv_spec.stack_dim
    if isinstance(parts[0], tuple):
        return (tuple(_stack(pair, at) for pair in zip(*parts, strict=True)),)
    return (_stack(parts, at),)


def _latents(x: torch.Tensor, variant: Variant, scales: dict[str, torch.Tensor], joined: bool) -> Any:
    part, scale = stored(x, variant.k_storage)
    if scale is not None:
        scales["k_scale"] = scale.squeeze(-1) if variant.k_storage.scale == "token" else scale
    storage, wide = variant.k_storage, variant.head_dim_qk - variant.head_dim_pe
    whole = tuple(t.squeeze(-2 if t.dim() == x.dim() else -3) for t in (part if isinstance(part, tuple) else (part,)))
    if joined:
        return whole if isinstance(part, tuple) else whole[0]
    cuts = (wide // storage.packed, wide // (storage.block or 1))
    dims = (-1, -2 if storage.zero_point else -1)
    ckv = tuple(t.narrow(dim, 0, cut).contiguous() for t, cut, dim in zip(whole, cuts, dims, strict=False))
    kpe = tuple(
        t.narrow(dim, cut, t.shape[dim] - cut).contiguous() for t, cut, dim in zip(whole, cuts, dims, strict=False)
    )
    return (ckv, kpe) if isinstance(part, tuple) else (ckv[0], kpe[0])


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous()


def _stack(pair: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    bytes_of = [t.view(torch.uint8) if t.element_size() == 1 else t for t in pair]
    return torch.stack(bytes_of, dim).view(pair[0].dtype)
