"""Backward kernels: weights are recomputed from lse, gradients are summed inside one program (Dao, arXiv 2307.08691).

``delta`` takes ``rowsum(dout * out)``, less what flows through lse, and the gradients of gate and sink; ``dkdv`` walks the queries
that see a key tile, over all query heads of the group, so that dk and dv need no atomic additions; ``dq`` walks the keys that a
query tile sees and adds parameter gradients. Deterministically, ``dparams`` sums those as integers, whose order does not matter: a
first pass finds the largest contribution, from which follows the unit of the second.
"""

from __future__ import annotations

from attngen.schedule.arguments import (
    exact_param_gradients,
    param_gradients,
    parameters,
    random_stream,
    sequences,
    tensor,
    tile_lists,
)
from attngen.schedule.lists import plan_lists
from attngen.schedule.plan import Arg, KernelPlan
from attngen.schedule.planner import has_lists, plan_kernel
from attngen.target import Target
from attngen.variant import Variant


def plan_backward(variant: Variant, target: Target, backend: str, *, deterministic: bool) -> tuple[KernelPlan, ...]:
    """delta, then dk and dv, then dq, then, if ``deterministic``, parameter gradients; lists of tiles before who reads them."""
    stats = (Arg("lse", "*fp32"), Arg("delta", "*fp32")) if variant.is_softmax else ()
    inputs = (
        *tensor("q", variant.dtype),
        *tensor("k", variant.dtype),
        *tensor("v", variant.dtype),
        *tensor("dout", variant.out_dtype),
        *stats,
    )
    shape = (
        *sequences(variant),
        Arg("num_tokens", "i32"),
        Arg("num_tiles", "i32"),
        *tile_lists(lists=has_lists(variant)),
        *random_stream(variant),
        *parameters(variant),
    )
    q_weight, k_weight = variant.norm_weights
    dq_norm = (Arg("partial_dq_norm", "*fp32"),) if q_weight else ()
    dk_norm = (Arg("partial_dk_norm", "*fp32"),) if k_weight else ()
    exact = deterministic and bool(variant.gradient_params)
    added = () if exact else param_gradients(variant)
    dkdv = plan_kernel(
        variant,
        "backward",
        "dkdv",
        target,
        backend,
        args=(*inputs, *tensor("dk", variant.dtype), *tensor("dv", variant.dtype), *dk_norm, *shape),
    )
    dq = plan_kernel(
        variant,
        "backward",
        "dq",
        target,
        backend,
        args=(*inputs, *tensor("dq", variant.dtype), *dq_norm, *added, *shape),
        gradients="added" if added else "",
    )
    kernels = (
        *_delta(variant, target, backend),
        *plan_lists(dkdv, "query_lists"),
        dkdv,
        *plan_lists(dq, "key_lists"),
        dq,
    )
    if not exact:
        return kernels
    dparams = plan_kernel(
        variant,
        "backward",
        "dparams",
        target,
        backend,
        tiles=dq.tiles,
        args=(*inputs, *exact_param_gradients(variant), Arg("pass_idx", "i32"), *shape),
        gradients="exact",
    )
    return (*kernels, dparams)


def _delta(variant: Variant, target: Target, backend: str) -> tuple[KernelPlan, ...]:
    """What is worked out a row at a time; nothing for element-wise weights without a gate."""
    if not variant.is_softmax and not variant.gate:
        return ()
    rows = (Arg("dlse", "*fp32"), Arg("has_dlse", "i32"), Arg("lse", "*fp32"), Arg("delta", "*fp32"))
    total = (Arg("total_lse", "*fp32"),) if variant.sink is not None else ()
    dsink = (Arg("dsink", "*fp32"),) if variant.sink_param else ()
    gates = ("gate", variant.dtype), ("dgate", variant.dtype), ("gated_dout", variant.out_dtype)
    delta = plan_kernel(
        variant,
        "backward",
        "delta",
        target,
        backend,
        args=(
            *tensor("out", variant.out_dtype),
            *tensor("dout", variant.out_dtype),
            *(rows if variant.is_softmax else ()),
            *total,
            *dsink,
            *(arg for name, dtype in gates if variant.gate for arg in tensor(name, dtype)),
            Arg("qo_len", "i32"),
            Arg("num_tokens", "i32"),
            *parameters(variant, only=() if variant.sink_param is None else (variant.sink_param,)),
        ),
    )
    return (delta,)
