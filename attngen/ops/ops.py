"""The public object: all ops of one spec, compiled when they are needed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from attngen.errors import ArgumentError, UnsupportedError
from attngen.ops import calls
from attngen.ops.calls import Prefix, Rows
from attngen.ops.checks import torch_dtype
from attngen.ops.dispatch import is_tracked, of_one_token
from attngen.ops.methods import Methods
from attngen.ops.mixed import PrefixPrefill
from attngen.ops.op import Op
from attngen.ops.parts import parts
from attngen.ops.sparse import attend_listed
from attngen.ops.storage import Cache, Extras, Query
from attngen.signature import CALLS, OPS, CallName, Declaration, OpName, Signature
from attngen.spec import AttentionSpec, Paged
from attngen.variant import Variant


class Resolver(Protocol):
    """Where the variants and the compiled ops of a spec come from."""

    @property
    def variants(self) -> Mapping[OpName, Variant | UnsupportedError]:
        """What each op computes, or why there is none."""

    def variant(self, op: OpName) -> Variant:
        """What an op computes."""

    def signature(self, op: OpName) -> Signature:
        """What an op takes and gives."""

    def __call__(self, op: OpName, device: torch.device | None, *, deterministic: bool = False) -> Op:
        """The op for a device, compiled on first need; for the declared target, or the current GPU or CPU, when omitted."""

    def beside(self, spec: AttentionSpec, call: CallName) -> Resolver:
        """The same for another spec, of the same target and backend, whose ops are parts of a call."""

    def compiled(self) -> dict[OpName, Op]:
        """The ops compiled so far."""


class Ops(Methods):
    """Prefill, decode, backward, autograd attention and writing of the cache, of one spec.

    Serves every device of its target; kernels are compiled, or loaded from the cache, when an op is first needed. For the calls
    see :class:`attngen.ops.methods.Methods`.
    """

    def __init__(self, spec: AttentionSpec, resolve: Resolver, scope: str) -> None:
        handle = hashlib.sha256(f"{spec.model_dump_json()}|{scope}".encode()).hexdigest()[:16]
        super().__init__(declaration(spec), resolve, captured(spec), handle)
        self.spec = spec
        self._resolver, self._scope = resolve, scope
        self._parts: dict[CallName, tuple[tuple[Ops, OpName], ...]] = {}

    def op(self, name: OpName, device: torch.device | None = None, *, deterministic: bool = False) -> Op:
        """The compiled op for ``device`` (for the declared target when omitted); built or loaded if needed."""
        return self._resolver(name, device, deterministic=deterministic)

    def ops_of(self, name: CallName, device: torch.device | None = None) -> list[Op]:
        """The compiled ops that a call runs: one, or those of its parts, for ``prefix`` and ``listed``."""
        return [part.op(op, device) for part, op in self.parts(name)]

    def parts(self, name: CallName) -> tuple[tuple[Ops, OpName], ...]:
        """Whose ops a call runs; made once."""
        if name not in CALLS[len(OPS) :]:
            return ((self, name),)  # type: ignore[return-value]
        if name not in self._parts:
            self._parts[name] = tuple(
                (type(self)(spec, self._resolver.beside(spec, name), self._scope), op)
                for spec, op in parts(self.spec, name)
            )
        return self._parts[name]

    def variant(self, name: OpName) -> Variant:
        """What an op computes."""
        return self._resolver.variant(name)

    @property
    def artifacts(self) -> dict[str, tuple[Path, ...]]:
        """Cache folders of the kernels of each op compiled so far."""
        return {name: tuple(kernel.folder for kernel in op.kernels) for name, op in self._resolver.compiled().items()}

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
        """See :meth:`Methods.rows`; a prefix and listed keys take ops of further specs."""
        if key_indices is not None and prefix is not None:
            raise ArgumentError(
                "kv_cache has no meaning beside key_indices",
                where="kv_cache",
                why="listed keys are all in the paged cache that is passed as k",
                fix="append new tokens to the cache first, and leave kv_cache out",
            )
        if key_indices is not None:
            return self._over_listed(name, q, k, v, key_indices, extras, given, out, partial=partial, want_max=want_max)
        if prefix is not None:
            return self._over_prefix(q, k, v, prefix, extras, given, out, partial=partial, want_max=want_max)
        return super().rows(
            name,
            q,
            k,
            v,
            extras,
            given,
            out,
            partial=partial,
            want_max=want_max,
            prefix=prefix,
            key_indices=key_indices,
        )

    def _over_prefix(
        self,
        q: Query,
        k: Cache,
        v: Cache | None,
        prefix: Prefix,
        extras: Extras,
        params: dict[str, torch.Tensor],
        out: torch.Tensor | None,
        *,
        partial: bool,
        want_max: bool,
    ) -> Rows:
        variant = self.variant("prefill")
        (prefix_ops, _), (fresh_ops, _) = self.parts("prefix")
        mixed = PrefixPrefill(self.spec, variant, self.signature("prefill"), prefix_ops, fresh_ops)
        inputs = (q, k, v, prefix.cache, prefix.w_uk, prefix.w_uv, params)
        tracked = is_tracked(*inputs)
        calls.check_options(self.declared, self.signature("prefill"), tracked=tracked, out=out, partial=partial)
        with torch.no_grad():
            result, lse, largest = mixed(q, k, v, prefix, extras, params, partial=partial, want_max=want_max)
        if out is not None:
            calls.check_out(self.signature("prefill"), result, out)
            result = out.copy_(result)
        found = result, lse, largest
        return calls.undifferentiable(found, _no_backward(), *inputs) if tracked else found

    def _over_listed(
        self,
        name: OpName,
        q: Query,
        cache: Cache,
        v: Cache | None,
        key_indices: object,
        extras: Extras,
        params: dict[str, torch.Tensor],
        out: torch.Tensor | None,
        *,
        partial: bool,
        want_max: bool,
    ) -> Rows:
        variant, signature = self.variant("decode"), self.signature("decode")
        ((gathering, _),) = self.parts("listed")
        inputs = (q, cache, v, params)
        tracked = name == "prefill" and is_tracked(*inputs)
        calls.check_options(self.declared, signature, tracked=tracked, out=out, partial=partial)
        q, one_token = of_one_token(q) if name == "decode" else (q, False)
        if one_token:
            if isinstance(gate := params.get(signature.gate or ""), torch.Tensor):
                params = {**params, signature.gate or "": gate.unsqueeze(1)}
            key_indices = key_indices.unsqueeze(1) if isinstance(key_indices, torch.Tensor) else key_indices
        with torch.no_grad():
            found = attend_listed(
                gathering,
                variant.mask,
                signature if name == "decode" else replace(signature, q_layout="ragged"),
                self.declared,
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
            calls.check_out(signature, result, out)
            result = out.copy_(result)
        found = result, lse, largest
        return calls.undifferentiable(found, _no_backward(), *inputs) if tracked else found

    def __reduce__(self) -> tuple[object, ...]:
        """Modules that hold ops can be copied, saved, and sent to other processes, which find the kernels in the cache."""
        return type(self), (self.spec, self._resolver, self._scope)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec.name or 'unnamed'}, {self.spec.heads!r}, kv={self.spec.kv.kind})"


def _no_backward() -> UnsupportedError:
    return UnsupportedError(
        "backward does not read a paged cache",
        where="kv_cache, key_indices",
        why="gradients of k and v would need pages of their own",
        fix="call prefill under torch.no_grad(), or train with kv=ag.Contiguous() or ag.Ragged()",
    )


def declaration(spec: AttentionSpec) -> Declaration:
    """What all ops of a spec have in common."""
    normalizer, kv = spec.normalizer, spec.kv
    pages = (kv.page_size, kv.layout, kv.stack_dim) if isinstance(kv, Paged) else ()
    return Declaration(normalizer.kind, normalizer.depends_on_length, *pages)


def captured(spec: AttentionSpec) -> dict[str, torch.Tensor]:
    """Tensors that mods captured, as parameters; those captured may have a wider type: int64, float64."""
    declared = [param for source in (spec.mask, *spec.score_mods) for param in source.params()]
    dtypes = {param.name: torch_dtype(param.dtype) for param in declared}
    return {name: tensor.to(dtypes[name]) for name, tensor in spec.defaults().items()}
