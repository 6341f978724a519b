"""Runs a slice of the corpus in a process of its own and prints one JSON line a case.

Triton's interpreter must be switched on before triton is imported, and a GPU kernel that hangs must cost no more than its own
process: both need a child that a watchdog can end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Outcome:
    """What a child printed about one case; ``failures`` is empty where it passed."""

    name: str
    failures: tuple[str, ...]
    errors: dict[str, Any]
    seconds: float


def run_in_child(suite: str, start: int, stop: int, timeout: float) -> list[Outcome]:
    """Cases ``start .. stop`` of a suite in a watched child; cases it never reached are failures."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "PYTHONWARNINGS": "default"}
    env["TRITON_INTERPRET"] = "1" if suite == "interpret" else "0"
    command = [sys.executable, "-m", "tests.numerics.worker", suite, str(start), str(stop)]
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            stdout, stderr = child.communicate(timeout=timeout)
            reason = f"the process ended with {child.returncode}: {stderr[-1500:]}"
        except subprocess.TimeoutExpired:
            child.kill()
            stdout, _ = child.communicate()
            reason = f"the process hung for {timeout:.0f} s"
    outcomes = []
    for line in stdout.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            outcomes.append(Outcome(row["name"], tuple(row["failures"]), row["errors"], row["seconds"]))
    names = [case.name for case in suite_cases(suite)[start:stop]]
    outcomes += [Outcome(name, (reason,), {}, 0.0) for name in names[len(outcomes) :]]
    return outcomes


def suite_cases(suite: str) -> list[Any]:
    """``interpret``: the corpus by Triton's interpreter; on a GPU, ``cuda``: the corpus, ``draws``: 1,000 random cases.

    Triton's interpreter computes bf16 products wrongly, so it runs fp32 and fp16. It is slow, and runs no shipped specs, which are
    made of what other cases cover.
    """
    import attngen as ag
    from tests.numerics.cases import corpus, widened
    from tests.numerics.draws import draws

    if suite == "draws":
        return draws(200)
    if suite == "cuda":
        return [*corpus(("bf16", "fp16", "fp32")), *widened(corpus(("bf16", "fp16")))]
    shipped = tuple(f"{name}-" for name in ag.shipped_specs())
    return [case for case in corpus(("fp32", "fp16")) if not case.name.startswith(shipped)]


def _backends(suite: str, case: Any) -> tuple[str, ...]:
    """Triton and, where it makes other kernels of the case for this device, cuda."""
    import torch

    from attngen.backends.registry import builds_for
    from attngen.compiler import plan_op
    from attngen.target import Target

    if suite == "interpret":
        return ("triton",)
    target = Target.from_cuda_capability(*torch.cuda.get_device_capability())
    if not builds_for("cuda", target):
        return ("triton",)
    ops = ("prefill", "backward") if case.op == "backward" else (case.op,)
    kernels = [kernel for op in ops for kernel in plan_op(case.spec, op, target, "cuda").kernels]
    return ("triton", "cuda") if any(kernel.backend == "cuda" for kernel in kernels) else ("triton",)


def main(arguments: Sequence[str] | None = None) -> None:
    """Child's entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("suite", choices=("interpret", "cuda", "draws"))
    parser.add_argument("start", type=int)
    parser.add_argument("stop", type=int)
    options = parser.parse_args(arguments)
    import torch

    import attngen as ag
    from tests.numerics.harness import run_case

    torch.use_deterministic_algorithms(True, warn_only=True)  # uninitialized memory is filled with NaN
    torch.utils.deterministic.fill_uninitialized_memory = True
    device = "cpu" if options.suite == "interpret" else "cuda"
    for case in suite_cases(options.suite)[options.start : options.stop]:
        began = time.perf_counter()
        try:
            failures, errors = (), {}
            for backend in _backends(options.suite, case):
                ops = ag.compile(
                    case.spec, target="interpret" if options.suite == "interpret" else None, ops=(), backend=backend
                )
                verdict = run_case(case, ops, device)
                failures += tuple(f"{backend}: {failure}" for failure in verdict.failures)
                errors |= verdict.errors
        except Exception as error:
            failures, errors = (f"{type(error).__name__}: {error}",), {}
        row = {"name": case.name, "failures": failures, "errors": errors, "seconds": time.perf_counter() - began}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
