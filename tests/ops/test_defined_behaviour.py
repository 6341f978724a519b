"""What odd masks, scores and parameters give: defined, and the same on every backend."""

from __future__ import annotations

import math

import pytest
import torch

import attngen as ag
from tests.acceptance.probes import Place, declare

HIDE = ag.CustomMask(name="nothing", expression="q < 0")


@ag.score_mod
def gain(score, b, h, q, k, gains: ag.Tensor(64)):
    return score * gains[q]


@ag.score_mod
def key_bias(score, b, h, q, k, bias: ag.Tensor("keys")):
    return score + bias[k]


@ag.mask_mod
def allowed(b, h, q, k, flags: ag.Tensor("keys", dtype="bool")):
    return flags[k]


def tensors(place: Place, length: int = 40) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, length, 2, 32, generator=generator).to(place.device) for _ in range(4)]


def spec(**fields: object) -> ag.AttentionSpec:
    return declare(2, 2, 32, dtype="fp32", **fields)


@pytest.mark.parametrize("normalizer", [ag.Softmax(), ag.Softmax(sink=True), ag.Sigmoid()], ids=lambda n: n.kind)
def test_a_mask_that_keeps_nothing(place: Place, normalizer: object) -> None:
    ops = place.compile(spec(mask=HIDE, normalizer=normalizer))
    q, k, v, dout = tensors(place)
    params = {p.name: torch.ones(2, device=place.device) for p in normalizer.params()}
    rows = {"return_lse": True} if isinstance(normalizer, ag.Softmax) else {}
    for method in (ops.prefill, ops.decode):
        found = method(q, k, v, params=params, **rows)
        out, lse = found if rows else (found, None)
        assert out.count_nonzero() == 0
        assert lse is None or bool((lse == -math.inf).all())
    grads = ops.backward(dout, q, k, v, ops.prefill(q, k, v, params=params), lse, params=params)
    assert all(grad.count_nonzero() == 0 for grad in (*grads[:3], *grads[3].values()))


def test_a_score_that_overflows_is_nan_in_its_own_row(place: Place) -> None:
    ops = place.compile(spec(score_mods=(gain,)))
    q, k, v, _ = tensors(place)
    gains = torch.ones(64, device=place.device)
    want = ops.prefill(q, k, v, params={"gains": gains})
    gains[5] = 3e38
    gains[5] *= 10  # infinite
    out = ops.prefill(q, k, v, params={"gains": gains})
    assert out[:, 5].isnan().all()
    others = [n for n in range(40) if n != 5]
    assert torch.equal(out[:, others], want[:, others])


def test_a_score_of_minus_infinity_hides(place: Place) -> None:
    ops = place.compile(spec(score_mods=(key_bias,)))
    q, k, v, _ = tensors(place)
    bias = torch.zeros(40, device=place.device)
    bias[10:] = -math.inf
    out, lse = ops.prefill(q, k, v, params={"bias": bias}, return_lse=True)
    want, want_lse = place.compile(spec()).prefill(q, k[:, :10].clone(), v[:, :10].clone(), return_lse=True)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


def test_nan_that_no_visible_pair_reads(place: Place) -> None:
    """Hidden keys' biases may be NaN: in the forward pass, in every gradient, and their own gradient is 0."""
    ops = place.compile(spec(mask=ag.SlidingWindow(left=40, right=40) & allowed, score_mods=(key_bias,)))
    q, k, v, dout = tensors(place)
    flags = torch.arange(40, device=place.device) % 3 != 1
    clean = torch.linspace(-1, 1, 40, device=place.device)
    dirty = torch.where(flags, clean, math.nan)
    results = []
    for bias in (clean, dirty):
        params = {"flags": flags, "bias": bias}
        out, lse = ops.prefill(q, k, v, params=params, return_lse=True)
        decoded = ops.decode(q, k, v, params=params)
        dq, dk, dv, dparams = ops.backward(dout, q, k, v, out, lse, params=params)
        results.append((out, lse, decoded, dq, dk, dv, dparams["bias"]))
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert results[1][-1][~flags].count_nonzero() == 0
    assert bool((results[1][-1][flags] != 0).all())


