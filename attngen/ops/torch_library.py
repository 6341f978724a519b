"""Registered torch ops, so that calls trace under ``torch.compile`` and autograd flows.

One op serves every spec: it names its :class:`Ops` by a handle made from the spec, so that a compiled graph means the same in
every process that has compiled the same spec.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from attngen.errors import ArgumentError
from attngen.ops.append import Places, Rows, Slots, written
from attngen.ops.checks import check_addresses, readable, torch_dtype
from attngen.ops.storage import Extras
from attngen.signature import Signature

if TYPE_CHECKING:
    from attngen.ops.dispatch import Dispatch

# Packages that carry these modules have ops of their own.
NAMESPACE = __name__.partition(".")[0]

# All living objects of a handle: which of them serves a graph makes no difference.
_OPS: dict[str, WeakSet[Dispatch]] = {}


def register(handle: str, ops: Dispatch) -> None:
    """Make ``ops`` reachable from graphs under ``handle``."""
    _OPS.setdefault(handle, WeakSet()).add(ops)


def _lookup(handle: str) -> Dispatch:
    for ops in _OPS.get(handle, ()):
        return ops
    raise ArgumentError(
        "the attention op of this graph is gone",
        where=f"{NAMESPACE}::forward({handle!r})",
        why="its ops were deleted, or were not made in this process",
        fix="keep what holds them alive, like the result of ag.compile",
    )


def _unflatten(indices: Sequence[torch.Tensor | None]) -> Extras:
    return Extras(*indices)


def _flatten(extras: Extras) -> list[torch.Tensor | None]:
    return [getattr(extras, field.name) for field in fields(extras)]


def _registered() -> Any:
    return getattr(torch.ops, NAMESPACE)


@torch.library.custom_op(f"{NAMESPACE}::forward", mutates_args=())
def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    params: Sequence[torch.Tensor],
    names: str,
    handle: str,
    op: str,
    want_max: bool,
    partial: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    given = dict(zip(names.split(","), params, strict=True)) if names else {}
    extras, ops = _unflatten(indices), _lookup(handle)
    check_addresses(q=q, q_pe=extras.q_pe)
    _check_cache(k, v, extras)
    return ops.run_forward(
        op,  # type: ignore[arg-type]
        q,
        k,
        v,
        extras,
        given,
        want_max=want_max,
        partial=partial,
    )


def _check_cache(k: torch.Tensor, v: torch.Tensor | None, parts: Extras | Slots) -> None:
    """Where rows of a cache start; those of latents hold keys and values in one."""
    check_addresses(k=k, k_pe=parts.k_pe)
    check_addresses(k_blocks=parts.k_blocks, k_pe_blocks=parts.k_pe_blocks)
    if parts.k_pe is None:
        check_addresses(v=v)
        check_addresses(v_blocks=parts.v_blocks)


@_forward.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    params: Sequence[torch.Tensor],
    names: str,
    handle: str,
    op: str,
    want_max: bool,
    partial: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    variant = _lookup(handle).signature(op)  # type: ignore[arg-type]
    out = q.new_empty((*q.shape[:-1], variant.head_dim_vo), dtype=torch_dtype(variant.out_dtype))
    rows = (variant.is_softmax, want_max)
    lse, largest = (q.new_empty(q.shape[:-1] if there else 0, dtype=torch.float32) for there in rows)
    return out, lse, largest


@torch.library.custom_op(f"{NAMESPACE}::backward", mutates_args=())
def _backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    indices: Sequence[torch.Tensor | None],
    params: Sequence[torch.Tensor],
    names: str,
    handle: str,
    deterministic: bool,
) -> list[torch.Tensor]:
    given = dict(zip(names.split(","), params, strict=True)) if names else {}
    dq, dk, dv, dparams = _lookup(handle).run_backward(
        dout, q, k, v, out, lse, dlse, _unflatten(indices), given, deterministic=deterministic
    )
    return [dq, dk, dv, *(dparams.get(name, torch.zeros_like(tensor)) for name, tensor in given.items())]


@_backward.register_fake
def _(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    indices: Sequence[torch.Tensor | None],
    params: Sequence[torch.Tensor],
    names: str,
    handle: str,
    deterministic: bool,
) -> list[torch.Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in (q, k, v, *params)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    q, k, v, indices, params, ctx.names, ctx.handle, *_ = inputs
    ctx.ops = _lookup(ctx.handle)  # lives as long as the graph
    ctx.num_params, ctx.present = len(params), [index is not None for index in indices]
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(q, k, v, *output[:2], *(index for index in indices if index is not None), *params)
    ctx.set_materialize_grads(False)


def _grads(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, _: torch.Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, *rest = ctx.saved_tensors
    params = rest[len(rest) - ctx.num_params :]
    found = iter(rest)
    indices = [next(found) if present else None for present in ctx.present]
    dout = torch.zeros_like(out) if dout is None else dout
    if ctx.ops.declared.normalizer != "softmax":
        lse = dlse = None  # rows of element-wise weights have none
    exact = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    dq, dk, dv, *dparams = _registered().backward(
        dout, dlse, q, k, v, out, lse, indices, params, ctx.names, ctx.handle, exact
    )
    names = ctx.names.split(",") if ctx.names else []
    given = [grad if name in ctx.ops.differentiable else None for name, grad in zip(names, dparams, strict=True)]
    return dq, dk, dv, None, given, None, None, None, None, None


_forward.register_autograd(_grads, setup_context=_save)


def attention(
    handle: str,
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    extras: Extras,
    params: Mapping[str, torch.Tensor],
    *,
    want_max: bool = False,
    partial: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(out, lse, largest logits)`` through the dispatcher: traceable, differentiable; see :meth:`Dispatch.run_forward`."""
    for name, tensor in params.items():
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(
                f"params[{name!r}] is a {type(tensor).__name__}",
                where=f"params[{name!r}]",
                why="a tensor is needed",
                fix="pass one",
            )
    return _registered().forward(  # type: ignore[no-any-return]
        q, k, v, _flatten(extras), list(params.values()), ",".join(params), handle, op, want_max, partial
    )


