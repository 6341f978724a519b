"""Settings of the whole test run."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("ATTNGEN_CACHE_DIR", str(Path(__file__).resolve().parents[1] / "cache"))

import pytest
import torch

from tests.acceptance.probes import CPP, REFERENCE, TRITON, Place, on_gpu


@pytest.fixture(autouse=True)
def _poisoned_memory() -> None:
    """Fill uninitialized memory with NaN, so that an element no kernel wrote is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture(params=[REFERENCE, CPP, on_gpu(TRITON)], ids=str)
def place(request: pytest.FixtureRequest) -> Place:
    """Every backend, the oracle included."""
    return request.param


@pytest.fixture(params=[CPP, on_gpu(TRITON)], ids=str)
def kernels(request: pytest.FixtureRequest) -> Place:
    """Backends that compile kernels."""
    return request.param
