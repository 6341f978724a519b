"""Variant -> plan: which kernels an op runs, and how they are tiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from attngen.schedule.append import plan_append
from attngen.schedule.backward import plan_backward
from attngen.schedule.forward import plan_decode, plan_prefill
from attngen.schedule.plan import Arg, KernelPlan, OpPlan, Tiles
from attngen.schedule.tables import choose_tiles
from attngen.target import Target
from attngen.variant import OpName, Variant


def choose_schedule(
    variant: Variant, op: OpName, target: Target, backend: str, *, deterministic: bool = False
) -> OpPlan:
    """The kernels that ``op`` runs on ``target``, in launch order; none for a backend without templates.

    Args:
        deterministic: backward sums every gradient in a way that does not depend on the order.
    """
    plans: dict[OpName, Callable[[Variant, Target, str], tuple[KernelPlan, ...]]] = {
        "prefill": plan_prefill,
        "decode": plan_decode,
        "backward": partial(plan_backward, deterministic=deterministic),
        "append": plan_append,
    }
    kernels = () if backend == "reference" else plans[op](variant, target, backend)
    return OpPlan(op=op, backend=backend, target=target, variant=variant, kernels=kernels)


def retile(plan: OpPlan, rejected: KernelPlan) -> OpPlan:
    """The same op with the next choice of tiles for one of its kernels; with Triton's kernels where there is none."""
    variant, schedule = plan.variant, rejected.op if rejected.schedule == "forward" else rejected.schedule
    lists = "key_lists" if rejected.schedule == "forward" else "query_lists"
    try:
        tiles = choose_tiles(
            rejected.backend, schedule, variant, plan.target, mappable=rejected.tiles.maps, after=rejected.tiles
        )
    except LookupError:
        return choose_schedule(variant, plan.op, plan.target, "triton", deterministic=plan.deterministic)

    def retiled(kernel: KernelPlan) -> KernelPlan:
        # What one walk adds up is read in the same tiles.
        if kernel.role == rejected.role or (rejected.schedule == "dqkv" and kernel.schedule == "dq_cast"):
            return replace(kernel, tiles=tiles)
        if rejected.lists and kernel.schedule == lists:
            return replace(kernel, tiles=replace(kernel.tiles, q=tiles.q, kv=tiles.kv))
        return kernel

    return replace(plan, kernels=tuple(retiled(kernel) for kernel in plan.kernels))


__all__ = ["Arg", "KernelPlan", "OpPlan", "Tiles", "choose_schedule", "retile"]
