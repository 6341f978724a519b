"""Every case on a real GPU, in watched processes of a few."""

from __future__ import annotations

import pytest

from tests.numerics.worker import run_in_child, suite_cases

# Cases of a process: of the corpus, each with kernels of its own; of random variants, several lengths each.
CHUNKS = {"cuda": 14, "draws": 50}
COUNTS = {suite: len(suite_cases(suite)) for suite in CHUNKS}

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("suite", "start"), [(suite, start) for suite in CHUNKS for start in range(0, COUNTS[suite], CHUNKS[suite])]
)
def test_matches_the_oracle(suite: str, start: int) -> None:
    stop = min(start + CHUNKS[suite], COUNTS[suite])
    outcomes = run_in_child(suite, start, stop, timeout=400)
    assert len(outcomes) == stop - start
    assert not [outcome for outcome in outcomes if outcome.failures]
