"""Every backend draws the same words for the same positions, also of keys that start within a block of four."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.numerics.dropout import errors
from tests.numerics.worker import ROOT


def test_dropout_of_cpp() -> None:
    assert max(errors(None, "cpp")) < 1e-5


def test_dropout_of_triton() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.numerics.dropout", "interpret", "triton"]
    child = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=True)
    assert max(json.loads(child.stdout.splitlines()[-1])) < 1e-5
