"""Every case, and some random ones, on the CPU backend against the oracle."""

from __future__ import annotations

import pytest

import attngen as ag
from tests.numerics.cases import corpus
from tests.numerics.draws import draws
from tests.numerics.harness import Case, run_case


@pytest.mark.parametrize(
    "case", [*corpus(), *draws(16, ("fp32", "bf16", "fp16"))], ids=lambda case: f"{case.name}-{case.spec.dtype}"
)
def test_matches_the_oracle(case: Case) -> None:
    verdict = run_case(case, ag.compile(case.spec, backend="cpp"))
    assert not verdict.failures, verdict
    assert verdict.errors
