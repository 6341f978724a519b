"""Rendered CUDA kernels as C++ for the CPU: PTX becomes calls of functions, which ``runtime.h`` has."""

from __future__ import annotations

import ctypes
import re
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from attngen.backends.base import Launch
from attngen.compiler import _Resolver, build_op, plan_op, render_kernel
from attngen.ops import Ops
from attngen.ops.op import Op
from attngen.schedule.hopper import launch_shape
from attngen.schedule.plan import KernelPlan
from attngen.spec import AttentionSpec
from attngen.target import Target
from attngen.variant import OpName

HOPPER = Target.parse("cuda:sm90a")
_RUNTIME = Path(__file__).with_name("runtime.h")
_TYPES = {"i32": ctypes.c_int32, "i64": ctypes.c_int64}


def host_source(plan: KernelPlan) -> str:
    """C++ of a kernel, with an entry point ``run(blocks, arguments)``."""
    source = _without_ptx(render_kernel(plan).source)
    source = re.sub(
        r"extern __shared__ (\w+) (\w+)\[\];", r"\1* const \2 = reinterpret_cast<\1*>(machine::shared);", source
    )
    threads, shared = launch_shape(plan)
    return (
        f'#include "{_RUNTIME}"\nnamespace kernel {{\n{source}\n}}\n'
        f'extern "C" void run(int blocks, void** arguments) {{\n'
        f"  machine::launch(kernel::{plan.entry}, blocks, {threads}, {shared}, arguments);\n}}\n"
    )


def _without_ptx(source: str) -> str:
    made, place = [], 0
    for found in re.finditer(r"\basm\s*(?:volatile)?\s*\(", source):
        end = _closing(source, found.end() - 1)
        made += [source[place : found.start()], _call(source[found.end() : end])]
        place = end + 1
    return "".join([*made, source[place:]])


def _closing(text: str, start: int) -> int:
    """Where the parenthesis at ``start`` closes, strings left out."""
    depth, quoted = 0, False
    for place in range(start, len(text)):
        if text[place] == '"':
            quoted = not quoted
        elif not quoted and text[place] in "()":
            depth += 1 if text[place] == "(" else -1
            if depth == 0:
                return place
    raise ValueError("a parenthesis is not closed")


def _call(inside: str) -> str:
    head = re.match(r'\s*((?:"[^"]*"\s*)+)', inside)
    assert head is not None
    template = "".join(re.findall(r'"([^"]*)"', head[1]))
    operands, place = [], head.end()
    for found in re.finditer(r'"[=+&]*[rlfhn]"\s*\(', inside[place:]):
        start = place + found.end() - 1
        operands.append(inside[start + 1 : _closing(inside, start)])
    return f"{_name(template)}({', '.join(operands)})"


def _name(template: str) -> str:
    if template.startswith("{"):
        return "ptx_low_half" if template.rstrip(" };").endswith("l") else "ptx_high_half"
    name = "ptx_" + re.sub(r"\W", "_", template.split(maxsplit=1)[0].rstrip(";"))
    immediate = re.search(r", (0x\w+);$", template)
    return f"{name}_{immediate[1]}" if immediate else name


@cache
def _library(source: str) -> ctypes.CDLL:
    folder = Path(tempfile.mkdtemp(prefix="cuda_host_"))
    (folder / "kernel.cpp").write_text(source)
    command = ["c++", "-std=c++17", "-O1", "-march=native", "-w", "-shared", "-fPIC", "kernel.cpp", "-o", "kernel.so"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(folder / "kernel.so"))


def host_launch(plan: KernelPlan) -> Launch:
    """The kernel as a function of its blocks and arguments, which are tensors on the CPU."""
    library = _library(host_source(plan))

    def launch(programs: int, values: Sequence[torch.Tensor | int]) -> None:
        words = [
            ctypes.c_void_p(value.data_ptr()) if isinstance(value, torch.Tensor) else _TYPES[arg.type](value)
            for arg, value in zip(plan.args, values, strict=True)
        ]
        table = (ctypes.c_void_p * len(words))(*(ctypes.addressof(word) for word in words))
        library.run(ctypes.c_int(programs), table)

    return launch


class HostOp(Op):
    """An op planned for a Hopper GPU whose CUDA kernels run here; the others are those of the C++ backend."""

    def __init__(self, spec: AttentionSpec, op: OpName) -> None:
        self._others = build_op(spec, plan_op(spec, op, Target.parse("cpu"), "cpp"))
        super().__init__(plan_op(spec, op, HOPPER, "cuda"), ())

    def load(self, device: torch.device) -> dict[str, tuple[KernelPlan, Launch]]:
        """Plans and launch functions by role."""
        others = self._others.load(device)
        return {
            kernel.role: (kernel, host_launch(kernel)) if kernel.backend == "cuda" else others[kernel.role]
            for kernel in self.plan.kernels
        }


class _HostResolver(_Resolver):
    def __call__(self, op: OpName, device: torch.device | None, *, deterministic: bool = False) -> Op:
        return HostOp(self.spec, op)


def host_ops(spec: AttentionSpec) -> Ops:
    """Ops on CPU tensors by the kernels of a Hopper GPU."""
    return Ops(spec, _HostResolver(spec, Target.parse("cpu"), "cpp", None), "host")
