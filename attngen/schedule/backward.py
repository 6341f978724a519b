"""Backward kernels: weights are recomputed from lse, gradients are summed inside one program (Dao, arXiv 2307.08691).

``delta`` takes ``rowsum(dout * out) - dlse``; ``dkdv`` walks the queries that see a key tile, over all query heads of the group,
so that dk and dv need no atomic additions; ``dq`` walks the keys that a query tile sees and adds parameter gradients.
"""

from __future__ import annotations

from attngen.schedule.arguments import param_gradients, parameters, sequences, tensor
from attngen.schedule.plan import Arg, KernelPlan
from attngen.schedule.planner import plan_kernel
from attngen.target import Target
from attngen.variant import Variant


def plan_backward(variant: Variant, target: Target, backend: str) -> tuple[KernelPlan, ...]:
    """delta, then dk and dv, then dq."""
    inputs = (
        *tensor("q", variant.dtype),
        *tensor("k", variant.kv_dtype),
        *tensor("v", variant.kv_dtype),
        *tensor("dout", variant.out_dtype),
        Arg("lse", "*fp32"),
        Arg("delta", "*fp32"),
    )
    shape = (*sequences(variant), Arg("num_tokens", "i32"), Arg("num_tiles", "i32"), *parameters(variant))
    delta = plan_kernel(
        variant,
        "backward",
        "delta",
        target,
        backend,
        args=(
            *tensor("out", variant.out_dtype),
            *tensor("dout", variant.out_dtype),
            Arg("dlse", "*fp32"),
            Arg("has_dlse", "i32"),
            Arg("delta", "*fp32"),
            Arg("qo_len", "i32"),
            Arg("num_tokens", "i32"),
        ),
    )
    dkdv = plan_kernel(
        variant,
        "backward",
        "dkdv",
        target,
        backend,
        args=(*inputs, *tensor("dk", variant.kv_dtype), *tensor("dv", variant.kv_dtype), *shape),
    )
    dq = plan_kernel(
        variant,
        "backward",
        "dq",
        target,
        backend,
        args=(*inputs, *tensor("dq", variant.dtype), *param_gradients(variant), *shape),
    )
    return (delta, dkdv, dq)
