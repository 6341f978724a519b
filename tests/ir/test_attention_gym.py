"""Masks and score mods of attention-gym, unchanged: traced, written, read, and compared with what FlexAttention makes of them."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from attn_gym import masks, mods
from attn_gym.masks.document_mask import length_to_offsets
from attn_gym.masks.vsa import generate_vsa_padding_mask_mod
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

import attngen as ag
from attngen.ir.evaluate import evaluate
from attngen.ir.text import parse, to_text

BATCH, HEADS = 2, 3
OFFSETS = length_to_offsets([5, 1, 9, 8], "cpu")
NODES = 12


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def graphs() -> torch.Tensor:
    linked = torch.rand(BATCH, NODES, NODES, generator=seeded(0)) < 0.15
    return linked | linked.transpose(1, 2)


@functools.cache
def paths() -> tuple[torch.Tensor, torch.Tensor]:
    types = torch.randint(0, 4, (BATCH, NODES, NODES), generator=seeded(1))
    return mods.shortest_path_edge_types(graphs(), types, 3)


def top_tiles() -> torch.Tensor:
    return torch.rand(BATCH, HEADS, 6, 6, generator=seeded(2)).topk(2).indices


TREE = masks.build_tree_ancestor_matrix([-1, 0, 0, 1, 2], device="cpu")
# A factory, and the lengths it is asked about.
MASKS = {
    "causal": (lambda: masks.causal_mask, 23, 23),
    "full": (lambda: noop_mask, 4, 9),
    "sliding_window": (lambda: masks.generate_sliding_window(5), 23, 23),
    "dilated_sliding_window": (lambda: masks.generate_dilated_sliding_window(6, 2), 23, 23),
    "document": (lambda: masks.generate_doc_mask_mod(masks.causal_mask, OFFSETS), 23, 23),
    "document, windows": (lambda: masks.generate_doc_mask_mod(masks.generate_sliding_window(3), OFFSETS), 23, 23),
    "packed_causal_document": (lambda: masks.generate_packed_causal_doc_mask_mod(OFFSETS), 23, 23),
    "prefix_lm": (lambda: masks.generate_prefix_lm_mask(4), 15, 15),
    "document, prefixes": (lambda: masks.generate_doc_mask_mod(masks.generate_prefix_lm_mask(3), OFFSETS), 23, 23),
    "batchify": (lambda: masks.batchify_mask_mod(masks.causal_mask, 5), 23, 23),
    "batchify, full": (lambda: masks.batchify_mask_mod(noop_mask, 5), 23, 23),
    "flamingo": (
        lambda: masks.generate_vision_cross_attention_mask_mod(torch.tensor([[0, 4], [4, 9], [9, 20]]), 4),
        20,
        12,
    ),
    "global_sliding_window": (
        lambda: masks.generate_global_sliding_window(3, torch.rand(24, generator=seeded(3)) < 0.2),
        24,
        24,
    ),
    "jetspec_tree": (lambda: masks.generate_jetspec_tree_causal_mask_mod(6, TREE), 5, 11),
    "jetspec_training": (lambda: masks.generate_jetspec_training_mask_mod(6, 4), 12, 18),
    "natten": (lambda: masks.generate_natten(6, 4, 3, 3), 24, 24),
    "tiled_natten": (lambda: masks.generate_tiled_natten(6, 4, 3, 3, 3, 2), 24, 24),
    "morton_natten": (lambda: masks.generate_morton_natten(8, 8, 3, 3), 64, 64),
    "shared_prefix": (lambda: masks.generate_shared_prefix_mask_mod(OFFSETS, torch.tensor([0, 0, 2, 2])), 23, 23),
    "sta_2d": (lambda: masks.generate_sta_mask_mod_2d((4, 6), (2, 3), (2, 3), 4), 28, 28),
    "sta_3d": (lambda: masks.generate_sta_mask_mod_3d((2, 4, 4), (2, 4, 2), (1, 2, 2), 3), 35, 35),
    "svg_spatial": (lambda: masks.generate_spatial_head_mask_mod(3, 3, 5, 2, True, 4), 18, 18),
    "svg_temporal": (lambda: masks.generate_temporal_head_mask_mod(3, 3, 5, 2), 18, 18),
    "block_diffusion": (lambda: masks.generate_block_diffusion_mask(12, 4), 24, 24),
    "vsa": (lambda: masks.generate_vsa_mask_mod(top_tiles(), 4), 24, 24),
    "vsa, padded": (lambda: masks.generate_vsa_mask_mod(top_tiles(), 4, torch.tensor([4, 4, 3, 2, 4, 1])), 24, 24),
    "vsa padding": (lambda: generate_vsa_padding_mask_mod(torch.tensor([4, 4, 3, 2, 4, 1]), 4), 24, 24),
    "and, or": (
        lambda: or_masks(
            and_masks(masks.causal_mask, masks.generate_natten(6, 4, 3, 3)), masks.generate_prefix_lm_mask(2)
        ),
        24,
        24,
    ),
}
SCORES = {
    "alibi": (lambda: mods.generate_alibi_bias(HEADS), 17),
    "softcap": (lambda: mods.generate_tanh_softcap(30), 17),
    "softcap, approximate": (lambda: mods.generate_tanh_softcap(30, approx=True), 17),
    "gelu": (mods.generate_activation_score_mod, 17),
    "gelu, tanh": (lambda: mods.generate_activation_score_mod(functools.partial(F.gelu, approximate="tanh")), 17),
    "relu": (lambda: mods.generate_activation_score_mod(F.relu), 17),
    "silu": (lambda: mods.generate_activation_score_mod(F.silu), 17),
    "sigmoid": (lambda: mods.generate_activation_score_mod(torch.sigmoid), 17),
    "softplus": (lambda: mods.generate_activation_score_mod(F.softplus), 17),
    "logsigmoid": (lambda: mods.generate_activation_score_mod(F.logsigmoid, offset=60.0), 17),
    "sandwich": (lambda: mods.generate_sandwich_bias(HEADS, 17, d_bar=8), 17),
    "graphormer_spatial": (
        lambda: mods.generate_graphormer_spatial_bias(
            torch.randn(HEADS, 6, generator=seeded(4)), mods.shortest_path_distances(graphs(), 4)
        ),
        NODES,
    ),
    "graphormer_edge": (
        lambda: mods.generate_graphormer_edge_bias(torch.randn(HEADS, 3, 4, generator=seeded(5)), *paths()),
        NODES,
    ),
}


def mapped(fn, qo_len: int, kv_len: int, *scores: torch.Tensor) -> torch.Tensor:
    """The function over all coordinates, mapped as FlexAttention maps it."""
    lead = (0,) * len(scores)
    for axes in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        fn = torch.vmap(fn, in_dims=(*lead, *axes))
    places = (torch.arange(n, dtype=torch.int32) for n in (BATCH, HEADS, qo_len, kv_len))
    return fn(*scores, *places)


def env(qo_len: int, kv_len: int) -> dict[str, torch.Tensor | int]:
    """Rows count from 0, as in FlexAttention."""
    places = {"b": BATCH, "h": HEADS, "q": qo_len, "k": kv_len}
    grids = torch.meshgrid(*(torch.arange(n) for n in places.values()), indexing="ij")
    return {**dict(zip(places, grids, strict=True)), "qo_len": qo_len, "kv_len": kv_len}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    make, qo_len, kv_len = MASKS[name]
    fn = make()
    traced = ag.mask_mod(fn)
    want = mapped(fn, qo_len, kv_len)
    shape = (BATCH, HEADS, qo_len, kv_len)
    assert torch.equal(
        evaluate(traced.expr(), env(qo_len, kv_len), traced.defaults()).expand(shape), want.expand(shape)
    )
    assert name == "full" or 0 < int(want.sum()) < want.numel()
    assert parse(to_text(traced.expr()), traced.params()) == traced.expr()
    assert set(traced.defaults()) == {param.name for param in traced.params()}


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str) -> None:
    make, length = SCORES[name]
    fn = make()
    traced = ag.score_mod(fn)
    score = 3.0 * torch.randn(BATCH, HEADS, length, length, generator=seeded(6), dtype=torch.float64)
    if name == "gelu, tanh":
        score = score.clamp(min=-2.0)
    expr = traced.expr(parse("score"), HEADS)
    got = evaluate(expr, {**env(length, length), "score": score}, traced.defaults())
    torch.testing.assert_close(got, mapped(fn, length, length, score), rtol=1e-6, atol=1e-6, check_dtype=False)
    assert (got - score).abs().max() > 1e-3
    assert parse(to_text(expr), traced.params()) == expr


@pytest.mark.parametrize("name", ["document", "morton_natten", "vsa, padded", "flamingo"])
def test_masks_in_a_kernel(name: str) -> None:
    """With q = 0, lse is the logarithm of the visible keys; q_offset=0 counts rows from 0."""
    make, qo_len, kv_len = MASKS[name]
    fn = make()
    spec = ag.AttentionSpec(heads=ag.MHA(HEADS, 16), mask=ag.mask_mod(fn), dtype="fp32")
    q, k = torch.zeros(BATCH, qo_len, HEADS, 16), torch.randn(BATCH, kv_len, HEADS, 16)
    offset = torch.zeros(BATCH, dtype=torch.int32)
    _, lse = ag.compile(spec, backend="cpp").prefill(q, k, k, q_offset=offset, return_lse=True)
    want = mapped(fn, qo_len, kv_len).expand(BATCH, HEADS, qo_len, kv_len).sum(-1).transpose(1, 2)
    torch.testing.assert_close(lse.double().exp(), want.double(), rtol=1e-5, atol=0)


def test_products_of_vectors_are_refused() -> None:
    q_pe, k_pe = torch.randn(1, HEADS, 9, 8), torch.randn(1, 1, 9, 8)
    with pytest.raises(ag.UnsupportedError) as caught:
        ag.score_mod(mods.generate_mla_rope_score_mod(q_pe, k_pe, HEADS))
    assert caught.value.what == "a dot product of vectors of 8 elements cannot be traced"
    assert "latent_attention.py" in caught.value.where
    assert "append the vectors to q and k" in caught.value.fix


def test_unknown_operators_are_refused() -> None:
    with torch.library._scoped_library("attngen_test", "DEF") as library:
        library.define("tanh(Tensor x) -> Tensor")
        library.impl("tanh", torch.sin, "CompositeExplicitAutograd")
        with pytest.raises(ag.UnsupportedError, match="custom operator attngen_test::tanh cannot be traced"):
            ag.score_mod(lambda score, b, h, q, k: torch.ops.attngen_test.tanh(score))
    traced = ag.score_mod(lambda score, b, h, q, k: torch.ops.aten.tanh(score) + torch.ops.aten.exp.default(score))
    assert traced.expression == "tanh(score) + exp(score)"


def test_long_rows_are_refused() -> None:
    table = torch.zeros(100, dtype=torch.int32)
    with pytest.raises(ag.UnsupportedError, match="100 elements of parameter 'table' are used at once"):
        ag.mask_mod(lambda b, h, q, k: (table == k).any())


def test_rows() -> None:
    table = torch.tensor([4, 7, 9])

    def counted(b, h, q, k):
        return (q >= table).sum() == (table <= k).sum(-1) + table[0] - 4

    traced = ag.mask_mod(counted)
    assert traced.expression == (
        "0 + (table[0] <= q) + (table[1] <= q) + (table[2] <= q)"  # the tensor's own operator is asked first
        " == 0 + (table[0] <= k) + (table[1] <= k) + (table[2] <= k) + table[0] - 4"
    )
    rows = table[:, None] <= torch.arange(12)
    got = evaluate(traced.expr(), {"q": torch.arange(12)[:, None], "k": torch.arange(12)}, {"table": table})
    assert torch.equal(got, rows.sum(0)[:, None] == rows.sum(0))
