"""A compiled op: its plan, its artifacts, and how they are launched."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attngen.backends import reference
from attngen.backends.base import Backend, Inputs, Launch
from attngen.errors import UnsupportedError
from attngen.ops.binding import Value, input_values, map_values, ordered, tensor_values
from attngen.ops.checks import torch_dtype
from attngen.schedule.plan import KernelPlan, OpPlan
from attngen.variant import Variant


@dataclass(frozen=True)
class BuiltKernel:
    """A kernel on disk.

    Attributes:
        plan: what it was rendered from.
        folder: its cache entry, readable by a person.
        binary: file to load.
        metadata: facts of the build (shared memory, warps, registers).
    """

    plan: KernelPlan
    folder: Path
    binary: Path
    metadata: Mapping[str, Any]


class Op:
    """One callable op on one target. Kernels load on first use, once a device."""

    def __init__(self, plan: OpPlan, backend: Backend | None, kernels: Sequence[BuiltKernel]) -> None:
        self.plan = plan
        self.kernels = tuple(kernels)
        self._backend = backend
        self._loaded: dict[torch.device, dict[str, tuple[KernelPlan, Launch]]] = {}
        self._lock = threading.Lock()

    @property
    def variant(self) -> Variant:
        """What the op computes."""
        return self.plan.variant

    def load(self, device: torch.device) -> dict[str, tuple[KernelPlan, Launch]]:
        """Plans and launch functions by schedule, loaded for ``device``."""
        loaded = self._loaded.get(device)
        if loaded is None:
            with self._lock:
                loaded = self._loaded.get(device)
                if loaded is None and self._backend is not None:
                    loaded = {
                        kernel.plan.schedule: (
                            kernel.plan,
                            self._backend.load(kernel.binary, kernel.metadata, kernel.plan, device),
                        )
                        for kernel in self.kernels
                    }
                    self._loaded[device] = loaded
        assert loaded is not None
        return loaded

    def forward(self, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Write ``out`` (shape of q with head_dim_vo) and ``lse`` ``[tokens, num_qo_heads]`` of every row."""
        if not self.plan.kernels:
            exact, exact_lse = reference.forward(self.variant, inputs)
            out.copy_(exact.view(out.shape))
            lse.copy_(exact_lse)
            return
        device, batch = inputs.q.device, inputs.batch
        kernels = self.load(device)
        plan, launch = kernels["forward"]
        values = input_values(inputs) | tensor_values("out", out) | {"lse": lse}
        tiles = query_tiles(plan, inputs)
        programs = tiles * (self.variant.num_kv_heads if plan.packed else self.variant.num_qo_heads)
        values["num_tiles"] = tiles
        if plan.tiles.maps:
            values |= map_values(inputs)
        num_splits = provided_splits(plan, inputs) if plan.split else 1
        if plan.split:
            values["num_splits"] = num_splits
            if num_splits > 1:
                shape = (num_splits, batch.num_tokens, self.variant.num_qo_heads)
                values["partial_out"] = torch.empty(
                    (*shape, self.variant.head_dim_vo), dtype=torch.float32, device=device
                )
                values["partial_lse"] = torch.empty(shape, dtype=torch.float32, device=device)
        launch(programs * num_splits, ordered(plan, values, device))
        if num_splits > 1:
            self._launch_rows(kernels["merge"], values, device)

    def backward(
        self,
        inputs: Inputs,
        dout: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dlse: torch.Tensor | None,
        grads: Mapping[str, torch.Tensor],
    ) -> None:
        """Write ``grads``: dq, dk, dv in the shapes of q, k, v, and ``d_param_<name>`` (fp32, zeroed)."""
        if not self.plan.kernels:
            dq, dk, dv, dparams = reference.backward(self.variant, inputs, dout, dlse)
            exact = {"dq": dq, "dk": dk, "dv": dv} | {f"d_param_{name}": grad for name, grad in dparams.items()}
            for name, target in grads.items():
                target.copy_(exact[name].view(target.shape))
            return
        device, batch = inputs.q.device, inputs.batch
        kernels = self.load(device)
        delta = torch.empty(lse.shape, dtype=torch.float32, device=device)
        values = input_values(inputs) | {"lse": lse, "delta": delta, "has_dlse": int(dlse is not None)}
        values |= tensor_values("dout", dout) | tensor_values("out", out)
        if dlse is not None:
            values["dlse"] = dlse
        for name, grad in grads.items():
            values |= {name: grad} if name.startswith("d_") else tensor_values(name, grad)
        self._launch_rows(kernels["delta"], values, device)
        plan, launch = kernels["dkdv"]
        values["num_tiles"] = tiles_of(plan.tiles.kv, batch.batch, batch.kv_len, batch.num_keys, plan.variant.kv_layout)
        launch(int(values["num_tiles"]) * self.variant.num_kv_heads, ordered(plan, values, device))
        plan, launch = kernels["dq"]
        values["num_tiles"] = query_tiles(plan, inputs)
        launch(int(values["num_tiles"]) * self.variant.num_qo_heads, ordered(plan, values, device))

    def _launch_rows(
        self, kernel: tuple[KernelPlan, Launch], values: Mapping[str, Value], device: torch.device
    ) -> None:
        plan, launch = kernel
        rows = int(values["num_tokens"]) * self.variant.num_qo_heads
        launch(-(-rows // plan.tiles.q), ordered(plan, values, device))


def tiles_of(tile: int, batch: int, padded_len: int, rows: int, layout: str) -> int:
    """Tiles over all requests; for ragged rows an upper bound that needs no lengths."""
    return rows // tile + batch if layout == "ragged" else batch * -(-padded_len // tile)


def query_tiles(plan: KernelPlan, inputs: Inputs) -> int:
    """Query tiles over all requests, as :func:`tiles_of`; packed rows are token times head of the group."""
    pack = plan.variant.group_size if plan.packed else 1
    batch = inputs.batch
    return tiles_of(plan.tiles.q, batch.batch, batch.qo_len * pack, batch.num_tokens * pack, plan.variant.q_layout)


def provided_splits(plan: KernelPlan, inputs: Inputs) -> int:
    """Parts the grid provides for: what the longest request that fits the storage would be cut into."""
    capacity = inputs.batch.num_keys if plan.variant.kv_layout == "ragged" else inputs.batch.kv_len
    return max(1, min(plan.max_splits, capacity // plan.min_split))


def allocate_forward(op: Op, inputs: Inputs, out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Buffers for out and lse. Ragged rows that no request covers read 0 and -inf."""
    q, variant = inputs.q, op.variant
    shape = (*q.shape[:-1], variant.head_dim_vo)
    ragged = variant.q_layout == "ragged"
    if out is None:
        make = torch.zeros if ragged else torch.empty
        out = make(shape, dtype=torch_dtype(variant.out_dtype), device=q.device)
    lse = torch.empty((inputs.batch.num_tokens, variant.num_qo_heads), dtype=torch.float32, device=q.device)
    return out, lse.fill_(float("-inf")) if ragged else lse


def allocate_backward(op: Op, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Buffers for dq, dk, dv (dense, in the shapes of q, k, v) and zeroed fp32 accumulators of parameter gradients."""
    make = torch.zeros if op.variant.q_layout == "ragged" else torch.empty
    grads = {
        f"d{name}": make(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        for name, tensor in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v))
    }
    for param in op.variant.gradient_params:
        tensor = inputs.params[param.name]
        grads[f"d_{param.symbol}"] = torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device)
    return grads


def require_deterministic(op: Op) -> None:
    """Raise where gradients are summed in no fixed order."""
    if op.plan.kernels and op.variant.gradient_params:
        names = ", ".join(param.name for param in op.variant.gradient_params)
        raise UnsupportedError(
            f"the gradient of {names} is not deterministic",
            where="backward(deterministic=True)",
            why="parameter gradients are summed by atomic additions, whose order varies",
            fix="leave deterministic out (dq, dk and dv are bitwise repeatable anyway), or use backend='reference'",
        )
