"""Merging partial attention results over disjoint keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attngen.errors import ArgumentError


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
        ArgumentError: shapes or dtypes do not match.
    """
    parts, stats = list(outs), list(lses)
    if not parts or len(parts) != len(stats):
        raise ArgumentError(
            f"{len(parts)} outs and {len(stats)} lses",
            where="merge_states",
            why="each part has both",
            fix="pass as many",
        )
    for index, (part, stat) in enumerate(zip(parts, stats, strict=True)):
        if part.shape[:-1] != stat.shape or part.shape != parts[0].shape or stat.dtype != torch.float32:
            raise ArgumentError(
                f"part {index} does not match: out {list(part.shape)}, lse {list(stat.shape)} {stat.dtype}",
                where=f"outs[{index}], lses[{index}]",
                why=f"every out is {list(parts[0].shape)}, every lse fp32 {list(parts[0].shape[:-1])}",
                fix="pass parts of one shape",
            )
    stacked = torch.stack(stats)
    lse = torch.logsumexp(stacked, 0)
    safe = torch.where(lse.isinf(), 0.0, lse)
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part, stat in zip(parts, stats, strict=True):
        weight = torch.exp(stat - safe)[..., None]
        total += torch.where(weight > 0, part.float() * weight, 0.0)
    if sink is not None:
        total *= torch.sigmoid(lse - sink)[..., None]
    return total.to(parts[0].dtype), lse
