"""C28: non-contiguous q, k, v with a custom mask return garbage silently."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import attngen as ag
from attngen.ops.checks import torch_dtype
from tests.acceptance.probes import Place, Request, assert_near, band, declare, exact, exact_gradients

BATCH, LENGTH, HEADS, DIM = 2, 441, 12, 64
VISIBLE = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(5)) < 0.5


@ag.mask_mod
def given(b, h, q, k, visible: ag.Tensor("max_qo_len", "max_kv_len", dtype="bool")):
    return visible[q, k]


Random = Callable[..., torch.Tensor]
LAYOUTS: dict[str, Callable[[Random], tuple[torch.Tensor, ...]]] = {
    "packed": lambda random: random(BATCH, LENGTH, 3, HEADS, DIM).unbind(2),
    "transposed": lambda random: tuple(random(BATCH, HEADS, LENGTH, DIM).transpose(1, 2) for _ in "qkv"),
    "sliced": lambda random: tuple(random(2 * BATCH, LENGTH, HEADS, DIM)[::2] for _ in "qkv"),
    "expanded": lambda random: (
        random(BATCH, LENGTH, HEADS, DIM),
        *(random(BATCH, LENGTH, 1, DIM).expand(-1, -1, HEADS, -1) for _ in "kv"),
    ),
}
MASKS = {
    "given": (declare(HEADS, HEADS, mask=given, dtype="fp32"), {"visible": VISIBLE}, VISIBLE),
    "causal": (declare(HEADS, HEADS, mask=ag.Causal()), {}, band(LENGTH, LENGTH)),
}
EACH_MASK = pytest.mark.parametrize("mask", MASKS)


def random_for(place: Place, spec: ag.AttentionSpec) -> Random:
    generator = torch.Generator().manual_seed(3)
    dtype = torch_dtype(spec.dtype)
    return lambda *shape: torch.randn(*shape, generator=generator).to(dtype).to(place.device)


@EACH_MASK
@pytest.mark.parametrize("layout", LAYOUTS)
def test_c28_views_give_what_copies_give(place: Place, layout: str, mask: str) -> None:
    spec, params, visible = MASKS[mask]
    ops, random = place.compile(spec), random_for(place, spec)
    views = LAYOUTS[layout](random)
    copies = [view.contiguous() for view in views]
    dout = random(BATCH, HEADS, LENGTH, DIM).transpose(1, 2)
    given = {name: tensor.to(place.device) for name, tensor in params.items()}
    strided = {name: tensor.T.contiguous().T for name, tensor in given.items()}

    want, want_lse = ops.prefill(*copies, params=given, return_lse=True)
    got, got_lse = ops.prefill(*views, params=strided, return_lse=True)
    assert torch.equal(got, want)
    assert torch.equal(got_lse, want_lse)
    want_grads = ops.backward(dout.contiguous(), *copies, want, want_lse, params=given)[:3]
    got_grads = ops.backward(dout, *views, got, got_lse, params=strided)[:3]
    for view, grad, want_grad in zip(views, got_grads, want_grads, strict=True):
        assert grad.shape == view.shape
        assert torch.equal(grad, want_grad)

    if layout == "packed":
        request = Request(*(copy[1].cpu() for copy in copies))
        assert_near(got[1].cpu(), exact(request, visible).out)
        right = exact_gradients(request, dout[1].cpu(), visible)
        for grad, name in zip(got_grads, ("dq", "dk", "dv"), strict=True):
            assert_near(grad[1].cpu(), getattr(right, name))


@EACH_MASK
def test_c28_gradients_reach_the_packed_tensor(place: Place, mask: str) -> None:
    spec, params, _ = MASKS[mask]
    ops, random = place.compile(spec), random_for(place, spec)
    given = {name: tensor.to(place.device) for name, tensor in params.items()}
    packed = random(BATCH, LENGTH, 3, HEADS, DIM).requires_grad_()
    dout = random(BATCH, LENGTH, HEADS, DIM)
    ops.attention(*packed.unbind(2), params=given).backward(dout)
    copies = [view.detach().contiguous() for view in packed.unbind(2)]
    out, lse = ops.prefill(*copies, params=given, return_lse=True)
    want = ops.backward(dout, *copies, out, lse, params=given)[:3]
    assert torch.equal(packed.grad, torch.stack(want, 2))


@EACH_MASK
def test_c28_gradients_of_an_expanded_head_add_up(place: Place, mask: str) -> None:
    spec, params, _ = MASKS[mask]
    ops, random = place.compile(spec), random_for(place, spec)
    given = {name: tensor.to(place.device) for name, tensor in params.items()}
    q = random(BATCH, LENGTH, HEADS, DIM)
    k, v = (random(BATCH, LENGTH, 1, DIM).requires_grad_() for _ in "kv")
    wide = [tensor.expand(-1, -1, HEADS, -1) for tensor in (k, v)]
    ops.attention(q, *wide, params=given).sum().backward()
    copies = [tensor.detach().contiguous() for tensor in wide]
    out, lse = ops.prefill(q, *copies, params=given, return_lse=True)
    _, dk, dv, _ = ops.backward(torch.ones_like(out), q, *copies, out, lse, params=given)
    for leaf, grad in ((k, dk), (v, dv)):
        assert leaf.grad.shape == leaf.shape
        assert_near(leaf.grad.cpu(), grad.sum(2, keepdim=True).cpu().double())
