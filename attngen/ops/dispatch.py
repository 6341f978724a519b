"""What all ops of one spec share: how a call is checked, routed, and reached from compiled graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from attngen.errors import ArgumentError, UnsupportedError
from attngen.ops import append, calls, torch_library
from attngen.ops.calls import Gradients, Params, Prefix, Rows
from attngen.ops.kernels import KernelOp
from attngen.ops.storage import Cache, Extras, Query, unpack
from attngen.signature import OPS, CallName, Declaration, OpName, Signature

Result = torch.Tensor | tuple[torch.Tensor, ...]
LOG2_E = 1.4426950408889634


class Resolver(Protocol):
    """Where the ops of a spec come from."""

    def signature(self, op: OpName) -> Signature:
        """What an op takes and gives.

        Raises:
            UnsupportedError: there is none.
        """

    def __call__(self, op: OpName, device: torch.device | None, *, deterministic: bool = False) -> KernelOp:
        """The op for a device, made on first need; for the declared target, or the current GPU or CPU, when omitted."""


class Dispatch:
    """Calls of the ops of one spec, wherever they come from."""

    def __init__(
        self, declared: Declaration, resolve: Resolver, defaults: Mapping[str, torch.Tensor], handle: str
    ) -> None:
        """
        Args:
            defaults: tensors of parameters that a call leaves out, in the parameters' dtypes.
            handle: what graphs name the ops by: the same for the same meaning, in every process.
        """
        self.declared, self._resolve, self._defaults, self._handle = declared, resolve, dict(defaults), handle
        self._signatures = {op: _signature(resolve, op) for op in OPS}
        trained = self._signatures["backward"]
        self.differentiable = trained.differentiable if isinstance(trained, Signature) else ()
        torch_library.register(handle, self)

    def op(self, name: OpName, device: torch.device | None = None, *, deterministic: bool = False) -> KernelOp:
        """The op for ``device`` (for the declared target when omitted); built or loaded if needed."""
        return self._resolve(name, device, deterministic=deterministic)

    def ops_of(self, name: CallName, device: torch.device | None = None) -> Sequence[KernelOp]:
        """The ops that a call runs."""
        if name == "prefix":
            raise _elsewhere("kv_cache")
        if name == "listed":
            raise _elsewhere("key_indices")
        return [self.op(name, device)]

    def warmup(self, *names: CallName, device: torch.device | str | None = None) -> None:
        """Compile and load now: afterwards ``names`` (every op the spec has, by default) run under CUDA graph capture.

        ``prefix`` are prefills with ``kv_cache=``, ``listed`` calls with ``key_indices=``: those take ops of their own. To trace
        the former whole (``fullgraph=True``), warm it up or call it first.
        """
        place = None if device is None else torch.empty(0, device=device).device
        refused: list[UnsupportedError] = []
        for name in names or OPS:
            try:
                for op in self.ops_of(name, place):
                    op.warmup(place)
            except UnsupportedError as error:
                refused.append(error)
        if refused and (names or len(refused) == len(OPS)):
            raise refused[0]

    def check_rows(self, *, return_lse: bool, return_max: bool) -> None:
        """Raise where rows have no lse or largest logit."""
        for name, wanted in (("return_lse", return_lse), ("return_max", return_max)):
            if wanted and self.declared.normalizer != "softmax":
                raise UnsupportedError(
                    f"{name} has no meaning here",
                    where=name,
                    why=f"with the {self.declared.normalizer} normalizer each weight depends on its own logit only",
                    fix="leave it out; partial results simply add",
                )

    def forward(
        self,
        name: OpName,
        q: Query,
        k: Cache,
        v: Cache | None,
        extras: Extras,
        params: Params | None,
        out: torch.Tensor | None,
        return_lse: bool,
        lse_base: str,
        *,
        partial: bool,
        return_max: bool,
        prefix: Prefix | None = None,
        key_indices: torch.Tensor | None = None,
    ) -> Result:
        """What :meth:`Methods.prefill` and :meth:`Methods.decode` share; ``prefix`` is a cache beside k and v."""
        if lse_base not in ("e", "log2"):
            raise ArgumentError(
                f"lse_base is {lse_base!r}", where="lse_base", why="it is a unit", fix="pass 'e' or 'log2'"
            )
        self.check_rows(return_lse=return_lse, return_max=return_max)
        given = self.with_defaults(params)
        found = self.rows(
            name,
            q,
            k,
            v,
            extras,
            given,
            out,
            partial=partial,
            want_max=return_max,
            prefix=prefix,
            key_indices=key_indices,
        )
        return chosen(found, lse_base, return_lse=return_lse, return_max=return_max)

    def rows(
        self,
        name: OpName,
        q: Query,
        k: Cache,
        v: Cache | None,
        extras: Extras,
        given: dict[str, torch.Tensor],
        out: torch.Tensor | None,
        *,
        partial: bool,
        want_max: bool,
        prefix: Prefix | None,
        key_indices: torch.Tensor | None,
    ) -> Rows:
        """out, lse and largest logits; ``given`` are all parameters."""
        for label, asked in (("kv_cache", prefix), ("key_indices", key_indices)):
            if asked is not None:
                raise _elsewhere(label)
        variant = self.signature(name)
        q, one_token = of_one_token(q) if name == "decode" else (q, False)
        if one_token:
            out = out.unsqueeze(1) if isinstance(out, torch.Tensor) else out
            if isinstance(given.get(variant.gate or ""), torch.Tensor):
                given[variant.gate or ""] = given[variant.gate or ""].unsqueeze(1)
        query, keys, values, extras = unpack(variant, self.declared, q, k, v, extras)
        tracked = name == "prefill" and is_tracked(query, keys, values, *given.values())
        calls.check_options(self.declared, variant, tracked=tracked, out=out, partial=partial)
        found = self.attend(
            name, query, keys, values, extras, given, out, tracked=tracked, want_max=want_max, partial=partial
        )
        result, lse, largest = (x.squeeze(1) if one_token and x.dim() > 1 else x for x in found)
        return result, lse, largest

    def signature(self, name: OpName) -> Signature:
        """What an op takes and gives."""
        found = self._signatures[name]
        if isinstance(found, UnsupportedError):
            raise found
        return found

    def attend(
        self,
        name: OpName,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        extras: Extras,
        params: Params,
        out: torch.Tensor | None = None,
        *,
        want_max: bool,
        partial: bool,
        tracked: bool = False,
    ) -> Rows:
        """:meth:`run_forward`; through torch's dispatcher where the call is traced, or ``tracked``: gradients are recorded."""
        if out is None and (torch.compiler.is_compiling() or tracked):
            with torch.set_grad_enabled(tracked):
                return torch_library.attention(
                    self._handle, name, q, k, v, extras, params, want_max=want_max, partial=partial
                )
        return self.run_forward(name, q, k, v, extras, params, out, want_max=want_max, partial=partial)

    def run_forward(
        self,
        name: OpName,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        extras: Extras,
        params: Params,
        out: torch.Tensor | None = None,
        *,
        want_max: bool = False,
        partial: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What :meth:`prefill`, :meth:`decode` and the registered torch op share; see :func:`calls.forward`."""
        op = self.op(name, q.device)
        return calls.forward(op, q, k, v, extras, params, out, want_max=want_max, partial=partial)

    def run_backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        dlse: torch.Tensor | None,
        extras: Extras,
        params: Params,
        *,
        deterministic: bool = False,
    ) -> Gradients:
        """What :meth:`backward` and the registered torch op share; see :func:`calls.backward`."""
        op = self._resolve("backward", q.device, deterministic=deterministic)
        q, k, v, extras = unpack(op.signature, self.declared, q, k, v, extras)
        return calls.backward(op, dout, q, k, v, out, lse, dlse, extras, params)

    def run_append(self, new: append.Rows, slots: append.Slots, places: append.Places, params: Params) -> None:
        """What :meth:`append` and the registered torch op share; see :func:`append.run`."""
        append.run(self.op("append", new.k.device), new, slots, places, params)

    def with_defaults(self, params: Params | None) -> dict[str, torch.Tensor]:
        if params is not None and not isinstance(params, Mapping):
            raise ArgumentError(
                f"params is a {type(params).__name__}",
                where="params",
                why="parameters go by name",
                fix="pass {name: tensor}",
            )
        return {**self._defaults, **(params or {})}


def _elsewhere(label: str) -> UnsupportedError:
    """Why calls with this argument are not served by ops of one spec alone."""
    return UnsupportedError(
        f"{label} is not served here",
        where=label,
        why="it takes kernels of further specs, which attngen compiles when they are needed",
        fix="use ag.compile of the spec"
        + ("" if label == "key_indices" else ", or prefill each part with partial=True, and merge_states"),
    )


def _signature(resolve: Resolver, op: OpName) -> Signature | UnsupportedError:
    """What an op takes and gives, or why there is none."""
    try:
        return resolve.signature(op)
    except UnsupportedError as error:
        return error


def chosen(found: Rows, lse_base: str, *, return_lse: bool, return_max: bool) -> Result:
    """out alone, or with the values of rows that were asked for."""
    out, lse, largest = found
    if return_lse and lse_base == "log2":
        lse = lse * LOG2_E
    rows = (*((lse,) if return_lse else ()), *((largest,) if return_max else ()))
    return (out, *rows) if rows else out


def of_one_token(q: Any) -> tuple[Any, bool]:
    """q with a dim of tokens, and whether it came without one: ``[batch, heads, dim]``, or a pair of such."""
    if isinstance(q, torch.Tensor):
        return (q.unsqueeze(1), True) if q.dim() == 3 else (q, False)
    if not isinstance(q, (tuple, list)):
        return q, False
    if len(q) == 2 and all(isinstance(x, torch.Tensor) and x.dim() == 3 for x in q):
        return (q[0].unsqueeze(1), q[1].unsqueeze(1)), True
    return q, False


def is_tracked(*inputs: object) -> bool:
    """Whether gradients of a call of these tensors are recorded."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in calls.tensors(inputs))
