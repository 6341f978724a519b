"""Merging partial attention results over disjoint keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from attngen.errors import ArgumentError
from attngen.ops.checks import check_tensor


def merge_states(
    outs: torch.Tensor | Sequence[torch.Tensor],
    lses: torch.Tensor | Sequence[torch.Tensor],
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine softmax results over disjoint sets of keys into the result over their union (Dao et al., flash-decoding).

    Args:
        outs: parts ``[..., num_qo_heads, head_dim_vo]``, as a sequence or stacked in front.
        lses: their log-sum-exp, natural logarithm, fp32 ``[..., num_qo_heads]``; -inf marks a part without keys.
        sink: fp32 ``[num_qo_heads]``: a logit that takes weight and gives no value, applied once, to out only.

    Returns:
        ``(out, lse)``: out in the dtype of the parts, accumulated in fp32; lse without the sink.

    Raises:
        ArgumentError: shapes, dtypes or devices do not match.
    """
    parts, stats = _parts("outs", outs), _parts("lses", lses)
    if not parts or len(parts) != len(stats):
        raise ArgumentError(
            f"{len(parts)} outs and {len(stats)} lses",
            where="merge_states",
            why="each part has both",
            fix="pass as many",
        )
    for index, (part, stat) in enumerate(zip(parts, stats, strict=True)):
        same_shape = part.shape == parts[0].shape and stat.shape == part.shape[:-1]
        same_dtype = part.dtype == parts[0].dtype and stat.dtype == torch.float32
        if not same_shape or not same_dtype or not part.device == stat.device == parts[0].device:
            raise ArgumentError(
                f"part {index} does not match: out {_words(part)}, lse {_words(stat)}",
                where=f"outs[{index}], lses[{index}]",
                why=f"every out is {_words(parts[0])}, every lse torch.float32 {list(parts[0].shape[:-1])}",
                fix="pass parts of one shape, dtype and device",
            )
    if sink is not None:
        check_tensor(
            "sink", sink, dtype="fp32", shape=parts[0].shape[-2:-1], axes="[num_qo_heads]", device=parts[0].device
        )
    stacked = torch.stack(stats)
    lse = torch.logsumexp(stacked, 0)
    safe = torch.where(lse.isinf(), 0.0, lse)
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part, stat in zip(parts, stats, strict=True):
        weight = torch.exp(stat - safe)[..., None]
        total += torch.where(weight == 0, 0.0, part.float() * weight)  # a part without keys holds anything
    if sink is not None:
        total *= torch.where(lse == -torch.inf, 0.0, torch.sigmoid(lse - sink))[..., None]
    return total.to(parts[0].dtype), lse


def _parts(name: str, given: object) -> list[torch.Tensor]:
    parts: list[torch.Tensor] = []
    for part in given if isinstance(given, Iterable) else [given]:
        if not isinstance(part, torch.Tensor):
            raise ArgumentError(
                f"{name}[{len(parts)}] is a {type(part).__name__}",
                where="merge_states",
                why="parts are tensors",
                fix="pass a sequence of tensors, or tensors stacked in front",
            )
        parts.append(part)
    return parts


def _words(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
