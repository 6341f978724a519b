"""Rendered CUDA kernels as C++ for the CPU: PTX becomes calls of functions, which ``runtime.h`` has."""

from __future__ import annotations

import atexit
import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from attngen.backends.base import Launch
from attngen.backends.cuda import SWIZZLE_128
from attngen.backends.launcher import ArgumentLayout, TensorMaps
from attngen.compiler import _Resolver, build_op, plan_op, render_kernel
from attngen.ops import Ops
from attngen.ops.op import Op
from attngen.schedule.hopper import launch_shape, map_boxes
from attngen.schedule.plan import KernelPlan, OpPlan
from attngen.schedule.planner import plan_kernel
from attngen.spec import AttentionSpec
from attngen.target import Target
from attngen.variant import OPS, OpName
from tests.backends.cuda_host.driver import HostDriver

HOPPER, CPU = Target.parse("cuda:sm90a"), Target.parse("cpu")
_COMPILER = ("c++", "-std=c++17", "-O1", "-march=native", "-U_FORTIFY_SOURCE", "-w", "-fPIC")


def host_source(plan: KernelPlan) -> str:
    """C++ of a kernel, with an entry point ``run(blocks, side_by_side, seed, arguments)``."""
    source = _without_ptx(render_kernel(plan).source)
    source = re.sub(
        r"extern __shared__ (?:__align__\(1024\) )?([\w ]+) (\w+)\[\];",
        r"\1* const \2 = reinterpret_cast<\1*>(machine::shared);",
        source,
    )
    threads, shared = launch_shape(plan)
    return (
        f'#include "runtime.h"\nnamespace kernel {{\n{source}\n}}\n'
        f'extern "C" const char* run(int blocks, int side_by_side, uint64_t seed, void** arguments) {{\n'
        f"  constexpr auto entry = kernel::{plan.entry};\n"
        f"  return machine::launch<entry>(entry, blocks, side_by_side, {threads}, {shared}, seed, arguments);\n}}\n"
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
    head = re.match(r'\s*((?:"[^"]*"\s*)*)', inside)
    assert head is not None
    template = "".join(re.findall(r'"([^"]*)"', head[1])).replace("\\n", "\n")
    operands, place = [], head.end()
    for found in re.finditer(r'"[=+&]*[rlfhn]"\s*\(', inside[place:]):
        start = place + found.end() - 1
        operands.append(inside[start + 1 : _closing(inside, start)])
    if "wgmma.mma_async" in template:
        return _product(template, operands)
    return f"{_name(template)}({', '.join(operands)})"


def _product(template: str, operands: Sequence[str]) -> str:
    """A product of a warpgroup: its sums are an array, of which the first number stands for all."""
    form = re.search(r"m64n(\d+)k(16|32)\.f32\.(bf16|f16|e4m3)\.\3 ", template)
    adds = re.search(r"setp\.ne\.b32 adds, ([01]), 0;", template)
    across = re.search(r"adds, 1, 1(?:, ([01]))??(?:, ([01]))?;", template)
    assert form is not None
    assert adds is not None
    assert across is not None
    assert (form[2] == "32") == (form[3] == "e4m3") == (across[2] is None)
    count = int(form[1]) // 2
    assert [*operands[:count]] == [f"sums[{i}]" for i in range(count)]
    places = ", ".join(f"%{i}" for i in range(count))
    assert f"{{{places}}}, " in template
    numbers = {"bf16": "machine::Bf16", "f16": "machine::Fp16", "e4m3": "machine::E4m3"}[form[3]]
    flags = f"{form[1]}, {numbers}, {adds[1]}, {across[1] or 0}, {across[2] or 0}"
    return f"ptx_wgmma<{flags}>({', '.join([operands[0], *operands[count:]])})"


def _name(template: str) -> str:
    """The function that stands for an instruction, or for one in a block with a predicate or with halves of a register."""
    if not template:
        return "ptx_nothing"
    first = r"(?m)^(?:@\w+ )?((?:mbarrier|cp)\.[\w.:]+)"
    if template.startswith("{") and (instruction := re.search(first, template)) is not None:
        name = "ptx_" + re.sub(r"\W", "_", instruction[1])
        return f"{name}_if_0" if "setp.eq.u32 first, %1, 0;" in template else name
    if template.startswith("{"):
        if "e4m3x2.f32" in template:
            return "ptx_pack_e4m3"
        if template.count("cvt.f32.f16") == 2:
            return "ptx_halves"
        return "ptx_low_half" if template.rstrip(" };").endswith("l") else "ptx_high_half"
    if template.startswith("cp.async.bulk.tensor.4d."):
        return "ptx_cp_async_bulk_tensor_4d"
    name = "ptx_" + re.sub(r"\W", "_", template.split(maxsplit=1)[0].rstrip(";"))
    immediate = re.search(r", (0x\w+);$", template)
    return f"{name}_{immediate[1]}" if immediate else name


def _compile(*arguments: str | Path) -> None:
    done = subprocess.run([*_COMPILER, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]


@cache
def _runtime() -> Path:
    """A folder with the compiled header."""
    folder = Path(tempfile.mkdtemp(prefix="cuda_host_"))
    atexit.register(shutil.rmtree, folder)
    _compile(Path(__file__).with_name("runtime.h"), "-o", folder / "runtime.h.gch")
    return folder


@cache
def library(source: str) -> ctypes.CDLL:
    """The compiled kernel of :func:`host_source`."""
    made = tempfile.mkdtemp(dir=_runtime())
    path = Path(made, "kernel.cpp")
    path.write_text(source)
    _compile("-I", _runtime(), path, "-shared", "-o", path.with_suffix(".so"))
    loaded = ctypes.CDLL(str(path.with_suffix(".so")))
    loaded.run.restype = ctypes.c_char_p
    return loaded


known_source = cache(host_source)


class MachineError(Exception):
    """A launch that ends in no way that is allowed: threads wait for each other, or read what is not theirs to read."""


def host_launch(plan: KernelPlan, seed: int = 0) -> Launch:
    """The kernel as a function of its blocks and arguments, which are tensors on the CPU; ``seed`` of who runs when."""
    kernel = library(known_source(plan))
    kinds = [arg.element for arg in plan.args if arg.is_map]
    maps = [
        TensorMaps(HostDriver(), plan.entry, kind, box, SWIZZLE_128)
        for kind, box in zip(kinds, map_boxes(plan) if kinds else (), strict=True)
    ]
    layout = ArgumentLayout(plan.args, 0, maps, sized_maps=False)

    def launch(programs: int, values: Sequence[torch.Tensor | int]) -> None:
        block = ctypes.create_string_buffer(layout.struct.size)
        layout.pack(block, values)
        table = (ctypes.c_void_p * len(layout.offsets))(*(ctypes.addressof(block) + at for at in layout.offsets))
        resident = 1 + seed % 3
        blocks = min(programs, resident) if plan.is_resident else programs
        failure = kernel.run(blocks, resident if plan.is_resident else 1, ctypes.c_uint64(seed), table)
        if failure is not None:
            raise MachineError(f"{plan.entry}, seed {seed}: {failure.decode()}")

    return launch


def _by_head(plan: KernelPlan, launch: Launch) -> Launch:
    """The C++ backend's delta ``[tokens, num_qo_heads]`` as that of a GPU, ``[num_qo_heads, tokens]``."""
    place = [arg.name for arg in plan.args].index("delta") if plan.variant.is_softmax else None

    def transposed(programs: int, values: Sequence[torch.Tensor | int]) -> None:
        launch(programs, values)
        if place is not None:
            delta = values[place]
            assert isinstance(delta, torch.Tensor)
            delta.copy_(delta.T.contiguous().view(delta.shape))

    return transposed


class HostOp(Op):
    """An op planned for a Hopper GPU whose CUDA kernels run here; the others are those of the C++ backend."""

    def __init__(self, spec: AttentionSpec, plan: OpPlan, seed: int) -> None:
        super().__init__(plan, ())
        self._seed = seed
        own = plan_op(spec, plan.op, CPU, "cpp")
        # Lists are of the tiles of the kernels that read them.
        kernels = tuple(
            plan_kernel(plan.variant, plan.op, kernel.schedule, CPU, "cpp", tiles=kernel.tiles, args=kernel.args)
            if kernel.schedule.endswith("_lists")
            else own.kernel(kernel.role)
            for kernel in plan.kernels
            if kernel.backend != "cuda"
        )
        self._others = build_op(spec, replace(own, kernels=kernels))

    def load(self, device: torch.device) -> dict[str, tuple[KernelPlan, Launch]]:
        """Plans and launch functions by role."""
        if device not in self._loaded:
            others = self._others.load(device)
            if "delta" in others:
                others = others | {"delta": (others["delta"][0], _by_head(*others["delta"]))}
            self._loaded[device] = {
                kernel.role: (kernel, host_launch(kernel, self._seed))
                if kernel.backend == "cuda"
                else others[kernel.role]
                for kernel in self.plan.kernels
            }
        return self._loaded[device]


class _HostResolver(_Resolver):
    seed = 0
    ops: frozenset[OpName] = frozenset(OPS)

    def __call__(self, op: OpName, device: torch.device | None, *, deterministic: bool = False) -> Op:
        if op in self.ops:
            plan = plan_op(self.spec, op, HOPPER, "cuda", deterministic=deterministic)
            if any(kernel.backend == "cuda" for kernel in plan.kernels):
                return HostOp(self.spec, plan, self.seed)
        return super().__call__(op, device, deterministic=deterministic)


def host_ops(spec: AttentionSpec, seed: int = 0, ops: Iterable[OpName] = OPS) -> Ops:
    """Ops on CPU tensors by the kernels of a Hopper GPU, those of ``ops``; ``seed`` of the order in which threads run."""
    resolver = _HostResolver(spec, CPU, "cpp", None)
    resolver.seed, resolver.ops = seed, frozenset(ops)
    return Ops(spec, resolver, "host")
