"""The ops of a package that :mod:`attngen.export` has written: binaries, and a description as JSON.

Needs torch, and for NVIDIA ``cuda.bindings``; a package carries this module and all that it imports.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attngen.backends import launcher
from attngen.backends.call import Launch
from attngen.backends.cpp_launch import load_library
from attngen.backends.devices import device_target
from attngen.errors import BuildError, UnsupportedError
from attngen.ops.checks import torch_dtype
from attngen.ops.kernels import KernelOp
from attngen.ops.methods import Methods
from attngen.schedule.launch import KernelLaunch
from attngen.signature import Declaration, OpName, Signature
from attngen.target import CPU_ARCHS, Target, native_cpu_arch, runs_on_cpu


@dataclass(frozen=True)
class PackagedKernel:
    """A kernel in the package.

    Attributes:
        launch: how it is launched.
        binary: file to load.
        sha256: of the file.
        options: of :func:`attngen.backends.launcher.load`.
    """

    launch: KernelLaunch
    binary: Path
    sha256: str
    options: Mapping[str, Any]

    def load(self, device: torch.device) -> Launch:
        """Load it into this process, for one device.

        Raises:
            BuildError: the file is not what was exported, or cannot be loaded.
        """
        try:
            whole = hashlib.sha256(self.binary.read_bytes()).hexdigest() == self.sha256
        except OSError:
            whole = False
        if not whole:
            raise BuildError(
                f"{self.binary.name} is damaged or missing",
                where=str(self.binary),
                why="it does not match its checksum",
                fix="install the package again",
            )
        if self.launch.target.kind == "cpu":
            return load_library(self.binary, self.launch)
        return launcher.load(self.binary, self.launch.entry, self.launch.args, device, **self.options)


class PackagedOps(Methods):
    """Prefill, decode, backward, autograd attention and writing of the cache; for the calls see :class:`Methods`."""

    def __init__(self, description: Path) -> None:
        data = description.read_bytes()
        packaged = _Packaged(json.loads(data), description.parent)
        declared = Declaration(**packaged.data["declared"])
        super().__init__(declared, packaged, packaged.defaults(), hashlib.sha256(data).hexdigest()[:16])
        self._description = description

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._description,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._description.parent.name}, {self._description.stem})"


class _Packaged:
    """Ops by name and device: each made once a process and target."""

    def __init__(self, data: Mapping[str, Any], folder: Path) -> None:
        self.data, self._folder = data, folder
        self._targets = {Target.parse(text): ops for text, ops in data["targets"].items()}
        self._ops: dict[tuple[str, Target], KernelOp] = {}

    def signature(self, op: OpName) -> Signature:
        """What an op takes and gives."""
        return Signature.from_json(_there(self.data["ops"][op])["signature"])

    def __call__(self, op: OpName, device: torch.device | None, *, deterministic: bool = False) -> KernelOp:
        about, target = _there(self.data["ops"][op]), self._target(device)
        ops = self._targets[target]
        name = f"deterministic {op}" if deterministic and f"deterministic {op}" in ops else op
        if (name, target) not in self._ops:
            kernels = [self._kernel(kernel) for kernel in _there(ops[name])["kernels"]]
            self._ops.setdefault((name, target), KernelOp(Signature.from_json(about["signature"]), kernels))
        return self._ops[name, target]

    def defaults(self) -> dict[str, torch.Tensor]:
        """Tensors that the spec's mods have captured."""
        found = {}
        for name, about in self.data["defaults"].items():
            data = bytearray((self._folder / about["file"]).read_bytes())
            dtype = torch_dtype(about["dtype"])
            flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            found[name] = flat.reshape(about["shape"])
        return found

    def _kernel(self, data: Mapping[str, Any]) -> PackagedKernel:
        launch = KernelLaunch.from_json(data["launch"])
        return PackagedKernel(launch, self._folder / data["binary"], data["sha256"], data["options"])

    def _target(self, device: torch.device | None) -> Target:
        """The best of the package's targets for a device; of the current GPU, or of this CPU, without one."""
        if device is None:
            gpu = torch.cuda.is_available() and any(target.kind == "cuda" for target in self._targets)
            device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
        if device.type == "cpu":
            native = native_cpu_arch()
            here = f"cpu:{native}"
            fits = [target for target in self._targets if target.kind == "cpu" and runs_on_cpu(target, native)]
            fits.sort(key=lambda target: CPU_ARCHS.index(target.arch))
        else:
            wanted = device_target(device)
            here, fits = str(wanted), [target for target in self._targets if target == wanted]
        if not fits:
            names = ", ".join(map(str, self._targets))
            raise UnsupportedError(
                f"{self._folder.name} has no kernels for {here}",
                where=f"device {device}",
                why=f"it was exported for {names}",
                fix=f"move the tensors to such a device, or export it again with --target {names.replace(' ', '')},{here}",
            )
        return fits[-1]


def _there(about: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is in the package.

    Raises:
        UnsupportedError: it is not, and why.
    """
    if "refused" in about:
        what, where, why, fix = about["refused"]
        raise UnsupportedError(what, where=where, why=why, fix=fix)
    return about


def load(description: Path) -> PackagedOps:
    """The ops that a file describes; binaries are loaded when they are needed."""
    return PackagedOps(description)
