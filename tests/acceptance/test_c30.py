"""C30: empty inputs crash with a zero grid or "batch size must be positive"."""

from __future__ import annotations

import math

import pytest
import torch

import attngen as ag
from attngen.variant import OpName
from tests.acceptance.probes import STORAGES, Call, Place, declare, noise, pack, probe

EACH_STORAGE = pytest.mark.parametrize("kv", STORAGES, ids=lambda kv: kv.kind)
EACH_DENSE_STORAGE = pytest.mark.parametrize("kv", STORAGES[:2], ids=lambda kv: kv.kind)
EACH_OP = pytest.mark.parametrize("op", ["prefill", "decode"])
SHAPES = {
    "batch 0": [],
    "no query": [(0, 5), (0, 0), (0, 3)],
    "no key": [(2, 0), (3, 0), (1, 0)],
    "no key for one token each": [(1, 0), (1, 0)],
    "nothing": [(0, 0)] * 3,
}
EACH_SHAPE = pytest.mark.parametrize("shapes", SHAPES.values(), ids=list(SHAPES))


def declare_empty(kv: ag.Contiguous) -> ag.AttentionSpec:
    return declare(8, 2, mask=ag.Causal(), kv=kv)


def build(spec: ag.AttentionSpec, op: OpName, shapes: list[tuple[int, int]], device: str) -> Call:
    if shapes:
        return pack(spec, op, [noise(spec, *shape) for shape in shapes], device)
    call = pack(spec, op, [probe(spec, 1, 1)], device)  # and leave its only request out
    kv = call.kv if spec.kv.kind == "paged" else tuple(tensor[:0] for tensor in call.kv)
    lengths = {name: tensor[: 1 if name.endswith("indptr") else 0] for name, tensor in call.lengths.items()}
    return Call(call.q[:0], kv, lengths, (), ())


@EACH_STORAGE
@EACH_OP
@EACH_SHAPE
def test_c30_forward(place: Place, shapes: list[tuple[int, int]], op: OpName, kv: ag.Contiguous) -> None:
    spec = declare_empty(kv)
    call = build(spec, op, shapes, place.device)
    ops = ag.compile(spec, backend=place.backend)
    for _ in range(2):
        run = ops.decode if op == "decode" else ops.prefill
        out, lse = run(call.q, *call.kv, **call.lengths, return_lse=True)
        assert out.shape == call.q.shape
        assert (out.dtype, out.device) == (torch.float16, call.q.device)
        assert torch.equal(out, torch.zeros_like(out))
        assert lse.shape == call.q.shape[:-1]
        assert (lse.dtype, lse.device) == (torch.float32, call.q.device)
        assert torch.equal(lse, torch.full_like(lse, -math.inf))


@EACH_DENSE_STORAGE
@EACH_SHAPE
def test_c30_backward_and_autograd(place: Place, shapes: list[tuple[int, int]], kv: ag.Contiguous) -> None:
    spec = declare_empty(kv)
    call = build(spec, "prefill", shapes, place.device)
    ops = ag.compile(spec, backend=place.backend)
    for _ in range(2):
        leaves = [torch.nan_to_num(t).requires_grad_() for t in (call.q, *call.kv)]
        out, lse = ops.attention(*leaves, **call.lengths, return_lse=True)
        out.sum().backward()
        plain = [leaf.detach() for leaf in leaves]
        direct = ops.backward(torch.ones_like(out), *plain, out.detach(), lse.detach(), **call.lengths)
        assert direct[3] == {}
        for leaf, grad in zip(leaves, direct[:3], strict=True):
            for found in (leaf.grad, grad):
                assert found.device == call.q.device
                assert torch.equal(found, torch.zeros_like(leaf))


def test_c30_page_table_without_columns(place: Place) -> None:
    spec = declare_empty(ag.Paged(page_size=16))
    call = build(spec, "decode", [(1, 0)] * 3, place.device)
    assert call.lengths["page_table"].shape == (3, 0)
    none = tuple(cache[:0] for cache in call.kv[0])
    for cache in (call.kv[0], none):
        out, lse = place.compile(spec).decode(call.q, cache, **call.lengths, return_lse=True)
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.equal(lse, torch.full_like(lse, -math.inf))
