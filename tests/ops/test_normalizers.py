"""What the public ops promise of sinks, element-wise weights, gates, largest logits and dropout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import attngen as ag
from tests.acceptance.probes import Place, declare

GENERATOR = torch.Generator().manual_seed(3)
SINKS = torch.tensor([0.5, -1.0, 2.0, 40.0])
ELEMENTWISE = {
    "sigmoid": (ag.Sigmoid(bias=-1.0), lambda s, n: torch.sigmoid(s - 1.0)),
    "sigmoid-length": (ag.Sigmoid(), lambda s, n: torch.sigmoid(s - math.log(n))),
    "relu": (ag.ReLU(), lambda s, n: s.clamp(min=0) / n),
    "squared-relu": (ag.ReLU(power=2, length=4.0), lambda s, n: s.clamp(min=0).square() / 4),
    "silu": (ag.SiLU(), lambda s, n: torch.nn.functional.silu(s) / n),
}


def tensors(place: Place, qo_len: int = 7, kv_len: int = 50, heads: int = 4, dim: int = 32) -> list[torch.Tensor]:
    """Random fp32 q, k, v of two requests; two query heads a key head."""
    shapes = ((2, qo_len, heads, dim), (2, kv_len, heads // 2, dim), (2, kv_len, heads // 2, dim))
    return [torch.randn(shape, generator=GENERATOR).to(place.device) for shape in shapes]


def spec(**fields: Any) -> ag.AttentionSpec:
    return declare(4, 2, 32, dtype="fp32", **fields)


def logits(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Scaled products of float64 ``[batch, heads, qo_len, kv_len]``."""
    k = k.repeat_interleave(2, 2)
    return torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * q.shape[-1] ** -0.5


