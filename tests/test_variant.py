"""Normalization: one meaning whatever the words."""

from __future__ import annotations

from typing import Any

import pytest

import attngen as ag
from attngen.variant import normalize


def test_head_layouts_become_one_thing() -> None:
    mha = normalize(ag.AttentionSpec(heads=ag.MHA(num_heads=4, head_dim=64)), "prefill")
    gqa = normalize(ag.AttentionSpec(heads=ag.GQA(num_qo_heads=4, num_kv_heads=4, head_dim=64)), "prefill")
    mqa = normalize(ag.AttentionSpec(heads=ag.MQA(num_qo_heads=4, head_dim=64)), "prefill")
    one = normalize(ag.AttentionSpec(heads=ag.GQA(num_qo_heads=4, num_kv_heads=1, head_dim=64)), "prefill")
    assert mha == gqa
    assert mqa == one
    assert (mha.group_size, mqa.group_size) == (1, 4)
    assert mha.sm_scale == 0.125


def test_names_and_layouts_of_pages_do_not_reach_the_variant() -> None:
    heads = ag.MHA(num_heads=4, head_dim=64)
    nhd = ag.AttentionSpec(name="a", heads=heads, kv=ag.Paged(page_size=16))
    hnd = ag.AttentionSpec(name="b", heads=heads, kv=ag.Paged(page_size=16, layout="HND"))
    assert normalize(nhd, "decode") == normalize(hnd, "decode")
    assert normalize(nhd, "decode").q_layout == "padded"
    assert normalize(nhd, "prefill").q_layout == "ragged"


def test_backward_of_a_paged_cache_is_refused() -> None:
    spec = ag.AttentionSpec(heads=ag.MHA(num_heads=4, head_dim=64), kv=ag.Paged(page_size=16))
    with pytest.raises(ag.UnsupportedError, match="backward does not read a paged cache") as error:
        normalize(spec, "backward")
    assert "Contiguous" in error.value.fix


def test_turned_keys_must_fit_the_dtype_of_queries() -> None:
    def spec(**fields: Any) -> ag.AttentionSpec:
        rope = fields.pop("rope", ag.Rope())
        return ag.AttentionSpec(
            heads=ag.MHA(4, 64), rope=rope, kv=ag.Paged(16, dtype=fields.pop("kv", "fp8_e5m2")), **fields
        )

    with pytest.raises(ag.UnsupportedError, match="keys of fp8_e5m2 do not turn in fp16") as error:
        normalize(spec(dtype="fp16"), "decode")
    assert "bf16" in error.value.fix
    for fits in (
        spec(dtype="bf16"),
        spec(dtype="fp16", kv="fp8_e4m3"),
        spec(dtype="fp16", rope=ag.Rope(keys="append")),
        spec(dtype="fp16", qk_norm=ag.QKNorm()),
    ):
        assert normalize(fits, "decode").rope is not None


def test_mixed_dtypes_are_not_trained_on() -> None:
    spec = ag.AttentionSpec(heads=ag.MHA(num_heads=4, head_dim=64), dtype="bf16", kv=ag.Contiguous(dtype="fp16"))
    with pytest.raises(ag.UnsupportedError, match="backward does not train on fp16 keys and values with bf16 queries"):
        normalize(spec, "backward")


def test_one_parameter_declared_twice_differently_is_refused() -> None:
    @ag.mask_mod
    def by_table(b, h, q, k, table: ag.Tensor("batch", dtype="i32")):
        return k < table[b]

    @ag.score_mod
    def by_bias(score, b, h, q, k, table: ag.Tensor("num_qo_heads")):
        return score + table[h]

    spec = ag.AttentionSpec(heads=ag.MHA(num_heads=4, head_dim=64), mask=by_table, score_mods=(by_bias,))
    with pytest.raises(ag.SpecError, match="'table' is declared twice"):
        normalize(spec, "prefill")
