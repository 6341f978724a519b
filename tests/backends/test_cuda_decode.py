"""Decode kernels of the cuda backend over stored caches: what they serve, and machine code for a GPU that is not here."""

from __future__ import annotations

import re
from typing import Any

import pytest

import attngen as ag
from attngen.backends.cuda import compile_cubin, resources
from attngen.compiler import plan_op, render_kernel
from attngen.schedule.hopper import launch_shape
from attngen.schedule.plan import KernelPlan
from attngen.target import Target

H200 = Target.parse("cuda:sm90a")
SHARED = 227 << 10
STORAGES: dict[str, dict[str, Any]] = {
    "e4m3": {"dtype": "fp8_e4m3"},
    "e4m3-token": {"dtype": "fp8_e4m3", "scale": "token"},
    "e5m2": {"dtype": "fp8_e5m2", "scale": "head"},
    "int8": {"dtype": "int8"},
    "int4": {"dtype": "int4"},
    "int4-64": {"dtype": "int4", "group_size": 64},
    "int4-zero": {"dtype": "int4", "zero_point": True},
    "nvfp4": {"dtype": "nvfp4"},
    "mxfp4": {"dtype": "mxfp4"},
    "wide-keys": {"k_dtype": "bf16", "v_dtype": "fp8_e4m3"},
    "both": {"k_dtype": "int8", "v_dtype": "nvfp4"},
}


def _forward(storage: dict[str, Any], group: int = 4, dim: int = 128, page: int = 16, **fields: Any) -> KernelPlan:
    heads = ag.GQA(num_qo_heads=2 * group, num_kv_heads=2, head_dim=dim)
    spec = ag.AttentionSpec(heads=heads, kv=ag.Paged(page, **storage), **fields)
    return plan_op(spec, "decode", H200, "cuda").kernel("forward")


# Scales of two bytes a token are not copied.
CASES = [
    (name, group, dim)
    for name in STORAGES
    for group, dim in ((4, 128), (8, 128), (1, 64), (8, 256))
    if (name, dim) not in (("int4-64", 64), ("mxfp4", 64))
]


@pytest.mark.parametrize(("name", "group", "dim"), CASES)
def test_kernels_keep_their_sums_in_registers(name: str, group: int, dim: int) -> None:
    plan = _forward(STORAGES[name], group, dim)
    assert plan.backend == "cuda"
    kernel = render_kernel(plan)
    threads, shared = launch_shape(plan)
    assert threads == 32 * plan.tiles.num_warps
    assert shared * plan.tiles.blocks <= SHARED
    _, log = compile_cubin(kernel, [flag for flag in kernel.flags if not flag.startswith("launch:")])
    assert "warning" not in log
    assert resources(log)["spills"] <= 48, log


@pytest.mark.parametrize("page", [1, 3, 8, 16, 24, 64, 256])
def test_pages_of_any_size(page: int) -> None:
    kernel = render_kernel(_forward(STORAGES["int4"], page=page))
    compile_cubin(kernel, [flag for flag in kernel.flags if not flag.startswith("launch:")])


@pytest.mark.parametrize(
    ("storage", "fields"),
    [
        ({}, {}),
        ({"dtype": "int4", "group_size": 128}, {}),  # scales of two bytes a token
        ({"dtype": "int4"}, {"dtype": "fp16"}),
        ({"dtype": "fp8_e4m3"}, {"rope": ag.Rope()}),
        ({"dtype": "fp8_e4m3"}, {"normalizer": ag.Sigmoid()}),
        ({"dtype": "fp8_e4m3"}, {"group": 16}),
        ({"dtype": "fp8_e4m3"}, {"dim": 80}),
    ],
)
def test_other_variants_stay_with_triton(storage: dict[str, Any], fields: dict[str, Any]) -> None:
    assert _forward(storage, **fields).backend == "triton"


def test_merge_is_tritons_beside_it() -> None:
    heads = ag.GQA(num_qo_heads=8, num_kv_heads=2, head_dim=128)
    plan = plan_op(ag.AttentionSpec(heads=heads, kv=ag.Paged(16, dtype="fp8_e4m3")), "decode", H200, "cuda")
    assert [(kernel.schedule, kernel.backend) for kernel in plan.kernels] == [("forward", "cuda"), ("merge", "triton")]
    assert plan.backend == "cuda"


def test_blocks_of_sixteen_take_two_columns_a_row() -> None:
    source = render_kernel(_forward(STORAGES["nvfp4"])).source
    assert "COLUMN_ROWS = 4" in source
    assert "(group < 4) == (member < 2)" in source  # keys meet the even or the odd blocks
    assert "(group < 4) != (member < 2)" in source  # values give their dims
    assert "COLUMN_ROWS = 8" in render_kernel(_forward(STORAGES["int4"])).source


def test_sources_are_the_same_each_time_and_read_well() -> None:
    fields = {"mask": ag.Causal() & ag.SlidingWindow(left=1023), "score_mods": (ag.SoftCap(cap=30.0),)}
    source = render_kernel(_forward(STORAGES["int4"], **fields)).source
    assert source == render_kernel(_forward(STORAGES["int4"], **fields)).source
    assert "\n\n\n" not in source
    assert not re.search(r"[ \t]+\n", source)
