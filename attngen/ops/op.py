"""A compiled op: its plan, its artifacts, and how they are launched."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from attngen.backends import reference, registry
from attngen.backends.base import Batch, Inputs, Launch
from attngen.ops.binding import Value, Values, input_values, map_values, ordered, tensor_values, tile_map_values
from attngen.ops.checks import torch_dtype
from attngen.ops.param_sums import ParamSums
from attngen.schedule import hopper
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

    def __init__(self, plan: OpPlan, kernels: Sequence[BuiltKernel]) -> None:
        self.plan = plan
        self.kernels = tuple(kernels)
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
                if loaded is None:
                    loaded = {kernel.plan.role: (kernel.plan, _launch(kernel, device)) for kernel in self.kernels}
                    self._loaded[device] = loaded
        return loaded

    def forward(
        self,
        inputs: Inputs,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        max_logit: torch.Tensor | None = None,
        *,
        partial: bool = False,
    ) -> None:
        """Write ``out`` (shape of q with head_dim_vo) and, fp32 ``[tokens, num_qo_heads]``, ``lse`` and ``max_logit`` of every row.

        Args:
            lse: needed where weights are a softmax.
            partial: leave the sink out.
        """
        if not self.plan.kernels:
            variant = replace(self.variant, sink=None) if partial else self.variant
            exact, exact_lse, exact_max = reference.rows(variant, inputs)
            out.copy_(exact.view(out.shape))
            for target, found in ((lse, exact_lse), (max_logit, exact_max)):
                if target is not None:
                    target.copy_(found)
            return
        values = input_values(inputs) | tensor_values("out", out)
        values |= {"has_max_logit": int(max_logit is not None), "has_sink": int(not partial)}
        values |= {name: x for name, x in (("lse", lse), ("max_logit", max_logit)) if x is not None}
        for role in self._forward_roles(inputs.batch):
            self._launch_forward(role, inputs, values)

    def _forward_roles(self, batch: Batch) -> tuple[str, ...]:
        """Kernels that a call needs: those for short and long requests, unless sizes on the host tell that there are none."""
        plan = self.plan.kernel("forward")
        if plan.serves == "all":
            return ("forward",)
        longest = batch.num_tokens if self.variant.q_layout == "ragged" else batch.qo_len
        if longest <= plan.short_queries:
            return ("forward_short",)
        if self.variant.q_layout == "padded" and batch.qo_lens is None:
            return ("forward",)
        return ("forward", "forward_short")

    def _launch_forward(self, role: str, inputs: Inputs, values: Values) -> None:
        device, batch, variant = inputs.q.device, inputs.batch, self.variant
        plan, launch = self.load(device)[role]
        tiles = query_tiles(plan, inputs)
        values = values | {"num_tiles": tiles} | self.tile_lists("key_lists", plan, inputs)
        programs = tiles * (variant.num_kv_heads if plan.packed else variant.num_qo_heads)
        if plan.tiles.maps:
            values |= map_values(inputs)
        if plan.is_resident:
            values["next_item"] = torch.zeros(1, dtype=torch.int32, device=device)
        num_splits = provided_splits(plan, inputs) if plan.split else 1
        if plan.split:
            values["num_splits"] = num_splits
            if num_splits > 1:
                shape = (num_splits, batch.num_tokens, variant.num_qo_heads)
                rows = {"partial_out": (*shape, variant.head_dim_vo), "partial_lse": shape}
                if values["has_max_logit"]:
                    rows["partial_max"] = shape
                for name, size in rows.items():
                    values[name] = torch.empty(size, dtype=torch.float32, device=device)
        launch(programs * num_splits, ordered(plan, values, device))
        if num_splits > 1:
            self._launch_rows("merge", values, device)

    def backward(
        self,
        inputs: Inputs,
        dout: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        dlse: torch.Tensor | None,
        grads: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Write ``grads``: dq, dk, dv in the shapes of q, k, v. Returns the gradients of the parameters and the gate, by name."""
        if not self.plan.kernels:
            dq, dk, dv, dparams = reference.backward(self.variant, inputs, dout, dlse)
            for name, exact in (("dq", dq), ("dk", dk), ("dv", dv)):
                grads[name].copy_(exact.view(grads[name].shape))
            return {
                name: grad.to(inputs.params[name].dtype if name in inputs.params else inputs.q.dtype)
                for name, grad in dparams.items()
            }
        device = inputs.q.device
        kernels = self.load(device)
        values = input_values(inputs) | {"has_dlse": int(dlse is not None)}
        values |= tensor_values("dout", dout) | tensor_values("out", out)
        values |= {name: x for name, x in (("lse", lse), ("dlse", dlse)) if x is not None}
        for name, grad in grads.items():
            values |= tensor_values(name, grad)
        sums = ParamSums(self.variant, inputs)
        if "delta" in kernels:
            values |= sums.row_values(lse, dout)
            self._launch_rows("delta", values, device)
            values |= sums.after_delta
        if "dqkv" in kernels:
            self._launch_one_walk(inputs, values)
            return sums.gradients()
        plan, launch = kernels["dkdv"]
        tiles = key_tiles(plan, inputs)
        programs = tiles * self.variant.num_kv_heads
        values |= {"num_tiles": tiles} | sums.norm_values("dk", programs)
        values |= self.tile_lists("query_lists", plan, inputs)
        launch(programs, ordered(plan, values, device))
        plan, launch = kernels["dq"]
        tiles = query_tiles(plan, inputs)
        programs = tiles * self.variant.num_qo_heads
        values |= {"num_tiles": tiles} | sums.norm_values("dq", programs)
        values |= self.tile_lists("key_lists", plan, inputs)
        if plan.gradients == "added":
            values |= sums.added_values()
        launch(programs, ordered(plan, values, device))
        if "dparams" in kernels:
            plan, launch = kernels["dparams"]
            for pass_idx in (0, 1):
                values |= sums.exact_values(pass_idx) | {"pass_idx": pass_idx}
                launch(programs, ordered(plan, values, device))
        return sums.gradients()

    def _launch_one_walk(self, inputs: Inputs, values: Values) -> None:
        """dk, dv and sums of dq, then dq."""
        device = inputs.q.device
        kernels = self.load(device)
        plan, launch = kernels["dqkv"]
        tiles, q_tiles = key_tiles(plan, inputs), query_tiles(plan, inputs)
        shape = (self.variant.num_qo_heads, q_tiles, hopper.dq_sums(plan))
        values |= {"dq_sums": torch.zeros(shape, dtype=torch.float32, device=device), "num_q_tiles": q_tiles}
        values |= tile_map_values(plan, values) | self.tile_lists("query_lists", plan, inputs)
        launch(tiles * self.variant.num_kv_heads, ordered(plan, values | {"num_tiles": tiles}, device))
        plan, launch = kernels["dq_cast"]
        launch(q_tiles * self.variant.num_qo_heads, ordered(plan, values | {"num_tiles": q_tiles}, device))

    def _launch_rows(self, schedule: str, values: Mapping[str, Value], device: torch.device) -> None:
        plan, launch = self.load(device)[schedule]
        rows = int(values["num_tokens"]) * self.variant.num_qo_heads
        launch(-(-rows // plan.tiles.q), ordered(plan, values, device))

    def tile_lists(self, schedule: Literal["key_lists", "query_lists"], consumer: KernelPlan, inputs: Inputs) -> Values:
        """The lists of tiles that ``consumer`` reads, made on the device; nothing if it reads none."""
        if not consumer.lists:
            return {}
        device = inputs.q.device
        plan, launch = self.load(device)[schedule]
        tiles = query_tiles(consumer, inputs) if schedule == "key_lists" else key_tiles(consumer, inputs)
        num_lists = tiles * consumer.list_heads
        capacity = list_capacity(consumer, schedule, inputs)
        lists: Values = {
            "list_capacity": capacity,
            "tile_list": torch.empty((num_lists, capacity), dtype=torch.int32, device=device),
            "tile_counts": torch.empty((num_lists, 2), dtype=torch.int32, device=device),
        }
        launch(num_lists, ordered(plan, input_values(inputs) | lists | {"num_tiles": tiles}, device))
        return lists


def _launch(kernel: BuiltKernel, device: torch.device) -> Launch:
    toolchain = registry.backend(kernel.plan.backend)
    assert toolchain is not None  # kernels are made by one
    return toolchain.load(kernel.binary, kernel.metadata, kernel.plan, device)


def tiles_of(tile: int, batch: int, padded_len: int, rows: int, layout: str) -> int:
    """Tiles over all requests; for ragged rows an upper bound that needs no lengths."""
    return rows // tile + batch if layout == "ragged" else batch * -(-padded_len // tile)


def query_tiles(plan: KernelPlan, inputs: Inputs) -> int:
    """Query tiles over all requests, as :func:`tiles_of`; packed rows are token times head of the group."""
    pack = plan.variant.group_size if plan.packed else 1
    batch = inputs.batch
    return tiles_of(plan.tiles.q, batch.batch, batch.qo_len * pack, batch.num_tokens * pack, plan.variant.q_layout)


def key_tiles(plan: KernelPlan, inputs: Inputs) -> int:
    """Key tiles over all requests, as :func:`tiles_of`."""
    batch = inputs.batch
    return tiles_of(plan.tiles.kv, batch.batch, batch.kv_len, batch.num_keys, plan.variant.kv_layout)


def provided_splits(plan: KernelPlan, inputs: Inputs) -> int:
    """Parts the grid provides for: what the longest request that fits the storage would be cut into."""
    capacity = inputs.batch.num_keys if plan.variant.kv_layout == "ragged" else inputs.batch.kv_len
    return max(1, min(plan.max_splits, capacity // plan.min_split))


def list_capacity(consumer: KernelPlan, schedule: str, inputs: Inputs) -> int:
    """Most tiles of the other side that a request can have."""
    batch, tiles = inputs.batch, consumer.tiles
    if schedule == "key_lists":
        return -(-(batch.num_keys if consumer.variant.kv_layout == "ragged" else batch.kv_len) // tiles.kv)
    return -(-(batch.num_tokens if consumer.variant.q_layout == "ragged" else batch.qo_len) // tiles.q)


def allocate_forward(
    op: Op, inputs: Inputs, out: torch.Tensor | None, *, want_max: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Buffers for out, lse (of a softmax) and, if wanted, largest logits. Ragged rows that no request covers read 0 and -inf."""
    q, variant = inputs.q, op.variant
    shape = (*q.shape[:-1], variant.head_dim_vo)
    ragged = variant.q_layout == "ragged"
    if out is None:
        make = torch.zeros if ragged else torch.empty
        out = make(shape, dtype=torch_dtype(variant.out_dtype), device=q.device)

    def row_values() -> torch.Tensor:
        rows = torch.empty((inputs.batch.num_tokens, variant.num_qo_heads), dtype=torch.float32, device=q.device)
        return rows.fill_(float("-inf")) if ragged else rows

    return out, row_values() if variant.is_softmax else None, row_values() if want_max else None


def allocate_backward(op: Op, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Buffers for dq, dk, dv, dense, in the shapes of q, k, v."""
    make = torch.zeros if op.variant.q_layout == "ragged" else torch.empty
    return {
        f"d{name}": make(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        for name, tensor in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v))
    }
