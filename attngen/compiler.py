"""The whole path of a compile, top to bottom.

==================  ===========================================  ======================
stage               function                                     value it returns
==================  ===========================================  ======================
normalize           :func:`attngen.variant.normalize`            ``Variant``
choose_schedule     :func:`attngen.schedule.choose_schedule`     ``OpPlan``
render              :func:`attngen.codegen.render.render`        ``RenderedKernel``
build               :meth:`attngen.store.Store.get_or_build`     ``Artifact``
bind                :class:`attngen.ops.Op`                      ``Op``
==================  ===========================================  ======================
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from attngen.backends.devices import device_target
from attngen.backends.registry import backend as get_backend
from attngen.choice import bound, choose_op, plan_op, plan_variant, render_kernel, toolchain_of
from attngen.codegen.render import RenderedKernel
from attngen.errors import ArgumentError, UnsupportedError
from attngen.ir.text import to_text
from attngen.ops import Op, Ops
from attngen.schedule import KernelPlan, OpPlan, retile
from attngen.settings import Settings
from attngen.signature import CALLS, CallName, Signature
from attngen.spec import AttentionSpec
from attngen.store import Artifact, Store
from attngen.target import Target
from attngen.variant import OPS, OpName, Variant, normalize

__all__ = ["build_kernels", "build_op", "compile", "default_target", "plan_op", "render_kernel"]

log = logging.getLogger("attngen")


def compile(  # noqa: A001 - the name of the public contract
    spec: AttentionSpec,
    *,
    target: str | Target | None = None,
    ops: Iterable[CallName] | None = None,
    backend: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Ops:
    """Compile a spec into callable ops.

    Args:
        spec: the declaration.
        target: ``cpu``, ``cuda:sm90a``, ``hip:gfx942``, ``interpret``, ...: build ahead of time for it, no such device needed.
            When omitted, each call compiles for the device of its tensors on first need.
        ops: what to build now; with a target, every op the spec has by default; without one, nothing before the first call.
            ``prefix`` is what prefill with ``kv_cache=`` takes, ``listed`` what calls with ``key_indices=`` take.
        backend: ``reference``, ``cpp``, ``triton`` or ``cuda``; by default ``ATTNGEN_BACKEND``, else the fastest for the target.
        progress: called with a line before each build.

    Raises:
        UnsupportedError: the backend or target cannot run an op of the spec that was asked for.
        BuildError: a toolchain is missing or failed.
    """
    if not isinstance(spec, AttentionSpec):
        raise ArgumentError(
            f"spec is a {type(spec).__name__}",
            where="spec",
            why="an AttentionSpec is compiled",
            fix=f"pass ag.load_spec({spec!r})" if isinstance(spec, str) else "pass an AttentionSpec",
        )
    declared = None if target is None else Target.parse(target)
    name = backend or Settings.from_env().backend
    if name is not None:
        get_backend(name)
    resolver = _Resolver(spec, declared, name, progress)
    wanted = tuple(ops) if ops is not None else None
    for op in wanted or ():
        _check_name(op, CALLS)
    if wanted is not None or declared is not None:
        resolver.build_now(None if wanted is None else tuple(op for op in OPS if op in wanted))
    made = Ops(spec, resolver, f"{declared}|{name}")
    for call in wanted or ():
        if call not in OPS:
            made.ops_of(call)
    return made


def _check_name(op: str, names: Sequence[str] = OPS) -> None:
    if op not in names:
        raise UnsupportedError(f"no op {op!r}", where="ops", why="it does not exist", fix=f"use {', '.join(names)}")


def build_op(
    spec: AttentionSpec, plan: OpPlan, progress: Callable[[str], None] | None = None, call: CallName | None = None
) -> Op:
    """Render, build or find, and bind the kernels of one op; others take the place of those that come out slow.

    Args:
        call: what the op is a part of.
    """
    op, rejected = build_kernels(spec, plan, progress, call)
    for kernel in plan.kernels:
        if kernel.role in rejected:
            return build_op(spec, retile(plan, kernel), progress, call)
    return op


def build_kernels(
    spec: AttentionSpec, plan: OpPlan, progress: Callable[[str], None] | None = None, call: CallName | None = None
) -> tuple[Op, dict[str, str]]:
    """The op of exactly this plan, its kernels built side by side, and by role why those that come out slow do."""
    if not plan.kernels:
        return Op(plan, ()), {}
    settings = Settings.from_env()
    store = Store.from_settings(settings)

    def find(kernel: KernelPlan) -> Artifact | None:
        rendered = render_kernel(kernel)
        artifact = store.find(rendered, toolchain_of(kernel.backend).fingerprint(rendered.target))
        if settings.debug:
            _show(settings.debug, kernel, rendered, artifact)
        return artifact

    def build(kernel: KernelPlan) -> Artifact:
        if progress is not None:
            progress(f"{kernel.entry} for {kernel.target}")
        about = {
            "spec": spec.name or "",
            "op": call or plan.op,
            "backend": kernel.backend,
            "explain": _explain(spec, plan),
        }
        artifact = store.get_or_build(render_kernel(kernel), toolchain_of(kernel.backend), about)
        if artifact.rejected:
            shape = f"{kernel.tiles.q} x {kernel.tiles.kv}"
            log.warning(
                "attngen: %s is slow with tiles of %s: %s; others are tried", kernel.entry, shape, artifact.rejected
            )
        return artifact

    found = {kernel.role: find(kernel) for kernel in plan.kernels}
    missing = [kernel for kernel in plan.kernels if found[kernel.role] is None]
    if len(missing) == 1:
        found[missing[0].role] = build(missing[0])
    elif missing:
        with ThreadPoolExecutor(max_workers=min(len(missing), os.cpu_count() or 1)) as pool:
            found |= zip((kernel.role for kernel in missing), pool.map(build, missing), strict=True)
    artifacts = {role: artifact for role, artifact in found.items() if artifact is not None}
    rejected = {role: artifact.rejected for role, artifact in artifacts.items() if artifact.rejected}
    return Op(plan, [bound(kernel, artifacts[kernel.role]) for kernel in plan.kernels]), rejected


def _show(level: int, plan: KernelPlan, rendered: RenderedKernel, artifact: Artifact | None) -> None:
    """What ``ATTNGEN_DEBUG`` asks for, on standard error: compile lines, plan, expressions, source, assembly."""
    variant = plan.variant
    assembly = (
        [] if artifact is None else sorted(f for f in artifact.folder.iterdir() if f.suffix in (".ptx", ".amdgcn"))
    )
    texts = (
        f"attngen: {plan.entry} for {plan.target}: {'to be built' if artifact is None else artifact.folder}",
        f"{plan.tiles}, packed={plan.packed}, split={plan.split}, arguments: {', '.join(a.name for a in plan.args)}",
        f"mask:  {to_text(variant.mask)}\nlogit: {to_text(variant.score)}",
        rendered.source,
        "\n".join(file.read_text(encoding="utf-8") for file in assembly),
    )
    print("\n".join(text for text in texts[:level] if text), file=sys.stderr)


def _explain(spec: AttentionSpec, plan: OpPlan) -> str:
    source = spec.name or "SPEC.toml"
    return f"attngen explain {source} --op {plan.op} --target {plan.target} --backend {plan.backend} --stage source"


@dataclass(frozen=True)
class _Key:
    op: OpName
    target: Target
    deterministic: bool = False


class _Resolver:
    """Ops of one spec by op and target: each compiled once a process, whichever thread asks first."""

    def __init__(
        self,
        spec: AttentionSpec,
        target: Target | None,
        backend: str | None,
        progress: Callable[[str], None] | None,
        call: CallName | None = None,
    ) -> None:
        self.spec, self.target, self.backend, self.progress, self.call = spec, target, backend, progress, call
        self.variants = {op: _meaning(spec, op) for op in OPS}
        self._ops: dict[_Key, Future[Op]] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return _Resolver, (self.spec, self.target, self.backend, None, self.call)

    def __call__(self, op: OpName, device: torch.device | None, *, deterministic: bool = False) -> Op:
        _check_name(op)
        target = self._target(device)
        key = _Key(op, target, deterministic)
        with self._lock:
            future = self._ops.get(key)
            mine = future is None
            if future is None:
                future = self._ops[key] = Future()
        if mine:
            try:
                variant = self.variant(op)
                chosen = choose_op(variant, op, target, self.backend, deterministic=deterministic)
                if deterministic and _is_usual(chosen.plan if isinstance(chosen, Op) else chosen):
                    future.set_result(self(op, device))
                else:
                    future.set_result(
                        chosen if isinstance(chosen, Op) else build_op(self.spec, chosen, self.progress, self.call)
                    )
            except BaseException as error:
                with self._lock:
                    del self._ops[key]
                future.set_exception(error)
        return future.result()

    def variant(self, op: OpName) -> Variant:
        """What an op computes."""
        found = self.variants[op]
        if isinstance(found, UnsupportedError):
            raise found
        return found

    def signature(self, op: OpName) -> Signature:
        """What an op takes and gives."""
        return self.variant(op).signature

    def beside(self, spec: AttentionSpec, call: CallName) -> _Resolver:
        """The same for another spec, whose ops are parts of a call."""
        return _Resolver(spec, self.target, self.backend, self.progress, call)

    def compiled(self) -> dict[OpName, Op]:
        """The ops compiled so far, in the order of :data:`OPS`."""
        with self._lock:
            done = {key.op: future for key, future in self._ops.items() if future.done() and not key.deterministic}
        return {op: done[op].result() for op in OPS if op in done}

    def build_now(self, ops: tuple[OpName, ...] | None) -> None:
        """Build the ops side by side; without a list, those the spec has, of which there must be one."""

        def build(op: OpName) -> UnsupportedError | None:
            try:
                self(op, None)
            except UnsupportedError as error:
                return error
            return None

        wanted = OPS if ops is None else ops
        with ThreadPoolExecutor(max_workers=len(OPS)) as pool:
            refused = [error for error in pool.map(build, wanted) if error is not None]
        if refused and (ops is not None or len(refused) == len(wanted)):
            raise refused[0]

    def _target(self, device: torch.device | None) -> Target:
        if device is None:
            return self.target or default_target()
        if self.target is None:
            return device_target(device)
        kind = "cuda" if self.target.kind in ("cuda", "hip") else "cpu"
        if device.type != kind or (kind == "cuda" and device_target(device) != self.target):
            raise ArgumentError(
                f"q is on {device}",
                where="q",
                why=f"these ops were compiled for {self.target}",
                fix="compile without target=, or for this device",
            )
        return self.target


def _is_usual(plan: OpPlan) -> bool:
    """Whether the kernels that give repeatable gradients are those that run anyway, whatever their tiles."""
    exact, usual = (
        plan_variant(plan.variant, plan.op, plan.target, plan.backend, deterministic=given) for given in (True, False)
    )
    return exact == usual


def _meaning(spec: AttentionSpec, op: OpName) -> Variant | UnsupportedError:
    """What an op computes, or why there is none."""
    try:
        return normalize(spec, op)
    except UnsupportedError as error:
        return error


def default_target() -> Target:
    """The current GPU where there is one, else this machine's CPU."""
    if torch.cuda.is_available():
        return device_target(torch.device("cuda", torch.cuda.current_device()))
    return Target.parse("cpu")
