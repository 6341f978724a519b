"""Absorbed decode: forms of queries and caches, page sizes, several query tokens, parts of the keys."""

from __future__ import annotations

import pytest
import torch

import attngen as ag
from tests.acceptance.latents import declare_latents, decode_latents, exact_latents
from tests.acceptance.probes import Place, Request, State, assert_near, band, exact

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


def test_a_chunk_over_latents_and_projected_tokens_merges(kernels: Place) -> None:
    """Absorbed over the prefix, projected over the new tokens, as the refusal of ``kv_cache=`` beside latents advises."""
    generator = torch.Generator().manual_seed(7)
    prefix, new, heads = (37, 128), 9, SMALL.num_qo_heads
    spec = ag.AttentionSpec(heads=SMALL, mask=ag.Causal(), dtype="fp32", kv=ag.Paged(16))
    ops, device = kernels.compile(spec), kernels.device
    to_keys, to_values = (torch.randn(heads, 96, 48, generator=generator) * 96**-0.5 for _ in range(2))
    latents = [torch.randn(n + new, 128, generator=generator) for n in prefix]
    q = torch.randn(len(prefix), new, heads, 80, generator=generator)
    pool = torch.full((12, 16, 128), torch.nan)
    table = torch.tensor([[7, 2, 5, -1, -1, -1, -1, -1], [0, 9, 4, 1, 11, 3, 8, 6]]).int()
    for n, row, own in zip(prefix, table.tolist(), latents, strict=True):
        for page, chunk in zip(row, own[:n].split(16), strict=False):
            pool[page, : len(chunk)] = chunk
    absorbed = torch.cat([torch.einsum("bqhd,hcd->bqhc", q[..., :48], to_keys), q[..., 48:]], -1)
    lens = torch.tensor(prefix).int().to(device)
    states = [
        ops.decode(
            absorbed.to(device),
            pool.to(device),
            page_table=table.to(device),
            kv_lens=lens,
            q_offset=lens,
            return_lse=True,
            partial=True,
        )
    ]
    fresh = torch.cat([own[n:] for n, own in zip(prefix, latents, strict=True)])
    k, v = (torch.einsum("tc,hcd->thd", fresh[:, :96], weight) for weight in (to_keys, to_values))
    k = torch.cat([k, fresh[:, None, 96:].expand(-1, heads, -1)], -1)
    indptr = torch.tensor([0, new, 2 * new]).int().to(device)
    rows = (x.to(device) for x in (q.flatten(0, 1), k, v))
    states.append(ops.prefill(*rows, qo_indptr=indptr, kv_indptr=indptr, return_lse=True, partial=True))
    over_prefix = torch.einsum("bqhc,hcd->bqhd", states[0][0].cpu(), to_values).flatten(0, 1)
    lse = (states[0][1].cpu().flatten(0, 1), states[1][1].cpu())
    found = ag.merge_states((over_prefix, states[1][0].cpu()), lse)
    for b, (n, own) in enumerate(zip(prefix, latents, strict=True)):
        keys, values = (torch.einsum("tc,hcd->thd", own[:, :96], weight) for weight in (to_keys, to_values))
        keys = torch.cat([keys, own[:, None, 96:].expand(-1, heads, -1)], -1)
        want = exact(Request(q[b], keys, values), band(new, n + new), sm_scale=80**-0.5)
        assert_near(found[0].view(2, new, heads, 48)[b], want.out, atol=2e-5)
        assert_near(found[1].view(2, new, heads)[b], want.lse, atol=2e-5)


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
