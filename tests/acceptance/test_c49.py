"""C49: a document mask whose boundaries lie inside tiles gives a wrong forward pass or NaN gradients."""

from __future__ import annotations

import pytest
import torch

import attngen as ag
from tests.acceptance.probes import (
    Place,
    Request,
    State,
    assert_near,
    assert_state,
    attend,
    band,
    declare,
    exact,
    exact_gradients,
    gradients,
    noise,
    probe,
)

LENS = (100, 29, 128)
TOTAL = sum(LENS)
IDS = torch.arange(3).repeat_interleave(torch.tensor(LENS)).to(torch.int32)[None]
EACH_SPEC = pytest.mark.parametrize(("dtype", "biased"), [("fp16", False), ("bf16", False), ("fp16", True)])


@ag.score_mod
def relative(score, b, h, q, k):
    return score + (q - k)


def declare_documents(dtype: str, *, biased: bool, mask: ag.MaskMod | None = None) -> ag.AttentionSpec:
    mods = (relative,) if biased else ()
    return declare(mask=mask or ag.Causal() & ag.Document("ids"), score_mods=mods, dtype=dtype)


def add_distance(scores: torch.Tensor) -> torch.Tensor:
    return scores + torch.arange(TOTAL)[:, None] - torch.arange(TOTAL)


def documents(request: Request) -> list[Request]:
    pieces = [t.split(LENS) for t in (request.q, request.k, request.v)]
    return [Request(*piece) for piece in zip(*pieces, strict=True)]


VISIBLE = band(TOTAL, TOTAL) & (IDS[0][:, None] == IDS[0])


@EACH_SPEC
def test_c49_forward(place: Place, dtype: str, biased: bool) -> None:
    spec = declare_documents(dtype, biased=biased)
    alone = declare_documents(dtype, biased=biased, mask=ag.Causal())
    meaning = {"modify": add_distance} if biased else {}
    for request in (probe(spec, TOTAL, TOTAL), noise(spec, TOTAL, TOTAL)):
        (state,) = attend(place, spec, "prefill", [request], {"ids": IDS})
        want = exact(request, VISIBLE, **meaning)
        assert_near(state.out, want.out)
        assert_near(state.lse, want.lse, atol=1e-3)
        separate = [attend(place, alone, "prefill", [document])[0] for document in documents(request)]
        assert_near(state.out, torch.cat([one.out for one in separate]).double())
        assert_near(state.lse, torch.cat([one.lse for one in separate]).double(), atol=1e-3)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_c49_boundaries(place: Place, dtype: str) -> None:
    spec = declare_documents(dtype, biased=False)
    (state,) = attend(place, spec, "prefill", [probe(spec, TOTAL, TOTAL)], {"ids": IDS})
    for row, out, lse in ((128, 114.0, 3.367296), (129, 129.0, 0.0), (256, 192.5, 4.852030)):
        assert_state(State(state.out[row : row + 1], state.lse[row : row + 1]), out, lse)


def test_c49_documents_of_one_token(place: Place) -> None:
    spec = declare_documents("fp16", biased=False)
    (state,) = attend(
        place, spec, "prefill", [probe(spec, TOTAL, TOTAL)], {"ids": torch.arange(TOTAL).to(torch.int32)[None]}
    )
    assert_state(state, torch.arange(TOTAL), 0.0)


@EACH_SPEC
def test_c49_backward(place: Place, dtype: str, biased: bool) -> None:
    spec = declare_documents(dtype, biased=biased)
    alone = declare_documents(dtype, biased=biased, mask=ag.Causal())
    request, dout = noise(spec, TOTAL, TOTAL), noise(spec, TOTAL, 1, seed=1).q
    (got,) = gradients(place, spec, [request], [dout], {"ids": IDS})
    want = exact_gradients(request, dout, VISIBLE, **({"modify": add_distance} if biased else {}))
    pieces = zip(documents(request), dout.split(LENS), strict=True)
    separate = [gradients(place, alone, [document], [part])[0] for document, part in pieces]
    for name in ("dq", "dk", "dv"):
        assert_near(getattr(got, name), getattr(want, name))
        assert_near(getattr(got, name), torch.cat([getattr(one, name) for one in separate]).double())