def times_values(weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bhqk,bkhd->bqhd", weights, v.double().repeat_interleave(2, 2))


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_a_sink_takes_weight(place: Place, op: str) -> None:
    q, k, v = tensors(place)
    sinks = SINKS.to(place.device)
    ops = place.compile(spec(normalizer=ag.Softmax(sink=True)))
    out, lse, largest = getattr(ops, op)(q, k, v, params={"sink": sinks}, return_lse=True, return_max=True)
    scores = logits(q, k)
    total = scores.exp().sum(-1) + sinks.double().exp()[:, None]
    close(out, times_values(scores.exp() / total[..., None], v))
    close(lse, scores.logsumexp(-1).transpose(1, 2))
    close(largest, scores.amax(-1).transpose(1, 2))
    off = place.compile(spec(normalizer=ag.Softmax(off_by_one=True)))
    close(getattr(off, op)(q, k, v), times_values(scores.exp() / (1 + scores.exp().sum(-1, keepdim=True)), v))


@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_partial_results_count_a_sink_once(place: Place, op: str) -> None:
    q, k, v = tensors(place, kv_len=1300)
    ops = place.compile(spec(normalizer=ag.Softmax(sink=True)))
    params = {"sink": SINKS.to(place.device)}
    whole = getattr(ops, op)(q, k, v, params=params)
    parts = [
        getattr(ops, op)(q, k[:, cut], v[:, cut], params=params, partial=True, return_lse=True)
        for cut in (slice(0, 1200), slice(1200, None))
    ]
    merged, _ = ag.merge_states([part[0] for part in parts], [part[1] for part in parts], sink=params["sink"])
    close(merged, whole)
    plain = place.compile(spec())
    close(getattr(ops, op)(q, k, v, params=params, partial=True), getattr(plain, op)(q, k, v))


@pytest.mark.parametrize("op", ["prefill", "decode"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_weights(place: Place, name: str, op: str) -> None:
    normalizer, weight = ELEMENTWISE[name]
    ops = place.compile(spec(normalizer=normalizer, mask=ag.SlidingWindow(left=20, right=2)))
    q, k, v = tensors(place)
    distance = torch.arange(43, 50)[:, None] - torch.arange(50)
    visible = ((distance <= 20) & (distance >= -2)).to(place.device)
    out = getattr(ops, op)(q, k, v)
    close(out, times_values(torch.where(visible, weight(logits(q, k), 50), 0.0), v))
    if normalizer.length is None if hasattr(normalizer, "length") else normalizer.bias is None:
        return  # the length of a part is not that of the whole
    at = {"q_offset": torch.full((2,), 43, dtype=torch.int32, device=place.device)}
    half = torch.full((2,), 30, dtype=torch.int32, device=place.device)
    parts = (
        getattr(ops, op)(q, k[:, :30], v[:, :30], **at),
        getattr(ops, op)(q, k[:, 30:], v[:, 30:], kv_offset=half, **at),
    )
    close(parts[0] + parts[1], out)


@pytest.mark.parametrize("normalizer", [ag.Sigmoid(), ag.ReLU(), ag.SiLU()], ids=lambda n: n.kind)
def test_parts_of_a_sum_over_the_length_are_refused(place: Place, normalizer: Any) -> None:
    ops = place.compile(spec(normalizer=normalizer))
    with pytest.raises(ag.UnsupportedError, match=f"partial results of {normalizer.kind} do not add"):
        ops.prefill(*tensors(place), partial=True)


def test_elementwise_weights_have_no_lse(place: Place) -> None:
    ops = place.compile(spec(normalizer=ag.ReLU()))
    q, k, v = tensors(place)
    for option in ("return_lse", "return_max"):
        for method in (ops.prefill, ops.decode, ops.attention):
            with pytest.raises(ag.UnsupportedError, match=f"{option} has no meaning here"):
                method(q, k, v, **{option: True})


@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_largest_logits(place: Place, op: str) -> None:
    ops = place.compile(spec(mask=ag.Causal(), score_mods=(ag.SoftCap(cap=2.0),)))
    q, k, v = tensors(place, qo_len=9, kv_len=5)  # the first queries see no key
    q = q * 3
    out, largest = getattr(ops, op)(q, k, v, return_max=True)
    visible = (torch.arange(-4, 5)[:, None] >= torch.arange(5)).to(place.device)
    want = torch.where(visible, 2.0 * torch.tanh(logits(q, k) / 2.0), -math.inf).amax(-1).transpose(1, 2)
    assert torch.equal(largest.isinf(), want.isinf())
    close(largest[:, 4:], want[:, 4:])
    assert out[:, :4].count_nonzero() == 0


def test_gates_and_their_gradients(place: Place) -> None:
    ops = place.compile(spec(output_gate="gate", mask=ag.Causal()))
    plain = place.compile(spec(mask=ag.Causal()))
    q, k, v = tensors(place)
    gate = torch.randn(q.shape, generator=GENERATOR).to(place.device)
    close(ops.prefill(q, k, v, params={"gate": gate}), plain.prefill(q, k, v) * gate.sigmoid())
    close(
        ops.decode(q[:, -1], k, v, params={"gate": gate[:, -1]}), plain.decode(q[:, -1], k, v) * gate[:, -1].sigmoid()
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v, gate)]
    dout = torch.randn(q.shape, generator=GENERATOR).to(place.device)
    ours = torch.autograd.grad(ops.attention(*leaves[:3], params={"gate": leaves[3]}), leaves, dout)
    theirs = torch.autograd.grad(plain.attention(*leaves[:3]) * leaves[3].sigmoid(), leaves, dout)
    for got, want in zip(ours, theirs, strict=True):
        close(got, want, 5e-5)


def test_gates_are_checked(place: Place) -> None:
    ops = place.compile(spec(output_gate="gate"))
    q, k, v = tensors(place)
    with pytest.raises(ag.ArgumentError, match="params\\['gate'\\] is missing"):
        ops.prefill(q, k, v)
    with pytest.raises(ag.ArgumentError, match="params\\['gate'\\] has shape"):
        ops.prefill(q, k, v, params={"gate": q[..., :8]})


def test_dropout_needs_a_seed_and_nothing_else_takes_one(place: Place) -> None:
    q, k, v = tensors(place)
    seed = torch.tensor([7], device=place.device)
    ops = place.compile(spec(dropout=0.25))
    with pytest.raises(ag.ArgumentError, match="seed is missing"):
        ops.prefill(q, k, v)
    with pytest.raises(ag.ArgumentError, match="seed has dtype"):
        ops.prefill(q, k, v, seed=seed.float())
    with pytest.raises(ag.UnsupportedError, match="decode has no dropout"):
        ops.decode(q, k, v)
    with pytest.raises(ag.ArgumentError, match="seed has no meaning here"):
        place.compile(spec()).prefill(q, k, v, seed=seed)


def test_dropout_keeps_what_it_says(place: Place) -> None:
    ops = place.compile(spec(dropout=0.25))
    q, k, v = tensors(place, qo_len=64, kv_len=500)
    q, v = q * 0, v * 0 + 1
    seed, offset = (torch.tensor([n], device=place.device) for n in (7, 100))
    out = ops.prefill(q, k, v, seed=seed, offset=offset)
    kept = out[..., 0].double() * 500 * 0.75
    close(kept, kept.round())
    share = float(kept.mean()) / 500
    assert abs(share - 0.75) < 4 * (0.25 * 0.75 / (2 * 4 * 64 * 500)) ** 0.5
    assert torch.equal(out, ops.prefill(q, k, v, seed=seed, offset=offset))
    offset += 1  # as between replays of a graph
    other = ops.prefill(q, k, v, seed=seed, offset=offset)
    assert float((out != other).double().mean()) > 0.9
    assert torch.equal(ops.prefill(q, k, v, seed=seed), ops.prefill(q, k, v, seed=seed, offset=offset * 0))


def test_dropout_draws_by_position_alone(place: Place) -> None:
    """One weight is dropped or not, whatever else the call holds: chunks and padding change nothing."""
    ops = place.compile(spec(dropout=0.4, mask=ag.Causal()))
    q, k, v = tensors(place, qo_len=90, kv_len=90)
    seed = torch.tensor([11], device=place.device)
    whole = ops.prefill(q, k, v, seed=seed)
    chunks = [ops.prefill(q[:, a:b], k[:, :b], v[:, :b], seed=seed) for a, b in ((0, 1), (1, 33), (33, 34), (34, 90))]
    close(torch.cat(chunks, 1), whole)


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_everything_traces_and_differentiates_under_torch_compile(backend: str) -> None:
    ops = ag.compile(
        spec(normalizer=ag.Softmax(sink=True), output_gate="gate", dropout=0.3, mask=ag.Causal()), backend=backend
    )
    q, k, v = (x.requires_grad_() for x in tensors(Place(backend, "cpu")))
    params = {"sink": SINKS.clone().requires_grad_(), "gate": torch.randn(q.shape).requires_grad_()}
    seed = torch.tensor([5])

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: dict[str, torch.Tensor]) -> torch.Tensor:
        out, largest = ops.prefill(q, k, v, params=params, seed=seed, return_max=True)
        return (out.square().sum() + 0 * largest.sum()) * 0.5

    traced = torch.compile(loss, fullgraph=True, backend="aot_eager")
    leaves = [q, k, v, *params.values()]
    for got, want in zip(
        torch.autograd.grad(traced(q, k, v, params), leaves),
        torch.autograd.grad(loss(q, k, v, params), leaves),
        strict=True,
    ):
        close(got, want)
