"""A tuning of one op: its plans are built, checked, measured, and the best one is stored.

A tuning decides by the time that whole calls take. Each kernel of an op is tried alone with other tiles; what is faster is then
tried together, beside the table's plan. Later calls, in whichever process, run the plan that is stored: one plan for all calls
of an op, so that a result depends on its own request alone, as before.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from attngen.choice import plan_op, table_plan, tiled, tuning_key
from attngen.compiler import build_kernels, build_op
from attngen.errors import AttngenError, CacheMissError, UnsupportedError
from attngen.ops import Op
from attngen.schedule import KernelPlan, OpPlan, Tiles, tile_candidates
from attngen.settings import Settings
from attngen.signature import OpName
from attngen.spec import AttentionSpec
from attngen.store import Store, Tuning, Tunings
from attngen.store.key import SCHEMA
from attngen.target import Target
from attngen.timing import as_graph, time_cpu, time_gpu
from attngen.workers import Say, run_jobs
from attngen.workload import Call, Shape, random_call

# A plan must be so much faster than the table's to take its place: what is measured again differs by less.
LEAST_GAIN = 1.02
_ROUNDS, _FINAL_ROUNDS = 7, 15
_CPU_SECONDS = 0.05  # of one sample

Changed = tuple[tuple[str, Tiles], ...]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Candidate:
    """A plan that may be faster than the table's.

    Attributes:
        spec, op, target, backend: what it is a plan of.
        changed: kernels by role, and their tiles in place of the table's; empty for the table's plan.
    """

    spec: AttentionSpec
    op: OpName
    target: Target
    backend: str
    changed: Changed = ()

    def plan(self) -> OpPlan:
        """The plan."""
        return tiled(plan_op(self.spec, self.op, self.target, self.backend), dict(self.changed))

    def __str__(self) -> str:
        return (
            f"{self.op} with {'; '.join(f'{role} {tiles_text(tiles)}' for role, tiles in self.changed) or 'the table'}"
        )


@dataclass
class Measured:
    """What came of a candidate.

    Attributes:
        changed: as in :class:`Candidate`.
        times: median milliseconds, one for each shape; empty where it was dropped.
        dropped: why it was not measured, or not considered; empty where it was.
        speedup: the table's time over its own, the geometric mean over the shapes.
    """

    changed: Changed
    times: tuple[float, ...] = ()
    dropped: str = ""
    speedup: float = 0.0


@dataclass
class TunedOp:
    """What a tuning of one op found.

    Attributes:
        op, target, backend: what was tuned.
        shapes: what was measured.
        measured: the table's plan, then every candidate.
        chosen: what is stored, kernels by role with their tiles; empty where the table's plan stays.
        speedup: of what was chosen, measured again beside the table's plan.
        record: the file; ``None`` where the table's plan stays.
    """

    op: OpName
    target: Target
    backend: str
    shapes: tuple[Shape, ...]
    measured: list[Measured] = field(default_factory=list)
    chosen: Mapping[str, Tiles] = field(default_factory=dict)
    speedup: float = 1.0
    record: Path | None = None


def tiles_text(tiles: Tiles) -> str:
    """Tiles in a few words."""
    parts = [f"{tiles.q} x {tiles.kv}"]
    parts += [f"{tiles.num_warps} warps", f"{tiles.num_stages} stages"] if tiles.num_warps else []
    parts += [f"{tiles.q_stages} of queries"] if tiles.q_stages > 1 else []
    parts += [f"{tiles.blocks} blocks"] if tiles.blocks > 1 else []
    parts += ["tensor maps"] if tiles.maps else []
    return ", ".join(parts)


def _built(candidate: Candidate, say: Say) -> str | AttngenError:
    """Build a candidate, in whichever process; why it is of no use, or nothing."""
    try:
        rejected = build_kernels(candidate.spec, candidate.plan(), say)[1]
        return next(iter(rejected.values()), "")
    except AttngenError as error:
        return error


class Tuner:
    """A tuning of one op."""

    def __init__(
        self,
        spec: AttentionSpec,
        op: OpName,
        target: Target,
        device: torch.device,
        backend: str | None,
        shapes: tuple[Shape, ...],
    ) -> None:
        self.spec, self.op, self.device, self.shapes = spec, op, device, shapes
        self.table_plan = table_plan(spec, op, target, backend or "")
        if not self.table_plan.kernels:
            raise UnsupportedError(
                f"{self.table_plan.backend} has no tiles",
                where="backend",
                why="it evaluates the variant directly",
                fix="tune another",
            )
        self.table = Candidate(spec, op, target, self.table_plan.backend)
        self.found = TunedOp(op, target, self.table.backend, shapes)

    def run(self, params: Mapping[str, torch.Tensor], workers: int, progress: Progress) -> TunedOp:
        """Build, check, measure, store."""
        candidates = [
            replace(self.table, changed=((kernel.role, tiles),))
            for kernel in self.table_plan.kernels
            if self._is_used(kernel)
            for tiles in tile_candidates(kernel)
        ]
        steps = len(candidates) + len(self.shapes) + 1
        table = build_op(self.spec, self.table_plan)
        if table.plan != self.table_plan:
            raise UnsupportedError(
                f"{self.op} of {self.table.backend} cannot be tuned",
                where="backend",
                why="the tiles of its table come out slow with this toolchain",
                fix="tune another backend, or use another version of the toolchain",
            )
        ready = {(): table} | self._build(candidates, table, workers, progress, steps)
        calls = [self._call(shape, params) for shape in self.shapes]
        self._check(ready, calls)
        times = self._times(
            ready, calls, _ROUNDS, lambda i: progress(f"measuring {self.shapes[i]}", len(candidates) + i, steps)
        )
        for changed, per_shape in times.items():
            speedup = _speedup(times[()], per_shape)
            self.found.measured.append(Measured(changed, per_shape, speedup=speedup))
        progress("measuring the best ones again", steps - 1, steps)
        self._choose(ready, calls)
        self._store(len(times))
        progress("done", steps, steps)
        return self.found

    def _is_used(self, kernel: KernelPlan) -> bool:
        """Whether calls of the shapes have work for the kernel."""
        short = [shape.queries(self.op) <= kernel.short_queries for shape in self.shapes]
        return kernel.serves == "all" or (any(short) if kernel.serves == "short" else not all(short))

    def _build(
        self, candidates: Sequence[Candidate], table: Op, workers: int, progress: Progress, steps: int
    ) -> dict[Changed, Op]:
        """Ops of the candidates that build and spill no more than the table's."""
        spills = {kernel.plan.role: kernel.metadata.get("spills", 0) for kernel in table.kernels}
        ready: dict[Changed, Op] = {}
        done = 0

        def say(line: str) -> None:
            progress(f"building {line}", done, steps)

        for candidate, outcome in run_jobs(_built, candidates, workers, say):
            done += 1
            if isinstance(outcome, CacheMissError):
                raise outcome
            reason = outcome if isinstance(outcome, str) else f"does not build: {outcome.why or outcome.what}"
            if not reason:
                op, rejected = build_kernels(self.spec, candidate.plan())  # found in the cache
                spilled = [kernel.metadata.get("spills", 0) - spills[kernel.plan.role] for kernel in op.kernels]
                reason = next(iter(rejected.values()), f"spills {max(spilled)} bytes" if max(spilled) > 0 else "")
                ready[candidate.changed] = op
            if reason:
                ready.pop(candidate.changed, None)
                self._drop(candidate.changed, reason)
        return ready

    def _drop(self, changed: Changed, reason: str) -> None:
        self.found.measured.append(Measured(changed, dropped=reason.partition("\n")[0]))

    def _call(self, shape: Shape, params: Mapping[str, torch.Tensor]) -> Call:
        plan, forward = self.table_plan, None
        if self.op == "backward":
            prefill = table_plan(self.spec, "prefill", plan.target, plan.backend)
            forward = build_op(self.spec, prefill)
        return random_call(self.spec, plan.variant, self.op, shape, self.device, forward, params)

    def _check(self, ready: dict[Changed, Op], calls: Sequence[Call]) -> None:
        """Drop what does not run, or gives another result than the table's plan."""
        for shape, call in zip(self.shapes, calls, strict=True):
            wanted = call.results(ready[()])
            for changed in [changed for changed in ready if changed]:
                try:
                    reason = difference(call.results(ready[changed]), wanted, self._tolerance(shape))
                    if self.device.type == "cuda":
                        torch.cuda.synchronize(self.device)
                except (AttngenError, RuntimeError) as error:
                    reason = f"does not run: {error}"
                if reason:
                    del ready[changed]
                    self._drop(changed, f"{reason}, with {shape}")

    def _tolerance(self, shape: Shape) -> float:
        """How far results of other tiles may lie apart: weights are rounded to the dtype of q, sums of so many terms to fp32."""
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(
            self.table_plan.variant.compute_dtype, torch.float32
        )
        terms = max(shape.kv_len, shape.queries(self.op))
        return 8 * torch.finfo(dtype).eps + 4 * math.sqrt(terms) * torch.finfo(torch.float32).eps

    def _times(
        self, ready: Mapping[Changed, Op], calls: Sequence[Call], rounds: int, before: Callable[[int], None]
    ) -> dict[Changed, tuple[float, ...]]:
        """Median milliseconds of each, for every shape."""
        times: dict[Changed, list[float]] = {changed: [] for changed in ready}
        for index, call in enumerate(calls):
            before(index)
            runs = {str(number): partial(call.run, op) for number, op in enumerate(ready.values())}
            if self.device.type == "cpu":
                found = time_cpu(runs, rounds=rounds, seconds=_CPU_SECONDS)
            else:
                with torch.cuda.device(self.device):
                    found = time_gpu({name: as_graph(run) for name, run in runs.items()}, rounds=rounds, calls=1)
            for number, changed in enumerate(ready):
                times[changed].append(found[str(number)])
        return {changed: tuple(values) for changed, values in times.items()}

    def _choose(self, ready: Mapping[Changed, Op], calls: Sequence[Call]) -> None:
        """Measure the best of each kernel again, alone and together, beside the table's plan."""
        best: dict[str, Measured] = {}
        for measured in self.found.measured:
            if measured.speedup > 1.0 and measured.changed:
                role = measured.changed[0][0]
                if role not in best or best[role].speedup < measured.speedup:
                    best[role] = measured
        finalists = {(): ready[()]} | {measured.changed: ready[measured.changed] for measured in best.values()}
        if len(best) > 1:
            together = tuple(pair for measured in best.values() for pair in measured.changed)
            finalists[together] = build_kernels(self.spec, replace(self.table, changed=together).plan())[0]
            checked = {changed: finalists[changed] for changed in ((), together)}
            self._check(checked, calls)
            if together not in checked:
                del finalists[together]
        if len(finalists) == 1:
            return
        times = self._times(finalists, calls, _FINAL_ROUNDS, lambda _: None)
        speedups = {changed: _speedup(times[()], per_shape) for changed, per_shape in times.items()}
        winner = max(speedups, key=lambda changed: speedups[changed])
        if speedups[winner] >= LEAST_GAIN:
            self.found.chosen, self.found.speedup = dict(winner), speedups[winner]

    def _store(self, candidates: int) -> None:
        """Keep what was chosen, in the place of what an earlier tuning chose."""
        tunings, key = Tunings(Store.from_settings(Settings.from_env())), tuning_key(self.table_plan)
        if not self.found.chosen:
            tunings.forget(key)
            return
        self.found.record = tunings.put(
            Tuning(
                schema=SCHEMA,
                digest=key.digest,
                fingerprint=key.fingerprint or "",
                spec=self.spec.name or "",
                declaration=self.spec.model_dump_json(),
                op=self.op,
                target=str(self.found.target),
                backend=self.found.backend,
                tiles=self.found.chosen,
                shapes=tuple(map(str, self.shapes)),
                device=_device_name(self.device),
                candidates=candidates,
                speedup=round(self.found.speedup, 4),
            )
        )


