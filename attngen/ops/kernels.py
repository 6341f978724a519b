"""The kernels of an op, and how a call launches them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import torch

from attngen.backends.call import Inputs, Launch, NewTokens
from attngen.ops.binding import (
    Value,
    Values,
    append_values,
    input_values,
    map_values,
    ordered,
    tensor_values,
    tile_map_values,
)
from attngen.ops.checks import torch_dtype
from attngen.ops.param_sums import ParamSums
from attngen.schedule.launch import KernelLaunch
from attngen.signature import Signature


class Kernel(Protocol):
    """A kernel that is there."""

    @property
    def launch(self) -> KernelLaunch:
        """How it is launched."""

    def load(self, device: torch.device) -> Launch:
        """Load it into this process, for one device."""


class KernelOp:
    """One callable op on one target. Kernels load on first use, once a device."""

    def __init__(self, signature: Signature, kernels: Sequence[Kernel]) -> None:
        self.signature = signature
        self._kernels = tuple(kernels)
        self._loaded: dict[torch.device, dict[str, tuple[KernelLaunch, Launch]]] = {}
        self._lock = threading.Lock()

    def load(self, device: torch.device) -> dict[str, tuple[KernelLaunch, Launch]]:
        """Plans and launch functions by schedule, loaded for ``device``."""
        loaded = self._loaded.get(device)
        if loaded is None:
            with self._lock:
                loaded = self._loaded.get(device)
                if loaded is None:
                    loaded = {kernel.launch.role: (kernel.launch, kernel.load(device)) for kernel in self._kernels}
                    self._loaded[device] = loaded
        return loaded

    def warmup(self, device: torch.device | None) -> None:
        """Load now, on the current device of the target where none is given."""
        if self._kernels:
            kind = "cpu" if self._kernels[0].launch.target.kind in ("cpu", "interpret") else "cuda"
            self.load(device or torch.empty(0, device=kind).device)

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
        values = input_values(inputs) | tensor_values("out", out)
        values |= {"has_max_logit": int(max_logit is not None), "has_sink": int(not partial)}
        values |= {name: x for name, x in (("lse", lse), ("max_logit", max_logit)) if x is not None}
        for role in self._forward_roles(inputs):
            self._launch_forward(role, inputs, values)

    def _forward_roles(self, inputs: Inputs) -> tuple[str, ...]:
        """Kernels that a call needs: those for short and long requests, unless sizes on the host tell that there are none."""
        batch, (plan, _) = inputs.batch, self.load(inputs.q.device)["forward"]
        if plan.serves == "all":
            return ("forward",)
        longest = batch.num_tokens if self.signature.q_layout == "ragged" else batch.qo_len
        if longest <= plan.short_queries:
            return ("forward_short",)
        if self.signature.q_layout == "padded" and batch.qo_lens is None:
            return ("forward",)
        return ("forward", "forward_short")

    def _launch_forward(self, role: str, inputs: Inputs, values: Values) -> None:
        device, batch, variant = inputs.q.device, inputs.batch, self.signature
        plan, launch = self.load(device)[role]
        tiles = query_tiles(self.signature, plan, inputs)
        values = values | {"num_tiles": tiles} | self.tile_lists("key_lists", plan, inputs)
        programs = tiles * (variant.num_kv_heads if plan.packed else variant.num_qo_heads)
        if plan.tiles.maps:
            values |= map_values(inputs)
        if plan.is_resident:
            values["next_item"] = torch.zeros(1, dtype=torch.int32, device=device)
        num_splits = provided_splits(self.signature, plan, inputs) if plan.split else 1
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
        device = inputs.q.device
        kernels = self.load(device)
        values = input_values(inputs) | {"has_dlse": int(dlse is not None)}
        values |= tensor_values("dout", dout) | tensor_values("out", out)
        values |= {name: x for name, x in (("lse", lse), ("dlse", dlse)) if x is not None}
        for name, grad in grads.items():
            values |= tensor_values(name, grad)
        sums = ParamSums(self.signature, inputs)
        if "delta" in kernels:
            values |= sums.row_values(lse, dout)
            self._launch_rows("delta", values, device)
            values |= sums.after_delta
        if "dqkv" in kernels:
            self._launch_one_walk(inputs, values)
            return sums.gradients()
        plan, launch = kernels["dkdv"]
        tiles = key_tiles(self.signature, plan, inputs)
        programs = tiles * self.signature.num_kv_heads
        values |= {"num_tiles": tiles} | sums.norm_values("dk", programs)
        values |= self.tile_lists("query_lists", plan, inputs)
        launch(programs, ordered(plan, values, device))
        plan, launch = kernels["dq"]
        tiles = query_tiles(self.signature, plan, inputs)
        programs = tiles * self.signature.num_qo_heads
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

    def append(self, tokens: NewTokens) -> None:
        """Write new tokens into a cache."""
        device = tokens.new_k.device
        plan, launch = self.load(device)["append"]
        rows = len(tokens.new_k) * self.signature.num_kv_heads
        launch(-(-rows // plan.tiles.q), ordered(plan, append_values(tokens), device))

    def _launch_one_walk(self, inputs: Inputs, values: Values) -> None:
        """dk, dv and sums of dq, then dq."""
        device = inputs.q.device
        kernels = self.load(device)
        plan, launch = kernels["dqkv"]
        tiles, q_tiles = key_tiles(self.signature, plan, inputs), query_tiles(self.signature, plan, inputs)
        shape = (self.signature.num_qo_heads, q_tiles, plan.dq_sums)
        values |= {"dq_sums": torch.zeros(shape, dtype=torch.float32, device=device), "num_q_tiles": q_tiles}
        values |= tile_map_values(plan, values) | self.tile_lists("query_lists", plan, inputs)
        launch(tiles * self.signature.num_kv_heads, ordered(plan, values | {"num_tiles": tiles}, device))
        plan, launch = kernels["dq_cast"]
        launch(q_tiles * self.signature.num_qo_heads, ordered(plan, values | {"num_tiles": q_tiles}, device))

    def _launch_rows(self, schedule: str, values: Mapping[str, Value], device: torch.device) -> None:
        plan, launch = self.load(device)[schedule]
        rows = int(values["num_tokens"]) * self.signature.num_qo_heads
        launch(-(-rows // plan.tiles.q), ordered(plan, values, device))

    def tile_lists(
        self, schedule: Literal["key_lists", "query_lists"], consumer: KernelLaunch, inputs: Inputs
    ) -> Values:
        """The lists of tiles that ``consumer`` reads, made on the device; nothing if it reads none."""
        if not consumer.lists:
            return {}
        device = inputs.q.device
        plan, launch = self.load(device)[schedule]
        tiles = (
            query_tiles(self.signature, consumer, inputs)
            if schedule == "key_lists"
            else key_tiles(self.signature, consumer, inputs)
        )
        num_lists = tiles * consumer.list_heads
        capacity = list_capacity(self.signature, consumer, schedule, inputs)
        lists: Values = {
            "list_capacity": capacity,
            "tile_list": torch.empty((num_lists, capacity), dtype=torch.int32, device=device),
            "tile_counts": torch.empty((num_lists, 2), dtype=torch.int32, device=device),
        }
        launch(num_lists, ordered(plan, input_values(inputs) | lists | {"num_tiles": tiles}, device))
        return lists


def tiles_of(tile: int, batch: int, padded_len: int, rows: int, layout: str) -> int:
    """Tiles over all requests; for ragged rows an upper bound that needs no lengths."""
    return rows // tile + batch if layout == "ragged" else batch * -(-padded_len // tile)


def query_tiles(variant: Signature, plan: KernelLaunch, inputs: Inputs) -> int:
    """Query tiles over all requests, as :func:`tiles_of`; packed rows are token times head of the group."""
    pack = variant.group_size if plan.packed else 1
    batch = inputs.batch
    return tiles_of(plan.tiles.q, batch.batch, batch.qo_len * pack, batch.num_tokens * pack, variant.q_layout)


def key_tiles(variant: Signature, plan: KernelLaunch, inputs: Inputs) -> int:
    """Key tiles over all requests, as :func:`tiles_of`."""
    batch = inputs.batch
    return tiles_of(plan.tiles.kv, batch.batch, batch.kv_len, batch.num_keys, variant.kv_layout)


def provided_splits(variant: Signature, plan: KernelLaunch, inputs: Inputs) -> int:
    """Parts the grid provides for: what the longest request that fits the storage would be cut into."""
    capacity = inputs.batch.num_keys if variant.kv_layout == "ragged" else inputs.batch.kv_len
    return max(1, min(plan.max_splits, capacity // plan.min_split))


def list_capacity(variant: Signature, consumer: KernelLaunch, schedule: str, inputs: Inputs) -> int:
    """Most tiles of the other side that a request can have."""
    batch, tiles = inputs.batch, consumer.tiles
    if schedule == "key_lists":
        return -(-(batch.num_keys if variant.kv_layout == "ragged" else batch.kv_len) // tiles.kv)
    return -(-(batch.num_tokens if variant.q_layout == "ragged" else batch.qo_len) // tiles.q)


def allocate_forward(
    op: KernelOp, inputs: Inputs, out: torch.Tensor | None, *, want_max: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Buffers for out, lse (of a softmax) and, if wanted, largest logits. Ragged rows that no request covers read 0 and -inf."""
    q, variant = inputs.q, op.signature
    shape = (*q.shape[:-1], variant.head_dim_vo)
    ragged = variant.q_layout == "ragged"
    if out is None:
        make = torch.zeros if ragged else torch.empty
        out = make(shape, dtype=torch_dtype(variant.out_dtype), device=q.device)

    def row_values() -> torch.Tensor:
        rows = torch.empty((inputs.batch.num_tokens, variant.num_qo_heads), dtype=torch.float32, device=q.device)
        return rows.fill_(float("-inf")) if ragged else rows

    return out, row_values() if variant.is_softmax else None, row_values() if want_max else None


def allocate_backward(op: KernelOp, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Buffers for dq, dk, dv, dense, in the shapes of q, k, v."""
    make = torch.zeros if op.signature.q_layout == "ragged" else torch.empty
    return {
        f"d{name}": make(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        for name, tensor in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v))
    }
