"""The emulated machine sees faults of order: each kernel here has one."""

from __future__ import annotations

import pytest

import attngen as ag
from attngen.schedule.plan import KernelPlan
from attngen.variant import OpName
from tests.backends.cuda_host import emulator
from tests.numerics.axes import declare
from tests.numerics.harness import Case, run_case

SEEDS = range(6)
PREFILL = {
    "keys-are-not-waited-for": ("wait_for(key_full + 8 * key_turn.stage, key_turn.parity);", ""),
    "keys-are-overwritten": ("wait_for(key_empty + 8 * key_turn.stage, key_turn.parity);", ""),
    "items-are-overwritten": ("wait_for(item_empty + 8 * found_turn.stage, found_turn.parity);", ""),
    "scores-are-read-early": ("await_products<1>();", ""),
    "values-are-released-early": ("await_products<0>();\n          settle(sums);\n", "settle(sums);\n"),
    "bytes-are-too-few": ("arrive_expecting(full, K_BYTES);", "arrive_expecting(full, K_BYTES / 2);"),
    "zeros-are-not-published": ("publish();", ""),
    "nobody-has-the-first-turn": ("arrive_threads(1, 256);", ""),
    "the-next-tile-is-never-found": ("if (i == max(num_columns - 1, 1)) take_item();", ""),
}
SMALL_PAGES = {
    "orders-are-not-waited-for": ("wait_for(ordered + 8 * place, turn.parity);", ""),
    "rows-are-not-waited-for": ("        await_copies();\n", ""),
    "rows-are-not-published": ("publish();\n        arrive_as_warp", "arrive_as_warp"),
    "nobody-ends-the-orders": ("if (order.item < 0) break;", ""),
}
STORED = {
    "stored-keys-are-not-waited-for": ("wait_for(key_full + 8 * key_turn.stage, key_turn.parity);", ""),
    "wide-keys-are-overwritten": ("wait_for(wide_key_empty + 8 * key_turn.stage, key_turn.parity ^ 1);", ""),
    "wide-values-are-overwritten": ("wait_for(wide_value_empty + 8 * value_turn.stage, value_turn.parity ^ 1);", ""),
    "wide-tiles-are-not-published": ("publish();\n        __syncwarp();", "__syncwarp();"),
}
BACKWARD = {
    "dscore-is-not-waited-for": ("wait_for(DSCORE_WRITTEN + 8 * before, (step - 1) / 2 & 1);", ""),
    "dscore-is-not-published": (
        "      publish();\n      arrive_as_warp(DSCORE_WRITTEN",
        "      arrive_as_warp(DSCORE_WRITTEN",
    ),
    "queries-are-overwritten": ("wait_for(Q_USED + 8 * stage, step / 2 & 1 ^ 1);", ""),
    "dout-is-released-early": ("      arrive_as_warp(DOUT_USED + 8 * stage, lane);", ""),
    "dq-is-read-early": ("await_products<2>();", ""),
}

WIDE_BACKWARD = {
    "weights-are-not-waited-for": ("wait_for(WEIGHTS_WRITTEN + 8 * stage, parity);", ""),
    "dscore-is-overwritten": ("wait_for(DSCORE_USED + 8 * stage, parity ^ 1);", ""),
    "dscore-is-not-published": (
        "      publish();\n      arrive_as_warp(DSCORE_WRITTEN",
        "      arrive_as_warp(DSCORE_WRITTEN",
    ),
    "dq-is-read-early": ("          start(part + 1);\n          await_products<1>();", "          start(part + 1);"),
    "dscore-is-released-early": (
        "          await_products<0>();\n          arrive_as_warp",
        "          arrive_as_warp",
    ),
    "nobody-ends-dq": ("    arrive_as_warp(DSCORE_WRITTEN + 8 * (step & 1), lane);\n", ""),
    "values-are-overwritten": ("    wait_for(DOUT_USED + 8 * (step - 1 & 1), (step - 1) / 2 & 1);\n", ""),
    "keys-are-overwritten": ("    wait_for(DSCORE_USED + 8 * (step - 1 & 1), (step - 1) / 2 & 1);\n", ""),
}


def _seen(spec: ag.AttentionSpec, op: OpName, lens: tuple[int, ...]) -> bool:
    """Whether the judge or the machine refuses some order of events."""
    case = Case("fault", spec, op, lens, lens[::-1], seed=3)
    for seed in SEEDS:
        try:
            if run_case(case, emulator.host_ops(spec, seed, ops=(op,))).failures:
                return True
        except emulator.MachineError:
            return True
    return False


def _with_fault(monkeypatch: pytest.MonkeyPatch, before: str, after: str) -> None:
    def source(plan: KernelPlan) -> str:
        text = emulator.host_source(plan)
        assert before in text or plan.schedule == "dq_cast"
        return text.replace(before, after)

    monkeypatch.setattr(emulator, "known_source", source)


@pytest.mark.parametrize("name", PREFILL)
def test_faults_of_prefill_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_fault(monkeypatch, *PREFILL[name])
    assert _seen(declare((1, 1), (128, 128), mask=ag.Causal(), kv=ag.Ragged()), "prefill", (300, 150, 700))


@pytest.mark.parametrize("name", SMALL_PAGES)
def test_faults_of_prefill_over_small_pages_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_fault(monkeypatch, *SMALL_PAGES[name])
    assert _seen(declare((1, 1), (64, 64), mask=ag.Causal(), kv=ag.Paged(1)), "prefill", (300, 150, 700))


@pytest.mark.parametrize("name", STORED)
def test_faults_of_prefill_over_stored_numbers_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_fault(monkeypatch, *STORED[name])
    spec = declare((1, 1), (64, 64), mask=ag.Causal(), kv=ag.Ragged(dtype="int8"))
    assert _seen(spec, "prefill", (300, 150, 700))


@pytest.mark.parametrize("name", BACKWARD)
def test_faults_of_backward_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_fault(monkeypatch, *BACKWARD[name])
    assert _seen(declare((1, 1), (64, 64), mask=ag.Causal(), kv=ag.Ragged()), "backward", (300, 150, 400))


@pytest.mark.parametrize("name", WIDE_BACKWARD)
def test_faults_of_backward_of_wide_heads_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_fault(monkeypatch, *WIDE_BACKWARD[name])
    assert _seen(declare((1, 1), (256, 64), mask=ag.Causal(), kv=ag.Ragged()), "backward", (300, 150, 400))
