"""Forward and backward of one setting by attngen and its peers: checked against one of them, then timed in turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend

import attngen as ag
from attngen.ops.checks import torch_dtype
from attngen.timing import time_gpu
from benchmarks.measure import Row, relative_error
from benchmarks.peers import peers, sdpa
from benchmarks.settings import Setting


@dataclass(frozen=True)
class Cell:
    """One setting at one size; random data ``[batch, length, heads, dim]``.

    Attributes:
        backend: of attngen; ``None`` is its own choice.
        dtype: of queries, keys and values: ``bf16`` or ``fp8_e4m3``.
    """

    setting: Setting
    batch: int
    length: int
    heads: int
    dim: int
    backend: str | None = None
    dtype: str = "bf16"

    def __str__(self) -> str:
        dtype = "" if self.dtype == "bf16" else f" {self.dtype}"
        return f"d{self.dim} h{self.heads} s{self.length} b{self.batch} {self.setting.name}{dtype}"

    def tensors(self, count: int) -> list[torch.Tensor]:
        """Random inputs."""
        shape = (self.batch, self.length, self.heads, self.dim)
        return [torch.randn(*shape, device="cuda").to(torch_dtype(self.dtype)) for _ in range(count)]

    def ops(self) -> ag.Ops:
        """attngen's."""
        heads = ag.MHA(num_heads=self.heads, head_dim=self.dim)
        spec = ag.AttentionSpec(heads=heads, dtype=self.dtype, **self.setting.fields)
        return ag.compile(spec, backend=self.backend, ops=())

    @property
    def work(self) -> float:
        """Floating-point operations of both products of forward over pairs that the mask keeps."""
        return 4.0 * self.heads * self.dim * self.setting.visible_pairs(self.batch, self.length, "cuda")


def forward(cell: Cell) -> list[Row]:
    """TFLOP/s of every system."""
    q, k, v = cell.tensors(3)
    others = peers(cell.setting, cell.batch, cell.length, cell.dtype)
    exact = _exact(cell, others)(*(x.bfloat16() for x in (q, k, v)))
    ours = partial(cell.ops().prefill, q, k, v, params=cell.setting.params)
    calls = {"attngen": ours} | {name: partial(peer, q, k, v) for name, peer in others.items()}
    return timed(f"prefill {cell}", calls, lambda out: relative_error(out, exact), cell.work)


def backward(cell: Cell) -> list[Row]:
    """TFLOP/s of every system that has gradients; five products where forward has two."""
    q, k, v, dout = cell.tensors(4)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    others = peers(cell.setting, cell.batch, cell.length)

    def grads_of(peer: Callable[..., torch.Tensor]) -> Callable[[], Any]:
        return partial(torch.autograd.grad, peer(*leaves), leaves, dout, retain_graph=True)

    ops = cell.ops()
    out, lse = ops.prefill(q, k, v, params=cell.setting.params, return_lse=True)
    calls: dict[str, Callable[[], Any]] = {
        "attngen": partial(ops.backward, dout, q, k, v, out, lse, params=cell.setting.params)
    }
    for name, peer in others.items():
        try:
            calls[name] = grads_of(peer)
        except Exception as failure:
            print(f"backward {cell}: {name} cannot run: {str(failure).splitlines()[0][:120]}", flush=True)
    exact = grads_of(_exact(cell, others))()

    def error(grads: Any) -> float:
        return max(relative_error(got, right) for got, right in zip(grads[:3], exact, strict=True))

    return timed(f"backward {cell}", calls, error, 2.5 * cell.work)


def _exact(cell: Cell, others: dict[str, Any]) -> Callable[..., torch.Tensor]:
    """A system that all others are compared with."""
    if not cell.setting.is_plain:
        return others["flex"]
    return partial(sdpa, backend=SDPBackend.FLASH_ATTENTION, causal=cell.setting.mask is not None)


def timed(
    case: str, contenders: dict[str, Callable[[], Any]], error_of: Callable[[Any], float], work: float
) -> list[Row]:
    """Those that run, checked, then timed in turn."""
    errors = {}
    for name in list(contenders):
        try:
            errors[name] = error_of(contenders[name]())
        except Exception as failure:
            print(f"{case}: {name} cannot run: {str(failure).splitlines()[0][:120]}", flush=True)
            del contenders[name]
    rows = [Row(case, n, ms, work / ms / 1e9, "TFLOP/s", errors[n]) for n, ms in time_gpu(contenders).items()]
    print(case, {row.contender: round(row.rate) for row in rows}, flush=True)
    return rows
