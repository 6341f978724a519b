"""Lists of tiles name every tile that is visible, once, and take none as whole that is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.numerics.lists import cases, faults, judged
from tests.numerics.worker import ROOT


@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case.name}-{case.spec.kv.kind}")
def test_lists_of_cpp(case) -> None:
    assert list(faults(case, None, "cpp")) == []


def test_lists_of_triton() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.numerics.lists", "interpret", "triton"]
    child = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=True)
    assert json.loads(child.stdout.splitlines()[-1]) == []


def test_the_judge_sees_faults() -> None:
    rows = torch.zeros(4, 8, dtype=torch.bool)
    rows[:, :4] = True
    assert list(judged(rows, 4, [], [0])) == []
    assert list(judged(rows, 4, [0], [0])) == ["a tile is listed twice"]
    assert list(judged(rows, 4, [1], [])) == ["tile 0 is missing"]
    assert list(judged(rows, 4, [0], [1])) == ["tile 1 is not visible as a whole"]
