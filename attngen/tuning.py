"""Tunes ops: builds the plans that may be faster than the table's, measures them here, and stores the best one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import torch

from attngen.backends.devices import device_target
from attngen.choice import table_plan, tuning_key
from attngen.compiler import default_target
from attngen.errors import ArgumentError, UnsupportedError
from attngen.settings import Settings
from attngen.signature import OPS, OpName
from attngen.spec import AttentionSpec
from attngen.store import Store, Tunings
from attngen.target import Target, native_cpu_arch, runs_on_cpu
from attngen.tuner import Measured, Progress, TunedOp, Tuner, tiles_text
from attngen.variant import normalize
from attngen.workload import Shape

__all__ = ["Measured", "Progress", "Shape", "TunedOp", "forget", "tiles_text", "tune"]


def tune(
    spec: AttentionSpec,
    *,
    shapes: Iterable[Shape | str],
    ops: Iterable[OpName] | None = None,
    target: str | Target | None = None,
    backend: str | None = None,
    params: Mapping[str, torch.Tensor] | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> tuple[TunedOp, ...]:
    """Measure plans of a spec's ops on the device at hand, and keep the fastest of each in the cache.

    Later calls of :func:`attngen.compile`, in every process that finds this cache, use it as long as the shipped table's plan,
    the kernels' text and the toolchains stay what they are now. Kernels that spill more than the table's, that do not build or
    run, or that give another result, are passed over. Objects compiled before keep their kernels.

    Args:
        spec: the declaration.
        shapes: what to measure, each counting alike: ``"batch=64,kv_len=8192"``, and ``qo_len=`` where the default is not
            meant: one query in decode and append, as many as keys elsewhere.
        ops: what to tune; by default every op of the spec but append, which memory bounds.
        target: of this machine; by default that of the current GPU or, without one, of the CPU.
        backend: as for :func:`attngen.compile`; its plans alone are measured.
        params: run-time tensors whose values matter to the time, by name; others are drawn.
        jobs: processes that build.
        progress: called with what is being done, and how many of how many steps are done.

    Raises:
        ArgumentError: a shape is not one, or there is none.
        UnsupportedError: the target is not this machine's, or the backend has no tiles or cannot run an op.
        BuildError: a toolchain is missing, or the table's plan does not build.
        CacheMissError: the settings forbid building.
        AttngenError: the cache cannot be written.
    """
    sizes = tuple(shape if isinstance(shape, Shape) else Shape.parse(shape) for shape in shapes)
    if not sizes:
        raise ArgumentError(
            "no shape is given", where="shapes", why="speed is of a shape", fix="pass batch=64,kv_len=8192"
        )
    device, place = _device(None if target is None else Target.parse(target))
    wanted, found = _ops_of(spec, ops), []
    _check_names(spec, wanted, params or {})
    for op in wanted:
        tuner = Tuner(spec, op, place, device, backend, sizes)
        found.append(tuner.run(params or {}, jobs or min(8, os.cpu_count() or 1), progress or (lambda *_: None)))
    return tuple(found)


def forget(
    spec: AttentionSpec,
    *,
    ops: Iterable[OpName] | None = None,
    target: str | Target | None = None,
    backend: str | None = None,
) -> int:
    """Return to the table's plans: remove what tunings of these ops have stored in the user's own cache.

    Returns:
        How many records there were.
    """
    place = default_target() if target is None else Target.parse(target)
    tunings, removed = Tunings(Store.from_settings(Settings.from_env())), 0
    for op in _ops_of(spec, OPS if ops is None else ops, missing="pass over"):
        plan = table_plan(spec, op, place, backend or "")
        removed += tunings.forget(tuning_key(plan)) if plan.kernels else 0
    return removed


def _ops_of(spec: AttentionSpec, ops: Iterable[OpName] | None, missing: str = "") -> list[OpName]:
    """Those that were asked for; by default, those that there are."""
    wanted, found = [op for op in OPS if op != "append"] if ops is None else list(ops), []
    for op in wanted:
        try:
            normalize(spec, op)
            found.append(op)
        except UnsupportedError:
            if ops is not None and not missing:
                raise
    return found


def _check_names(spec: AttentionSpec, ops: Iterable[OpName], params: Mapping[str, torch.Tensor]) -> None:
    variants = [normalize(spec, op) for op in ops]
    declared = {param.name for variant in variants for param in variant.params} | {variant.gate for variant in variants}
    for name in params:
        if name not in declared:
            raise ArgumentError(
                f"params holds {name!r}",
                where=f"params[{name!r}]",
                why=f"these ops read {', '.join(sorted(repr(known) for known in declared if known)) or 'no parameter'}",
                fix="remove or rename it",
            )


def _device(target: Target | None) -> tuple[torch.device, Target]:
    """Where kernels of the target are measured."""
    here = default_target()
    place = here if target is None else target
    if place.kind == "cpu" and runs_on_cpu(place, native_cpu_arch()):
        return torch.device("cpu"), place
    if place.kind in ("cuda", "hip") and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        if device_target(device) == place:
            return device, place
    raise UnsupportedError(
        f"{place} cannot be tuned here",
        where="target",
        why=f"plans are measured on the device at hand, and this machine is {here}",
        fix="tune where such a device is, and ship the cache: attngen compile --into carries what was tuned",
    )
