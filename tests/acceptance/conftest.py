"""Where a case runs: on the CPU always, on a GPU under the marker ``gpu``."""

from __future__ import annotations

import pytest

from tests.acceptance.probes import CPP, REFERENCE, TRITON, Place, on_gpu


@pytest.fixture(params=[REFERENCE, CPP, on_gpu(TRITON)], ids=str)
def place(request: pytest.FixtureRequest) -> Place:
    """Every backend, the oracle included."""
    return request.param


@pytest.fixture(params=[CPP, on_gpu(TRITON)], ids=str)
def kernels(request: pytest.FixtureRequest) -> Place:
    """Backends that compile kernels."""
    return request.param
