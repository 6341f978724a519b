"""Which plan an op gets: of which backend, from which cache, with which tiles."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import cast

from attngen.backends.base import Backend
from attngen.backends.registry import backend as get_backend
from attngen.backends.registry import serving
from attngen.codegen.render import RenderedKernel, render
from attngen.errors import AttngenError, UnsupportedError
from attngen.ops import BuiltKernel, Op
from attngen.schedule import KernelPlan, OpPlan, Tiles, choose_schedule, retile, tile_candidates, with_tiles
from attngen.settings import Settings
from attngen.spec import AttentionSpec
from attngen.store import Artifact, Store, Tuning, TuningKey, Tunings
from attngen.target import Target
from attngen.variant import OpName, Variant, normalize

log = logging.getLogger("attngen")


def plan_op(spec: AttentionSpec, op: OpName, target: Target, backend: str, *, deterministic: bool = False) -> OpPlan:
    """Normalize and schedule one op, checking that the backend can run it."""
    return plan_variant(normalize(spec, op), op, target, backend, deterministic=deterministic)


def plan_variant(variant: Variant, op: OpName, target: Target, backend: str, *, deterministic: bool = False) -> OpPlan:
    """Schedule one op of a variant, checking that the backend can run it."""
    toolchain = get_backend(backend)
    if toolchain is not None:
        toolchain.check(variant, op, target)
    return choose_schedule(variant, op, target, backend, deterministic=deterministic)


def render_kernel(plan: KernelPlan) -> RenderedKernel:
    """The source of one kernel, or its replacement from ``ATTNGEN_OVERRIDE_DIR``."""
    kernel = _rendered(plan)
    override = Settings.from_env().override_dir
    if override:
        path = Path(override) / f"{kernel.entry}{kernel.suffix}"
        if path.is_file():
            log.warning("attngen: source of %s replaced by %s", kernel.entry, path)
            return replace(kernel, source=path.read_text(encoding="utf-8"))
    return kernel


@lru_cache(maxsize=64)
def _rendered(plan: KernelPlan) -> RenderedKernel:
    """Remembered, since a plan is rendered to look for a tuning of it, and again to look for its kernels."""
    toolchain = toolchain_of(plan.backend)
    return render(plan, toolchain.dialect, toolchain.suffix, toolchain.flags(plan))


def choose_op(
    variant: Variant, op: OpName, target: Target, backend: str | None, *, deterministic: bool = False
) -> OpPlan | Op:
    """What to build for one op, or the op itself where a cache decides; with the tiles of a tuning where there is one.

    Without a backend, an image's cache (``ATTNGEN_CACHE_PATH``) comes first: its kernels run wherever it is, whichever
    toolchains happen to be there. Then come, the fastest first, backends whose toolchains are here and those whose kernels lie
    in a cache; where building is forbidden, only the latter.

    Raises:
        UnsupportedError: no backend can run it.
    """

    @cache
    def plan_for(name: str) -> OpPlan | UnsupportedError:
        try:
            return plan_variant(variant, op, target, name, deterministic=deterministic)
        except UnsupportedError as error:
            return error

    def plans() -> Iterator[OpPlan]:
        return (plan for name in names if isinstance(plan := plan_for(name), OpPlan))

    names = (backend,) if backend else serving(target)
    default = next(plans(), None)
    if default is None:
        raise cast("UnsupportedError", plan_for(names[0]))
    settings = Settings.from_env()
    store = Store.from_settings(settings)
    if settings.require_cached and default.kernels:
        return _first(plans(), store) or default
    if len(names) == 1:
        return as_tuned(default, store)
    shipped = store.shipped_only()
    for plan in plans() if store.shipped else ():
        if find_op(plan, shipped) is not None:
            return find_op(plan, store) or plan
    for plan in plans():
        if all(toolchain_of(kernel.backend).fingerprint(target) is not None for kernel in plan.kernels):
            return as_tuned(plan, store)
        if (found := find_op(plan, store)) is not None:
            return found
    return as_tuned(default, store)


def _first(plans: Iterable[OpPlan], store: Store) -> Op | None:
    return next((found for plan in plans if (found := find_op(plan, store)) is not None), None)


def find_op(plan: OpPlan, store: Store) -> Op | None:
    """The op from kernels in caches, as it was tuned or else as the table has it; ``None`` if a kernel is missing."""
    tuned = as_tuned(plan, store)
    return _find_kernels(tuned, store) or (_find_kernels(plan, store) if tuned is not plan else None)


def _find_kernels(plan: OpPlan, store: Store) -> Op | None:
    """The op from kernels in caches, with the tiles that their builds settled on."""
    found = []
    for kernel in plan.kernels:
        rendered = render_kernel(kernel)
        artifact = store.find(rendered, toolchain_of(kernel.backend).fingerprint(rendered.target))
        if artifact is None:
            return None
        if artifact.rejected:
            return _find_kernels(retile(plan, kernel), store)
        found.append(bound(kernel, artifact))
    return Op(plan, found)


def bound(kernel: KernelPlan, artifact: Artifact) -> BuiltKernel:
    """The kernel in an entry. Until it is loaded somebody may remove the entry: then it is looked for, or built, again."""

    def renew() -> BuiltKernel:
        store = Store.from_settings(Settings.from_env())
        toolchain, about = toolchain_of(kernel.backend), artifact.manifest.about
        return bound(kernel, store.get_or_build(render_kernel(kernel), toolchain, about))

    return BuiltKernel(kernel, artifact.folder, artifact.binary, artifact.manifest.metadata, renew)


def as_tuned(plan: OpPlan, store: Store) -> OpPlan:
    """The plan with the tiles that a tuning of it has stored; the plan itself where there is none."""
    found = tuning_of(plan, store)
    return plan if found is None else tiled(plan, found.tiles)


def tuning_of(plan: OpPlan, store: Store) -> Tuning | None:
    """What a tuning has stored for the table's ``plan``.

    It is found by the text of the kernels that it started from, and by their toolchains: it ends with either.
    """
    tunings = Tunings(store)
    if not plan.kernels or not tunings.any():
        return None
    key = tuning_key(plan)
    found = tunings.find(key)
    try:
        if found is not None:
            tiled(plan, found.tiles)
    except LookupError as error:
        tunings.refuse(key, str(error))
        return None
    return found


def is_in_use(record: Tuning, store: Store) -> bool:
    """Whether its op would find this record now: not where table, templates or toolchains have changed since."""
    spec = AttentionSpec.model_validate_json(record.declaration)
    try:
        plan = plan_op(spec, cast("OpName", record.op), Target.parse(record.target), record.backend)
        return bool(plan.kernels) and Tunings(store).find(tuning_key(plan)) == record
    except AttngenError:  # there is no such op, target or backend any more
        return False


def tiled(plan: OpPlan, tiles: Mapping[str, Tiles]) -> OpPlan:
    """The plan with other tiles for the kernels of these roles.

    Raises:
        LookupError: no tuning would try them.
    """
    for role, sizes in tiles.items():
        kernel = next((kernel for kernel in plan.kernels if kernel.role == role), None)
        if kernel is None or sizes not in tile_candidates(kernel):
            raise LookupError(f"{plan.op} has no {role} with {sizes}")
        plan = with_tiles(plan, role, sizes)
    return plan


def tuning_key(plan: OpPlan) -> TuningKey:
    """What a tuning that starts from the table's ``plan`` is stored under."""
    made_by = {kernel.backend: toolchain_of(kernel.backend).fingerprint(plan.target) for kernel in plan.kernels}
    return TuningKey.of([render_kernel(kernel) for kernel in plan.kernels], list(made_by.values()))


def chosen_plan(spec: AttentionSpec, op: OpName, target: Target, backend: str = "") -> OpPlan:
    """The plan that :func:`compile` would build or find."""
    chosen = choose_op(normalize(spec, op), op, target, backend or Settings.from_env().backend)
    return chosen.plan if isinstance(chosen, Op) else chosen


def table_plan(spec: AttentionSpec, op: OpName, target: Target, backend: str = "") -> OpPlan:
    """The same before any tuning, and before any build has rejected its tiles."""
    return plan_op(spec, op, target, chosen_plan(spec, op, target, backend).backend)


def toolchain_of(name: str) -> Backend:
    """The backend called ``name``, which makes kernels."""
    toolchain = get_backend(name)
    if toolchain is None:
        raise UnsupportedError(
            f"{name} has no kernels", where="backend", why="it evaluates the variant directly", fix="use cpp or triton"
        )
    return toolchain
