"""Variant -> plan: which kernels an op runs, and how they are tiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from attngen.schedule.append import plan_append
from attngen.schedule.backward import plan_backward
from attngen.schedule.forward import plan_decode, plan_prefill
from attngen.schedule.plan import Arg, KernelPlan, OpPlan, Tiles
from attngen.schedule.planner import choices
from attngen.schedule.tiling import tile_candidates, with_tiles
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
    fitting = choices(rejected).fitting
    following = fitting.index(rejected.tiles) + 1 if rejected.tiles in fitting else 0
    if following == len(fitting):
        return choose_schedule(plan.variant, plan.op, plan.target, "triton", deterministic=plan.deterministic)
    return with_tiles(plan, rejected.role, fitting[following])


__all__ = [
    "Arg",
    "KernelPlan",
    "OpPlan",
    "Tiles",
    "choose_schedule",
    "retile",
    "tile_candidates",
    "with_tiles",
]
