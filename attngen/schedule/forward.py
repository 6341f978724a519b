"""Forward kernels: tiled online softmax, over all keys of a request or over one part of them (flash-decoding).

The recurrence over key tiles keeps a row's running maximum, sum and output (Milakov and Gimelshein, arXiv 1805.02867; Dao et
al., arXiv 2205.14135). For few queries the keys are divided among programs and the partial results merged by their lse.
"""

from __future__ import annotations

from typing import Literal

from attngen.schedule.arguments import (
    keys_and_values,
    parameters,
    queries,
    random_stream,
    sequences,
    sink,
    tensor,
    tile_lists,
)
from attngen.schedule.lists import plan_lists
from attngen.schedule.plan import Arg, KernelPlan
from attngen.schedule.planner import has_lists, plan_kernel
from attngen.target import Target
from attngen.variant import OpName, Variant


def plan_prefill(variant: Variant, target: Target, backend: str) -> tuple[KernelPlan, ...]:
    """A query tile of one head walks the keys it can see; where data decide which, lists of tiles are made first.

    Requests of few queries are left to a second kernel, whose tiles hold all heads of a group. Over latents, which all heads share,
    there is no other.
    """
    if variant.value_source == "keys":
        return (_forward(variant, "prefill", target, backend, packed=True),)
    packs = variant.group_size > 1 and not variant.dropout
    forward = _forward(variant, "prefill", target, backend, serves="long" if packs else "all")
    short = (_forward(variant, "prefill", target, backend, packed=True, serves="short"),) if packs else ()
    return (*plan_lists(forward, "key_lists"), forward, *short)


def plan_decode(variant: Variant, target: Target, backend: str) -> tuple[KernelPlan, ...]:
    """A kernel over packed query heads and parts of the keys, then a merge of the parts."""
    merge = plan_kernel(
        variant,
        "decode",
        "merge",
        target,
        backend,
        args=(
            Arg("partial_out", "*fp32"),
            Arg("partial_lse", "*fp32"),
            *((Arg("partial_max", "*fp32"),) if variant.is_softmax else ()),
            *_outputs(variant),
            Arg("qo_len", "i32"),
            Arg("num_tokens", "i32"),
            Arg("num_splits", "i32"),
            *parameters(variant, only=() if variant.sink_param is None else (variant.sink_param,)),
        ),
    )
    return (_forward(variant, "decode", target, backend, packed=True, split=True), merge)


def _outputs(variant: Variant) -> tuple[Arg, ...]:
    """What forward and merge write, and what they multiply it by."""
    rows = (Arg("lse", "*fp32"), Arg("max_logit", "*fp32"), Arg("has_max_logit", "i32"))
    return (
        *tensor("out", variant.out_dtype),
        *(rows if variant.is_softmax else ()),
        *sink(variant),
        *(tensor("gate", variant.compute_dtype) if variant.gate else ()),
    )


def _forward(
    variant: Variant,
    op: OpName,
    target: Target,
    backend: str,
    *,
    packed: bool = False,
    split: bool = False,
    serves: Literal["all", "short", "long"] = "all",
) -> KernelPlan:
    partials: tuple[Arg, ...] = ()
    if split:
        partials = (Arg("partial_out", "*fp32"), Arg("partial_lse", "*fp32"), Arg("num_splits", "i32"))
        partials += (Arg("partial_max", "*fp32"),) if variant.is_softmax else ()
    return plan_kernel(
        variant,
        op,
        "forward",
        target,
        backend,
        packed=packed,
        split=split,
        serves=serves,
        args=(
            *queries(variant),
            *keys_and_values(variant),
            *_outputs(variant),
            *partials,
            *sequences(variant),
            Arg("num_tokens", "i32"),
            Arg("num_tiles", "i32"),
            *tile_lists(lists=has_lists(variant) and not packed),
            *random_stream(variant),
            *parameters(variant),
        ),
    )
