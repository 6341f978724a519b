"""Which target a device of torch is."""

from __future__ import annotations

import os

import torch

from attngen.errors import UnsupportedError
from attngen.target import Target

_user: int | None = None  # the process that has used a GPU, or the one that it was forked from


def device_target(device: torch.device) -> Target:
    """The target of a torch device; looked up each time, since devices of one host may differ.

    Raises:
        UnsupportedError: no backend serves such a device, or not in this process.
    """
    if device.type == "cpu":
        return Target.parse("cpu")
    if device.type == "cuda" and _is_forked():
        raise UnsupportedError(
            f"{device} cannot be used in this process",
            where=f"process {os.getpid()}",
            why="it was forked from one that had used a GPU, and the driver's state does not survive a fork",
            fix="start processes with the method 'spawn' or 'forkserver', or fork before the first use of a GPU",
        )
    if device.type == "cuda" and torch.version.hip:
        return Target.parse(f"hip:{torch.cuda.get_device_properties(device).gcnArchName.split(':')[0]}")
    if device.type == "cuda":
        return Target.from_cuda_capability(*torch.cuda.get_device_capability(device))
    raise UnsupportedError(
        f"no backend serves {device.type} tensors",
        where="device",
        why="kernels run on cpu and cuda",
        fix="move the tensors",
    )


def _is_forked() -> bool:
    """Whether this process was forked from one that had used a GPU. torch itself does not always know."""
    global _user  # noqa: PLW0603
    if _user is None and not torch.cuda._is_in_bad_fork():
        _user = os.getpid()
    return _user != os.getpid()
