"""Absorbed decode: forms of queries and caches, page sizes, several query tokens, parts of the keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attngen as ag
from attngen.dtypes import quantize
from attngen.ops.checks import torch_dtype
from tests.acceptance.latents import declare_latents, decode_latents, exact_latents, paged_latents
from tests.acceptance.probes import Place, Request, State, assert_near, band, exact, indptr, int32
from tests.backends.triton_kernels import run_python

SMALL = ag.MLA(num_qo_heads=3, head_dim_ckv=96, head_dim_kpe=32, head_dim_nope=48, head_dim_vo=48)
WIDE = ag.MLA(num_qo_heads=5)


def noise(spec: ag.AttentionSpec, qo_len: int, kv_lens: tuple[int, ...]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Queries ``[batch, qo_len, heads, head_dim]`` and keys of each request."""
    generator = torch.Generator().manual_seed(qo_len + sum(kv_lens))
    width, dtype = (
        spec.heads.head_dim_ckv + spec.heads.head_dim_kpe,
        getattr(torch, {"fp16": "float16"}.get(spec.dtype, "float32")),
    )
    q = torch.randn(len(kv_lens), qo_len, spec.heads.num_qo_heads, width, generator=generator)
    return q.to(dtype), [torch.randn(n, width, generator=generator).to(dtype) for n in kv_lens]


def check(
    spec: ag.AttentionSpec, state: State, q: torch.Tensor, keys: list[torch.Tensor], qo_lens: tuple[int, ...]
) -> None:
    """Every row against float64, padding 0 and -inf."""
    for b, (n, own) in enumerate(zip(qo_lens, keys, strict=True)):
        want = exact_latents(spec, q[b, :n], own)
        assert_near(state.out[b, :n], want.out, atol=4e-3 if spec.dtype == "fp16" else 2e-5)
        assert_near(state.lse[b, :n], want.lse, atol=1e-3)
        assert not state.out[b, n:].any()
        assert (state.lse[b, n:] == -torch.inf).all()


