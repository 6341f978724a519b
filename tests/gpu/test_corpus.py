"""Every case on a real GPU, in watched processes of a few."""

from __future__ import annotations

import pytest

from tests.numerics.worker import run_in_child, suite_cases

CHUNK = 14
COUNT = len(suite_cases("cuda"))

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("start", range(0, COUNT, CHUNK))
def test_matches_the_oracle(start: int) -> None:
    outcomes = run_in_child("cuda", start, min(start + CHUNK, COUNT), timeout=400)
    assert len(outcomes) == min(CHUNK, COUNT - start)
    assert not [outcome for outcome in outcomes if outcome.failures]
