"""Backward kernels: weights are recomputed from lse (Dao, arXiv 2307.08691).

``delta`` takes ``rowsum(dout * out)``, less what flows through lse, and the gradients of gate and sink; ``dkdv`` walks the queries
that see a key tile, over all query heads of the group, so that dk and dv need no atomic additions; ``dq`` walks the keys that a
query tile sees and adds parameter gradients. Deterministically, ``dparams`` sums those as integers, whose order does not matter: a
first pass finds the largest contribution, from which follows the unit of the second.

On Hopper, ``dqkv`` takes the place of ``dkdv`` and ``dq`` and recomputes each weight once: it adds up dq in fp32, in any order, and
``dq_cast`` makes dq of the sums. Deterministically the other two run.
"""

from __future__ import annotations

from attngen.schedule import hopper
from attngen.schedule.arguments import (
    backward_maps,
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
    """delta, then dk and dv, then dq, then, if ``deterministic``, parameter gradients; lists of tiles before who reads them.

    Where one walk makes dk, dv and sums of dq, what makes dq of these comes last.
    """
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
    if backend == "cuda" and not deterministic and hopper.serves(variant, "dqkv", packed=False, requests="all"):
        return _in_one_walk(variant, target, inputs, shape)
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


def _in_one_walk(
    variant: Variant, target: Target, inputs: tuple[Arg, ...], shape: tuple[Arg, ...]
) -> tuple[KernelPlan, ...]:
    """delta, then dk, dv and sums of dq, then dq."""
    sums = Arg("dq_sums", "*fp32")
    dqkv = plan_kernel(
        variant,
        "backward",
        "dqkv",
        target,
        "cuda",
        args=(
            *backward_maps(variant),
            *inputs,
            *tensor("dk", variant.dtype),
            *tensor("dv", variant.dtype),
            sums,
            Arg("num_q_tiles", "i32"),
            *shape,
        ),
    )
    dq_cast = plan_kernel(
        variant,
        "backward",
        "dq_cast",
        target,
        "cuda",
        tiles=dqkv.tiles,
        args=(
            sums,
            *tensor("dq", variant.dtype),
            *sequences(variant),
            Arg("num_tokens", "i32"),
            Arg("num_tiles", "i32"),
        ),
    )
    return (*_delta(variant, target, "cuda"), *plan_lists(dqkv, "query_lists"), dqkv, dq_cast)


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
