"""Gradients of run-time parameters: what backward kernels accumulate, and how it becomes one gradient a parameter."""

from __future__ import annotations

import torch

from attngen.backends.call import Inputs
from attngen.ops.binding import Values, tensor_values
from attngen.ops.checks import torch_dtype
from attngen.signature import Signature

_LARGEST_SUM = 62  # bits of a sum of integers
_LARGEST_SHIFT = 126  # exponents of fp32


class ParamSums:
    """Buffers of one backward call. Sinks and norm weights are summed here from a part a row or program: in a fixed order."""

    def __init__(self, variant: Signature, inputs: Inputs) -> None:
        self._variant, self._inputs, self._device = variant, inputs, inputs.q.device
        self.after_delta: Values = {}
        self._added: dict[str, torch.Tensor] = {}
        self._exact: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._norms: dict[str, torch.Tensor] = {}
        self._dsink: torch.Tensor | None = None
        self._dgate: torch.Tensor | None = None

    def row_values(self, lse: torch.Tensor | None, dout: torch.Tensor) -> Values:
        """What ``delta`` writes; :attr:`after_delta` is what the kernels after it then read instead."""
        variant = self._variant
        values: Values = {}
        if lse is not None:
            values["delta"] = self.after_delta["delta"] = torch.empty_like(lse)
            if variant.has_sink:
                values["total_lse"] = self.after_delta["lse"] = torch.empty_like(lse)
            if variant.sink_param is not None:
                values["dsink"] = self._dsink = torch.zeros_like(lse.T, memory_format=torch.contiguous_format)
        if self._inputs.gate is not None:
            self._dgate = torch.zeros(self._inputs.gate.shape, dtype=self._inputs.gate.dtype, device=self._device)
            gated = torch.zeros(dout.shape, dtype=dout.dtype, device=self._device)
            values |= tensor_values("dgate", self._dgate) | tensor_values("gated_dout", gated)
            self.after_delta |= tensor_values("dout", gated)
        return values

    def norm_values(self, side: str, programs: int) -> Values:
        """Parts of the gradient of the weight of queries (``dq``) or keys (``dk``), where they have one."""
        weight = self._variant.norm_weights[side == "dk"]
        if weight is None:
            return {}
        shape = (programs, self._variant.head_dim_qk)
        self._norms[side] = torch.zeros(shape, dtype=torch.float32, device=self._device)
        return {f"partial_{side}_norm": self._norms[side]}

    def added_values(self) -> Values:
        """fp32 accumulators of atomic additions."""
        for param in self._variant.gradient_params:
            shape = self._inputs.params[param.name].shape
            self._added[param.name] = torch.zeros(shape, dtype=torch.float32, device=self._device)
        return {f"d_{p.symbol}": self._added[p.name] for p in self._variant.gradient_params}

    def exact_values(self, pass_idx: int) -> Values:
        """Accumulators of integers: pass 0 finds the largest contribution, which fixes the unit in which pass 1 adds.

        The unit leaves room for as many contributions of that size as one element can get, so no sum overflows.
        """
        values: Values = {}
        for param in self._variant.gradient_params:
            if pass_idx == 0:
                top = torch.zeros(1, dtype=torch.float32, device=self._device)
                total = torch.zeros(self._inputs.params[param.name].shape, dtype=torch.int64, device=self._device)
                self._exact[param.name] = (top, torch.ones_like(top), total)
            else:
                top, _, total = self._exact[param.name]
                room = _LARGEST_SUM - self._most_contributions().bit_length()
                shift = (room - torch.frexp(top).exponent).clamp(-_LARGEST_SHIFT, _LARGEST_SHIFT)
                self._exact[param.name] = (top, torch.ldexp(torch.ones_like(top), shift), total)
            top, scale, total = self._exact[param.name]
            symbol = param.symbol
            values |= {f"top_{symbol}": top, f"scale_{symbol}": scale, f"sum_{symbol}": total}
        return values

    def _most_contributions(self) -> int:
        batch = self._inputs.batch
        return max(1, batch.num_tokens * self._variant.num_qo_heads * max(batch.kv_len, batch.num_keys))

    def gradients(self) -> dict[str, torch.Tensor]:
        """By name, in the dtypes of the parameters."""
        found = dict(self._added)
        for name, (top, scale, total) in self._exact.items():
            found[name] = torch.where(top[0].isfinite(), total.double() / scale[0], torch.nan).float()
        for side, part in self._norms.items():
            weight = self._variant.norm_weights[side == "dk"]
            assert weight is not None
            found[weight] = found.get(weight, 0.0) + part.sum(0)
        if self._dsink is not None and self._variant.sink_param is not None:
            name = self._variant.sink_param.name
            found[name] = found.get(name, 0.0) + self._dsink.sum(1)
        dtypes = {param.name: torch_dtype(param.dtype) for param in self._variant.params}
        gradients = {name: grad.to(dtypes[name]) for name, grad in found.items()}
        if self._dgate is not None and self._variant.gate is not None:
            gradients[self._variant.gate] = self._dgate
        return gradients
