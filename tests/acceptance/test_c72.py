"""C72: recompiles for every new length or batch size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import attngen as ag
from attngen.settings import Settings
from attngen.store import Store
from attngen.variant import OpName
from tests.acceptance.probes import Place, State, assert_state, declare, pack, probe

CASES: list[tuple[OpName, ag.AttentionSpec]] = [
    ("prefill", declare(2, 1, mask=ag.Causal(), kv=ag.Ragged())),
    ("decode", declare(2, 1, mask=ag.Causal(), kv=ag.Paged(page_size=16))),
]
EACH_CASE = pytest.mark.parametrize(("op", "spec"), CASES, ids=["ragged prefill", "paged decode"])


def sweep() -> list[list[int]]:
    """Every length from 1 to 200, and every batch size from 1 to 40."""
    lengths = [[1 + (length + 7 * b) % 200 for b in range(1 + length % 4)] for length in range(200)]
    return lengths + [[1 + (batch + 5 * b) % 24 for b in range(batch)] for batch in range(1, 41)]


def check(place: Place, spec: ag.AttentionSpec, op: OpName, lens: Sequence[int], run: Callable[..., Any]) -> None:
    """Mean visible positions and their counts, of all rows."""
    call = pack(spec, op, [probe(spec, 1 if op == "decode" else n, n) for n in lens], place.device)
    out, lse = run(call.q, call.kv, call.lengths)
    row = torch.cat([torch.arange(n - 1 if op == "decode" else 0, n, dtype=torch.float64) for n in lens])
    assert_state(State(out.cpu(), lse.cpu()), row / 2, (row + 1).log())


def entries() -> int:
    return len(list(Store.from_settings(Settings.from_env()).entries()))


@EACH_CASE
def test_c72_eager_calls_compile_nothing_new(
    kernels: Place, op: OpName, spec: ag.AttentionSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "cache"))
    ops = ag.compile(spec, backend=kernels.backend)
    ops.warmup(op, device=kernels.device)
    assert 1 <= entries() <= 4
    monkeypatch.setenv("ATTNGEN_REQUIRE_CACHED", "1")
    built = entries()
    for lens in sweep():
        check(kernels, spec, op, lens, lambda q, kv, lengths: getattr(ops, op)(q, *kv, **lengths, return_lse=True))
    assert entries() == built


@EACH_CASE
def test_c72_dynamo_compiles_for_any_length(kernels: Place, op: OpName, spec: ag.AttentionSpec) -> None:
    torch.compiler.reset()
    graphs = []

    def count(graph: torch.fx.GraphModule, example: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    ops = kernels.compile(spec)

    @torch.compile(fullgraph=True, dynamic=True, backend=count)
    def run(q: torch.Tensor, kv: tuple[Any, ...], lengths: dict[str, torch.Tensor]) -> Any:
        return getattr(ops, op)(q, *kv, **lengths, return_lse=True)

    def call(q: torch.Tensor, kv: tuple[Any, ...], lengths: dict[str, torch.Tensor]) -> Any:
        if "page_table" in lengths:  # Dynamo itself makes a difference between one column and more
            torch._dynamo.decorators.mark_unbacked(lengths["page_table"], 1)
        return run(q, kv, lengths)

    for lens in sweep():
        check(kernels, spec, op, lens, call)
    assert 1 <= len(graphs) <= 3
