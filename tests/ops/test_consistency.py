"""The three ops of one spec mean the same thing: token by token, in chunks, and at once; merged and differentiated."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch

import attngen as ag

TOKENS = 75


@ag.score_mod
def distance_bias(score, b, h, q, k, slopes: ag.Tensor("num_qo_heads")):
    return score + slopes[h] * (k - q)


SPECS = {
    "causal": {"mask": ag.Causal()},
    "window-softcap": {"mask": ag.Causal() & ag.SlidingWindow(left=20), "score_mods": (ag.SoftCap(cap=4.0),)},
    "alibi": {"mask": ag.Causal(), "score_mods": (ag.ALiBi(),)},
    "bias": {"mask": ag.Causal(), "score_mods": (distance_bias,)},
}


def build(name: str, kv: object) -> tuple[ag.Ops, dict[str, torch.Tensor]]:
    spec = ag.AttentionSpec(
        heads=ag.GQA(num_qo_heads=6, num_kv_heads=2, head_dim=32), dtype="fp32", kv=kv, **SPECS[name]
    )
    params = {"slopes": torch.linspace(0.01, 0.4, 6)} if name == "bias" else {}
    return ag.compile(spec, backend="cpp"), params


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    return torch.randn(1, TOKENS, 6, 32), torch.randn(1, TOKENS, 2, 32), torch.randn(1, TOKENS, 2, 32)


@pytest.mark.parametrize("name", SPECS)
def test_decode_and_chunks_equal_one_prefill(name: str) -> None:
    ops, params = build(name, ag.Contiguous())
    q, k, v = tensors()
    whole, whole_lse = ops.prefill(q, k, v, params=params, return_lse=True)
    for start, stop in ((0, 31), (31, 64), (64, TOKENS)):
        chunk, lse = ops.prefill(q[:, start:stop], k[:, :stop], v[:, :stop], params=params, return_lse=True)
        torch.testing.assert_close(chunk, whole[:, start:stop], rtol=0, atol=2e-6)
        torch.testing.assert_close(lse, whole_lse[:, start:stop], rtol=0, atol=4e-6)
    for t in range(TOKENS):
        token, lse = ops.decode(q[:, t], k[:, : t + 1], v[:, : t + 1], params=params, return_lse=True)
        torch.testing.assert_close(token, whole[:, t], rtol=0, atol=2e-6)
        torch.testing.assert_close(lse, whole_lse[:, t], rtol=0, atol=4e-6)


@pytest.mark.parametrize("name", SPECS)
def test_storage_does_not_change_the_result(name: str) -> None:
    q, k, v = tensors()
    contiguous, params = build(name, ag.Contiguous())
    whole = contiguous.prefill(q, k, v, params=params)
    indptr = torch.tensor([0, TOKENS], dtype=torch.int32)
    ragged, _ = build(name, ag.Ragged())
    assert torch.equal(ragged.prefill(q[0], k[0], v[0], qo_indptr=indptr, kv_indptr=indptr, params=params), whole[0])
    paged, _ = build(name, ag.Paged(page_size=8))
    pages = -(-TOKENS // 8)
    pool = torch.full((2, pages * 8, 2, 32), float("nan"))
    pool[0, :TOKENS], pool[1, :TOKENS] = k[0], v[0]
    cache = tuple(pool.view(2, pages, 8, 2, 32))
    table = torch.arange(pages, dtype=torch.int32)[None]
    lens = torch.tensor([TOKENS], dtype=torch.int32)
    assert torch.equal(
        paged.prefill(q[0], cache, qo_indptr=indptr, page_table=table, kv_lens=lens, params=params), whole[0]
    )


def test_partial_results_over_disjoint_keys_merge() -> None:
    ops, _ = build("alibi", ag.Contiguous())
    q, k, v = tensors()
    whole, whole_lse = ops.prefill(q, k, v, return_lse=True)
    position = torch.tensor([0], dtype=torch.int32)
    parts = []
    for start, stop in ((0, 40), (40, TOKENS)):
        offset = torch.tensor([start], dtype=torch.int32)
        keys = (k[:, start:stop], v[:, start:stop])
        parts.append(ops.prefill(q, *keys, q_offset=position, kv_offset=offset, return_lse=True, partial=True))
    out, lse = ag.merge_states([out for out, _ in parts], [lse for _, lse in parts])
    torch.testing.assert_close(out, whole, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=4e-6)


def test_a_sink_takes_weight_once() -> None:
    outs = torch.tensor([[[2.0]], [[4.0]]])
    lses = torch.tensor([[1.0], [1.0]]).log()
    out, lse = ag.merge_states(outs, lses, sink=torch.tensor([2.0]).log())
    assert out.item() == pytest.approx(6.0 / 4.0)
    assert lse.exp().item() == pytest.approx(2.0)
    nothing = float("-inf")
    empty, _ = ag.merge_states(outs, torch.full((2, 1), nothing), sink=torch.tensor([nothing]))
    assert empty.item() == 0.0, "a row without keys gives 0, even beside a sink without weight"


def test_merging_a_part_without_keys_changes_nothing() -> None:
    outs = torch.tensor([[[2.0]], [[float("nan")]]])
    out, lse = ag.merge_states(outs, torch.tensor([[0.5], [float("-inf")]]))
    assert (out.item(), lse.item()) == (2.0, 0.5)


def test_merging_keeps_what_is_undefined_undefined() -> None:
    undefined = torch.tensor([[float("nan")]])
    out, lse = ag.merge_states([undefined[..., None], torch.ones(1, 1, 1)], [undefined, torch.zeros(1, 1)])
    assert out.isnan().item()
    assert lse.isnan().item()


def test_parts_that_do_not_match_are_named() -> None:
    out, lse = torch.ones(2, 4, 8), torch.zeros(2, 4)
    for outs, lses, what in (
        ([out, out.half()], [lse, lse], "part 1 does not match: out torch.float16"),
        ([out, out.to("meta")], [lse, lse], r"on meta"),
        ([out.tolist()], [lse], r"outs\[0\] is a list"),
        ([out], None, r"lses\[0\] is a NoneType"),
    ):
        with pytest.raises(ag.ArgumentError, match=what):
            ag.merge_states(outs, lses)
    for sink, what in ((torch.zeros(()), r"sink has shape \[\]"), ([0.0], "sink is a list")):
        with pytest.raises(ag.ArgumentError, match=what):
            ag.merge_states([out], [lse], sink=sink)


@pytest.mark.parametrize("backend", ["cpp", "reference"])
def test_one_row_of_a_page_table_serves_every_request(backend: str) -> None:
    spec = ag.AttentionSpec(heads=ag.MQA(2, 16), mask=ag.Causal(), dtype="fp32", kv=ag.Paged(page_size=4))
    ops = ag.compile(spec, backend=backend)
    torch.manual_seed(3)
    q, cache = torch.randn(3, 2, 16), (torch.randn(9, 4, 1, 16), torch.randn(9, 4, 1, 16))
    row = torch.tensor([[3, 7, 1]], dtype=torch.int32)
    kv_lens = torch.tensor([12, 5, 9], dtype=torch.int32)
    expected = ops.decode(q, cache, page_table=row.repeat(3, 1), kv_lens=kv_lens)
    assert torch.equal(ops.decode(q, cache, page_table=row.expand(3, -1), kv_lens=kv_lens), expected)


def test_copies_and_pickles_mean_the_same() -> None:
    bias = torch.linspace(0.0, 1.0, 4)
    spec = ag.AttentionSpec(
        heads=ag.MHA(4, 16), score_mods=(ag.score_mod(lambda score, b, h, q, k: score + bias[h] * k),)
    )
    ops = ag.compile(spec, backend="cpp")
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, 9, 4, 16).bfloat16() for _ in range(3))
    for twin in (copy.deepcopy(ops), pickle.loads(pickle.dumps(ops))):  # noqa: S301 - our own bytes
        assert twin.spec == spec
        assert torch.equal(twin.prefill(q, k, v), ops.prefill(q, k, v))


def test_a_traced_backward_means_what_the_eager_one_does() -> None:
    @ag.mask_mod
    def after(b, h, q, k, start: ag.Tensor("batch", dtype="i32")):
        return k >= start[b]

    spec = ag.AttentionSpec(heads=ag.MHA(2, 16), mask=after, score_mods=(distance_bias,), dtype="fp32")
    ops = ag.compile(spec, backend="cpp")
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, 5, 2, 16) for _ in range(3))
    params = {"start": torch.tensor([1, 2], dtype=torch.int32), "slopes": torch.tensor([0.1, 0.2])}
    out, lse = ops.prefill(q, k, v, params=params, return_lse=True)

    def backward(*, deterministic: bool) -> dict[str, torch.Tensor]:
        return ops.backward(out, q, k, v, out, lse, params=params, deterministic=deterministic)[3]

    traced = torch.compile(backward, backend="eager", fullgraph=True)
    eager = backward(deterministic=False)
    assert list(eager) == ["slopes"]
    torch.testing.assert_close(traced(deterministic=False), eager)
    assert torch.equal(traced(deterministic=True)["slopes"], backward(deterministic=True)["slopes"])


@pytest.mark.parametrize("name", SPECS)
def test_autograd_gives_the_oracles_gradients(name: str) -> None:
    ops, params = build(name, ag.Contiguous())
    oracle = ag.compile(ops.spec, backend="reference")
    leaves = [t.requires_grad_() for t in tensors()]
    params = {key: t.clone().requires_grad_() for key, t in params.items()}
    out, lse = ops.attention(*leaves, params=params, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    grads = torch.autograd.grad((out, lse), [*leaves, *params.values()], (dout, dlse))
    exact = oracle.backward(
        dout, *(t.detach() for t in leaves), out, lse, dlse=dlse, params={k: t.detach() for k, t in params.items()}
    )
    for got, want in zip(grads, [*exact[:3], *exact[3].values()], strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def test_prefill_records_gradients_where_an_input_asks_for_them() -> None:
    ops, _ = build("causal", ag.Contiguous())
    q, k, v = (t.requires_grad_() for t in tensors())
    ops.prefill(q, k, v).sum().backward()
    assert v.grad is not None
    with torch.no_grad():
        assert not ops.prefill(q, k, v).requires_grad
    assert not ops.decode(q[:, -1], k, v).requires_grad


def test_the_graph_keeps_the_op_alive() -> None:
    q, k, v = (t.requires_grad_() for t in tensors())
    out = build("causal", ag.Contiguous())[0].attention(q, k, v)
    gc.collect()
    out.sum().backward()
    assert v.grad is not None
    assert v.grad.sum().item() == pytest.approx(TOKENS * 6 * 32, rel=1e-5)


def test_memory_of_forward_and_backward_does_not_grow_with_the_square() -> None:
    import resource

    ops, _ = build("causal", ag.Contiguous())
    peaks = []
    for tokens in (1024, 4096):
        q, k, v = torch.randn(1, tokens, 6, 32), torch.randn(1, tokens, 2, 32), torch.randn(1, tokens, 2, 32)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        out, lse = ops.prefill(q, k, v, return_lse=True)
        ops.backward(out, q, k, v, out, lse)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert peaks[1] * 1024 < 6 * 4096 * 4096 * 4 / 8


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_autograd_is_deterministic_where_torch_is_asked_to_be(backend: str) -> None:
    """Gradients of parameters too, whose terms come from every tile: the same bits, and those of deterministic=True."""
    spec = ag.AttentionSpec(heads=ag.MHA(num_heads=4, head_dim=32), score_mods=(ag.ALiBi("slopes"),), dtype="fp32")
    ops = ag.compile(spec, backend=backend)
    q, k, v, dout = (torch.randn(2, 300, 4, 32) for _ in range(4))
    slopes = torch.rand(4, requires_grad=True)
    out, lse = ops.prefill(q, k, v, params={"slopes": slopes.detach()}, return_lse=True)
    want = ops.backward(dout, q, k, v, out, lse, params={"slopes": slopes.detach()}, deterministic=True)[3]["slopes"]
    torch.use_deterministic_algorithms(True)
    for _ in range(5):
        (got,) = torch.autograd.grad(ops.attention(q, k, v, params={"slopes": slopes}), slopes, dout)
        assert torch.equal(got, want)
