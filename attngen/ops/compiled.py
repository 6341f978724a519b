"""What all ops of one spec share: how they are compiled, called, and reached from compiled graphs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from attngen.errors import ArgumentError, UnsupportedError
from attngen.ops import append, calls, torch_library
from attngen.ops.calls import Gradients, Params, Rows
from attngen.ops.checks import torch_dtype
from attngen.ops.mixed import PrefixPrefill
from attngen.ops.op import Op
from attngen.ops.sparse import attend_listed, gathering_spec
from attngen.ops.storage import Cache, Extras, Query, unpack
from attngen.spec import AttentionSpec, Softmax
from attngen.variant import OPS, OpName, Variant

Result = torch.Tensor | tuple[torch.Tensor, ...]
LOG2_E = 1.4426950408889634


class Resolver(Protocol):
    """Where the variants and the compiled ops of a spec come from."""

    @property
    def variants(self) -> Mapping[OpName, Variant | UnsupportedError]:
        """What each op computes, or why there is none."""

    def variant(self, op: OpName) -> Variant:
        """What an op computes."""

    def __call__(self, op: OpName, device: torch.device | None, *, deterministic: bool = False) -> Op:
        """The op for a device, compiled on first need; for the declared target, or the current GPU or CPU, when omitted."""

    def beside(self, spec: AttentionSpec) -> Resolver:
        """The same for another spec, of the same target and backend."""

    def compiled(self) -> dict[OpName, Op]:
        """The ops compiled so far."""


class CompiledSpec:
    """The ops of one spec and the variants they compute."""

    def __init__(self, spec: AttentionSpec, resolve: Resolver, scope: str) -> None:
        self.spec = spec
        self._resolve, self._scope = resolve, scope
        self._defaults = spec.defaults()
        declared = [param for source in (spec.mask, *spec.score_mods) for param in source.params()]
        self._default_dtypes = {p.name: torch_dtype(p.dtype) for p in declared if p.name in self._defaults}
        trained = resolve.variants["backward"]
        self.differentiable = trained.differentiable if isinstance(trained, Variant) else ()
        self._prefix_prefill: PrefixPrefill | None = None
        self._gathering: CompiledSpec | None = None
        self._handle = hashlib.sha256(f"{spec.model_dump_json()}|{scope}".encode()).hexdigest()[:16]
        torch_library.register(self._handle, self)

    def op(self, name: OpName, device: torch.device | None = None) -> Op:
        """The compiled op for ``device`` (for the declared target when omitted); built or loaded if needed."""
        return self._resolve(name, device)

    def warmup(self, *names: OpName, device: torch.device | str | None = None) -> None:
        """Compile and load now: afterwards ``names`` (every op the spec has, by default) run under CUDA graph capture."""
        place = None if device is None else torch.empty(0, device=device).device
        refused: list[UnsupportedError] = []
        for name in names or OPS:
            try:
                op = self.op(name, place)
            except UnsupportedError as error:
                refused.append(error)
                continue
            if op.kernels:
                op.load(place or _default_device(op))
        if refused and (names or len(refused) == len(OPS)):
            raise refused[0]

    @property
    def artifacts(self) -> dict[str, tuple[Path, ...]]:
        """Cache folders of the kernels of each op compiled so far."""
        return {name: tuple(kernel.folder for kernel in op.kernels) for name, op in self._resolve.compiled().items()}

    def check_rows(self, *, return_lse: bool, return_max: bool) -> None:
        """Raise where rows have no lse or largest logit."""
        for name, wanted in (("return_lse", return_lse), ("return_max", return_max)):
            if wanted and not isinstance(self.spec.normalizer, Softmax):
                raise UnsupportedError(
                    f"{name} has no meaning here",
                    where=name,
                    why=f"with the {self.spec.normalizer.kind} normalizer each weight depends on its own logit only",
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
        prefix: Cache | None = None,
        key_indices: torch.Tensor | None = None,
    ) -> Result:
        """What :meth:`Ops.prefill` and :meth:`Ops.decode` share; ``prefix`` is a cache beside k and v."""
        if lse_base not in ("e", "log2"):
            raise ArgumentError(
                f"lse_base is {lse_base!r}", where="lse_base", why="it is a unit", fix="pass 'e' or 'log2'"
            )
        self.check_rows(return_lse=return_lse, return_max=return_max)
        given = self.with_defaults(params)
        if key_indices is not None and prefix is not None:
            raise ArgumentError(
                "kv_cache has no meaning beside key_indices",
                where="kv_cache",
                why="listed keys are all in the paged cache that is passed as k",
                fix="append new tokens to the cache first, and leave kv_cache out",
            )
        if key_indices is not None:
            found = self._over_listed(
                name, q, k, v, key_indices, extras, given, out, partial=partial, want_max=return_max
            )
            return chosen(found, lse_base, return_lse=return_lse, return_max=return_max)
        variant = self.variant(name)
        if prefix is not None:
            found = self._over_prefix(q, k, v, prefix, extras, given, out, partial=partial, want_max=return_max)
            return chosen(found, lse_base, return_lse=return_lse, return_max=return_max)
        q, one_token = _of_one_token(q) if name == "decode" else (q, False)
        if one_token:
            out = out.unsqueeze(1) if isinstance(out, torch.Tensor) else out
            if isinstance(given.get(variant.gate or ""), torch.Tensor):
                given[variant.gate or ""] = given[variant.gate or ""].unsqueeze(1)
        query, keys, values, extras = unpack(variant, self.spec.kv, q, k, v, extras)
        tracked = name == "prefill" and _tracked(query, keys, values, *given.values())
        calls.check_options(self.spec, tracked=tracked, out=out, partial=partial)
        if out is None and (torch.compiler.is_compiling() or tracked):
            with torch.set_grad_enabled(name == "prefill" and torch.is_grad_enabled()):
                found = torch_library.attention(
                    self._handle, name, query, keys, values, extras, given, want_max=return_max, partial=partial
                )
        else:
            found = self.run_forward(
                name, query, keys, values, extras, given, out, want_max=return_max, partial=partial
            )
        result, lse, largest = (x.squeeze(1) if one_token and x.dim() > 1 else x for x in found)
        return chosen((result, lse, largest), lse_base, return_lse=return_lse, return_max=return_max)

    def _over_prefix(
        self,
        q: Query,
        k: Cache,
        v: Cache | None,
        prefix: Cache,
        extras: Extras,
        params: dict[str, torch.Tensor],
        out: torch.Tensor | None,
        *,
        partial: bool,
        want_max: bool,
    ) -> Rows:
        variant = self.variant("prefill")
        if self._prefix_prefill is None:

            def part(spec: AttentionSpec) -> CompiledSpec:
                return type(self)(spec, self._resolve.beside(spec), self._scope)

            self._prefix_prefill = PrefixPrefill(self.spec, variant, part)
        calls.check_options(self.spec, tracked=_tracked(q, k, v, *params.values()), out=out, partial=partial)
        result, lse, largest = self._prefix_prefill(q, k, v, prefix, extras, params, partial=partial, want_max=want_max)
        if out is not None:
            calls.check_out(variant, result, out)
            result = out.copy_(result)
        return result, lse, largest

    def _over_listed(
        self,
        name: OpName,
        q: Query,
        cache: Cache,
        v: Cache | None,
        key_indices: torch.Tensor,
        extras: Extras,
        params: dict[str, torch.Tensor],
        out: torch.Tensor | None,
        *,
        partial: bool,
        want_max: bool,
    ) -> Rows:
        variant = self.variant("decode")
        if self._gathering is None:
            spec = gathering_spec(self.spec, variant)
            self._gathering = type(self)(spec, self._resolve.beside(spec), self._scope)
        calls.check_options(self.spec, tracked=_tracked(q, cache, v, *params.values()), out=out, partial=partial)
        q, one_token = _of_one_token(q) if name == "decode" else (q, False)
        if one_token:
            key_indices = key_indices.unsqueeze(1)
        found = attend_listed(
            self._gathering,
            variant if name == "decode" else replace(variant, q_layout="ragged"),
            self.spec.kv,
            q,
            cache,
            v,
            key_indices,
            extras,
            params,
            want_max=want_max,
            partial=partial,
        )
        result, lse, largest = (x.squeeze(1) if one_token and x.dim() > 1 else x for x in found)
        if out is not None:
            calls.check_out(variant, result, out)
            result = out.copy_(result)
        return result, lse, largest

    def variant(self, name: OpName) -> Variant:
        """What an op computes."""
        return self._resolve.variant(name)

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
        q, k, v, extras = unpack(op.variant, self.spec.kv, q, k, v, extras)
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
        given = dict(params or {})
        for name, tensor in self._defaults.items():
            if name not in given:  # captured tensors may have a wider type than parameters: int64, float64
                given[name] = tensor.to(self._default_dtypes[name])
        return given

    def __reduce__(self) -> tuple[object, ...]:
        """Modules that hold ops can be copied, saved, and sent to other processes, which find the kernels in the cache."""
        return type(self), (self.spec, self._resolve, self._scope)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec.name or 'unnamed'}, {self.spec.heads!r}, kv={self.spec.kv.kind})"


def chosen(found: Rows, lse_base: str, *, return_lse: bool, return_max: bool) -> Result:
    """out alone, or with the values of rows that were asked for."""
    out, lse, largest = found
    if return_lse and lse_base == "log2":
        lse = lse * LOG2_E
    rows = (*((lse,) if return_lse else ()), *((largest,) if return_max else ()))
    return (out, *rows) if rows else out


def _of_one_token(q: Any) -> tuple[Any, bool]:
    """q with a dim of tokens, and whether it came without one: ``[batch, heads, dim]``, or a pair of such."""
    if isinstance(q, torch.Tensor):
        return (q.unsqueeze(1), True) if q.dim() == 3 else (q, False)
    if not isinstance(q, (tuple, list)):
        return q, False
    if len(q) == 2 and all(isinstance(x, torch.Tensor) and x.dim() == 3 for x in q):
        return (q[0].unsqueeze(1), q[1].unsqueeze(1)), True
    return q, False


def _tracked(*inputs: object) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)


def _default_device(op: Op) -> torch.device:
    kind = "cuda" if op.plan.target.kind in ("cuda", "hip") else "cpu"
    return torch.empty(0, device=kind).device
