"""Lists of blocks -> the matrix that :class:`attngen.BlockSparse` reads."""

from __future__ import annotations

import torch

from attngen.errors import ArgumentError


def block_matrix(counts: torch.Tensor, indices: torch.Tensor, num_kv_blocks: int) -> torch.Tensor:
    """Mark the listed blocks.

    The lists are those of FlexAttention's ``BlockMask`` too: its partial blocks, which its ``mask_mod`` decides, are
    ``kv_num_blocks, kv_indices``, and its full ones ``full_kv_num_blocks, full_kv_indices``. As one mask that is
    ``BlockSparse("partial", q, kv, per_request=True) & ag.mask_mod(fn) | BlockSparse("full", q, kv, per_request=True)``. No host
    value is read, so the lists may be made on the device right before the call; listed numbers outside of it mark nothing.

    Args:
        counts: int ``[..., q blocks]``, entries of each list.
        indices: int ``[..., q blocks, longest list]``, numbers of kv blocks; what follows a list's last entry is ignored.
        num_kv_blocks: width of the matrix.

    Returns:
        bool ``[..., q blocks, num_kv_blocks]``.

    Raises:
        ArgumentError: the shapes do not fit.
    """
    if counts.shape != indices.shape[:-1]:
        raise ArgumentError(
            f"counts has shape {list(counts.shape)}, indices {list(indices.shape)}",
            where="counts",
            why="it has one entry for each list of indices",
            fix="pass counts of shape indices.shape[:-1]",
        )
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    inside = listed & (indices >= 0) & (indices < num_kv_blocks)
    columns = torch.where(inside, indices, num_kv_blocks).long()
    matrix = torch.zeros(*counts.shape, num_kv_blocks + 1, dtype=torch.bool, device=indices.device)
    return matrix.scatter_(-1, columns, True)[..., :num_kv_blocks].contiguous()
