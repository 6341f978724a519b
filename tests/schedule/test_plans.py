"""Plans: names, bounds and the numbers of programs."""

from __future__ import annotations

import pytest

import attngen as ag
from attngen.compiler import plan_op
from attngen.ir.scalar import evaluate_scalar
from attngen.ops.kernels import tiles_of
from attngen.schedule import hopper, retile, tile_candidates
from attngen.target import Target

SHORT = ("", "_short")  # heads that share keys have a kernel for short requests
CPU, H200 = Target.parse("cpu:x86-64-v3"), Target.parse("cuda:sm90a")


@pytest.mark.parametrize(
    ("name", "op", "entries"),
    [
        ("mistral-7b", "prefill", [f"prefill{short}_causal_window4095_gqa4_bf16_d128" for short in SHORT]),
        ("qwen3-8b", "decode", ["decode_causal_gqa4_page16_bf16_d128", "decode_merge_causal_gqa4_page16_bf16_d128"]),
        (
            "llama3-70b-int4",
            "decode",
            [f"decode{merge}_causal_gqa8_page16_kv_int4_bf16_d128" for merge in ("", "_merge")],
        ),
        ("llama3-70b", "prefill", [f"prefill{short}_causal_gqa8_ragged_bf16_d128" for short in SHORT]),
        ("gemma2-9b-global", "prefill", [f"prefill{short}_causal_softcap50_gqa2_bf16_d256" for short in SHORT]),
        ("falcon-7b", "prefill", [f"prefill{short}_causal_mqa71_bf16_d64" for short in SHORT]),
        ("minilm", "backward", [f"backward_{part}_full_fp32_d32" for part in ("delta", "dkdv", "dq")]),
    ],
)
def test_entry_names_say_what_a_kernel_does(name: str, op: str, entries: list[str]) -> None:
    plan = plan_op(ag.load_spec(name), op, H200, "triton")
    assert [kernel.entry for kernel in plan.kernels] == entries


@pytest.mark.parametrize(
    ("name", "target", "maps"),
    [
        ("llama3-70b", "cuda:sm90a", True),  # ragged
        ("mistral-7b", "cuda:sm90a", True),
        ("qwen3-8b", "cuda:sm90a", False),  # paged
        ("falcon-7b", "cuda:sm90a", False),  # head dim 64
        ("llama3-70b", "cuda:sm80", False),
        ("llama3-70b", "hip:gfx942", False),
    ],
)
def test_tensor_maps_serve_adjacent_keys_on_hopper(name: str, target: str, maps: bool) -> None:
    plan = plan_op(ag.load_spec(name), "prefill", Target.parse(target), "triton").kernel("forward")
    assert [arg.name for arg in plan.args if arg.is_map] == (["k_tiles", "v_tiles"] if maps else [])
    assert plan.tiles.maps == maps


def test_bounds_of_a_causal_window_are_tight() -> None:
    spec = ag.AttentionSpec(heads=ag.MHA(2, 64), mask=ag.Causal() & ag.SlidingWindow(left=100), dtype="fp32")
    kernel = plan_op(spec, "prefill", CPU, "cpp").kernels[0]
    tile = {"q0": 256, "q1": 383}
    ends = [
        evaluate_scalar(end, tile) for end in (kernel.keys.lo, kernel.keys.hi, kernel.keys.full_lo, kernel.keys.full_hi)
    ]
    assert ends == [156, 383, 283, 256]
    assert kernel.keys.exact


def test_bounds_of_packed_kernels_do_not_ask_for_the_head() -> None:
    @ag.mask_mod
    def per_head_window(b, h, q, k):
        return (q - k <= 10 * (h + 1)) & (k <= q)

    spec = ag.AttentionSpec(heads=ag.GQA(4, 2, 64), mask=per_head_window, dtype="fp32")
    prefill = plan_op(spec, "prefill", CPU, "cpp").kernels[0]
    decode = plan_op(spec, "decode", CPU, "cpp").kernels[0]
    assert evaluate_scalar(prefill.keys.lo, {"q0": 500, "q1": 563, "h": 2}) == 470
    assert decode.keys.lo is None
    assert evaluate_scalar(decode.keys.hi, {"q0": 500, "q1": 563}) == 563


def test_tiles_over_requests() -> None:
    assert tiles_of(64, batch=3, padded_len=130, rows=390, layout="padded") == 9
    assert tiles_of(64, batch=3, padded_len=0, rows=130, layout="ragged") == 5  # 130 // 64 + 3: enough for any division
    assert tiles_of(64, batch=0, padded_len=0, rows=0, layout="padded") == 0


