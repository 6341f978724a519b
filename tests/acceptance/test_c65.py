"""C65: float constants in generated source lose digits, or are no valid tokens."""

from __future__ import annotations

import json
import math
import re
import struct

import pytest
import torch

import attngen as ag
from attngen.compiler import plan_op, render_kernel
from attngen.target import Target
from tests.acceptance.probes import Place, Request, assert_near, attend, declare, probe

SCALES = (72**-0.5, 1 / 3, 1e-20, 1.0, 1e-40)
CAPS = (30, 50.0, 1e10)
EACH_BACKEND = pytest.mark.parametrize(
    ("backend", "target"), [("cpp", "cpu"), ("triton", "cuda:sm90a"), ("triton", "hip:gfx942")]
)


def source(spec: ag.AttentionSpec, backend: str, target: str) -> str:
    plans = [plan_op(spec, op, Target.parse(target), backend) for op in ("prefill", "decode", "backward")]
    return "\n".join(render_kernel(kernel).source for plan in plans for kernel in plan.kernels)


def float32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def literals(text: str) -> set[float]:
    """Every floating literal of a source, as the float32 that it denotes."""
    found = re.findall(r"(?<![\w.])\d+(?:\.\d*(?:e[+-]?\d+)?|e[+-]?\d+)(?=f?\b|f?$)", text)
    return {float32(float(token)) for token in found}


@EACH_BACKEND
@pytest.mark.parametrize("scale", SCALES)
def test_c65_scale_is_exact(scale: float, backend: str, target: str) -> None:
    assert float32(scale) in literals(source(declare(sm_scale=scale), backend, target))


@EACH_BACKEND
@pytest.mark.parametrize("cap", CAPS)
def test_c65_cap_is_exact(cap: float, backend: str, target: str) -> None:
    found = literals(source(declare(score_mods=(ag.SoftCap(cap=cap),)), backend, target))
    assert float32(cap) in found
    assert float32(1 / cap) in found


@EACH_BACKEND
def test_c65_equal_numbers_give_equal_source(backend: str, target: str) -> None:
    whole, fraction = (source(declare(score_mods=(ag.SoftCap(cap=cap),)), backend, target) for cap in (30, 30.0))
    assert whole == fraction


@pytest.mark.parametrize("cap", [math.inf, -math.inf, math.nan, 0, 0.0, -1])
def test_c65_senseless_caps_are_refused(cap: float) -> None:
    with pytest.raises(ag.SpecError, match=r"where: SoftCap\.cap\n"):
        ag.SoftCap(cap=cap)


@pytest.mark.parametrize("scale", [math.inf, -math.inf, math.nan])
def test_c65_senseless_scales_are_refused(scale: float) -> None:
    with pytest.raises(ag.SpecError, match=r"where: AttentionSpec\.sm_scale\n"):
        declare(sm_scale=scale)


def two_logits(spec: ag.AttentionSpec, dot: float) -> Request:
    """Dot products 0 and ``dot`` of values 0 and 1."""
    request = probe(spec, 1, 2)
    q, k = torch.zeros_like(request.q), torch.zeros_like(request.k)
    q[..., 0], k[1, :, 0] = math.sqrt(dot), math.sqrt(dot)
    return Request(q, k, request.v)


@pytest.mark.parametrize("scale", SCALES)
def test_c65_scaled_logits(place: Place, scale: float) -> None:
    spec = declare(sm_scale=scale, dtype="fp32")
    dot = min(1 / scale, 1e38)
    (state,) = attend(place, spec, "prefill", [two_logits(spec, dot)])
    assert_near(state.out, 1 / (1 + math.exp(-dot * scale)), atol=1e-5 if not place.on_gpu else 5e-3)


@pytest.mark.parametrize("cap", CAPS)
def test_c65_capped_logits(place: Place, cap: float) -> None:
    spec = declare(sm_scale=1.0, dtype="fp32", score_mods=(ag.SoftCap(cap=cap),))
    (state,) = attend(place, spec, "prefill", [two_logits(spec, 2.0)])
    assert_near(state.out, 1 / (1 + math.exp(-cap * math.tanh(2 / cap))), atol=1e-4)


@EACH_BACKEND
def test_c65_user_text_stays_out_of_source(backend: str, target: str) -> None:
    evil = '*/ } int main() { system("true"); } /* """\nimport os #'
    spec = declare(name=evil)
    assert source(spec, backend, target) == source(declare(), backend, target)


@pytest.mark.parametrize(
    "expression", ["__import__('os').system('true')", "q <= k); system(0", "k <= evil", "q.__class__"]
)
def test_c65_user_expressions_are_parsed(expression: str) -> None:
    declared = {"kind": "custom", "name": "evil", "expression": expression}
    with pytest.raises(ag.SpecError):
        ag.AttentionSpec.model_validate_json(
            json.dumps({"heads": {"kind": "mha", "num_heads": 1, "head_dim": 64}, "mask": declared})
        )
    with pytest.raises(ag.SpecError, match="name"):
        ag.CustomMask(name="evil */", expression="k <= q")
