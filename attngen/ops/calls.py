"""One call of an op: its arguments are checked, buffers made, kernels launched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attngen.errors import ArgumentError, UnsupportedError
from attngen.ops.batching import collect_inputs
from attngen.ops.checks import check_strides, check_tensor, check_writable, readable
from attngen.ops.kernels import KernelOp, allocate_backward, allocate_forward
from attngen.ops.storage import Cache, Extras
from attngen.signature import Declaration, Signature

Params = Mapping[str, torch.Tensor]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
# out, lse and largest logits; empty where there are none or none are wanted.
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_OUT_AXES = "[..., num_qo_heads, head_dim_vo]"


@dataclass(frozen=True)
class Prefix:
    """Keys before those of a call, in a paged cache.

    Attributes:
        w_uk, w_uv: what projects latents up to keys and to values, ``[num_qo_heads, head_dim_ckv, ...]``.
    """

    cache: Cache
    w_uk: torch.Tensor | None = None
    w_uv: torch.Tensor | None = None


def prefix_of(cache: Cache | None, w_uk: torch.Tensor | None, w_uv: torch.Tensor | None) -> Prefix | None:
    """The prefix of a call, if it has one."""
    for name, tensor in (("w_uk", w_uk), ("w_uv", w_uv)):
        if cache is None and tensor is not None:
            raise ArgumentError(
                f"{name} has no meaning here",
                where=name,
                why="it projects the latents of kv_cache, and there are none",
                fix="pass kv_cache too, or leave it out",
            )
    return None if cache is None else Prefix(cache, w_uk, w_uv)


def check_options(
    declared: Declaration, variant: Signature, *, tracked: bool, out: torch.Tensor | None, partial: bool
) -> None:
    """Raise for options of a forward call that contradict each other or the spec.

    Args:
        tracked: whether gradients are recorded.
    """
    if tracked and out is not None:
        raise ArgumentError(
            "out records no gradients",
            where="out",
            why="an input requires them",
            fix="leave out= out, or call under torch.no_grad()",
        )
    if partial and declared.depends_on_length:
        raise UnsupportedError(
            f"partial results of {declared.normalizer} do not add",
            where="partial",
            why="its weights depend on kv_len, which is another for a part than for the whole",
            fix="declare the normalizer with a length or bias of its own",
        )
    if tracked and partial and variant.has_sink:
        raise UnsupportedError(
            "partial results with a sink have no gradients",
            where="partial",
            why="backward counts the sink, which they leave out",
            fix="detach the inputs, or declare the spec without a sink and apply it after merging",
        )


def check_out(variant: Signature, q: torch.Tensor, out: torch.Tensor) -> None:
    """Raise for a buffer that does not fit the result of ``q``."""
    shape = (*q.shape[:-1], variant.head_dim_vo)
    check_tensor("out", out, dtype=variant.out_dtype, shape=shape, axes=_OUT_AXES, device=q.device)
    check_writable("out", out)


def undifferentiable(found: Rows, reason: UnsupportedError, *inputs: object) -> Rows:
    """The rows of a call of ``inputs`` that has no backward: they require gradients, and to ask for those raises ``reason``."""
    tracked = [x for x in tensors(inputs) if x.requires_grad]
    out, lse, largest = found
    return *_Undifferentiable.apply(reason, out, lse, *tracked), largest  # type: ignore[no-untyped-call]


class _Undifferentiable(torch.autograd.Function):
    """Passes on what depends on inputs in no way that backward knows."""

    @staticmethod
    def forward(
        ctx: Any, reason: UnsupportedError, out: torch.Tensor, lse: torch.Tensor, *_inputs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.reason = reason
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, *_grads: torch.Tensor) -> Any:
        raise ctx.reason


def tensors(given: object) -> Iterator[torch.Tensor]:
    """Those of an argument: itself, or the members of a tuple, a list or a dict."""
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, (tuple, list, dict)):
        for member in given.values() if isinstance(given, dict) else given:
            yield from tensors(member)


def forward(
    op: KernelOp,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    extras: Extras,
    params: Params,
    out: torch.Tensor | None,
    *,
    want_max: bool,
    partial: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of ``q``; tensors as :func:`attngen.ops.storage.unpack` returns them.

    Returns:
        out, lse and largest logits; empty where there are none or none are wanted.
    """
    variant = op.signature
    inputs = collect_inputs(variant, q, k, v, extras, params)
    if out is not None:
        check_out(variant, q, out)
    result, lse, largest = allocate_forward(op, inputs, out, want_max=want_max)
    if result.numel():
        op.forward(inputs, result, lse, largest, partial=partial)
    per_row = [q.new_empty(0, dtype=torch.float32) if x is None else x.view(q.shape[:-1]) for x in (lse, largest)]
    return result, per_row[0], per_row[1]


def backward(
    op: KernelOp,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    dlse: torch.Tensor | None,
    extras: Extras,
    params: Params,
) -> Gradients:
    """dq, dk, dv, and gradients of parameters and gate by name."""
    variant = op.signature
    inputs = collect_inputs(variant, q, k, v, extras, params)
    shape = (*q.shape[:-1], variant.head_dim_vo)
    for label, tensor in (("dout", dout), ("out", out)):
        check_tensor(label, tensor, dtype=variant.out_dtype, shape=shape, axes=_OUT_AXES, device=q.device)
    stats = _row_stats(op, q, lse, dlse)
    grads = allocate_backward(op, inputs)
    if q.numel() and k.numel():
        rows = check_strides("out", out)
        dparams = op.backward(inputs, readable(dout), rows, stats.get("lse"), stats.get("dlse"), grads)
    else:
        for grad in grads.values():
            grad.zero_()
        dparams = {name: torch.zeros_like(params[name]) for name in variant.differentiable}
    return grads["dq"], grads["dk"], grads["dv"], dparams


def _row_stats(
    op: KernelOp, q: torch.Tensor, lse: torch.Tensor | None, dlse: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """lse, and dlse if given, dense fp32 ``[tokens, num_qo_heads]``; nothing for element-wise weights."""
    stats = {}
    for name, tensor in (("lse", lse), ("dlse", dlse)):
        if not op.signature.is_softmax:
            if tensor is not None:
                raise ArgumentError(
                    f"{name} has no meaning here",
                    where=name,
                    why="each weight depends on its own logit only, so that rows have no lse",
                    fix="leave it out",
                )
        elif tensor is not None or name == "lse":
            axes = "[..., num_qo_heads]"
            checked = check_tensor(name, tensor, dtype="fp32", shape=q.shape[:-1], axes=axes, device=q.device)
            stats[name] = checked.contiguous().view(-1, op.signature.num_qo_heads)
    return stats
