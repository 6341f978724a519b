"""Prefill kernels of the cuda backend: what they serve, and machine code for a GPU that is not here."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import attngen as ag
from attngen.backends.cuda import CudaBackend, compile_cubin, resources
from attngen.codegen.render import RenderedKernel
from attngen.codegen.toolchain import BuildResult
from attngen.compiler import plan_op, render_kernel
from attngen.errors import SlowKernelError
from attngen.schedule import retile
from attngen.schedule.hopper import launch_shape, map_boxes
from attngen.schedule.plan import KernelPlan
from attngen.schedule.tables import CUDA
from attngen.target import Target

H200 = Target.parse("cuda:sm90a")
SHARED = 227 << 10
PREFILL = [row for row in CUDA if row.schedule == "prefill"]
CAUSAL = ag.Causal()
CAP, ALIBI = ag.SoftCap(cap=30.0), ag.ALiBi()


def _spec(dims: tuple[int, int] = (128, 128), **fields: object) -> ag.AttentionSpec:
    heads = ag.GQA(num_qo_heads=8, num_kv_heads=4, head_dim=dims[0], head_dim_vo=dims[1])
    return ag.AttentionSpec(heads=heads, **fields)


def _forward(spec: ag.AttentionSpec) -> KernelPlan:
    return plan_op(spec, "prefill", H200, "cuda").kernel("forward")


SERVED = {
    "full": _spec(),
    "causal": _spec(mask=CAUSAL),
    "narrow": _spec((64, 64), mask=CAUSAL),
    "narrow-full": _spec((64, 64)),
    "odd": _spec((40, 72), mask=CAUSAL),
    "unequal": _spec((192, 128), mask=CAUSAL),
    "wide": _spec((256, 256), mask=CAUSAL),
    "wide-full": _spec((256, 256)),
    "fp16": _spec(mask=CAUSAL, dtype="fp16", out_dtype="fp32"),
    "ragged": _spec(mask=ag.SlidingWindow(left=1023), kv=ag.Ragged()),
    "cap": _spec(mask=CAUSAL, score_mods=(CAP,)),
    "alibi": _spec(mask=CAUSAL, score_mods=(ALIBI,)),
    "both": _spec(score_mods=(ALIBI, CAP)),
    "documents": _spec(mask=ag.Document(doc_ids="ids") & CAUSAL),
    "hole": _spec(mask=CAUSAL & (ag.SlidingWindow(left=255) | ag.GlobalTokens(64))),
    "dilated": _spec(mask=CAUSAL & ag.Dilated(3)),
    "sink": _spec(mask=CAUSAL, normalizer=ag.Softmax(sink=True), output_gate="gate"),
    "negative": _spec(mask=CAUSAL, sm_scale=-0.1),
    "dropout": _spec(mask=CAUSAL, dropout=0.1),
    "dropout-narrow": _spec((64, 64), dropout=0.1),
    "dropout-unequal": _spec((192, 128), mask=CAUSAL, dropout=0.1, score_mods=(ALIBI,)),
    "dropout-wide": _spec((256, 256), mask=CAUSAL, dropout=0.1, dtype="fp16"),
    "sigmoid": _spec(mask=CAUSAL, normalizer=ag.Sigmoid()),
    "sigmoid-narrow": _spec((64, 64), normalizer=ag.Sigmoid(bias="bias")),
    "relu-wide": _spec((256, 256), mask=CAUSAL, normalizer=ag.ReLU(power=2)),
    "silu": _spec(mask=ag.SlidingWindow(left=1023), normalizer=ag.SiLU(), kv=ag.Paged(64), dtype="fp16"),
    "fp8": _spec(mask=CAUSAL, dtype="fp8_e4m3"),
    "fp8-unequal": _spec((192, 128), mask=CAUSAL, dtype="fp8_e4m3"),
    "fp8-wide": _spec((256, 256), dtype="fp8_e4m3", kv=ag.Ragged(scale="head"), score_mods=(CAP,)),
    "e4m3": _spec(mask=CAUSAL, kv=ag.Contiguous(dtype="fp8_e4m3")),
    "e5m2-full-fp16": _spec(kv=ag.Ragged(dtype="fp8_e5m2"), dtype="fp16"),
    "int8-paged": _spec(mask=CAUSAL, kv=ag.Paged(16, dtype="int8")),
    "int8-narrow": _spec((64, 64), mask=CAUSAL, kv=ag.Paged(64, dtype="int8")),
    "e4m3-unequal": _spec((192, 128), mask=CAUSAL, kv=ag.Ragged(k_dtype="int8", v_dtype="fp8_e4m3")),
    "e4m3-wide": _spec((256, 256), mask=CAUSAL, kv=ag.Ragged(dtype="fp8_e4m3", scale="head")),
    "e4m3-documents": _spec(mask=ag.Document(doc_ids="ids") & CAUSAL, kv=ag.Paged(16, dtype="fp8_e4m3")),
    "paged-1": _spec(mask=CAUSAL, kv=ag.Paged(1)),
    "paged-3-full": _spec(kv=ag.Paged(3), dtype="fp16"),
    "paged-4-narrow": _spec((64, 64), mask=CAUSAL, kv=ag.Paged(4)),
    "paged-5-wide": _spec((256, 256), mask=ag.SlidingWindow(left=1023), kv=ag.Paged(5)),
    "paged-12-unequal": _spec((192, 128), mask=CAUSAL, kv=ag.Paged(12)),
    "paged-rope": _spec(mask=CAUSAL, kv=ag.Paged(16), rope=ag.Rope(keys="append")),
    "paged-rope-table": _spec((64, 64), mask=CAUSAL, kv=ag.Paged(64), rope=ag.Rope(table="cos_sin", keys="append")),
    "paged-8": _spec(mask=CAUSAL, kv=ag.Paged(8)),
    "paged-16-full": _spec(kv=ag.Paged(16, "HND")),
    "paged-64": _spec(mask=ag.SlidingWindow(left=1023), kv=ag.Paged(64), dtype="fp16"),
    "paged-narrow": _spec((64, 64), mask=CAUSAL, kv=ag.Paged(256)),
    "paged-unequal": _spec((192, 128), mask=CAUSAL, kv=ag.Paged(32)),
    "paged-wide": _spec((256, 256), mask=CAUSAL, kv=ag.Paged(16)),
    "paged-fp8": _spec(mask=CAUSAL, dtype="fp8_e4m3", kv=ag.Paged(16)),
    "paged-documents": _spec(mask=ag.Document(doc_ids="ids") & CAUSAL, kv=ag.Paged(128)),
}
ELSEWHERE = {
    "fp32": _spec(dtype="fp32"),
    "small pages of fp8": _spec(kv=ag.Paged(page_size=4), dtype="fp8_e4m3"),
    "small pages of stored numbers": _spec(kv=ag.Paged(page_size=4, dtype="int8")),
    "scales of tokens": _spec(kv=ag.Contiguous(dtype="int8", scale="token")),
    "blocks": _spec(kv=ag.Contiguous(dtype="int4")),
    "keys alone": _spec(kv=ag.Contiguous(k_dtype="int8", v_dtype="bf16")),
    "stored-sigmoid": _spec(kv=ag.Contiguous(dtype="int8"), normalizer=ag.Sigmoid()),
    "fp8-sigmoid": _spec(dtype="fp8_e4m3", normalizer=ag.Sigmoid()),
    "rope": _spec(rope=ag.Rope()),
    "rope of keys in pages": _spec(rope=ag.Rope(), kv=ag.Paged(16)),
    "norm": _spec(qk_norm=ag.QKNorm()),
    "pairs": _spec(mask=ag.Dense("visible")),
    "narrow": _spec((32, 32)),
    "fp8-tokens": _spec(dtype="fp8_e4m3", kv=ag.Contiguous(scale="token")),
    "fp8-narrow": _spec((64, 64), dtype="fp8_e4m3"),
    "many parameters": _spec(mask=CAUSAL, score_mods=(ag.Fire(4),)),
}


@pytest.mark.parametrize("name", SERVED)
def test_kernels_multiply_asynchronously_and_keep_sums_in_registers(name: str) -> None:
    plan = _forward(SERVED[name])
    assert plan.backend == "cuda"
    kernel = render_kernel(plan)
    threads, shared = launch_shape(plan)
    assert threads == 32 * plan.tiles.num_warps == 128 * (plan.tiles.q // 64 + 1)
    assert shared <= SHARED
    _, log = compile_cubin(kernel, [flag for flag in kernel.flags if not flag.startswith("launch:")])
    assert not re.search(r"C75\d\d", log), log
    # The producer has few registers and may spill some.
    assert all(int(size) <= 192 for size in re.findall(r"(\d+) bytes spill stores", log)), log


@pytest.mark.parametrize("name", ELSEWHERE)
def test_other_variants_stay_with_triton(name: str) -> None:
    assert _forward(ELSEWHERE[name]).backend == "triton"


def test_sources_are_the_same_each_time_and_read_well() -> None:
    source = render_kernel(_forward(SERVED["causal"])).source
    assert source == render_kernel(_forward(SERVED["causal"])).source
    assert "\n\n\n" not in source
    assert source.count("visit(Yes{})") == 1  # masked tiles, from the last key on
    assert source.count("visit(No{})") == 1
    window = render_kernel(_forward(SERVED["ragged"])).source
    assert window.count("visit(Yes{})") == 2


def test_constants_are_left_to_the_exponential_and_rows_to_their_end() -> None:
    capped = render_kernel(_forward(SERVED["cap"])).source
    assert "score = tanh_f32(score * 0.0029462783f);" in capped
    assert "exp2_f32(fmaf(left, FACTOR, -shift))" in capped
    biased = render_kernel(_forward(SERVED["alibi"])).source
    assert re.search(r"score = score \* [\d.]+f \+ column_0;", biased)
    assert "row_shift = row_0;" in biased


@pytest.mark.parametrize("index", range(len(PREFILL)))
def test_every_row_of_the_table_fits_a_multiprocessor(index: int) -> None:
    row = PREFILL[index]
    mask = ag.Document("ids") if row.masked is not False else ag.Full()
    dtype = "fp8_e4m3" if row.kv_bits == 8 and not row.widened else "bf16"
    kv = ag.Contiguous(dtype="int8") if row.widened else ag.Contiguous()
    wide = _spec((row.head_dim, row.head_dim), mask=mask, dtype=dtype, kv=kv)
    plan = replace(_forward(wide), tiles=row.tiles)
    assert launch_shape(plan)[1] <= SHARED
    assert row.tiles.maps
    assert row.tiles.q == 64 * (row.tiles.num_warps // 4 - 1)


@pytest.mark.parametrize(
    ("mask", "page", "tile", "rows"),
    [
        (CAUSAL, 8, 80, 8),
        (CAUSAL, 24, 80, 8),
        (CAUSAL, 64, 80, 16),
        (CAUSAL & ag.SlidingWindow(left=100), 64, 128, 64),
        (CAUSAL & ag.SlidingWindow(left=100), 256, 128, 128),
        (ag.Full(), 64, 176, 16),
    ],
    ids=lambda value: value.kind if isinstance(value, ag.MaskMod) else str(value),
)
def test_a_copy_stays_in_a_page(mask: ag.MaskMod, page: int, tile: int, rows: int) -> None:
    plan = _forward(_spec(mask=mask, kv=ag.Paged(page)))
    assert plan.tiles.kv == tile
    assert map_boxes(plan) == [(1, 1, n, 64) for n in (64, rows, rows)]  # of queries, keys and values


def test_lists_of_tiles_have_powers_of_two() -> None:
    for dims in ((64, 64), (128, 128), (192, 128), (256, 256)):
        tiles = _forward(_spec(dims, mask=ag.Document("ids"))).tiles
        assert {tiles.q, tiles.kv} <= {64, 128}


def test_what_columns_read_is_gathered() -> None:
    source = render_kernel(_forward(SERVED["documents"])).source
    assert "gather(masked, item, column);" in source
    assert "column_0 = column_0_at[" in source


def test_slow_builds_take_other_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))
    spec = _spec(mask=ag.Document("ids") & CAUSAL)
    first = plan_op(spec, "prefill", H200, "cuda")
    build = CudaBackend.build

    def picky(self: CudaBackend, kernel: RenderedKernel, folder: Path) -> BuildResult:
        if f"TILE_KV = {first.kernel('forward').tiles.kv};" in kernel.source:
            raise SlowKernelError(f"{kernel.entry} is slow", why="300 bytes of registers spill")
        return build(self, kernel, folder)

    monkeypatch.setattr(CudaBackend, "build", picky)
    ops = ag.compile(spec, target="cuda:sm90a", ops=["prefill"], backend="cuda")
    plan = ops.op("prefill").plan
    lists, forward = plan.kernel("key_lists"), plan.kernel("forward")
    assert (forward.backend, forward.tiles.kv) == ("cuda", 64)
    assert (lists.tiles.q, lists.tiles.kv) == (forward.tiles.q, forward.tiles.kv)
    assert "with tiles of 128 x 128: 300 bytes of registers spill; others are tried" in caplog.text


def test_without_other_tiles_triton_takes_over() -> None:
    plan = plan_op(_spec(), "prefill", H200, "cuda")
    while (forward := plan.kernel("forward")).backend == "cuda":
        plan = retile(plan, forward)
    assert [k.backend for k in plan.kernels] == ["triton"] * len(plan.kernels)


def test_warnings_of_ptxas_are_read() -> None:
    log = "ptxas info : (C7512) Potential Performance Loss: wgmma\n 8 bytes stack frame, 12 bytes spill stores\nUsed 168 registers"
    assert resources(log) == {"registers": 168, "spills": 12, "serialized": 7512}


def test_flags_tell_the_launch() -> None:
    plan = _forward(SERVED["full"])
    assert plan.is_resident
    assert CudaBackend().flags(plan)[-2:] == tuple(
        f"launch:{x}" for x in ("threads=384", f"shared={launch_shape(plan)[1]}")
    )
