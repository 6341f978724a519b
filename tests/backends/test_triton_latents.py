"""Latents in Triton kernels for Hopper: tiles of large pages come by tensor maps, of small ones by addresses, to one arithmetic."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import attngen as ag
from attngen.explain import asm_section
from attngen.ops.op import BuiltKernel
from tests.backends.triton_kernels import forward_kernel

ARITHMETIC = re.compile(
    r"^\s+(wgmma\.mma_async|(?:fma|add|mul|sub|neg|max|ex2|lg2|div|rcp)(?=\.\S*f32\s))(\S*)", re.MULTILINE
)
# What a thread does with 64 rows and 64 keys, in two groups of four warps: half of the scores, over 512 and 64 columns, and half of
# the columns of out.
PRODUCTS = {"m64n32k16": (512 + 64) // 16, "m64n256k16": 64 // 16}
SCORES, ROWS = 16, 2
OTHERS = {"add.f32": SCORES, "fma.rn.f32": 2 * SCORES + ROWS, "ex2.approx.ftz.f32": SCORES + ROWS, "sub.f32": 0}


@cache
def _kernel(page_size: int, dtype: str, sink: bool = False) -> BuiltKernel:
    spec = ag.AttentionSpec(
        heads=ag.MLA(num_qo_heads=128),
        mask=ag.Causal(),
        dtype=dtype,
        kv=ag.Paged(page_size),
        normalizer=ag.Softmax(sink=sink),
    )
    return forward_kernel(spec, "cuda:sm90a", "decode")


def _arithmetic(kernel: BuiltKernel) -> Counter[str]:
    """How often each instruction of fp32 or of matrices stands in the kernel."""
    text = kernel.binary.with_suffix(".ptx").read_text(encoding="utf-8")
    found = ((name, rest) for name, rest in ARITHMETIC.findall(text))
    return Counter(rest.split(".")[3] if name.startswith("wgmma") else name + rest for name, rest in found)


@pytest.mark.triton_compile
@pytest.mark.parametrize(("dtype", "sink"), [("bf16", False), ("fp16", False), ("bf16", True)])
def test_tiles_of_all_pages_take_the_same_instructions(dtype: str, sink: bool) -> None:
    small, *others = (_arithmetic(_kernel(page_size, dtype, sink)) for page_size in (16, 1, 48))
    assert others == [small, small]
    for page_size in (64, 128, 256):
        kernel = _kernel(page_size, dtype, sink)
        assert kernel.plan.tiles == replace(_kernel(16, dtype).plan.tiles, maps=True)
        # Two loops: over whole tiles, and over what is left.
        tile = _arithmetic(kernel) - small
        assert {name: tile[name] for name in PRODUCTS | OTHERS} == PRODUCTS | OTHERS
        rest = small - tile
        assert not rest.keys() & PRODUCTS.keys()
        assert rest["ex2.approx.ftz.f32"] == (2 * ROWS if sink else 0)


@pytest.mark.triton_compile
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("page_size", [1, 16, 64, 128, 256])
def test_the_assembler_has_nothing_left_to_fuse(page_size: int, sink: bool, tmp_path: Path) -> None:
    kernel = _kernel(page_size, "bf16", sink)
    code = asm_section(replace(kernel, folder=tmp_path)).text
    assert len(re.findall(r"\bFFMA\b(?!\.FTZ)", code)) == _arithmetic(kernel)["fma.rn.f32"]
