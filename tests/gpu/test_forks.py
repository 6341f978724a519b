"""Forks of a process that uses a GPU: an error that says what to do, instead of a crash."""

from __future__ import annotations

import os

import pytest
import torch

import attngen as ag
from attngen.target import Target

pytestmark = pytest.mark.gpu
SPEC = ag.AttentionSpec(heads=ag.GQA(4, 2, 64), mask=ag.Causal(), dtype="bf16")


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of threads that a fork does not have
@pytest.mark.parametrize("target", [False, True])
def test_an_op_called_in_a_fork_says_what_to_do(target: bool) -> None:
    major, minor = torch.cuda.get_device_capability()
    name = str(Target.from_cuda_capability(major, minor)) if target else None
    ops = ag.compile(SPEC, target=name, ops=("prefill", "decode"))
    q, k, v = (torch.randn(2, 40, n, 64, device="cuda", dtype=torch.bfloat16) for n in (4, 2, 2))
    one = q[:, 0]  # torch cannot take views in a fork
    expected = ops.prefill(q, k, v)
    calls = {"prefill": lambda: ops.prefill(q, k, v), "decode": lambda: ops.decode(one, k, v)}
    for call in calls.values():
        receiver, sender = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                call()
                said = "nothing"
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            os.write(sender, said.encode())
            os._exit(0)
        os.close(sender)
        with os.fdopen(receiver, "rb") as file:
            said = file.read().decode()
        assert os.waitpid(child, 0)[1] == 0
        assert said.startswith("UnsupportedError: cuda:0 cannot be used in this process"), said
        assert "spawn" in said
    assert torch.equal(ops.prefill(q, k, v), expected)
