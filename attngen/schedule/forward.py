"""Forward kernels: tiled online softmax, over all keys of a request or over one part of them (flash-decoding).

The recurrence over key tiles keeps a row's running maximum, sum and output (Milakov and Gimelshein, arXiv 1805.02867; Dao et
al., arXiv 2205.14135). For few queries the keys are divided among programs and the partial results merged by their lse.
"""

from __future__ import annotations

from attngen.schedule.arguments import parameters, sequences, tensor
from attngen.schedule.plan import Arg, KernelPlan
from attngen.schedule.planner import plan_kernel
from attngen.target import Target
from attngen.variant import OpName, Variant


def plan_prefill(variant: Variant, target: Target, backend: str) -> tuple[KernelPlan, ...]:
    """One kernel: a query tile of one head walks the keys it can see."""
    return (_forward(variant, "prefill", target, backend, split=False),)


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
            *tensor("out", variant.out_dtype),
            Arg("lse", "*fp32"),
            Arg("qo_len", "i32"),
            Arg("num_tokens", "i32"),
            Arg("num_splits", "i32"),
        ),
    )
    return (_forward(variant, "decode", target, backend, split=True), merge)


def _forward(variant: Variant, op: OpName, target: Target, backend: str, *, split: bool) -> KernelPlan:
    partials = (Arg("partial_out", "*fp32"), Arg("partial_lse", "*fp32"), Arg("num_splits", "i32")) if split else ()
    return plan_kernel(
        variant,
        op,
        "forward",
        target,
        backend,
        packed=split,
        split=split,
        args=(
            *tensor("q", variant.dtype),
            *tensor("k", variant.kv_dtype),
            *tensor("v", variant.kv_dtype),
            *tensor("out", variant.out_dtype),
            Arg("lse", "*fp32"),
            *partials,
            *sequences(variant),
            Arg("num_tokens", "i32"),
            Arg("num_tiles", "i32"),
            *parameters(variant),
        ),
    )
