"""Every case in fp32 and fp16 through the rendered Triton kernels, run by Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest

from tests.numerics.worker import run_in_child, suite_cases

CHUNK = 9
COUNT = len(suite_cases("interpret"))


@pytest.mark.parametrize("start", range(0, COUNT, CHUNK))
def test_matches_the_oracle(start: int) -> None:
    outcomes = run_in_child("interpret", start, min(start + CHUNK, COUNT), timeout=600)
    assert len(outcomes) == min(CHUNK, COUNT - start)
    assert not [outcome for outcome in outcomes if outcome.failures]