def test_every_division_of_ragged_rows_fits_the_grid() -> None:
    for lens in ([130, 0, 0], [64, 65, 1], [1, 1, 128], [43, 43, 44]):
        needed = sum(-(-n // 64) for n in lens)
        assert needed <= tiles_of(64, batch=3, padded_len=0, rows=sum(lens), layout="ragged")


def test_short_requests_of_grouped_heads_have_a_kernel_of_their_own() -> None:
    heads = {"heads": ag.GQA(8, 2, 64), "mask": ag.Causal()}
    kernels = plan_op(ag.AttentionSpec(**heads, kv=ag.Ragged()), "prefill", H200, "triton").kernels
    assert [(kernel.role, kernel.serves, kernel.packed, kernel.split) for kernel in kernels] == [
        ("forward", "long", False, False),
        ("forward_short", "short", True, False),
    ]
    assert {kernel.short_queries for kernel in kernels} == {16}
    for fields in ({**heads, "heads": ag.MHA(8, 64)}, {**heads, "dropout": 0.1}):
        (only,) = plan_op(ag.AttentionSpec(**fields), "prefill", H200, "triton").kernels
        assert (only.serves, only.packed) == ("all", False)


@pytest.mark.parametrize(
    ("fields", "kernels"),
    [
        ({"mask": ag.Causal()}, "triton:delta cuda:dqkv cuda:dq_cast"),
        ({"mask": ag.Causal() & ag.Document("doc_ids")}, "triton:delta triton:query_lists cuda:dqkv cuda:dq_cast"),
        ({"normalizer": ag.Softmax(sink="sinks"), "output_gate": "gate"}, "triton:delta cuda:dqkv cuda:dq_cast"),
        ({"dtype": "fp32"}, "triton:delta triton:dkdv triton:dq"),
        ({"normalizer": ag.Sigmoid()}, "triton:dkdv triton:dq"),
        ({"dropout": 0.1}, "triton:delta triton:dkdv triton:dq"),
        ({"rope": ag.Rope()}, "triton:delta triton:dkdv triton:dq"),
        ({"score_mods": (ag.ALiBi("slopes"),)}, "triton:delta triton:dkdv triton:dq"),
    ],
)
def test_one_walk_makes_all_gradients_on_hopper(fields: dict[str, object], kernels: str) -> None:
    spec = ag.AttentionSpec(heads=ag.GQA(num_qo_heads=4, num_kv_heads=2, head_dim=128), **fields)
    plan = plan_op(spec, "backward", H200, "cuda")
    assert " ".join(f"{kernel.backend}:{kernel.schedule}" for kernel in plan.kernels) == kernels
    exact = plan_op(spec, "backward", H200, "cuda", deterministic=True)
    assert exact.deterministic
    assert "dqkv" not in [kernel.schedule for kernel in exact.kernels]
    assert plan.deterministic == (plan == exact)


@pytest.mark.parametrize("head_dim", [16, 32, 40, 64, 72, 96, 128, 136, 192, 256])
def test_tiles_of_one_walk_fit_shared_memory(head_dim: int) -> None:
    plan = plan_op(ag.AttentionSpec(heads=ag.MHA(4, head_dim)), "backward", H200, "cuda")
    served = [kernel for kernel in plan.kernels if kernel.schedule == "dqkv"]
    assert bool(served) == (head_dim > 32)
    for kernel in served:
        threads, shared = hopper.launch_shape(kernel)
        assert kernel.tiles.by_product == (head_dim > 128)
        assert threads == 128 * (1 + (3 if kernel.tiles.by_product else kernel.tiles.kv // 64))
        assert shared <= 227 << 10
        assert len(kernel.warpgroup_registers) == threads // 128
        assert sum(kernel.warpgroup_registers) <= 512
        assert all(count % 8 == 0 and 24 <= count <= 240 for count in kernel.warpgroup_registers)


def test_tiles_of_one_walk_that_do_not_fit_are_no_candidates() -> None:
    def sizes(head_dim: int, head_dim_vo: int) -> list[int]:
        spec = ag.AttentionSpec(heads=ag.MHA(4, head_dim, head_dim_vo=head_dim_vo))
        kernel = plan_op(spec, "backward", H200, "cuda").kernel("dqkv")
        return [tiles.q for tiles in (kernel.tiles, *tile_candidates(kernel))]

    assert sizes(256, 256) == [64]
    assert sizes(192, 192) == [80, 64]  # two stages of 96 queries do not fit shared memory
    assert sizes(192, 128) == [96, 80, 64]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mods", [(), (ag.SoftCap(cap=20.0),)])
def test_kernels_of_one_walk_are_tiled_alike_and_in_the_end_tritons(
    head_dim: int, mods: tuple[ag.SoftCap, ...]
) -> None:
    spec = ag.AttentionSpec(heads=ag.MHA(4, head_dim), mask=ag.Document("doc_ids"), score_mods=mods)
    plan, seen = plan_op(spec, "backward", H200, "cuda"), []
    while plan.backend == "cuda":
        walk = plan.kernel("dqkv")
        assert walk.tiles not in seen
        seen.append(walk.tiles)
        assert plan.kernel("dq_cast").tiles == walk.tiles
        assert (plan.kernel("query_lists").tiles.q, plan.kernel("query_lists").tiles.kv) == (
            walk.tiles.q,
            walk.tiles.kv,
        )
        plan = retile(plan, walk)
    assert len(seen) == (1 if head_dim == 256 else 3 if head_dim == 64 and not mods else 2)
    assert plan == plan_op(spec, "backward", H200, "triton")
