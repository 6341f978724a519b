"""CUDA graphs: what is data stays data when a captured call is replayed."""

from __future__ import annotations

import pytest
import torch

import attngen as ag
from attngen.ops import storage

pytestmark = pytest.mark.gpu

HEADS = ag.GQA(num_qo_heads=4, num_kv_heads=2, head_dim=64)


def tensors(length: int = 700) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = [(2, length, heads, 64) for heads in (4, 2, 2, 4)]
    return [torch.randn(shape, generator=generator).to("cuda", torch.bfloat16) for shape in shapes]


def captured(call: object) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def test_replays_draw_fresh_dropout_masks() -> None:
    ops = ag.compile(ag.AttentionSpec(heads=HEADS, mask=ag.Causal(), dropout=0.3))
    q, k, v, dout = tensors()
    seed, offset = (torch.tensor([n], device="cuda") for n in (3, 0))
    kept: dict[str, tuple[torch.Tensor, ...]] = {}

    def step() -> None:
        out, lse = ops.prefill(q, k, v, seed=seed, offset=offset, return_lse=True)
        kept["step"] = (out, *ops.backward(dout, q, k, v, out, lse, seed=seed, offset=offset)[:3])

    graph = captured(step)
    seen = []
    for number in range(3):
        offset.fill_(number)
        graph.replay()
        got = [tensor.clone() for tensor in kept["step"]]
        out, lse = ops.prefill(q, k, v, seed=seed, offset=offset, return_lse=True)
        want = (out, *ops.backward(dout, q, k, v, out, lse, seed=seed, offset=offset)[:3])
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
        seen.append(got[0])
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


def test_omitted_factors_are_of_the_graph_that_first_needs_them() -> None:
    """Recorded before any call: the graph makes its own, later calls make theirs."""
    ops = ag.compile(ag.AttentionSpec(heads=HEADS, kv=ag.Contiguous(dtype="int8", scale="tensor")))
    ops.warmup("decode", device="cuda")
    q = tensors()[0][:, :1]
    keys, values = (torch.randint(-9, 9, (2, 700, 2, 64), dtype=torch.int8, device="cuda") for _ in range(2))
    storage._kept_one.cache_clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = ops.decode(q, keys, values)
    eager = ops.decode(q, keys, values)
    graph.replay()
    assert torch.equal(recorded, eager)
    assert torch.equal(ops.decode(q, keys, values), eager)


def test_replays_find_the_tiles_of_new_documents() -> None:
    ops = ag.compile(ag.AttentionSpec(heads=HEADS, mask=ag.Causal() & ag.Document("doc_ids")))
    q, k, v, _ = tensors()
    ids = torch.zeros(2, 700, dtype=torch.int32, device="cuda")
    kept: dict[str, torch.Tensor] = {}

    def step() -> None:
        kept["out"] = ops.prefill(q, k, v, params={"doc_ids": ids})

    graph = captured(step)
    for cuts in ((), (100,), (1, 350, 699)):
        ids.copy_((torch.arange(700)[:, None] >= torch.tensor(cuts or (701,))).sum(1).int().expand(2, -1))
        graph.replay()
        assert torch.equal(kept["out"], ops.prefill(q, k, v, params={"doc_ids": ids}))
        first = q[:, :100], k[:, :100], v[:, :100]
        alone = ops.prefill(*first, params={"doc_ids": ids[:, :100].contiguous()})
        torch.testing.assert_close(kept["out"][:, :100], alone, rtol=2e-2, atol=2e-2)
