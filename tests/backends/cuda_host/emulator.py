"""Rendered CUDA kernels as C++ for the CPU: PTX becomes calls of functions, which ``runtime.h`` and ``warpgroups.h`` have."""

from __future__ import annotations

import ctypes
import re
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from attngen.backends.base import Launch
from attngen.compiler import _Resolver, build_op, plan_op, render_kernel
from attngen.ops import Ops
from attngen.ops.op import Op
from attngen.schedule.hopper import launch_shape, map_boxes
from attngen.schedule.plan import KernelPlan
from attngen.spec import AttentionSpec
from attngen.target import Target
from attngen.variant import OpName

HOPPER = Target.parse("cuda:sm90a")
_RUNTIME, _WARPGROUPS = (Path(__file__).with_name(name) for name in ("runtime.h", "warpgroups.h"))
_TYPES = {"i32": ctypes.c_int32, "i64": ctypes.c_int64}
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_RESIDENT_BLOCKS = 3  # that share the programs of a launch
# Several instructions that are one function, by a part of them.
_FUNCTIONS = {
    "mbarrier.try_wait": "ptx_wait_for",
    "@first mbarrier.arrive": "ptx_arrive_as_warp",
    "mov.b32 {low, high}": "ptx_unpack",
    "cp.async.bulk.tensor": "ptx_cp_async_bulk_tensor",
    "fence.": "ptx_nothing",
    "setmaxnreg.": "ptx_nothing",
}


def host_source(plan: KernelPlan) -> str:
    """C++ of a kernel, with an entry point ``run(blocks, arguments)``."""
    source = _without_ptx(render_kernel(plan).source)
    source = re.sub(
        r"extern __shared__ (?:__align__\(\d+\) )?([\w ]+) (\w+)\[\];",
        r"\1* const \2 = reinterpret_cast<\1*>(machine::shared);",
        source,
    )
    source = source.replace("constexpr uint32_t SHARED = 1024;", "constexpr uint32_t SHARED = 0;")
    threads, shared = launch_shape(plan)
    return (
        f'#include "{_RUNTIME}"\n#include "{_WARPGROUPS}"\nnamespace kernel {{\n{source}\n}}\n'
        f'extern "C" void run(int blocks, void** arguments) {{\n  machine::blocks_count = blocks;\n'
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
    if "wgmma.mma_async" in template:
        return _product(template, operands)
    return f"{_name(template)}({', '.join(operands)})"


def _product(template: str, operands: list[str]) -> str:
    kind = "Bf16" if ".bf16.bf16" in template else "Fp16"
    adds, across = re.search(r"setp.ne.b32 adds, (\d)", template), re.search(r"adds, 1, 1, ([01, ]+);", template)
    assert adds is not None
    assert across is not None
    flags = [adds[1], *across[1].split(", ")]
    given = [operand for operand in operands if not operand.startswith("sums[")]
    return f"machine::multiply<machine::{kind}>({', '.join([*flags, 'sums', *given])})"


def _name(template: str) -> str:
    for part, function in _FUNCTIONS.items():
        if part in template:
            return function
    if not template:
        return "ptx_nothing"
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
    boxes = dict(zip((arg.name for arg in plan.args if arg.is_map), map_boxes(plan), strict=True))

    def launch(programs: int, values: Sequence[torch.Tensor | int]) -> None:
        kept, addresses = [], []
        for arg, value in zip(plan.args, values, strict=True):
            word: Any
            if not isinstance(value, torch.Tensor):
                word = _TYPES[arg.type](value)
            elif arg.is_map:
                word = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
            else:
                word = ctypes.c_void_p(value.data_ptr())
            address = ctypes.addressof(word)
            if isinstance(value, torch.Tensor) and arg.is_map:
                address = -(-address // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
                ctypes.memmove(address, _map_words(value, boxes[arg.name]), _MAP_BYTES)
            kept.append(word)
            addresses.append(address)
        blocks = min(programs, _RESIDENT_BLOCKS) if plan.is_resident else programs
        library.run(ctypes.c_int(blocks), (ctypes.c_void_p * len(addresses))(*addresses))

    return launch


def _map_words(tensor: torch.Tensor, box: tuple[int, ...]) -> bytes:
    """``machine::Map``."""
    pitches = [stride * tensor.element_size() for stride in reversed(tensor.stride())]
    words = struct.pack("@q4q4q2q", tensor.data_ptr(), *reversed(tensor.shape), *pitches, box[3], box[2])
    return words.ljust(_MAP_BYTES, b"\0")


class HostOp(Op):
    """An op planned for a Hopper GPU whose CUDA kernels run here; the others are those of the C++ backend."""

    def __init__(self, spec: AttentionSpec, op: OpName) -> None:
        super().__init__(plan_op(spec, op, HOPPER, "cuda"), ())
        self._spec = spec

    def load(self, device: torch.device) -> dict[str, tuple[KernelPlan, Launch]]:
        """Plans and launch functions by role."""
        if device not in self._loaded:
            self._loaded[device] = {kernel.role: (kernel, self._launch(kernel)) for kernel in self.plan.kernels}
        return self._loaded[device]

    def _launch(self, kernel: KernelPlan) -> Launch:
        if kernel.backend == "cuda":
            return host_launch(kernel)
        if kernel.schedule == "delta":
            return _delta(kernel)
        cpu = Target.parse("cpu")
        plan = plan_op(self._spec, self.plan.op, cpu, "cpp")
        if kernel.schedule in ("key_lists", "query_lists"):  # of tiles as CUDA's
            plan = replace(plan, kernels=(replace(kernel, backend="cpp", target=cpu),))
        return build_op(self._spec, plan).load(torch.device("cpu"))[kernel.role][1]


def _delta(plan: KernelPlan) -> Launch:
    """Triton's kernel in torch, without sinks and gates."""

    def launch(_: int, values: Sequence[torch.Tensor | int]) -> None:
        named: dict[str, Any] = {arg.name: value for arg, value in zip(plan.args, values, strict=True)}
        sums = (named["out"].float() * named["dout"].float()).sum(-1).flatten(0, -2)
        if named["has_dlse"]:
            sums = sums - named["dlse"]
        named["delta"].view(sums.shape[1], sums.shape[0]).copy_(sums.T)

    return launch


class _HostResolver(_Resolver):
    def __call__(self, op: OpName, device: torch.device | None, *, deterministic: bool = False) -> Op:
        return HostOp(self.spec, op)


class _BackwardResolver(_Resolver):
    def __call__(self, op: OpName, device: torch.device | None, *, deterministic: bool = False) -> Op:
        return HostOp(self.spec, op) if op == "backward" else super().__call__(op, device)


def host_ops(spec: AttentionSpec) -> Ops:
    """Ops on CPU tensors by the kernels of a Hopper GPU."""
    return Ops(spec, _HostResolver(spec, Target.parse("cpu"), "cpp", None), "host")


def host_backward_ops(spec: AttentionSpec) -> Ops:
    """Backward on CPU tensors by the kernels of a Hopper GPU, the other ops by the C++ backend's."""
    return Ops(spec, _BackwardResolver(spec, Target.parse("cpu"), "cpp", None), "host backward")
