"""Triton: NVIDIA and AMD GPUs, and its interpreter on the CPU. Compiles for any target without its device."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from attngen.backends import launcher
from attngen.backends.base import Launch
from attngen.backends.ptxas import Ptxas, choose_ptxas
from attngen.backends.triton_compile import compile_kernel, excerpt, triton_folder, triton_version
from attngen.backends.triton_launch import load_hip, load_interpreted, map_box
from attngen.codegen.dialects import TritonDialect
from attngen.codegen.printer import Dialect
from attngen.codegen.render import RenderedKernel
from attngen.codegen.toolchain import BuildResult
from attngen.dtypes import DTYPES, Storage, alignment_of
from attngen.errors import BuildError, UnsupportedError
from attngen.schedule.plan import Arg, KernelPlan
from attngen.schedule.reading import has_fp8, pair_distance, pointer_dtype
from attngen.settings import Settings
from attngen.target import Target
from attngen.variant import OpName, Variant

# Bytes by which addresses and strides of q, k, v, out and their gradients are divisible, so that Triton loads vectors.
ALIGNMENT = 16

# Triton's own choice since 3.7: ptxas 13 allocates registers wrongly at its default level.
_PTXAS_OPTIONS = "ptx_options=--regAllocOptLevel=2"


class TritonBackend:
    """Triton 3.6 or newer."""

    name = "triton"
    suffix = ".py"
    dialect: Dialect = TritonDialect()
    kinds: tuple[str, ...] = ("cuda", "hip", "interpret")

    def check(self, variant: Variant, op: OpName, target: Target) -> None:  # every op is supported
        """Capabilities; see :meth:`attngen.backends.base.Backend.check`."""
        if target.kind not in self.kinds:
            raise UnsupportedError(
                f"backend triton does not build for {target}",
                where="backend",
                why="it makes kernels for GPUs, and for its interpreter",
                fix="leave backend out, or use a target like 'cuda:sm90a', 'hip:gfx942' or 'interpret'",
            )
        if target.kind == "interpret" and variant.dtype == "bf16":
            raise UnsupportedError(
                "Triton's interpreter cannot run bf16",
                where="spec.dtype",
                why="its matrix product of bf16 is wrong",
                fix="use dtype fp32 or fp16 with target='interpret'",
            )
        if variant.dtype == "fp8_e4m3" and target.kind == "cuda" and not has_fp8(target):
            raise UnsupportedError(
                f"{target.arch} does not multiply fp8 queries",
                where="spec.dtype",
                why="its tensor cores have no fp8",
                fix="use dtype bf16 or fp16, which read the same fp8 cache; or a target from sm89 on",
            )
        distance = pair_distance(variant)
        if distance % variant.k_storage.packed:
            raise UnsupportedError(
                f"triton does not rotate {2 * distance} dims of keys as they come out of storage {variant.k_storage.dtype}",
                where="spec.rope",
                why=f"the second elements of pairs start inside of a byte, at dim {distance}",
                fix="declare ag.Rope(keys='append'): ops.append rotates keys; or store them as fp8_e4m3 or int8 (k_dtype)",
            )

    def flags(self, plan: KernelPlan) -> tuple[str, ...]:
        """Options of ``triton.compile``, then ``arg:<name>=<type>[:<divisor>]`` for each argument."""
        options = [f"num_warps={plan.tiles.num_warps}", f"num_stages={plan.tiles.num_stages}"]
        if plan.target.kind == "cuda":
            options.append(_PTXAS_OPTIONS)
            if plan.tiles.max_registers:
                options.append(f"maxnreg={plan.tiles.max_registers}")
        divisors = argument_divisors(plan)
        for arg in plan.args:
            options.append(
                f"arg:{arg.name}={_triton_type(plan, arg)}" + (f":{divisors[arg.name]}" if arg.name in divisors else "")
            )
        return tuple(options)

    def fingerprint(self, target: Target) -> str | None:
        """Version of Triton and, for NVIDIA, of ptxas."""
        folder, version = triton_folder(), triton_version()
        if folder is None or version is None:
            return None
        ptxas = _ptxas(target, folder)
        return f"triton-{version} ptxas-{ptxas.identity}" if ptxas else f"triton-{version}"

    def build(self, kernel: RenderedKernel, folder: Path) -> BuildResult:
        """Compile for a GPU; for the interpreter the source is the binary."""
        triton = triton_folder()
        if triton is None:
            raise BuildError(
                f"{kernel.entry} cannot be built: there is no triton",
                where=f"target {kernel.target}",
                why="the package is not installed",
                fix="pip install attngen[triton]",
            )
        if kernel.target.kind == "interpret":
            return _check_syntax(kernel)
        return compile_kernel(kernel, folder, triton, _ptxas(kernel.target, triton))

    def load(self, binary: Path, metadata: Mapping[str, Any], plan: KernelPlan, device: torch.device) -> Launch:
        """A function that launches the kernel on the device's current stream."""
        if plan.target.kind == "interpret":
            return load_interpreted(binary, plan)
        if plan.target.kind == "hip":
            return load_hip(binary, plan, device)
        return launcher.load(binary, plan.entry, plan.args, device, **self.launch_options(metadata, plan))

    def launch_options(self, metadata: Mapping[str, Any], plan: KernelPlan) -> dict[str, Any]:
        """Of kernels for NVIDIA; see :meth:`attngen.backends.base.Backend.launch_options`."""
        if plan.target.kind != "cuda":
            raise UnsupportedError(
                f"{plan.entry} for {plan.target} runs through Triton only",
                where="target",
                why="the launcher that needs no compiler is one for the NVIDIA driver; AMD's has none yet",
                fix="use ag.compile on a machine with triton, or a cuda or cpu target",
            )
        return {
            "threads": metadata["num_warps"] * metadata["warp_size"],
            "shared": metadata["shared"],
            "trailing_pointers": 2,
            "maps": [dict(facts) for facts in metadata["tensor_maps"]],
        }


