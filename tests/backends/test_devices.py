"""Targets of devices."""

from __future__ import annotations

import os

import pytest
import torch

import attngen as ag
from attngen.backends import devices
from attngen.backends.devices import device_target
from attngen.target import Target

SPEC = ag.AttentionSpec(heads=ag.MHA(2, 64))


def test_the_cpu_is_its_own_target() -> None:
    assert device_target(torch.device("cpu")) == Target.parse("cpu")


def test_other_devices_are_refused() -> None:
    with pytest.raises(ag.UnsupportedError, match="no backend serves meta tensors"):
        device_target(torch.device("meta"))


@pytest.mark.parametrize("torch_knows", [False, True])
@pytest.mark.parametrize("target", [None, "cuda:sm90a"])
def test_a_fork_of_a_process_that_has_used_a_gpu_says_so(
    target: str | None, torch_knows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instead of torch's words, which come later and tell less."""
    ops = ag.compile(SPEC, target=target, ops=())
    monkeypatch.setattr(devices, "_user", None if torch_knows else os.getpid() + 1)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: torch_knows)
    with pytest.raises(ag.UnsupportedError) as caught:
        ops.op("prefill", torch.device("cuda", 0))
    text = str(caught.value)
    assert "cuda:0 cannot be used in this process" in text
    assert "forked from one that had used a GPU" in text
    assert "'spawn' or 'forkserver'" in text
    assert ops.signature("prefill").head_dim_qk == 64
    cpu = ag.compile(SPEC, backend="reference")
    assert cpu.op("prefill", torch.device("cpu")).plan.target == Target.parse("cpu")