@pytest.mark.parametrize("heads", [SMALL, WIDE], ids=["small", "wide"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_forms_and_page_sizes_agree(kernels: Place, heads: ag.MLA, dtype: str) -> None:
    qo_lens, kv_lens = (3, 0, 1, 2), (131, 9, 0, 64)
    results = []
    for page_size in (64, 16, 1):
        spec = declare_latents(heads=heads, dtype=dtype, mask=ag.Causal(), kv=ag.Paged(page_size))
        q, keys = noise(spec, 3, kv_lens)
        joined, apart = (
            decode_latents(kernels, spec, q, keys, qo_lens=qo_lens, apart=apart) for apart in (False, True)
        )
        assert torch.equal(joined.out, apart.out)
        assert torch.equal(joined.lse, apart.lse)
        check(spec, joined, q, keys, qo_lens)
        results.append(joined)
    for other in results[1:]:
        assert torch.equal(other.out, results[0].out)
        assert torch.equal(other.lse, results[0].lse)


def test_a_chunk_of_many_tokens_over_a_prefix(kernels: Place) -> None:
    spec = declare_latents(heads=SMALL, mask=ag.Causal(), kv=ag.Paged(64))
    qo_lens, kv_lens = (200, 77), (330, 77)
    q, keys = noise(spec, 200, kv_lens)
    check(spec, decode_latents(kernels, spec, q, keys, qo_lens=qo_lens), q, keys, qo_lens)


@pytest.mark.parametrize("form", ["table", "csr"])
@pytest.mark.parametrize("apart", [False, True], ids=["joined", "apart"])
@pytest.mark.parametrize("fields", [{}, {"dtype": "fp8_e4m3"}, {"dtype": "fp8_e4m3", "scale": "token"}], ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_new_tokens_beside_a_prefix_of_latents(
    place: Place, dtype: str, fields: dict[str, str], apart: bool, form: str
) -> None:
    compare_chunk(place.compile, place.device, dtype, fields, apart, form)


@pytest.mark.parametrize("form", ["table", "csr"])
def test_the_interpreter_sees_new_tokens_beside_latents(form: str) -> None:
    script = (
        "import sys, attngen as ag; from tests.ops.test_latents import compare_chunk; make = lambda spec: ag.compile(spec, "
        "target='interpret', backend='triton', ops=()); compare_chunk(make, 'cpu', 'fp32', {}, False, sys.argv[1])"
    )
    run_python(script, form, TRITON_INTERPRET="1")


def compare_chunk(
    compile_spec: Callable[[ag.AttentionSpec], ag.Ops],
    device: str,
    dtype: str,
    fields: dict[str, Any],
    apart: bool,
    form: str,
) -> None:
    """Prefill beside a prefix of latents against attention to all keys, projected up, in float64."""
    generator = torch.Generator().manual_seed(7)
    prefix, new, heads, real = (37, 0, 128), (9, 5, 0), SMALL.num_qo_heads, torch_dtype(dtype)
    spec = ag.AttentionSpec(heads=SMALL, mask=ag.Causal(), dtype=dtype, kv=ag.Paged(16, **fields))
    storage = spec.kv.storages(dtype)[0]
    w_uk, w_uv = ((torch.randn(heads, 96, 48, generator=generator) * 96**-0.5).to(real) for _ in range(2))
    old, fresh = (torch.randn(sum(lens), 128, generator=generator).to(real) for lens in (prefix, new))
    q = torch.randn(sum(new), heads, 80, generator=generator).to(real)
    data, tokens, options = old, None, {}
    if storage.is_quantized:
        given = torch.tensor(0.01) if storage.scale == "tensor" else None
        data, _, tokens = quantize(old.float(), storage, given)
        factor = given if tokens is None else tokens[:, None]
        old, options = data.double() * factor, {"k_scale": given}
    pool, table = paged_latents(
        data.view(torch.uint8).split(prefix) if storage.is_quantized else data.split(prefix), 16, 0
    )
    if tokens is not None:
        options["k_scale"] = paged_latents([x[:, None] for x in tokens.split(prefix)], 16)[0][..., 0]
    lens, counts = int32(prefix), int32([-(-n // 16) for n in prefix])
    options |= {"page_table": table, "kv_lens": lens}
    if form == "csr":
        last = torch.where(lens > 0, (lens - 1) % 16 + 1, 0)
        options |= {"page_indptr": indptr(counts.tolist()), "kv_indices": table[table >= 0], "kv_last_page_len": last}
        del options["page_table"], options["kv_lens"]
    cache = (pool[..., :96].contiguous(), pool[..., 96:].contiguous()) if apart else pool
    projected = [torch.einsum("tc,hcd->thd", fresh[:, :96].double(), w.double()).to(real) for w in (w_uk, w_uv)]
    k, v = torch.cat([projected[0], fresh[:, None, 96:].expand(-1, heads, -1)], -1), projected[1]
    there = {name: x.to(device) for name, x in options.items()}
    starts = indptr(new).to(device)
    found = compile_spec(spec).prefill(
        *(x.to(device) for x in (q, k, v)),
        kv_cache=tuple(x.to(device) for x in cache) if apart else cache.to(device),
        w_uk=w_uk.to(device),
        w_uv=w_uv.to(device),
        qo_indptr=starts,
        kv_indptr=starts,
        return_lse=True,
        return_max=True,
        **there,
    )
    rows = zip(
        *(x.cpu().split(new) for x in found), q.split(new), k.split(new), v.split(new), old.split(prefix), strict=True
    )
    for out, lse, largest, query, own_k, own_v, latent in rows:
        keys, values = (torch.einsum("tc,hcd->thd", latent[:, :96].double(), w.double()) for w in (w_uk, w_uv))
        keys = torch.cat([keys, latent[:, None, 96:].expand(-1, heads, -1).double()], -1)
        request = Request(query, torch.cat([keys, own_k.double()]), torch.cat([values, own_v.double()]))
        visible = band(len(query), len(request.k))
        want = exact(request, visible, sm_scale=80**-0.5)
        scores = torch.einsum("qhd,khd->qhk", query.double(), request.k) * 80**-0.5
        assert_near(out, want.out, atol=2e-5 if dtype == "fp32" else 2e-2)
        assert_near(lse, want.lse, atol=2e-5 if dtype == "fp32" else 1e-2)
        if len(query):
            top = scores.masked_fill(~visible[:, None], -torch.inf).amax(-1)
            assert_near(largest, top, atol=2e-5 if dtype == "fp32" else 2e-2)


def test_what_projects_a_prefix_is_checked() -> None:
    spec = ag.AttentionSpec(heads=SMALL, mask=ag.Causal(), dtype="fp32", kv=ag.Paged(16))
    q, v, starts = torch.randn(2, 3, 80), torch.randn(2, 3, 48), int32([0, 2])
    w = torch.randn(3, 96, 48)
    given = {"qo_indptr": starts, "kv_indptr": starts}
    latents = {"kv_cache": torch.randn(2, 16, 128), "page_table": int32([1]).view(1, 1), "kv_lens": int32([5])}
    prefill = ag.compile(spec, backend="reference").prefill
    prefill(q, q, v, w_uk=w, w_uv=w, **given, **latents)
    for change, what in (
        ({"w_uk": None}, "w_uk is missing"),
        ({"w_uv": w.half()}, "w_uv has dtype"),
        ({"w_uk": w.transpose(1, 2)}, "w_uk has shape"),
        ({"v_scale": 1.0}, "v_scale is given beside latents"),
    ):
        with pytest.raises(ag.ArgumentError, match=what):
            prefill(q, q, v, **({"w_uk": w, "w_uv": w} | change), **given, **latents)
    with pytest.raises(ag.ArgumentError, match="w_uv has no meaning here"):
        prefill(q, q, v, w_uv=w, **given)
    for fields, what in (
        ({"heads": SMALL.model_copy(update={"absorbed": True})}, "no meaning beside absorbed queries"),
        ({"dtype": "fp8_e4m3"}, "fp8 queries are not absorbed"),
    ):
        with pytest.raises(ag.UnsupportedError, match=what):
            ag.compile(spec.model_copy(update=fields), backend="reference").prefill(
                q, q, v, w_uk=w, w_uv=w, **given, **latents
            )


@pytest.mark.parametrize("heads", [SMALL, WIDE], ids=["small", "wide"])
@pytest.mark.parametrize("kv", [ag.Paged(16), ag.Paged(64, dtype="fp8_e4m3"), ag.Ragged(), ag.Contiguous()], ids=str)
def test_absorbed_prefill_equals_decode(place: Place, heads: ag.MLA, kv: ag.Paged | ag.Ragged | ag.Contiguous) -> None:
    """Ragged queries, or padded ones of Contiguous, over latents."""
    qo_lens, kv_lens, device = (7, 0, 33), (40, 9, 130), place.device
    spec = ag.AttentionSpec(heads=heads.model_copy(update={"absorbed": True}), mask=ag.Causal(), dtype="fp16", kv=kv)
    q, keys = noise(spec, 33, kv_lens)
    lengths: dict[str, torch.Tensor] = {"qo_indptr": indptr(qo_lens)}
    rows = torch.cat([own[:n] for own, n in zip(q, qo_lens, strict=True)])
    cache = torch.cat(keys)
    if kv.kind == "contiguous":
        cache, rows = torch.nn.utils.rnn.pad_sequence(keys, batch_first=True, padding_value=torch.nan), q
        lengths = {"qo_lens": int32(qo_lens), "kv_lens": int32(kv_lens)}
    elif kv.kind == "ragged":
        lengths["kv_indptr"] = indptr(kv_lens)
    elif kv.dtype:
        keys = [own.to(torch.float8_e4m3fn) for own in keys]
        cache, table = paged_latents([own.view(torch.uint8) for own in keys], kv.page_size, 0x7F)
        lengths |= {"page_table": table, "kv_lens": int32(kv_lens)}
    else:
        cache, table = paged_latents(keys, kv.page_size)
        lengths |= {"page_table": table, "kv_lens": int32(kv_lens)}
    there = {name: x.to(device) for name, x in lengths.items()}
    out, lse = (
        x.cpu() for x in place.compile(spec).prefill(rows.to(device), cache.to(device), return_lse=True, **there)
    )
    if kv.kind == "contiguous":
        parts = [(out[b, :n], lse[b, :n]) for b, n in enumerate(qo_lens)]
    else:
        parts = list(zip(out.split(qo_lens), lse.split(qo_lens), strict=True))
    for (got, stat), own, latent, n in zip(parts, q, keys, qo_lens, strict=True):
        want = exact_latents(spec, own[:n], latent)
        assert_near(got, want.out, atol=4e-3)
        assert_near(stat, want.lse, atol=1e-3)


def test_what_absorbed_prefill_has_no_meaning_for_is_refused() -> None:
    heads = SMALL.model_copy(update={"absorbed": True})
    for fields, op, what in (
        ({}, "backward", "does not train on latents"),
        ({"dropout": 0.1}, "prefill", "absorbed prefill has no dropout"),
        ({"qk_norm": ag.QKNorm()}, "prefill", "absorbed prefill neither rotates nor norms"),
    ):
        with pytest.raises(ag.UnsupportedError, match=what):
            ag.compile(ag.AttentionSpec(heads=heads, dtype="fp32", **fields), target="cpu", ops=(op,))


def test_a_request_cut_into_parts_does_not_depend_on_its_neighbours(kernels: Place) -> None:
    spec = declare_latents(heads=WIDE, mask=ag.Causal(), kv=ag.Paged(64))
    q, keys = noise(spec, 2, (2500, 5, 1100))
    whole = decode_latents(kernels, spec, q, keys)
    check(spec, whole, q, keys, (2, 2, 2))
    for b in range(3):
        alone = decode_latents(kernels, spec, q[b : b + 1], keys[b : b + 1])
        assert torch.equal(alone.out[0], whole.out[b])
        assert torch.equal(alone.lse[0], whole.lse[b])


def test_absorbed_decode_does_not_rotate() -> None:
    spec = declare_latents(rope=ag.Rope(dim=64))
    with pytest.raises(ag.UnsupportedError, match="neither rotates nor norms") as error:
        ag.compile(spec, target="cpu", ops=("decode",))
    assert "rotate q_pe and kpe before the call" in error.value.fix
