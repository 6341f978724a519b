"""C74: tensors on cuda:1 while the current device is cuda:0: zeros, an illegal access, or a launch on the wrong GPU.

``append`` of the case does not exist here. With one GPU the current device is the tensors' own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attngen as ag
from tests.acceptance.probes import Place, State, assert_state, declare, pack, probe

DENSE = declare(2, 1, mask=ag.Causal())
PAGED = declare(2, 1, mask=ag.Causal(), kv=ag.Paged(page_size=16))


@ag.mask_mod
def given(b, h, q, k, limit: ag.Tensor("batch", dtype="i32")):
    return k < limit[b]


def elsewhere(place: Place) -> str:
    return "cpu" if place.on_gpu else "meta"


@pytest.mark.parametrize("name", ["k_cache", "v_cache", "page_table", "kv_lens", "out"])
def test_c74_mixed_devices_of_a_paged_call(place: Place, name: str) -> None:
    ops = place.compile(PAGED)
    call = pack(PAGED, "decode", [probe(PAGED, 1, 20)], place.device)
    tensors: dict[str, torch.Tensor] = {
        "k_cache": call.kv[0][0],
        "v_cache": call.kv[0][1],
        "out": torch.empty_like(call.q),
        **call.lengths,
    }
    tensors[name] = tensors[name].to(elsewhere(place))
    with pytest.raises(ValueError, match=f"{name} is on {elsewhere(place)}\n") as caught:
        ops.decode(call.q, (tensors.pop("k_cache"), tensors.pop("v_cache")), **tensors)
    assert isinstance(caught.value, ag.ArgumentError)


@pytest.mark.parametrize("name", ["k", "v", "dout", "lse", "limit"])
def test_c74_mixed_devices_of_a_dense_call(place: Place, name: str) -> None:
    ops = place.compile(declare(2, 1, mask=given))
    call = pack(DENSE, "prefill", [probe(DENSE, 4, 4)], place.device)
    limit = torch.full((1,), 3, dtype=torch.int32, device=place.device)
    out, lse = ops.prefill(call.q, *call.kv, params={"limit": limit}, return_lse=True)
    tensors = {
        "dout": torch.ones_like(out),
        "q": call.q,
        "k": call.kv[0],
        "v": call.kv[1],
        "out": out,
        "lse": lse,
        "limit": limit,
    }
    tensors[name] = tensors[name].to(elsewhere(place))
    params = {"limit": tensors.pop("limit")}
    where = "params\\['limit'\\]" if name == "limit" else name
    with pytest.raises(ag.ArgumentError, match=f"{where} is on {elsewhere(place)}\n"):
        ops.backward(**tensors, params=params)
    if name not in ("dout", "lse"):
        with pytest.raises(ag.ArgumentError, match=f"{where} is on {elsewhere(place)}\n"):
            ops.prefill(tensors["q"], tensors["k"], tensors["v"], params=params)


def prefill(ops: ag.Ops, device: str) -> None:
    call = pack(DENSE, "prefill", [probe(DENSE, 9, 9)], device)
    out, lse = ops.prefill(call.q, *call.kv, return_lse=True)
    row = torch.arange(9, dtype=torch.float64)
    assert_state(State(out[0].cpu(), lse[0].cpu()), row / 2, (row + 1).log())


def backward(ops: ag.Ops, device: str) -> None:
    call = pack(DENSE, "prefill", [probe(DENSE, 9, 9)], device)
    leaves = [tensor.requires_grad_() for tensor in (call.q, *call.kv)]
    ops.attention(*leaves).sum().backward()
    want = (2 / torch.arange(1.0, 10)).flip(0).cumsum(0).flip(0)
    assert leaves[2].grad.device == torch.device(device)
    assert torch.allclose(leaves[2].grad[0, :, 0, 0].cpu().float(), want, atol=2e-2)


def decode(ops: ag.Ops, device: str) -> None:
    call = pack(PAGED, "decode", [probe(PAGED, 1, 2000)], device)
    out, lse = ops.decode(call.q, *call.kv, **call.lengths, return_lse=True)
    assert_state(State(out.cpu(), lse.cpu()), 999.5, 7.600902)


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(max(1, torch.cuda.device_count())))
@pytest.mark.parametrize(("spec", "run"), [(DENSE, prefill), (DENSE, backward), (PAGED, decode)])
def test_c74_device_of_the_tensors(index: int, spec: ag.AttentionSpec, run: Callable[[ag.Ops, Any], None]) -> None:
    current = (index + 1) % torch.cuda.device_count()
    with torch.cuda.device(current):
        ops = ag.compile(spec, backend="triton")
        held = torch.cuda.memory_allocated(current)
        run(ops, f"cuda:{index}")  # the first call of all
        if current != index:
            assert torch.cuda.memory_allocated(current) == held
        assert torch.cuda.current_device() == current
        run(ops, f"cuda:{current}")
        run(ops, f"cuda:{index}")
        assert torch.cuda.current_device() == current
