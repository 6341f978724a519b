"""Declarations: what is accepted, what is refused and how, and round trips."""

from __future__ import annotations

import pytest
import torch

import attngen as ag

HEADS = ag.GQA(num_qo_heads=6, num_kv_heads=2, head_dim=64)


@ag.mask_mod
def same_parity(b, h, q, k):
    return (q - k) % 2 == 0


@ag.score_mod
def distance_bias(score, b, h, q, k, slopes: ag.Tensor("num_qo_heads")):
    return score + slopes[h] * (k - q)


RICH = ag.AttentionSpec(
    name="rich",
    heads=ag.MQA(num_qo_heads=5, head_dim=40, head_dim_vo=72),
    mask=(ag.Causal() & ~same_parity) | ag.SlidingWindow(left=3, right=1),
    score_mods=(distance_bias, ag.SoftCap(cap=30), ag.ALiBi(slopes="other")),
    sm_scale=0.125,
    dtype="fp16",
    kv=ag.Paged(page_size=7, layout="HND"),
    out_dtype="fp32",
)


def test_round_trips_are_equal_and_hash_alike(tmp_path) -> None:
    from_json = ag.AttentionSpec.model_validate_json(RICH.model_dump_json())
    (tmp_path / "rich.toml").write_text(RICH.to_toml())
    (tmp_path / "rich.json").write_text(RICH.model_dump_json())
    for loaded in (from_json, ag.load_spec(tmp_path / "rich.toml"), ag.load_spec(str(tmp_path / "rich.json"))):
        assert loaded == RICH
        assert hash(loaded) == hash(RICH)
        assert loaded.mask.expr() == RICH.mask.expr()
        assert loaded.score_mods[0].expression == "score + slopes[h] * (k - q)"


@pytest.mark.parametrize("name", sorted(ag.shipped_specs()))
def test_shipped_specs_load_under_their_own_name(name: str) -> None:
    spec = ag.load_spec(name)
    assert spec.name == name
    assert ag.AttentionSpec.model_validate_json(spec.model_dump_json()) == spec


def test_shipped_specs_are_the_models() -> None:
    assert {"llama3-8b", "llama3-70b", "mistral-7b", "gemma2-9b-local", "gemma2-9b-global"} <= set(ag.shipped_specs())
    assert {"qwen3-8b", "falcon-7b", "bloom-7b", "gpt2", "minilm"} <= set(ag.shipped_specs())
    mistral = ag.load_spec("mistral-7b")
    assert (mistral.heads.num_qo_heads, mistral.heads.num_kv_heads, mistral.heads.head_dim_qk) == (32, 8, 128)
    assert mistral.mask == ag.Causal() & ag.SlidingWindow(left=4095)
    assert ag.load_spec("falcon-7b").heads == ag.MQA(num_qo_heads=71, head_dim=64)


def test_numbers_written_differently_are_the_same_spec() -> None:
    assert ag.SoftCap(cap=50) == ag.SoftCap(cap=50.0)
    written = ag.AttentionSpec(heads=HEADS, mask=ag.Full(), score_mods=(), sm_scale=None, rope=None, dropout=0)
    assert written == ag.AttentionSpec(heads=HEADS)


