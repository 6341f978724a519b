"""C58: two variants share a cache entry because a field that changes the code is missing from the key.

fp8 formats and sinks of the case do not exist here; LSE is always made; tiles and warps are no fields of a spec.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

import attngen as ag
from attngen.compiler import plan_op, render_kernel
from attngen.store import source_digest
from attngen.target import Target
from tests.acceptance.probes import Place, Request, assert_near, attend, band, declare, exact, noise, probe

QO_LEN, KV_LEN = 4, 200
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Meaning:
    """A spec and what it must compute."""

    spec: ag.AttentionSpec
    visible: torch.Tensor = field(default_factory=lambda: band(QO_LEN, KV_LEN, 127))
    modify: Callable[[torch.Tensor], torch.Tensor] = lambda score: 30 * torch.tanh(score / 30)
    sm_scale: float | None = None


def based_on(**changes: object) -> ag.AttentionSpec:
    fields = {"mask": ag.Causal() & ag.SlidingWindow(left=127), "score_mods": (ag.SoftCap(cap=30),), **changes}
    return declare(4, 2, **fields)


def masked(mask: ag.MaskMod, visible: torch.Tensor) -> Meaning:
    return Meaning(based_on(mask=mask), visible)


def every(step: int) -> ag.MaskMod:
    @ag.mask_mod
    def kept(b, h, q, k):
        return (q - k) % step == 0

    return kept


def shifted(constant: float) -> ag.ScoreMod:
    @ag.score_mod
    def shift(score, b, h, q, k):
        return score * constant

    return shift


POSITION = torch.arange(QO_LEN)[:, None] + KV_LEN - QO_LEN
DISTANCE = POSITION - torch.arange(KV_LEN)
top_left = ag.CustomMask(name="top_left", expression="k <= q - kv_len + qo_len")


@ag.mask_mod
def odd(b, h, q, k):
    return (q - k) % 2 == 1


BASE = Meaning(based_on())
CHANGES: dict[str, tuple[Meaning, Meaning]] = {
    "softcap 30 -> 50": (
        BASE,
        Meaning(based_on(score_mods=(ag.SoftCap(cap=50),)), modify=lambda s: 50 * torch.tanh(s / 50)),
    ),
    "softcap 30 -> none": (BASE, Meaning(based_on(score_mods=()), modify=lambda s: s)),
    "window 127 -> 128": (BASE, masked(ag.Causal() & ag.SlidingWindow(left=128), band(QO_LEN, KV_LEN, 128))),
    "left <-> right": (
        masked(ag.SlidingWindow(left=3, right=1), (DISTANCE <= 3) & (DISTANCE >= -1)),
        masked(ag.SlidingWindow(left=1, right=3), (DISTANCE <= 1) & (DISTANCE >= -3)),
    ),
    "scale": (BASE, Meaning(based_on(sm_scale=0.25), sm_scale=0.25)),
    "page size": (Meaning(based_on(kv=ag.Paged(page_size=16))), Meaning(based_on(kv=ag.Paged(page_size=32)))),
    "storage": (BASE, Meaning(based_on(kv=ag.Ragged()))),
    "dtype": (BASE, Meaning(based_on(dtype="bf16"))),
    "causal alignment": (masked(ag.Causal(), band(QO_LEN, KV_LEN)), masked(top_left, DISTANCE >= KV_LEN - QO_LEN)),
    "d_v": (BASE, Meaning(based_on(heads=ag.GQA(num_qo_heads=4, num_kv_heads=2, head_dim=64, head_dim_vo=32)))),
    "heads": (BASE, Meaning(based_on(heads=ag.GQA(num_qo_heads=4, num_kv_heads=4, head_dim=64)))),
    "mask expression": (masked(every(2), DISTANCE % 2 == 0), masked(odd, DISTANCE % 2 == 1)),
    "captured by the mask": (masked(every(2), DISTANCE % 2 == 0), masked(every(3), DISTANCE % 3 == 0)),
    "captured by the score": (
        Meaning(based_on(score_mods=(shifted(0.5),)), modify=lambda s: s * 0.5),
        Meaning(based_on(score_mods=(shifted(0.25),)), modify=lambda s: s * 0.25),
    ),
}
SAME_RESULT = {"page size", "storage"}
EACH_CHANGE = pytest.mark.parametrize("change", CHANGES)


def key(place: Place, spec: ag.AttentionSpec) -> list[str]:
    kernels = place.compile(spec).op("prefill", torch.device(place.device)).kernels
    return [kernel.folder.parent.name for kernel in kernels]


def call(place: Place, meaning: Meaning) -> list[torch.Tensor]:
    """Outputs on random data, whose logits are so large that a cap of 30 bends them, and on probe data; both right."""
    random, outs = noise(meaning.spec, QO_LEN, KV_LEN), []
    for request in (Request(random.q * 16, random.k, random.v), probe(meaning.spec, QO_LEN, KV_LEN)):
        (state,) = attend(place, meaning.spec, "prefill", [request])
        want = exact(request, meaning.visible, modify=meaning.modify, sm_scale=meaning.sm_scale)
        assert_near(state.out, want.out)
        assert_near(state.lse, want.lse, atol=1e-2)
        outs.append(state.out.float())
    return outs


def tells_apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape != other.shape or not torch.allclose(one, other, atol=4e-2)


@EACH_CHANGE
def test_c58_each_change_has_its_own_key_and_result(kernels: Place, change: str) -> None:
    first, second = CHANGES[change]
    assert not set(key(kernels, first.spec)) & set(key(kernels, second.spec))
    results = zip(call(kernels, first), call(kernels, second), strict=True)
    assert any(tells_apart(*pair) for pair in results) == (change not in SAME_RESULT)


def all_keys(place: Place) -> dict[str, list[str]]:
    return {change: [key(place, meaning.spec) for meaning in pair] for change, pair in CHANGES.items()}


def test_c58_another_process_finds_the_same_entries(kernels: Place) -> None:
    mine = all_keys(kernels)
    program = (
        "import json\n"
        "from tests.acceptance.probes import Place\n"
        "from tests.acceptance.test_c58 import all_keys\n"
        f"print(json.dumps(all_keys({kernels!r})))\n"
    )
    env = {**os.environ, "ATTNGEN_REQUIRE_CACHED": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    child = subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(child.stdout) == mine


HEADS = ag.GQA(num_qo_heads=8, num_kv_heads=8, head_dim=64)
SPELLINGS = {
    "50 or 50.0": [declare(score_mods=(ag.SoftCap(cap=cap),)) for cap in (50, 50.0)],
    "field order": [
        ag.AttentionSpec.model_validate({"heads": HEADS, "dtype": "fp16", "mask": {"kind": "causal"}}),
        ag.AttentionSpec.model_validate({"mask": {"kind": "causal"}, "dtype": "fp16", "heads": HEADS}),
    ],
    "default or omitted": [
        ag.AttentionSpec(heads=HEADS),
        ag.AttentionSpec(
            heads=HEADS.model_copy(update={"head_dim_vo": 64}),
            mask=ag.Full(),
            score_mods=(),
            normalizer=ag.Softmax(),
            sm_scale=64**-0.5,
            dtype="bf16",
            kv=ag.Contiguous(dtype="bf16"),
            out_dtype="bf16",
        ),
    ],
    "kind of heads": [declare(heads=HEADS), declare(heads=ag.MHA(num_heads=8, head_dim=64))],
    "one key head": [declare(4, 1), declare(heads=ag.MQA(num_qo_heads=4, head_dim=64))],
    "name": [declare(), declare(name="something else")],
    "a mask that hides nothing": [declare(mask=ag.Causal()), declare(mask=ag.Causal() & ag.Full())],
    "layout of pages": [declare(kv=ag.Paged(page_size=16, layout=layout)) for layout in ("NHD", "HND")],
    "read from a file": [BASE.spec, ag.AttentionSpec.model_validate_json(BASE.spec.model_dump_json())],
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(("backend", "target"), [("cpp", "cpu"), ("triton", "cuda:sm90a")])
def test_c58_equal_specs_share_their_keys(backend: str, target: str, spelling: str) -> None:
    keys = []
    for spec in SPELLINGS[spelling]:
        plans = [plan_op(spec, op, Target.parse(target), backend) for op in ("prefill", "decode")]
        keys.append([source_digest(render_kernel(kernel)) for plan in plans for kernel in plan.kernels])
    assert keys[0] == keys[1]