def _speedup(table: Sequence[float], times: Sequence[float]) -> float:
    return math.prod(before / now for before, now in zip(table, times, strict=True)) ** (1 / len(times))


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU with {torch.get_num_threads()} threads"


def difference(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], tolerance: float) -> str:
    """How results differ, in words; nothing where each row lies within ``tolerance`` of its size and of that of most rows.

    Integers and numbers of 8 bits, which caches hold, must be equal.
    """
    for mine, table in zip(got, wanted, strict=True):
        if not table.dtype.is_floating_point or table.element_size() == 1:
            if not torch.equal(mine.view(torch.uint8), table.view(torch.uint8)):
                return "it writes other bytes than the table's plan"
            continue
        known = table.isfinite()
        if not torch.equal(known, mine.isfinite()) or not torch.equal(
            mine[~known].nan_to_num(), table[~known].nan_to_num()
        ):
            return "its result is finite where that of the table's plan is not, or the reverse"
        x, y = (torch.where(known, tensor, 0).float().reshape(-1, tensor.shape[-1] or 1) for tensor in (mine, table))
        size = y.norm(dim=-1)
        apart = (x - y).norm(dim=-1) / (size + size.square().mean().sqrt() + torch.finfo(torch.float32).tiny)
        if apart.numel() and (worst := float(apart.max())) > tolerance:
            return f"its result lies {worst:.1e} apart from that of the table's plan, and {tolerance:.1e} are allowed"
    return ""
