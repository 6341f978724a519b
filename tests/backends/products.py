"""Products of tiles in compiled kernels: terms that each adds up, and how many of them a thread holds side by side."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import attngen as ag
from attngen.backends.triton_compile import parse_flags
from attngen.backends.triton_worker import load_module
from attngen.compiler import plan_op, render_kernel
from attngen.target import Target

_LEFT = re.compile(r"tt\.dot .*?: tensor<\d+x(\d+)x\w+, #ttg\.dot_op<\{opIdx = 0, parent = #\w+, kWidth = (\d+)\}>>")


def _heads(head_dim: int) -> ag.GQA:
    return ag.GQA(num_qo_heads=8, num_kv_heads=2, head_dim=head_dim)


def _stored(head_dim: int, rope: ag.Rope | None = None, **fields: object) -> ag.AttentionSpec:
    return ag.AttentionSpec(heads=_heads(head_dim), mask=ag.Causal(), kv=ag.Paged(page_size=16, **fields), rope=rope)


_DROPPED = {"mask": ag.Dense("visible"), "dropout": 0.1, "dtype": "bf16"}
_NARROW = ag.MLA(num_qo_heads=8, head_dim_ckv=64, head_dim_kpe=16)
# Operands of bytes that are joined: block scales, rotated keys, and weights that a mask of bytes hides and dropout drops.
SPECS: dict[str, tuple[ag.AttentionSpec, str]] = {
    "nvfp4": (_stored(16, dtype="nvfp4"), "decode"),
    "int4-zero": (_stored(256, dtype="int4", zero_point=True), "decode"),
    "e4m3-rope": (_stored(16, dtype="fp8_e4m3", rope=ag.Rope()), "prefill"),
    "nvfp4-rope": (_stored(32, dtype="nvfp4", rope=ag.Rope()), "decode"),
    "latents": (ag.AttentionSpec(heads=_NARROW, kv=ag.Paged(page_size=16, dtype="nvfp4")), "decode"),
    "dropout": (ag.AttentionSpec(heads=_heads(256), **_DROPPED), "backward"),
}


def shallow(name: str, target: str) -> list[str]:
    """Products with fewer terms than four threads hold, in a spec's kernels as Triton lays them out; and how many there are."""
    import triton  # only the child that compiles imports it
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    spec, op = SPECS[name]
    gpu, found, products = Target.parse(target), [], 0
    for plan in plan_op(spec, op, gpu, "triton").kernels:
        kernel = render_kernel(plan)
        options, arguments = parse_flags(kernel.flags)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.py"
            path.write_text(kernel.source, encoding="utf-8")
            compiled = triton.compile(
                ASTSource(getattr(load_module(path), kernel.entry), {name: kind for name, kind, _ in arguments}, {}),
                target=GPUTarget("cuda", gpu.capability, 32),
                options={key: value for key, value in options.items() if key != "ptx_options"},
            )
        for terms, width in _LEFT.findall(compiled.asm["ttgir"]):
            products += 1
            if int(terms) < 4 * int(width):
                found.append(f"{kernel.entry}: {terms} terms, {width} a thread")
    return [*found, f"{products} products"]