def test_an_index_outside_a_parameter_reads_0(place: Place) -> None:
    ops = place.compile(spec(mask=~ag.Full() | ag.Causal(), score_mods=(key_bias,)))
    q, k, v, dout = tensors(place)
    short = torch.linspace(-1, 1, 23, device=place.device)
    whole = torch.cat([short, torch.zeros(17, device=place.device)])
    found = []
    for bias in (short, whole):
        out, lse = ops.prefill(q, k, v, params={"bias": bias}, return_lse=True)
        grads = ops.backward(dout, q, k, v, out, lse, params={"bias": bias})
        found.append((out, lse, *grads[:3], grads[3]["bias"][:23]))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    hidden = place.compile(spec(mask=allowed))
    flags = torch.ones(12, dtype=torch.bool, device=place.device)
    lse = hidden.prefill(q * 0, k, v, params={"flags": flags}, return_lse=True)[1]
    torch.testing.assert_close(lse.exp(), torch.full_like(lse, 12.0))  # keys beyond the flags read false


def test_an_empty_parameter_reads_0(place: Place) -> None:
    ops = place.compile(spec(mask=allowed, normalizer=ag.Softmax()))
    q, k, v, _ = tensors(place)
    out = ops.prefill(q, k, v, params={"flags": torch.ones(0, dtype=torch.bool, device=place.device)})
    assert out.count_nonzero() == 0


def test_documents_of_parts_are_told_by_position(place: Place) -> None:
    """Part of the keys, at their own positions, reads the documents of the whole."""
    ops = place.compile(spec(mask=ag.Document("doc_ids")))
    q, k, v, _ = tensors(place, 100)
    ids = torch.arange(100, dtype=torch.int32, device=place.device)[None] // 50
    whole = ops.prefill(q, k, v, params={"doc_ids": ids})
    at = torch.zeros(1, dtype=torch.int32, device=place.device)
    parts = [
        ops.prefill(
            *(q, k[:, cut], v[:, cut]),
            params={"doc_ids": ids},
            q_offset=at,
            kv_offset=at + (cut.start or 0),
            partial=True,
            return_lse=True,
        )
        for cut in (slice(0, 60), slice(60, None))
    ]
    merged, _ = ag.merge_states([part[0] for part in parts], [part[1] for part in parts])
    torch.testing.assert_close(merged, whole, rtol=1e-5, atol=1e-5)


def test_rows_of_the_call_have_no_offset(place: Place) -> None:
    ops = place.compile(spec(mask=ag.Dense("keep")))
    q, k, v, _ = tensors(place)
    keep = torch.ones(1, 1, 40, 40, dtype=torch.bool, device=place.device)
    with pytest.raises(ag.ArgumentError, match="keep has a row for each query of the call"):
        ops.prefill(q, k, v, params={"keep": keep}, q_offset=torch.zeros(1, dtype=torch.int32, device=place.device))


@pytest.mark.parametrize("shape", [(40, 0), (40, 3), (2, 40)])
def test_parameters_with_an_axis_too_many_are_refused(place: Place, shape: tuple[int, ...]) -> None:
    ops = place.compile(spec(mask=allowed))
    flags = torch.ones(shape, dtype=torch.bool, device=place.device)
    with pytest.raises(ag.ArgumentError, match="params\\['flags'\\] has shape"):
        ops.prefill(*tensors(place)[:3], params={"flags": flags})


def test_axes_of_one_name_have_one_size(place: Place) -> None:
    ops = place.compile(spec(mask=ag.Tree("ancestors")))
    ancestors = torch.ones(1, 5, 9, dtype=torch.bool, device=place.device)
    with pytest.raises(ag.ArgumentError, match="has shape \\[1, 5, 9\\]"):
        ops.prefill(*tensors(place)[:3], params={"ancestors": ancestors})


def test_a_buffer_for_out_records_no_gradients(place: Place) -> None:
    ops = place.compile(spec())
    q, k, v, _ = tensors(place)
    with pytest.raises(ag.ArgumentError, match="out records no gradients"):
        ops.prefill(q.requires_grad_(), k, v, out=torch.empty_like(q))
    with torch.no_grad():
        ops.prefill(q, k, v, out=torch.empty_like(q))


def test_scalars_have_deterministic_gradients(place: Place) -> None:
    @ag.score_mod
    def scaled(score, b, h, q, k, factor: ag.Tensor()):
        return score * factor

    ops = place.compile(spec(score_mods=(scaled,)))
    q, k, v, dout = tensors(place)
    params = {"factor": torch.tensor(1.5, device=place.device)}
    out, lse = ops.prefill(q, k, v, params=params, return_lse=True)
    want, got = (
        ops.backward(dout, q, k, v, out, lse, params=params, deterministic=exact)[3]["factor"]
        for exact in (False, True)
    )
    assert got.shape == ()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
