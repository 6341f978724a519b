"""An op as attngen compiles it: its plan, its artifacts, or the reference where there are none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from attngen.backends import reference, registry
from attngen.backends.call import Inputs, Launch, NewTokens
from attngen.errors import BuildError
from attngen.ops.kernels import KernelOp
from attngen.schedule.launch import KernelLaunch
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
        renew: finds or builds the same kernel again.
    """

    plan: KernelPlan
    folder: Path
    binary: Path
    metadata: Mapping[str, Any]
    renew: Callable[[], BuiltKernel]

    @property
    def launch(self) -> KernelLaunch:
        """The plan."""
        return self.plan

    def load(self, device: torch.device) -> Launch:
        """Load it into this process, for one device; what has been removed since it was found is made again."""
        toolchain = registry.backend(self.plan.backend)
        assert toolchain is not None  # kernels are made by one
        try:
            return toolchain.load(self.binary, self.metadata, self.plan, device)
        except (OSError, BuildError):
            if self.binary.exists():
                raise
        return self.renew().load(device)

    def present(self) -> BuiltKernel:
        """This kernel, or one made again where its entry has been removed since it was found."""
        return self if self.binary.exists() else self.renew()


class Op(KernelOp):
    """One callable op on one target, by its plan; without kernels it evaluates the variant."""

    def __init__(self, plan: OpPlan, kernels: Sequence[BuiltKernel]) -> None:
        super().__init__(plan.variant.signature, kernels)
        self.plan = plan
        self.kernels = tuple(kernels)

    @property
    def variant(self) -> Variant:
        """What the op computes."""
        return self.plan.variant

    def forward(
        self,
        inputs: Inputs,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        max_logit: torch.Tensor | None = None,
        *,
        partial: bool = False,
    ) -> None:
        """See :meth:`KernelOp.forward`."""
        if not self.plan.kernels:
            variant = replace(self.variant, sink=None) if partial else self.variant
            exact, exact_lse, exact_max = reference.rows(variant, inputs)
            out.copy_(exact.view(out.shape))
            for target, found in ((lse, exact_lse), (max_logit, exact_max)):
                if target is not None:
                    target.copy_(found)
            return
        super().forward(inputs, out, lse, max_logit, partial=partial)

    def backward(
        self,
        inputs: Inputs,
        dout: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        dlse: torch.Tensor | None,
        grads: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """See :meth:`KernelOp.backward`."""
        if not self.plan.kernels:
            dq, dk, dv, dparams = reference.backward(self.variant, inputs, dout, dlse)
            for name, exact in (("dq", dq), ("dk", dk), ("dv", dv)):
                grads[name].copy_(exact.view(grads[name].shape))
            return {
                name: grad.to(inputs.params[name].dtype if name in inputs.params else inputs.q.dtype)
                for name, grad in dparams.items()
            }
        return super().backward(inputs, dout, out, lse, dlse, grads)

    def append(self, tokens: NewTokens) -> None:
        """See :meth:`KernelOp.append`."""
        if not self.plan.kernels:
            reference.append(self.variant, tokens)
            return
        super().append(tokens)
