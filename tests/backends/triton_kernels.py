"""Small kernels for tests of the Triton backend, with plans and what builds and runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import attngen as ag
from attngen.backends.triton import TritonBackend
from attngen.codegen.render import RenderedKernel
from attngen.codegen.toolchain import BuildResult
from attngen.ops.op import BuiltKernel
from attngen.schedule import choose_schedule
from attngen.schedule.arguments import tensor
from attngen.schedule.plan import Arg, KernelPlan, Tiles
from attngen.target import Target
from attngen.variant import OpName, normalize

ROOT = Path(__file__).resolve().parents[2]

# out[t, :] = 2 * q[t, :] + lse[t] for tokens of 64 numbers, 16 tokens a program.
SCALE = """\
import triton
import triton.language as tl


@triton.jit
def scale(
    q, q_stride_b, q_stride_t, q_stride_h, out, out_stride_b, out_stride_t, out_stride_h, lse, num_tokens, num_tiles
):
    rows = tl.program_id(0) * 16 + tl.arange(0, 16)
    columns = tl.arange(0, 64)
    valid = rows < num_tokens
    x = tl.load(q + rows[:, None] * q_stride_t + columns, mask=valid[:, None], other=0.0)
    shift = tl.load(lse + rows, mask=valid, other=0.0)
    tl.store(out + rows[:, None] * out_stride_t + columns, 2.0 * x + shift[:, None], mask=valid[:, None])
"""

# out = sum over tiles of q @ transpose(k), tiles of 128 rows of 64 numbers; its stages lie in shared memory.
PRODUCT = """\
import triton
import triton.language as tl


@triton.jit
def product(q, q_stride_b, q_stride_t, q_stride_h, k, k_stride_b, k_stride_t, k_stride_h, out, num_tiles):
    rows = tl.arange(0, 128)
    columns = tl.arange(0, 64)
    total = tl.zeros([128, 128], tl.float32)
    for tile in range(num_tiles):
        left = tl.load(q + tile * q_stride_b + rows[:, None] * q_stride_t + columns)
        right = tl.load(k + tile * k_stride_b + rows[None, :] * k_stride_t + columns[:, None])
        total = tl.dot(left, right, total)
    tl.store(out + rows[:, None] * 128 + rows, total)
"""

SCALE_ARGS = (
    *tensor("q", "fp32"),
    *tensor("out", "fp32"),
    Arg("lse", "*fp32"),
    Arg("num_tokens", "i32"),
    Arg("num_tiles", "i64"),
)
PRODUCT_ARGS = (*tensor("q", "fp16"), *tensor("k", "fp16"), Arg("out", "*fp32"), Arg("num_tiles", "i32"))

GPUS = ("cuda:sm80", "cuda:sm86", "cuda:sm89", "cuda:sm90a", "cuda:sm100", "hip:gfx942", "hip:gfx950")


def make_plan(entry: str, args: tuple[Arg, ...], target: str, num_warps: int = 4, num_stages: int = 2) -> KernelPlan:
    """A plan as the scheduler makes them, with another entry and other arguments."""
    variant = normalize(ag.AttentionSpec(heads=ag.MHA(num_heads=4, head_dim=64), dtype="fp32"), "prefill")
    plan = choose_schedule(variant, "prefill", Target.parse(target), "triton").kernels[0]
    return replace(plan, entry=entry, args=args, tiles=Tiles(16, 64, num_warps, num_stages))


def build(source: str, plan: KernelPlan, folder: Path) -> BuildResult:
    """Write the source into the folder, as the store does, and build it."""
    backend = TritonBackend()
    kernel = RenderedKernel(plan.entry, source, backend.suffix, backend.flags(plan), plan.target)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{plan.entry}.py").write_text(source, encoding="utf-8")
    return backend.build(kernel, folder)


def forward_kernel(spec: ag.AttentionSpec, target: str, op: OpName) -> BuiltKernel:
    """The built forward kernel of a spec's op, for requests of any length or long ones."""
    op_of = ag.compile(spec, target=target, backend="triton", ops=()).op(op)
    return next(kernel for kernel in op_of.kernels if kernel.plan.schedule == "forward")


def run_python(script: str, *arguments: str, **env: str) -> str:
    """What a fresh Python prints."""
    path = os.pathsep.join([str(ROOT), *sys.path])
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path} | env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
