"""C45: chunked prefill with a window differs from one-shot prefill."""

from __future__ import annotations

from collections.abc import Sequence

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
    noise,
    probe,
)

LENGTH = 300


def cut(prompt: Request, sizes: Sequence[int]) -> list[Request]:
    """Chunks of a prompt, each with all keys up to its own end."""
    stops = torch.tensor(sizes).cumsum(0).tolist()
    return [prompt.part(slice(stop - size, stop), slice(stop)) for size, stop in zip(sizes, stops, strict=True)]


@pytest.mark.parametrize("kv", [ag.Contiguous(), ag.Paged(page_size=16)], ids=["contiguous", "paged"])
@pytest.mark.parametrize("build", [probe, noise])
def test_c45_chunks_give_what_one_call_gives(place: Place, kv: ag.Contiguous | ag.Paged, build) -> None:
    spec = declare(mask=ag.Causal() & ag.SlidingWindow(left=63), kv=kv)
    prompt = build(spec, LENGTH, LENGTH)
    (whole,) = attend(place, spec, "prefill", [prompt])
    want = exact(prompt, band(LENGTH, LENGTH, 63))
    assert_near(whole.out, want.out)
    assert_near(whole.lse, want.lse, atol=1e-3)
    if build is probe:
        assert_state(State(whole.out[200:201], whole.lse[200:201]), 168.5, 4.158883)
    one_by_one = [attend(place, spec, "prefill", [chunk])[0] for chunk in cut(prompt, (128, 128, 44))]
    in_one_batch = attend(place, spec, "prefill", cut(prompt, (1,) * LENGTH))
    for states in (one_by_one, in_one_batch):
        assert_near(torch.cat([state.out for state in states]), whole.out.double(), atol=2e-3)
        assert_near(torch.cat([state.lse for state in states]), whole.lse.double(), atol=2e-3)
