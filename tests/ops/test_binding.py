"""Values of kernel arguments."""

from __future__ import annotations

import torch

import attngen as ag
from attngen.compiler import plan_op
from attngen.ops.binding import tensor_values, tile_map_values
from attngen.target import Target


def test_tensor_maps_are_of_heads_and_never_expanded() -> None:
    spec = ag.AttentionSpec(heads=ag.GQA(4, 2, 64), kv=ag.Ragged())
    plan = plan_op(spec, "backward", Target.parse("cuda:sm90a"), "cuda").kernel("dqkv")
    tensors = {
        "q": torch.randn(10, 4, 64),
        "k": torch.randn(10, 6, 64)[:, 2:4],
        "v": torch.randn(10, 2, 64),
        "dout": torch.randn(10, 1, 64).expand(10, 4, 64),
    }
    values = {name: value for tensor in tensors.items() for name, value in tensor_values(*tensor).items()}
    maps = tile_map_values(plan, values)
    assert list(maps) == ["q_tiles", "k_tiles", "v_tiles", "dout_tiles"]
    for name, tensor in tensors.items():
        heads = maps[f"{name}_tiles"]
        assert isinstance(heads, torch.Tensor)
        assert heads.shape == (1, tensor.shape[1], 10, 64)
        assert torch.equal(heads[0], tensor.transpose(0, 1))
        assert all(heads.stride())
        assert (heads.data_ptr() == tensor.data_ptr()) == (name != "dout")
