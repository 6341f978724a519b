"""What a tuning tries in place of the tiles of CUDA kernels gives the same results: on the CPU, thread by thread."""

from __future__ import annotations

import pytest
import torch

import attngen as ag
from attngen.compiler import plan_op
from attngen.schedule import tile_candidates, with_tiles
from attngen.schedule.hopper import launch_shape
from attngen.tuner import difference
from attngen.variant import OpName
from attngen.workload import Shape, random_call
from tests.backends.cuda_host.emulator import HOPPER, HostOp

ONE, CAUSAL = ag.MHA(1, 128), ag.Causal()
CASES: dict[str, tuple[ag.AttentionSpec, OpName]] = {
    "causal": (ag.AttentionSpec(heads=ONE, mask=CAUSAL), "prefill"),
    "full": (ag.AttentionSpec(heads=ONE), "prefill"),
    "narrow": (ag.AttentionSpec(heads=ag.MHA(1, 64), mask=CAUSAL), "prefill"),
    "wide": (ag.AttentionSpec(heads=ag.MHA(1, 192), mask=CAUSAL, score_mods=(ag.ALiBi(),)), "prefill"),
    "fp8": (ag.AttentionSpec(heads=ONE, mask=CAUSAL, dtype="fp8_e4m3"), "prefill"),
    "int8-prefill": (ag.AttentionSpec(heads=ONE, mask=CAUSAL, kv=ag.Contiguous(dtype="int8")), "prefill"),
    "paged": (ag.AttentionSpec(heads=ONE, mask=CAUSAL, kv=ag.Paged(page_size=16)), "prefill"),
    "documents": (ag.AttentionSpec(heads=ONE, mask=CAUSAL & ag.Document("ids")), "prefill"),
    "int4": (ag.AttentionSpec(heads=ag.GQA(4, 1, 128), mask=CAUSAL, kv=ag.Paged(16, dtype="int4")), "decode"),
    "nvfp4": (ag.AttentionSpec(heads=ag.GQA(4, 1, 128), mask=CAUSAL, kv=ag.Paged(16, dtype="nvfp4")), "decode"),
    "backward": (ag.AttentionSpec(heads=ag.MHA(1, 64), mask=CAUSAL), "backward"),
    "wide-backward": (ag.AttentionSpec(heads=ag.MHA(1, 192, head_dim_vo=128), mask=CAUSAL), "backward"),
}


@pytest.mark.parametrize("case", CASES)
def test_candidates_give_the_results_of_the_table(case: str) -> None:
    spec, op = CASES[case]
    plan = plan_op(spec, op, HOPPER, "cuda")
    forward = HostOp(spec, plan_op(spec, "prefill", HOPPER, "cuda"), 0) if op == "backward" else None
    shape = Shape(1, 300, 0 if op == "backward" else 300 if op == "prefill" else 1)
    call = random_call(spec, plan.variant, op, shape, torch.device("cpu"), forward)
    wanted, tried = call.results(HostOp(spec, plan, 0)), 0
    for kernel in (kernel for kernel in plan.kernels if kernel.backend == "cuda"):
        for tiles in tile_candidates(kernel):
            other = with_tiles(plan, kernel.role, tiles)
            if launch_shape(other.kernel(kernel.role))[1] > 227 << 10:
                continue  # the backend refuses it
            tried += 1
            assert difference(call.results(HostOp(spec, other, tried)), wanted, 0.04) == "", tiles
    assert tried


def test_tiles_that_a_product_does_not_divide_are_never_chosen() -> None:
    """Values of fp8 are multiplied 32 at a time; the table has tiles of 112 keys, for numbers of 16 bits."""
    spec, _ = CASES["fp8"]
    kernel = plan_op(spec, "prefill", HOPPER, "cuda").kernel("forward")
    assert all(tiles.kv % 32 == 0 for tiles in (kernel.tiles, *tile_candidates(kernel)))