def argument_divisors(plan: KernelPlan) -> dict[str, int]:
    """What callers promise of tensors with strides: divisors of addresses (in bytes) and of strides (in elements).

    That is what :mod:`attngen.ops.storage` checks: rows of a cache and of block scales start at multiples of the largest power of
    two that divides their bytes, scales of tokens anywhere.
    """
    divisors = {}
    names = {arg.name for arg in plan.args}
    for pointer, stride in pairwise(plan.args):
        if pointer.is_pointer and stride.name.startswith(f"{pointer.name}_stride_"):
            itemsize = DTYPES[pointer.element].itemsize
            alignment = _alignment(plan.variant, pointer)
            divisors[pointer.name] = alignment
            for name in (f"{pointer.name}_stride_{axis}" for axis in "bth"):
                if name in names:
                    divisors[name] = max(alignment // itemsize, 1)
    return {name: divisor for name, divisor in divisors.items() if divisor > 1}


def _alignment(variant: Variant, pointer: Arg) -> int:
    """Bytes of which addresses of a tensor's rows are multiples; parts of keys may be cut out of one tensor."""
    name, itemsize = pointer.name, DTYPES[pointer.element].itemsize
    if name in ("q_scale", "k_scale", "v_scale"):
        return itemsize
    if name.split("_")[0] not in ("q", "k", "v"):
        return ALIGNMENT
    storage = {"q": Storage(variant.dtype), "k": variant.k_storage, "v": variant.v_storage}[name[0]]
    widths = {variant.head_dim_vo} if name[0] == "v" else {variant.head_dim_main, variant.head_dim_pe} - {0}
    if name.endswith("_blocks"):
        return min(
            alignment_of(width // storage.block * (2 if storage.zero_point else 1) * itemsize) for width in widths
        )
    return min(alignment_of(width // storage.packed * itemsize) for width in widths)


def _triton_type(plan: KernelPlan, arg: Arg) -> str:
    if arg.is_map:
        box = ",".join(map(str, map_box(plan, arg)))
        return f"tensordesc<{DTYPES[arg.element].triton_name}[{box}]>"
    return f"*{pointer_dtype(arg.element, plan.target)}" if arg.is_pointer else arg.type


def _ptxas(target: Target, triton: Path) -> Ptxas | None:
    return choose_ptxas(Settings.from_env().ptxas, triton) if target.kind == "cuda" else None


def _check_syntax(kernel: RenderedKernel) -> BuildResult:
    file = f"{kernel.entry}{kernel.suffix}"
    try:
        compile(kernel.source, file, "exec")
    except SyntaxError as error:
        raise BuildError(
            f"{kernel.entry} is no Python",
            where=f"{file}, line {error.lineno}",
            why="\n".join([error.msg, *excerpt(kernel.source, error.lineno)]),
            fix="report it, with the source from `attngen explain`",
        ) from error
    return BuildResult(binary=file)