@pytest.mark.parametrize(
    ("fields", "where", "why"),
    [
        (
            {"heads": {"kind": "gqa", "num_qo_heads": 5, "num_kv_heads": 2, "head_dim": 64}},
            "heads",
            "num_qo_heads=5 is no multiple",
        ),
        ({"heads": {"kind": "mha", "num_heads": 2, "head_dim": 20}}, "heads.mha.head_dim", "multiple of 8"),
        (
            {"heads": {"kind": "mha", "num_heads": 2, "head_dim": 264}},
            "heads.mha.head_dim",
            "less than or equal to 256",
        ),
        ({"heads": HEADS, "sm_scale": float("nan")}, "sm_scale", "finite"),
        (
            {"heads": HEADS, "score_mods": [{"kind": "soft_cap", "cap": 0}]},
            "score_mods.0.soft_cap.cap",
            "greater than 0",
        ),
        ({"heads": HEADS, "score_mods": [{"kind": "soft_cap", "cap": float("inf")}]}, "soft_cap.cap", "finite"),
        (
            {"heads": HEADS, "mask": {"kind": "sliding_window", "left": -1}},
            "sliding_window.left",
            "greater than or equal to 0",
        ),
        ({"heads": HEADS, "kv": {"kind": "paged", "page_size": 0}}, "kv.paged.page_size", "greater than or equal to 1"),
        (
            {
                "heads": HEADS,
                "kv": {"kind": "paged", "page_size": 16, "k_dtype": "int4", "v_dtype": "nvfp4", "group_size": 16},
            },
            "kv.paged",
            "none of int4: 32, 64 or 128",
        ),
        ({"heads": HEADS, "dtype": "fp8"}, "dtype", "'fp32', 'bf16', 'fp16' or 'fp8_e4m3'"),
        ({"heads": HEADS, "window": 3}, "window", "not permitted"),
        ({"heads": HEADS, "dropout": 1.0}, "dropout", "less than 1"),
        ({"heads": HEADS, "mask": {"kind": "custom", "name": "m", "expression": "q +"}}, "mask.custom", "expression"),
        (
            {"heads": HEADS, "mask": {"kind": "custom", "name": "m", "expression": "__import__('os')"}},
            "mask.custom",
            "not part",
        ),
    ],
)
def test_wrong_fields_are_named(fields: dict, where: str, why: str) -> None:
    with pytest.raises(ag.SpecError) as error:
        ag.AttentionSpec(**fields)
    assert where in error.value.where
    assert why in str(error.value)


def test_unknown_spec_lists_the_shipped_ones() -> None:
    with pytest.raises(ag.SpecError, match="no spec 'llama9'") as error:
        ag.load_spec("llama9")
    assert "llama3-8b" in error.value.fix


def test_a_file_that_is_no_text_is_named(tmp_path) -> None:
    path = tmp_path / "spec.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ag.SpecError, match=r"cannot read .*spec\.toml") as error:
        ag.load_spec(path)
    assert "can't decode byte 0xff" in error.value.why


def test_captured_tensors_stay_out_of_equality_and_files() -> None:
    bias = torch.arange(4.0)

    def by_key(score, b, h, q, k):
        return score + bias[k]

    first = ag.score_mod(by_key)
    bias = torch.arange(4.0) * 2
    second = ag.score_mod(by_key)
    assert first == second
    assert hash(first) == hash(second)
    assert "defaults" not in first.model_dump_json()
    spec = ag.AttentionSpec(heads=HEADS, score_mods=(second,), dtype="fp32")
    assert torch.equal(spec.defaults()["bias"], bias)
    loaded = ag.AttentionSpec.model_validate_json(spec.model_dump_json())
    q, k, v = torch.randn(1, 2, 6, 64), torch.randn(1, 4, 2, 64), torch.randn(1, 4, 2, 64)
    with pytest.raises(ag.ArgumentError, match=r"params\['bias'\] is missing"):
        ag.compile(loaded, backend="reference").prefill(q, k, v)
    kept = ag.compile(spec, backend="reference").prefill(q, k, v)
    passed = ag.compile(loaded, backend="reference").prefill(q, k, v, params={"bias": bias})
    assert torch.equal(kept, passed)


def test_primitives_take_their_arguments_by_position() -> None:
    assert ag.SlidingWindow(4, 1) == ag.SlidingWindow(left=4, right=1)
    assert ag.ALiBi("slopes") == ag.ALiBi(slopes="slopes")
    assert ag.GQA(8, 2, 64) == ag.GQA(num_qo_heads=8, num_kv_heads=2, head_dim=64)
    assert ag.SoftCap(30.0) == ag.SoftCap(cap=30)
    with pytest.raises(ag.SpecError, match="Causal is given 1 values by position"):
        ag.Causal(3)
    with pytest.raises(ag.SpecError, match="takes num_heads, head_dim, head_dim_vo, each once"):
        ag.MHA(8, num_heads=8, head_dim=64)
