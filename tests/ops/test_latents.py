"""Absorbed decode: forms of queries and caches, page sizes, several query tokens, parts of the keys."""

from __future__ import annotations

import pytest
import torch

import attngen as ag
from tests.acceptance.latents import declare_latents, decode_latents, exact_latents
from tests.acceptance.probes import Place, State, assert_near

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
    """Bitwise on the CPU; on the GPU tiles of large pages are loaded another way."""
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
    assert torch.equal(results[1].out, results[2].out)
    if not kernels.on_gpu:
        assert torch.equal(results[0].out, results[1].out)


def test_a_chunk_of_many_tokens_over_a_prefix(kernels: Place) -> None:
    spec = declare_latents(heads=SMALL, mask=ag.Causal(), kv=ag.Paged(64))
    qo_lens, kv_lens = (200, 77), (330, 77)
    q, keys = noise(spec, 200, kv_lens)
    check(spec, decode_latents(kernels, spec, q, keys, qo_lens=qo_lens), q, keys, qo_lens)


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
