"""Every storage of keys and values in every layout that an engine keeps, read by decode and by prefill."""

from __future__ import annotations

from typing import Any

import pytest

import attngen as ag
from tests.acceptance.probes import Place
from tests.numerics.axes import declare
from tests.numerics.harness import Case, run_case
from tests.numerics.stored_cases import STORAGES

# Which storage a cache is of, and how it is passed: the paged ones share their kernels.
LAYOUTS: tuple[tuple[type, dict[str, Any], str], ...] = (
    (ag.Contiguous, {}, "table"),
    (ag.Ragged, {}, "table"),
    (ag.Paged, {"page_size": 8}, "table"),
    (ag.Paged, {"page_size": 8}, "csr"),
    (ag.Paged, {"page_size": 8}, "stacked"),
    (ag.Paged, {"page_size": 8, "stack_dim": 0}, "stacked"),
    (ag.Paged, {"page_size": 8, "layout": "HND"}, "csr"),
    (ag.Paged, {"page_size": 8, "layout": "HND"}, "stacked"),
    (ag.Paged, {"page_size": 8, "layout": "HND", "stack_dim": 0}, "stacked"),
)
LENS = {"decode": ((1, 1, 1), (1, 45, 0)), "prefill": ((9, 0, 3), (21, 5, 40))}


@pytest.mark.parametrize("op", LENS)
@pytest.mark.parametrize("name", STORAGES)
def test_every_storage_in_every_layout(kernels: Place, name: str, op: Any) -> None:
    fields = STORAGES[name]
    head_dim = max(64, fields.get("group_size", 0))
    dtype = ("bf16", "fp16", "fp32")[list(STORAGES).index(name) % 3]
    for kind, place, form in LAYOUTS:
        way = (
            form if form != "stacked" or "dtype" in fields else "table"
        )  # keys and values of two dtypes are never stacked
        spec = declare((4, 2), (head_dim, head_dim), mask=ag.Causal(), kv=kind(**place, **fields), dtype=dtype)
        for probe in (False, True):
            case = Case(name, spec, op, *LENS[op], way, seed=2, probe=probe)
            verdict = run_case(case, kernels.compile(spec), kernels.device)
            assert not verdict.failures, (place, way, probe, verdict)
