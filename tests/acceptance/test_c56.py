"""C56: the architecture is taken from device 0 or kept for the whole process: a wrong binary on hosts with mixed GPUs.

No environment variable sets the architecture; ``target=`` does, and is refused aloud for another device.
"""

from __future__ import annotations

import pytest
import torch

import attngen as ag
from attngen.ops import Op
from tests.acceptance.probes import declare

SPEC = declare(2, 1, mask=ag.Causal())


@pytest.fixture
def capabilities(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, int]]:
    """A host of two different GPUs."""
    found = {0: (9, 0), 1: (8, 6)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: found[torch.device(device).index])
    return found


def digest(op: Op) -> tuple[str, ...]:
    return tuple(kernel.folder.parent.name for kernel in op.kernels)


@pytest.mark.triton_compile
def test_c56_target_follows_the_tensors(capabilities: dict[int, tuple[int, int]]) -> None:
    ops = ag.compile(SPEC)
    second, first = (ops.op("prefill", torch.device("cuda", index)) for index in (1, 0))
    assert [str(op.plan.target) for op in (first, second)] == ["cuda:sm90a", "cuda:sm86"]
    assert [op.kernels[0].plan.target for op in (first, second)] == [first.plan.target, second.plan.target]
    assert digest(first) != digest(second)
    assert ops.op("prefill", torch.device("cuda", 1)) is second

    capabilities[1] = (8, 0)  # nothing is remembered of a device
    third = ops.op("prefill", torch.device("cuda", 1))
    assert str(third.plan.target) == "cuda:sm80"
    assert len({digest(op) for op in (first, second, third)}) == 3


@pytest.mark.triton_compile
@pytest.mark.usefixtures("capabilities")
def test_c56_declared_target_is_refused_for_another_device() -> None:
    ops = ag.compile(SPEC, target="cuda:sm90a", ops=("prefill",))
    assert str(ops.op("prefill", torch.device("cuda", 0)).plan.target) == "cuda:sm90a"
    with pytest.raises(ag.ArgumentError, match=r"q is on cuda:1\n.*\n.*compiled for cuda:sm90a"):
        ops.op("prefill", torch.device("cuda", 1))
