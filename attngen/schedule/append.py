"""New keys and values on their way into the cache: one kernel turns, scales, rounds and scatters them.

A program takes a tile of rows, each one head of one token.
"""

from __future__ import annotations

from attngen.dtypes import Storage
from attngen.schedule.arguments import parameters, tensor
from attngen.schedule.plan import Arg, KernelPlan
from attngen.schedule.planner import plan_kernel
from attngen.target import Target
from attngen.variant import Variant


def plan_append(variant: Variant, target: Target, backend: str) -> tuple[KernelPlan, ...]:
    """The kernel that writes new tokens."""
    keys, values = variant.k_storage, variant.v_storage
    has_pe, has_values = variant.head_dim_pe > 0, variant.value_source == "values"
    args = (
        *_new("k", variant),
        *(_new("k_pe", variant) if has_pe else ()),
        *(_new("v", variant) if has_values else ()),
        *_stored("k", keys),
        *(_stored("k_pe", keys) if has_pe else ()),
        *(_stored("v", values) if has_values else ()),
        *_factor("k_scale", keys),
        *(_factor("v_scale", values) if has_values else ()),
        *_places(variant),
        *parameters(variant),
    )
    return (plan_kernel(variant, "append", "append", target, backend, args=args),)


def _new(name: str, variant: Variant) -> tuple[Arg, ...]:
    return (Arg(f"new_{name}", f"*{variant.dtype}"), *(Arg(f"new_{name}_stride_{axis}", "i64") for axis in "th"))


def _stored(name: str, storage: Storage) -> tuple[Arg, ...]:
    """A tensor of the cache; what kernels round by themselves they write as bytes."""
    as_bytes = storage.packed > 1 or storage.dtype.startswith("fp8")
    blocks: tuple[Arg, ...] = ()
    if storage.block:
        scale = storage.row.block_scale
        blocks = tensor(f"{name}_blocks", "u8" if scale.startswith("fp8") else scale)
    return (*tensor(name, "u8" if as_bytes else storage.dtype), *blocks)


def _factor(name: str, storage: Storage) -> tuple[Arg, ...]:
    if storage.scale == "token":
        return tensor(name, "fp32")
    return (Arg(name, "*fp32"),) if storage.scale else ()


def _places(variant: Variant) -> tuple[Arg, ...]:
    """Where tokens go: by slot, or by request and position."""
    by_position = {
        "padded": (Arg("kv_len", "i32"),),
        "ragged": (Arg("kv_indptr", "*i32"),),
        "paged": (
            Arg("kv_len", "i32"),
            Arg("page_table", "*i32"),
            Arg("page_table_stride", "i64"),
            Arg("page_indptr", "*i32"),
        ),
    }[variant.kv_layout]
    return (
        Arg("num_tokens", "i32"),
        Arg("num_slots", "i64"),
        Arg("slot_mapping", "*i64"),
        Arg("has_slot_mapping", "i32"),
        Arg("positions", "*i32"),
        Arg("batch_indices", "*i32"),
        Arg("batch", "i32"),
        *by_position,
    )
