"""Parameters may have any name, also one that kernels use themselves."""

from __future__ import annotations

import pytest
import torch

import attngen as ag
from attngen.codegen.printer import float32_literal


@pytest.mark.parametrize(
    "name", ["out", "lse", "run", "logit", "tile", "int", "for_", "qo_len_", "tl", "visit", "row_max"]
)
def test_a_parameter_cannot_collide_with_the_kernel(name: str) -> None:
    mod = ag.CustomScoreMod(
        name="bias",
        expression=f"score + {name}[h]",
        parameters=[{"name": name, "dims": ["num_qo_heads"]}],
    )
    spec = ag.AttentionSpec(heads=ag.MHA(2, 16), score_mods=(mod,), dtype="fp32")
    q, k, v = (torch.randn(1, 3, 2, 16) for _ in range(3))
    params = {name: torch.tensor([0.5, -0.25])}
    got = ag.compile(spec, backend="cpp").prefill(q, k, v, params=params, return_lse=True)
    exact = ag.compile(spec, backend="reference").prefill(q, k, v, params=params, return_lse=True)
    torch.testing.assert_close(got, exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("value", [1 / 72**0.5, 1 / 3, 1e-20, 1.0, 1e-40, 30.0, 50, 1e10, -2.5, 0.1, 3.4028235e38])
def test_literals_read_back_as_the_same_float32(value: float) -> None:
    import struct

    text = float32_literal(value)
    assert struct.pack("<f", float(text)) == struct.pack("<f", value)
    assert any(c in text for c in ".e")


def test_literals_are_short() -> None:
    assert [float32_literal(x) for x in (50.0, 30, 0.1, 1 / 3, 1e20)] == ["50.0", "30.0", "0.1", "0.33333334", "1e+20"]
    with pytest.raises(ag.SpecError, match="does not fit float32"):
        float32_literal(1e39)
