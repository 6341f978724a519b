"""Settings of the whole test run."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("ATTNGEN_CACHE_DIR", str(Path(__file__).resolve().parents[1] / "cache"))

import pytest
import torch


@pytest.fixture(autouse=True)
def _poisoned_memory() -> None:
    """Fill uninitialized memory with NaN, so that an element no kernel wrote is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