def backward(
    handle: str,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    extras: Extras,
    params: Mapping[str, torch.Tensor],
    *,
    deterministic: bool,
) -> list[torch.Tensor]:
    """``[dq, dk, dv, *dparams]`` through the dispatcher: traceable."""
    return _registered().backward(  # type: ignore[no-any-return]
        dout, dlse, q, k, v, out, lse, _flatten(extras), list(params.values()), ",".join(params), handle, deterministic
    )


_WRITTEN = ("k", "v", "k_pe", "k_blocks", "v_blocks", "k_pe_blocks", "k_scale", "v_scale")


@torch.library.custom_op(f"{NAMESPACE}::append", mutates_args=_WRITTEN)
def _append(
    new: Sequence[torch.Tensor | None],
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_pe: torch.Tensor | None,
    k_blocks: torch.Tensor | None,
    v_blocks: torch.Tensor | None,
    k_pe_blocks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    factors: Sequence[torch.Tensor | None],
    places: Sequence[torch.Tensor | None],
    params: Sequence[torch.Tensor],
    names: str,
    handle: str,
) -> None:
    k_factor, v_factor = (x if x is not None else y for x, y in zip(factors, (k_scale, v_scale), strict=True))
    slots = Slots(k, v, k_pe, k_blocks, v_blocks, k_pe_blocks, k_factor, v_factor)
    _check_cache(k, v, slots)
    given = dict(zip(names.split(","), params, strict=True)) if names else {}
    rows = Rows(*(None if x is None else readable(x) for x in new))  # type: ignore[arg-type]
    _lookup(handle).run_append(rows, slots, Places(*places), given)


def append(
    handle: str, variant: Signature, new: Rows, slots: Slots, places: Places, params: Mapping[str, torch.Tensor]
) -> None:
    """Write new tokens through the dispatcher: traceable; see :meth:`Dispatch.run_append`."""
    targets = written(variant, slots)
    factors = [getattr(slots, name) if name not in targets else None for name in ("k_scale", "v_scale")]
    _registered().append(
        [new.k, new.k_pe, new.v],
        *(targets.get(name) for name in _WRITTEN),
        factors,
        places.flat(),
        list(params.values()),
        ",".join(params),
        handle,
    )
