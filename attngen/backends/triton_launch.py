"""Kernels that Triton itself launches: AMD binaries through its driver, and source through its interpreter."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from attngen.backends.base import Launch
from attngen.backends.launcher import require_grid, require_no_capture
from attngen.backends.triton_worker import load_module
from attngen.errors import BuildError, UnsupportedError
from attngen.schedule.plan import Arg, KernelPlan

# The interpreter replaces functions of triton.language while it runs.
_INTERPRETER = threading.Lock()


def load_interpreted(source: Path, plan: KernelPlan) -> Launch:
    """The kernel under Triton's interpreter, on CPU tensors.

    Raises:
        UnsupportedError: this process has already imported Triton as a compiler.
    """
    _require_interpreter(plan.entry)
    from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: PLC0415

    kernel = getattr(load_module(source), plan.entry)
    boxes = {i: map_box(plan, arg) for i, arg in enumerate(plan.args) if arg.is_map}

    def launch(grid: int, values: Sequence[torch.Tensor | int]) -> None:
        require_grid(grid, plan.entry)
        if grid:
            given: list[Any] = list(values)
            for i, box in boxes.items():
                given[i] = TensorDescriptor.from_tensor(given[i], box)
            with _INTERPRETER:
                kernel[(grid,)](*given)

    return launch


def map_box(plan: KernelPlan, arg: Arg) -> list[int]:
    """What one copy takes by a tensor map ``[request or page, head, token, dim]``."""
    width = {"k_tiles": plan.block_qk, "k_pe_tiles": plan.block_pe, "v_tiles": plan.block_vo}[arg.name]
    return [1, 1, plan.tiles.kv, width]


def load_hip(binary: Path, plan: KernelPlan, device: torch.device) -> Launch:
    """The kernel on an AMD device, by Triton's own launcher."""
    triton = _import_triton(plan.entry)
    from triton.compiler import ASTSource, CompiledKernel  # noqa: PLC0415

    if triton.knobs.runtime.interpret:
        raise UnsupportedError(
            f"{plan.entry} cannot run on {device}",
            where="environment variable TRITON_INTERPRET",
            why="this process runs Triton's interpreter",
            fix="unset it",
        )
    require_no_capture(plan.entry, device)
    function = getattr(load_module(binary.with_suffix(".py")), plan.entry)
    source = ASTSource(function, {arg.name: arg.type for arg in plan.args}, {}, {})
    files = (binary, binary.with_suffix(".json"))
    kernel: Any = CompiledKernel(source, {path.name: str(path) for path in files}, plan.entry)
    with torch.cuda.device(device):
        kernel._init_handles()

    def launch(grid: int, values: Sequence[torch.Tensor | int]) -> None:
        require_grid(grid, plan.entry)
        if grid:
            with torch.cuda.device(device):
                kernel[(grid, 1, 1)](*values)

    return launch


def _require_interpreter(entry: str) -> None:
    """Make Triton's first import one for the interpreter: its library functions are bound to a mode when imported."""
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    triton = _import_triton(entry)
    from triton.runtime.interpreter import InterpretedFunction  # noqa: PLC0415

    if not (triton.knobs.runtime.interpret and isinstance(triton.language.sum, InterpretedFunction)):
        raise UnsupportedError(
            f"{entry} cannot be interpreted in this process",
            where="target 'interpret'",
            why="triton was imported here before TRITON_INTERPRET=1 was set",
            fix="start the process with TRITON_INTERPRET=1",
        )


def _import_triton(entry: str) -> Any:
    try:
        import triton  # noqa: PLC0415
    except ImportError as error:
        raise BuildError(
            f"{entry} cannot be loaded: there is no triton", why=str(error), fix="pip install attngen[triton]"
        ) from error
    return triton
