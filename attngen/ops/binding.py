"""Inputs -> values of kernel arguments, by the names of :mod:`attngen.schedule.arguments`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch

from attngen.backends.call import Batch, Inputs, NewTokens
from attngen.ops.checks import torch_dtype
from attngen.schedule.launch import Arg, KernelLaunch

Value = torch.Tensor | int
Values = dict[str, Value]


def tensor_values(name: str, tensor: torch.Tensor) -> Values:
    """A tensor ``[(request or page,) token, head, dim]`` and its strides in elements; the request stride of a ragged one is 0."""
    strides = tensor.stride()
    request = strides[0] if tensor.dim() == 4 else 0
    token, head = strides[-3], strides[-2]
    return {name: tensor, f"{name}_stride_b": request, f"{name}_stride_t": token, f"{name}_stride_h": head}


def input_values(inputs: Inputs) -> Values:
    """Values of everything that describes the inputs of a call."""
    values = tensor_values("q", inputs.q) | tensor_values("k", inputs.k) | tensor_values("v", inputs.v)
    values |= storage_values(inputs) | batch_values(inputs.batch)
    if inputs.gate is not None:
        values |= tensor_values("gate", inputs.gate)
    if inputs.seed is not None and inputs.offset is not None:
        values |= {"seed": inputs.seed, "offset": inputs.offset}
    return values | param_values(inputs.params)


def param_values(params: Mapping[str, torch.Tensor]) -> Values:
    """Values of run-time parameters and of their sizes."""
    values: Values = {}
    for name, tensor in params.items():
        values[f"param_{name}"] = tensor
        values |= {f"param_{name}_dim{axis}": size for axis, size in enumerate(tensor.shape)}
    return values


def storage_values(inputs: Inputs) -> Values:
    """Values of parts that lie apart, block scales, and factors; absent ones stay out."""
    values: Values = {}
    for name in ("q_pe", "k_pe", "k_blocks", "v_blocks", "k_pe_blocks"):
        tensor = getattr(inputs, name)
        if tensor is not None:
            values |= tensor_values(name, tensor)
    for name in ("q_scale", "k_scale", "v_scale"):
        values |= scale_values(name, getattr(inputs, name))
    return values


def scale_values(name: str, scale: torch.Tensor | None) -> Values:
    """Values of factors of a tensor, of heads, or of tokens, which have strides."""
    if scale is None:
        return {}
    return {name: scale} if scale.dim() == 1 else tensor_values(name, scale.unsqueeze(-1))


def map_values(inputs: Inputs) -> Values:
    """Queries, keys and values ``[request or page, head, token, dim]``, of which a kernel's tensor maps are made."""
    rows = {"q_tiles": inputs.q, "k_tiles": inputs.k, "k_pe_tiles": inputs.k_pe, "v_tiles": inputs.v}
    views = {name: x.transpose(-3, -2) for name, x in rows.items() if x is not None}
    return {name: x if x.dim() == 4 else x[None] for name, x in views.items()}


def tile_map_values(plan: KernelLaunch, values: Mapping[str, Value]) -> Values:
    """Of every tensor map of a kernel, the tensor, as ``[request, head, token, dim]``; ``values`` has it by its own name.

    Expanded tensors are copied, since maps have no stride of 0.
    """
    found: Values = {}
    for arg in plan.args:
        if arg.is_map:
            tensor = values[arg.name.removesuffix("_tiles")]
            assert isinstance(tensor, torch.Tensor)
            is_expanded = any(step == 0 and n > 1 for step, n in zip(tensor.stride(), tensor.shape, strict=True))
            heads = (tensor.contiguous() if is_expanded else tensor).transpose(-3, -2)
            found[arg.name] = heads if heads.dim() == 4 else heads[None]
    return found


def batch_values(batch: Batch) -> Values:
    """Values of the lengths and index tensors; absent ones stay out and become dummies."""
    values: Values = {
        "batch": batch.batch,
        "qo_len": batch.qo_len,
        "kv_len": batch.kv_len,
        "num_tokens": batch.num_tokens,
        "num_keys": batch.num_keys,
        "page_table_stride": batch.page_table_stride,
    }
    for name in ("qo_indptr", "kv_indptr", "page_table", "page_indptr"):
        tensor = getattr(batch, name)
        if tensor is not None:
            values[name] = tensor
    for name in ("qo_lens", "kv_lens", "q_offset", "kv_offset"):
        tensor = getattr(batch, name)
        values[f"has_{name}"] = int(tensor is not None)
        if tensor is not None:
            values[name] = tensor
    return values


def append_values(tokens: NewTokens) -> Values:
    """Values of everything that describes new tokens and the cache; fp8 is written as bytes."""
    values: Values = {}
    for name in ("new_k", "new_v", "new_k_pe", "k", "v", "k_pe", "k_blocks", "v_blocks", "k_pe_blocks"):
        tensor = getattr(tokens, name)
        if tensor is not None:
            values |= tensor_values(name, tensor.view(torch.uint8) if _is_fp8(tensor) else tensor)
    values |= scale_values("k_scale", tokens.k_scale) | scale_values("v_scale", tokens.v_scale)
    for name in ("slot_mapping", "positions", "batch_indices", "page_table", "page_indptr", "kv_indptr"):
        tensor = getattr(tokens, name)
        if tensor is not None:
            values[name] = tensor
    return (
        values
        | param_values(tokens.params)
        | {
            "num_tokens": len(tokens.new_k),
            "num_slots": tokens.num_slots,
            "has_slot_mapping": int(tokens.slot_mapping is not None),
            "batch": tokens.batch,
            "kv_len": tokens.kv_len,
            "page_table_stride": tokens.page_table_stride,
        }
    )


def _is_fp8(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def ordered(plan: KernelLaunch, values: Mapping[str, Value], device: torch.device) -> list[Value]:
    """The plan's arguments in order; an absent pointer becomes a one-element dummy that the kernel does not read."""
    return [values[arg.name] if arg.name in values else _absent(arg, device) for arg in plan.args]


def _absent(arg: Arg, device: torch.device) -> torch.Tensor:
    if not arg.is_pointer:
        raise KeyError(arg.name)
    return _dummy(arg.element, device)


@cache
def _dummy(dtype: str, device: torch.device) -> torch.Tensor:
    return torch.zeros(1, dtype=torch_dtype(dtype), device=device)
