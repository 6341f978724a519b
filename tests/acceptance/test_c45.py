"""C45: chunked prefill with a window differs from one-shot prefill."""

from __future__ import annotations

import pytest
import torch

import attngen as ag
from tests.acceptance.probes import Place, State, assert_near, assert_state, attend, band, declare, exact, noise, probe

LENGTH = 300
CHUNKS = {"chunks": (128, 128, 44), "tokens": (1,) * LENGTH}


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
    for sizes in CHUNKS.values():
        stop = 0
        for size in sizes:
            start, stop = stop, stop + size
            (chunk,) = attend(place, spec, "prefill", [prompt.part(slice(start, stop), slice(stop))])
            assert_near(chunk.out, whole.out[start:stop].double(), atol=2e-3)
            assert_near(chunk.lse, whole.lse[start:stop].double(), atol=2e-3)
    assert stop == LENGTH
    assert torch.equal(chunk.out, whole.out[-1:])
