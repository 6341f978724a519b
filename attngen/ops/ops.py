"""The public object: all ops of one spec."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol

import torch

from attngen.errors import ArgumentError, UnsupportedError
from attngen.ops import calls, torch_library
from attngen.ops.calls import Gradients, Params
from attngen.ops.checks import torch_dtype
from attngen.ops.op import Op
from attngen.ops.storage import Cache, Extras, Query, unpack
from attngen.spec import AttentionSpec, Softmax
from attngen.variant import OPS, OpName, Variant, normalize

Result = torch.Tensor | tuple[torch.Tensor, ...]
LOG2_E = 1.4426950408889634


class Resolver(Protocol):
    """Where the compiled ops of a spec come from."""

    def __call__(self, op: OpName, device: torch.device | None, *, deterministic: bool = False) -> Op:
        """The op for a device, compiled on first need; for the declared target, or the current GPU or CPU, when omitted."""

    def compiled(self) -> dict[OpName, Op]:
        """The ops compiled so far."""


class Ops:
    """Prefill, decode, backward and autograd attention of one spec.

    Serves every device of its target; kernels are compiled, or loaded from the cache, when an op is first needed. Shapes are
    those of the spec's storage: Contiguous ``q [batch, qo_len, num_qo_heads, head_dim_qk]`` and ``k, v [batch, kv_len,
    num_kv_heads, dim]``; Ragged ``[nnz, heads, dim]`` with ``qo_indptr, kv_indptr`` int32 ``[batch + 1]``; Paged: ragged q and
    a cache of ``[num_pages, page_size, num_kv_heads, dim]`` (NHD) or ``[num_pages, num_kv_heads, page_size, dim]`` (HND).

    Every method raises :class:`ArgumentError` for tensors that do not fit, before anything is launched,
    :class:`UnsupportedError` where the backend cannot run the op, and :class:`BuildError` where a toolchain fails.
    """

    def __init__(self, spec: AttentionSpec, resolve: Resolver, scope: str) -> None:
        self.spec = spec
        self._resolve, self._scope = resolve, scope
        self._defaults = spec.defaults()
        self._variants = {name: _meaning(spec, name) for name in OPS}
        declared = [param for source in (spec.mask, *spec.score_mods) for param in source.params()]
        self._default_dtypes = {p.name: torch_dtype(p.dtype) for p in declared if p.name in self._defaults}
        trained = self._variants["backward"]
        self.differentiable = trained.differentiable if isinstance(trained, Variant) else ()
        self._summed = trained.gradient_params if isinstance(trained, Variant) else ()
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

    def prefill(
        self,
        q: torch.Tensor,
        k: Cache,
        v: Cache | None = None,
        *,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_last_page_len: torch.Tensor | None = None,
        qo_lens: torch.Tensor | None = None,
        kv_lens: torch.Tensor | None = None,
        q_offset: torch.Tensor | None = None,
        kv_offset: torch.Tensor | None = None,
        q_scale: torch.Tensor | float | None = None,
        k_scale: torch.Tensor | float | None = None,
        v_scale: torch.Tensor | float | None = None,
        params: Params | None = None,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: Literal["e", "log2"] = "e",
        partial: bool = False,
        return_max: bool = False,
        seed: torch.Tensor | None = None,
        offset: torch.Tensor | None = None,
    ) -> Result:
        """Attention of many queries a request; like :meth:`attention`, gradients flow where an input requires them.

        Args:
            k: keys, or for Paged the cache: ``(k_cache, v_cache)`` or one tensor stacked after ``num_pages``.
            qo_indptr, kv_indptr: int32 ``[batch + 1]``; ``kv_indptr`` counts tokens (Ragged) or pages (Paged, CSR form).
            page_table: int32 ``[batch, max_pages]``, with ``kv_lens``; or CSR ``kv_indptr, kv_indices, kv_last_page_len``.
            qo_lens, kv_lens: int32 ``[batch]``, valid lengths of padded rows; padded queries give out 0 and lse -inf.
            q_offset, kv_offset: int32 ``[batch]``, positions of the first query (default ``kv_len - qo_len``) and key (0).
            params: run-time tensors of the spec by name, also the output gate's; captured ones default to what was captured.
            out: buffer for the result, ``[..., num_qo_heads, head_dim_vo]``.
            return_lse: also return the log-sum-exp of the logits over visible keys, fp32 ``[..., num_qo_heads]``. A sink is not in
                it; element-wise normalizers have none.
            lse_base: unit of lse: natural logarithm or base 2.
            partial: results over part of the keys, to be merged with :func:`merge_states`, which then counts the sink once.
                Element-wise ones simply add, if the normalizer has a length or bias of its own.
            return_max: also return the largest logit over visible keys, fp32 ``[..., num_qo_heads]``, without a gradient.
            seed, offset: int64 ``[1]`` of dropout, on the device of q, so that a graph replays with fresh masks; offset is 0 by
                default.

        Returns:
            out in the spec's out dtype, or ``(out, lse)``, ``(out, max)``, ``(out, lse, max)``.
        """
        extras = Extras(
            qo_indptr,
            kv_indptr,
            qo_lens,
            kv_lens,
            page_table,
            kv_indices,
            kv_last_page_len,
            q_offset,
            kv_offset,
            seed,
            offset,
            q_scale,  # type: ignore[arg-type] # numbers become tensors when the call is unpacked
            k_scale,  # type: ignore[arg-type]
            v_scale,  # type: ignore[arg-type]
        )
        return self._forward(
            "prefill", q, k, v, extras, params, out, return_lse, lse_base, partial=partial, return_max=return_max
        )

    def decode(
        self,
        q: Query,
        k: Cache,
        v: Cache | None = None,
        *,
        kv_indptr: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_last_page_len: torch.Tensor | None = None,
        qo_lens: torch.Tensor | None = None,
        kv_lens: torch.Tensor | None = None,
        q_offset: torch.Tensor | None = None,
        kv_offset: torch.Tensor | None = None,
        q_scale: torch.Tensor | float | None = None,
        k_scale: torch.Tensor | float | None = None,
        v_scale: torch.Tensor | float | None = None,
        params: Params | None = None,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: Literal["e", "log2"] = "e",
        partial: bool = False,
        return_max: bool = False,
    ) -> Result:
        """Attention of one query token a request, ``q [batch, num_qo_heads, head_dim_qk]``, or a few, ``[batch, qo_len, ...]``.

        No gradients are recorded. The keys of a request are divided among programs by its own length alone, so that a result
        does not depend on its neighbours. Arguments and result as for :meth:`prefill`.
        """
        extras = Extras(
            None,
            kv_indptr,
            qo_lens,
            kv_lens,
            page_table,
            kv_indices,
            kv_last_page_len,
            q_offset,
            kv_offset,
            q_scale=q_scale,  # type: ignore[arg-type] # numbers become tensors when the call is unpacked
            k_scale=k_scale,  # type: ignore[arg-type]
            v_scale=v_scale,  # type: ignore[arg-type]
        )
        return self._forward(
            "decode", q, k, v, extras, params, out, return_lse, lse_base, partial=partial, return_max=return_max
        )

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        qo_lens: torch.Tensor | None = None,
        kv_lens: torch.Tensor | None = None,
        q_offset: torch.Tensor | None = None,
        kv_offset: torch.Tensor | None = None,
        params: Params | None = None,
        return_lse: bool = False,
        return_max: bool = False,
        seed: torch.Tensor | None = None,
        offset: torch.Tensor | None = None,
    ) -> Result:
        """Prefill with autograd: gradients reach q, k, v, floating parameters and the gate, and flow through lse too.

        All are bitwise repeatable under ``torch.use_deterministic_algorithms(True)``; arguments as for :meth:`prefill`.
        """
        extras = Extras(
            qo_indptr, kv_indptr, qo_lens, kv_lens, q_offset=q_offset, kv_offset=kv_offset, seed=seed, offset=offset
        )
        self._check_rows(return_lse=return_lse, return_max=return_max)
        found = torch_library.attention(
            self._handle,
            "prefill",
            *unpack(self.variant("prefill"), self.spec.kv, q, k, v, extras),
            self._with_defaults(params),
            want_max=return_max,
        )
        return _chosen(found, return_lse=return_lse, return_max=return_max)

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        *,
        dlse: torch.Tensor | None = None,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        qo_lens: torch.Tensor | None = None,
        kv_lens: torch.Tensor | None = None,
        q_offset: torch.Tensor | None = None,
        kv_offset: torch.Tensor | None = None,
        params: Params | None = None,
        seed: torch.Tensor | None = None,
        offset: torch.Tensor | None = None,
        deterministic: bool = False,
    ) -> Gradients:
        """Gradients of :meth:`prefill`, recomputing the weights from ``lse``; no memory that grows with the square of a length.

        Args:
            dout: gradient of out, same shape and dtype.
            out, lse: what prefill returned (lse in natural logarithm); without ``partial``. Element-wise normalizers have no lse.
            dlse: gradient of lse, fp32, same shape.
            seed, offset: those of the forward call, where the spec has dropout.
            deterministic: every gradient is bitwise repeatable. dq, dk, dv always are; parameters of score mods are then summed
                by another kernel, which runs twice.

        Returns:
            ``(dq, dk, dv, dparams)``: dense, in the shapes and dtypes of q, k, v; ``dparams`` by name, the gate's among them.
        """
        extras = Extras(
            qo_indptr, kv_indptr, qo_lens, kv_lens, q_offset=q_offset, kv_offset=kv_offset, seed=seed, offset=offset
        )
        given = self._with_defaults(params)
        if torch.compiler.is_compiling():
            dq, dk, dv, *rest = torch_library.backward(
                self._handle, dout, dlse, q, k, v, out, lse, extras, given, deterministic=deterministic
            )
            grads = dict(zip(given, rest, strict=True))
            return dq, dk, dv, {name: grads[name] for name in self.differentiable if name in grads}
        return self.run_backward(dout, q, k, v, out, lse, dlse, extras, given, deterministic=deterministic)

    def _check_rows(self, *, return_lse: bool, return_max: bool) -> None:
        """Raise where rows have no lse or largest logit."""
        for name, wanted in (("return_lse", return_lse), ("return_max", return_max)):
            if wanted and not isinstance(self.spec.normalizer, Softmax):
                raise UnsupportedError(
                    f"{name} has no meaning here",
                    where=name,
                    why=f"with the {self.spec.normalizer.kind} normalizer each weight depends on its own logit only",
                    fix="leave it out; partial results simply add",
                )

    def _forward(
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
    ) -> Result:
        if lse_base not in ("e", "log2"):
            raise ArgumentError(
                f"lse_base is {lse_base!r}", where="lse_base", why="it is a unit", fix="pass 'e' or 'log2'"
            )
        self._check_rows(return_lse=return_lse, return_max=return_max)
        variant, given = self.variant(name), self._with_defaults(params)
        one_token = name == "decode" and _dims(q) == 3
        if one_token:
            q = q.unsqueeze(1) if isinstance(q, torch.Tensor) else (q[0].unsqueeze(1), q[1].unsqueeze(1))
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
        if return_lse and lse_base == "log2":
            lse = lse * LOG2_E
        return _chosen((result, lse, largest), return_lse=return_lse, return_max=return_max)

    def variant(self, name: OpName) -> Variant:
        """What an op computes."""
        found = self._variants[name]
        if isinstance(found, UnsupportedError):
            raise found
        return found

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
        op = self._resolve("backward", q.device, deterministic=deterministic and bool(self._summed))
        q, k, v, extras = unpack(op.variant, self.spec.kv, q, k, v, extras)
        return calls.backward(op, dout, q, k, v, out, lse, dlse, extras, params)

    def _with_defaults(self, params: Params | None) -> dict[str, torch.Tensor]:
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
        return Ops, (self.spec, self._resolve, self._scope)

    def __repr__(self) -> str:
        return f"Ops({self.spec.name or 'unnamed'}, {self.spec.heads!r}, kv={self.spec.kv.kind})"


def _meaning(spec: AttentionSpec, name: OpName) -> Variant | UnsupportedError:
    """What an op computes, or why there is none."""
    try:
        return normalize(spec, name)
    except UnsupportedError as error:
        return error


def _chosen(found: tuple[torch.Tensor, ...], *, return_lse: bool, return_max: bool) -> Result:
    """out alone, or with the values of rows that were asked for."""
    out, lse, largest = found
    rows = (*((lse,) if return_lse else ()), *((largest,) if return_max else ()))
    return (out, *rows) if rows else out


def _dims(q: object) -> int:
    first = q[0] if isinstance(q, (tuple, list)) and q else q
    return first.dim() if isinstance(first, torch.Tensor) else 0


def _tracked(*inputs: object) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)


def _default_device(op: Op) -> torch.device:
    kind = "cuda" if op.plan.target.kind in ("cuda", "hip") else "cpu"
    return torch.empty(0, device=kind).device
