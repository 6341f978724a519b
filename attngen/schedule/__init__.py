"""Variant -> plan: which kernels an op runs, and how they are tiled."""

from __future__ import annotations

from attngen.schedule.backward import plan_backward
from attngen.schedule.forward import plan_decode, plan_prefill
from attngen.schedule.plan import Arg, KernelPlan, OpPlan, Tiles
from attngen.target import Target
from attngen.variant import OpName, Variant

_SCHEDULES = {"prefill": plan_prefill, "decode": plan_decode, "backward": plan_backward}


def choose_schedule(variant: Variant, op: OpName, target: Target, backend: str) -> OpPlan:
    """The kernels that ``op`` runs on ``target``, in launch order; none for a backend without templates."""
    kernels = () if backend == "reference" else _SCHEDULES[op](variant, target, backend)
    return OpPlan(op=op, backend=backend, target=target, variant=variant, kernels=kernels)


__all__ = ["Arg", "KernelPlan", "OpPlan", "Tiles", "choose_schedule"]
