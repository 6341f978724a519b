"""Queries that see only the keys of a list: against attention to those keys alone, computed in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attngen as ag
from attngen.dtypes import dequantize, quantize
from tests.acceptance.probes import Place

QO, KV, PAGE, TOP_K = (3, 1, 2), (21, 0, 9), 4, 12
MLA = ag.MLA(num_qo_heads=5, head_dim_ckv=64, head_dim_kpe=32)
GQA = ag.GQA(num_qo_heads=4, num_kv_heads=2, head_dim=64)


def i32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def lists(generator: torch.Generator) -> torch.Tensor:
    """int32 ``[batch, qo_len, top_k]``: -1 anywhere between positions, some of which lie beyond the keys."""
    rows = torch.full((len(KV), max(QO), TOP_K), -1, dtype=torch.int32)
    for b, n in enumerate(KV):
        for row in range(max(QO)):
            chosen = torch.randperm(n + 3, generator=generator)[: TOP_K - 2].int()
            rows[b, row, torch.randperm(TOP_K, generator=generator)[: len(chosen)]] = chosen
    return rows


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float) -> Any:
    """out and lse of one token: ``q [heads, dim]``, ``k, v [keys, heads, dim]``."""
    if not len(seen):
        return torch.zeros(q.shape[0], v.shape[-1]).double(), torch.full((q.shape[0],), float("-inf")).double()
    logits = torch.einsum("hd,khd->hk", q.double(), k[seen].double()) * scale
    return torch.einsum("hk,khd->hd", logits.softmax(-1), v[seen].double()), logits.logsumexp(-1)


@pytest.mark.parametrize("csr", [False, True], ids=["table", "csr"])
@pytest.mark.parametrize("ragged", [False, True], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    ("heads", "kv"),
    [
        (MLA, ag.Paged(page_size=PAGE)),
        (MLA, ag.Paged(page_size=PAGE, dtype="fp8_e4m3")),
        (MLA, ag.Paged(page_size=PAGE, dtype="int8", scale="token")),
        (GQA, ag.Paged(page_size=PAGE)),
        (GQA, ag.Paged(page_size=PAGE, layout="HND", dtype="int8", scale="token")),
        (GQA, ag.Paged(page_size=PAGE, dtype="int4")),
        (GQA, ag.Paged(page_size=PAGE, dtype="nvfp4")),
        (GQA, ag.Paged(page_size=PAGE, dtype="mxfp4")),
    ],
    ids=[
        "latents",
        "latents-e4m3",
        "latents-int8-tokens",
        "heads",
        "heads-first-int8-tokens",
        "int4",
        "nvfp4",
        "mxfp4",
    ],
)
def test_only_listed_keys_are_seen(place: Place, heads: Any, kv: ag.Paged, ragged: bool, csr: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    latent = isinstance(heads, ag.MLA)
    width = 96 if latent else 64
    spec = ag.AttentionSpec(heads=heads, mask=ag.Causal(), dtype="fp32", kv=kv)
    storage = kv.storages("fp32")[0]
    table = i32([[7, 2, 5, 0, 1, 9], [-1] * 6, [3, 8, 4, -1, -1, -1]])
    num_kv = 1 if latent else 2
    pools = [torch.randn(10, PAGE, num_kv, width, generator=generator) for _ in range(1 if latent else 2)]
    scales = {}
    parts, numbers = [], []
    for name, pool in zip("kv", pools, strict=False):
        factor = torch.tensor(0.01) if storage.scale == "tensor" else None
        data, blocks, tokens = quantize(pool, storage, factor)
        found = tokens if storage.scale == "token" else factor
        numbers.append(dequantize(data, storage, blocks, found).flatten(0, 1))
        if found is not None and storage.scale == "token":
            scales[f"{name}_scale"] = found.squeeze(-1) if latent else found.transpose(1, 2).contiguous()
        elif found is not None:
            scales[f"{name}_scale"] = found
        moved = [x.squeeze(-2) if latent else x for x in (data, blocks) if x is not None]
        if kv.layout == "HND":
            moved = [x.transpose(1, 2).contiguous() for x in moved]
        parts.append(moved[0] if len(moved) == 1 else tuple(moved))
    cache = parts[0] if latent else tuple(parts)
    q = torch.randn(len(KV), max(QO), heads.num_qo_heads, width, generator=generator)
    index = lists(generator)
    rows = [(b, row) for b, n in enumerate(QO) for row in range(n)]
    flat = tuple(torch.stack([x[b, row] for b, row in rows]) for x in (q, index))
    lengths = {"qo_indptr": i32([0, 3, 4, 6])} if ragged else {"qo_lens": i32(QO)}
    pages = {"page_table": table, "kv_lens": i32(KV)}
    if csr:
        listed = i32([7, 2, 5, 0, 1, 9, 3, 8, 4])
        pages = {"kv_indptr": i32([0, 6, 6, 9]), "kv_indices": listed, "kv_last_page_len": i32([1, 0, 1])}
    options = {**pages, **lengths, **scales}
    device = place.device

    def on_device(x: Any) -> Any:
        return tuple(on_device(t) for t in x) if isinstance(x, tuple) else x.to(device)

    method = getattr(place.compile(spec), "prefill" if ragged else "decode")
    given = flat if ragged else (q, index)
    out, lse = method(
        given[0].to(device),
        on_device(cache),
        key_indices=given[1].to(device),
        return_lse=True,
        **{name: x.to(device) for name, x in options.items()},
    )
    scale = (heads.head_dim_nope + heads.head_dim_kpe if latent else 64) ** -0.5
    for number, (b, row) in enumerate(rows):
        last = KV[b] - QO[b] + row
        seen = [int(j) for j in index[b, row] if 0 <= j < KV[b] and j <= last]
        slots = torch.tensor([int(table[b, j // PAGE]) * PAGE + j % PAGE for j in seen], dtype=torch.long)
        group = heads.num_qo_heads // num_kv
        k = numbers[0].repeat_interleave(group, 1)
        v = k[..., :64] if latent else numbers[1].repeat_interleave(group, 1)
        want = expected(q[b, row], k, v, slots, scale)
        got = (out[number], lse[number]) if ragged else (out[b, row], lse[b, row])
        torch.testing.assert_close(got[0].cpu().double(), want[0], rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(got[1].cpu().double(), want[1], rtol=2e-5, atol=2e-6)


def test_lists_need_pages_and_keys_without_positions() -> None:
    q, cache, index = torch.randn(2, 4, 64), torch.randn(3, 2, 4, 2, 64), torch.zeros(2, 3, dtype=torch.int32)
    for spec, why in (
        (ag.AttentionSpec(heads=GQA, dtype="fp32"), "need a paged cache"),
        (ag.AttentionSpec(heads=GQA, dtype="fp32", kv=ag.Paged(4), score_mods=(ag.ALiBi(),)), "reads positions"),
        (ag.AttentionSpec(heads=GQA, dtype="fp32", kv=ag.Paged(4), rope=ag.Rope()), "not rotated on load"),
    ):
        with pytest.raises(ag.UnsupportedError, match=why):
            ag.compile(spec, backend="reference").decode(q, cache, key_indices=index)


def test_what_lists_give_no_meaning_is_refused() -> None:
    spec = ag.AttentionSpec(heads=GQA, mask=ag.Causal(), dtype="fp32", kv=ag.Paged(page_size=PAGE))
    cache = torch.randn(3, 2, PAGE, 2, 64)
    q, index = torch.randn(2, 4, 64), torch.zeros(2, 3, dtype=torch.int32)
    pages = {"page_table": i32([[0], [1]]), "kv_lens": i32([4, 2])}
    decode = ag.compile(spec, backend="reference").decode
    decode(q, cache, key_indices=index, **pages)
    for extra, what in (
        ({"v": cache}, "v is given beside a paged cache"),
        ({"kv_offset": i32([0, 0])}, "kv_offset has no meaning here"),
        ({"kv_indices": i32([0, 1])}, "kv_lens has no meaning here"),
        ({"out": torch.empty(2, 4, 64).half()}, "out has dtype torch.float16"),
        ({"out": torch.empty(1, 4, 64)}, "out has shape"),
    ):
        with pytest.raises(ag.ArgumentError, match=what):
            decode(q, cache, key_indices=index, **pages, **extra)
    prefill = ag.compile(spec, backend="reference").prefill
    with pytest.raises(ag.ArgumentError, match="kv_cache has no meaning beside key_indices"):
        prefill(q, cache, key_indices=index, kv_cache=cache, qo_indptr=i32([0, 1, 2]), **pages)


def test_backward_says_that_it_reads_no_pages() -> None:
    spec = ag.AttentionSpec(heads=GQA, mask=ag.Causal(), dtype="fp32", kv=ag.Paged(page_size=PAGE))
    q, cache = torch.randn(2, 4, 64, requires_grad=True), tuple(torch.randn(3, PAGE, 2, 64) for _ in range(2))
    ops, listed = ag.compile(spec, backend="reference"), i32([[0, 1], [1, -1]])
    pages = {"page_table": i32([[2]]), "kv_lens": i32([3])}
    out = ops.prefill(q, cache, qo_indptr=i32([0, 2]), key_indices=listed, **pages)
    with pytest.raises(ag.UnsupportedError, match="backward does not read a paged cache"):
        out.sum().backward()
    pages = {name: x.repeat(2, *[1] * (x.dim() - 1)) for name, x in pages.items()}
    assert not ops.decode(q, cache, key_indices=listed, **pages).requires_grad, "decode records none"


PAGES = {"page_table": i32([[3, 0, 4], [1, 2, 5]]), "kv_lens": i32([6, 12])}
LISTS = {"kv_indptr": i32([0, 2, 5]), "kv_indices": i32([3, 0, 1, 2, 5]), "kv_last_page_len": i32([2, 3])}


def wrong_calls() -> list[tuple[str, dict[str, Any]]]:
    """Calls that ordinary decode and prefill refuse."""
    decode = [
        PAGES | {"kv_lens": i32([6, 20])},
        PAGES | {"kv_lens": i32([-3, 5])},
        PAGES | {"page_table": PAGES["page_table"][:1]},
        PAGES | {"page_table": PAGES["page_table"].repeat(2, 1)},
        PAGES | {"page_table": PAGES["page_table"] + 3},
        PAGES | {"qo_lens": i32([-5, 9])},
        PAGES | {"params": {"foo": torch.ones(1)}},
        LISTS | {"kv_last_page_len": i32([-1, 9])},
        LISTS | {"kv_indptr": i32([0, 2, 9])},
    ]
    prefill = [PAGES | {"qo_indptr": i32(x)} for x in ([0, 2, 1], [0, 1, 9], [0, 1, 1], [0])]
    return [("decode", call) for call in decode] + [("prefill", call) for call in prefill]


@pytest.mark.parametrize(("method", "call"), wrong_calls())
def test_lists_are_checked_as_calls_without_them(method: str, call: dict[str, Any]) -> None:
    spec = ag.AttentionSpec(heads=GQA, mask=ag.Causal(), dtype="fp32", kv=ag.Paged(page_size=PAGE))
    forward = getattr(ag.compile(spec, backend="reference"), method)
    q, cache = torch.randn(2, 4, 64), torch.randn(6, 2, PAGE, 2, 64).unbind(1)
    with pytest.raises(ag.ArgumentError) as plain:
        forward(q, cache, **call)
    with pytest.raises(ag.ArgumentError) as listed:
        forward(q, cache, key_indices=i32([[0, 1], [2, 3]]), **call)
    assert str(listed.value) == str(plain.value)


def test_parameters_and_lists_are_checked() -> None:
    kv = ag.Paged(page_size=PAGE)
    q, cache, index = torch.randn(2, 4, 64), torch.randn(6, 2, PAGE, 2, 64).unbind(1), i32([[0, 1], [2, 3]])
    gated = ag.compile(ag.AttentionSpec(heads=GQA, dtype="fp32", kv=kv, output_gate="gate"), backend="reference")
    documents = ag.compile(
        ag.AttentionSpec(heads=GQA, dtype="fp32", kv=kv, mask=ag.Document("ids")), backend="reference"
    )
    with pytest.raises(ag.ArgumentError, match="key_indices is a list"):
        gated.decode(q, cache, key_indices=[[0, 1], [2, 3]], **PAGES)
    with pytest.raises(ag.ArgumentError, match=r"params\['gate'\] is missing"):
        gated.decode(q, cache, key_indices=index, **PAGES)
    for ids in (torch.zeros(2, 12), torch.zeros(3, 12, dtype=torch.int32)):
        with pytest.raises(ag.ArgumentError, match=r"params\['ids'\] has"):
            documents.decode(q, cache, key_indices=index, params={"ids": ids}, **PAGES)


def test_lists_without_requests_or_keys(place: Place) -> None:
    spec = ag.AttentionSpec(heads=GQA, mask=ag.Causal(), dtype="fp32", kv=ag.Paged(page_size=PAGE))
    decode, device = place.compile(spec).decode, place.device
    q, cache = torch.randn(2, 4, 64, device=device), torch.randn(6, 2, PAGE, 2, 64, device=device).unbind(1)
    table, index = PAGES["page_table"].to(device), i32([[0, 1], [2, 3]]).to(device)
    none = table.new_zeros(2)
    out = decode(q[:0], cache, page_table=table[:0], kv_lens=none[:0], key_indices=index[:0])
    assert out.shape == (0, 4, 64)
    assert not decode(q, cache, page_table=table[:, :0], kv_lens=none, key_indices=index).count_nonzero()


@pytest.mark.parametrize(
    ("method", "call", "bad"),
    [
        ("decode", PAGES | {"kv_lens": i32([6, 20])}, [1]),
        ("decode", PAGES | {"kv_lens": i32([-3, 5])}, [0]),
        ("decode", LISTS | {"kv_indptr": i32([0, 2, 9])}, [1]),
        ("decode", LISTS | {"kv_indptr": i32([-7, 2, 5])}, [0]),
        ("decode", LISTS | {"kv_last_page_len": i32([-1, 3])}, [0]),
        ("prefill", PAGES | {"qo_indptr": i32([0, 1, 1])}, [1]),
        ("prefill", {name: x[:0] for name, x in PAGES.items()} | {"qo_indptr": i32([0])}, [0, 1]),
    ],
)
def test_lengths_that_are_not_read_back_mark_their_requests(
    method: str, call: dict[str, Any], bad: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels on a GPU make rows with a negative length NaN."""
    spec = ag.AttentionSpec(heads=GQA, mask=ag.Causal(), dtype="fp32", kv=ag.Paged(page_size=PAGE))
    ops = ag.compile(spec, backend="cpp")
    q, cache = torch.randn(2, 4, 64), torch.randn(6, 2, PAGE, 2, 64).unbind(1)
    index = i32([[0, 1], [2, 19]])
    ops.decode(q, cache, key_indices=index, **PAGES)
    seen: list[torch.Tensor] = []

    def recorded(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Any, *_: Any, **__: Any) -> Any:
        seen.append(extras.kv_lens)
        return q, q.new_empty(0), q.new_empty(0)

    monkeypatch.setattr("attngen.ops.batching.reads", lambda device: False)
    ((gathering, _),) = ops.parts("listed")
    monkeypatch.setattr(gathering, "run_forward", recorded)
    getattr(ops, method)(q, cache, key_indices=index, **call)
    assert (seen[0] < 0).nonzero().flatten().tolist() == bad


def test_listed_keys_that_append_rotated(place: Place) -> None:
    """Every key listed is decode; queries turn by their positions, whatever the order of the list."""
    spec = ag.AttentionSpec(heads=GQA, mask=ag.Causal(), dtype="fp32", kv=ag.Paged(PAGE), rope=ag.Rope(keys="append"))
    ops, device = place.compile(spec), place.device
    q, cache = torch.randn(2, 2, 4, 64, device=device), torch.randn(6, 2, PAGE, 2, 64, device=device).unbind(1)
    pages = {name: x.to(device) for name, x in PAGES.items()}
    index = torch.arange(11, -1, -1, dtype=torch.int32, device=device).expand(2, 2, 12)
    for where in ({}, {"q_offset": i32([20, 30]).to(device)}):
        want = ops.decode(q, cache, **pages, **where)
        torch.testing.assert_close(
            ops.decode(q, cache, key_indices=index, **pages, **where), want, rtol=1e-5, atol=1e-5
        )
