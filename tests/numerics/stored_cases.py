"""Numeric cases of every storage of keys and values, and of latents."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import attngen as ag
from tests.numerics.axes import DECODE_LENS, GROUPS, LENS, MASKS, declare
from tests.numerics.harness import Case

STORAGES = {
    "half": {"dtype": "fp16"},
    "wide": {"k_dtype": "fp32", "v_dtype": "bf16"},
    "e4m3": {"dtype": "fp8_e4m3"},
    "e4m3-heads": {"dtype": "fp8_e4m3", "scale": "head"},
    "e4m3-tokens": {"dtype": "fp8_e4m3", "scale": "token"},
    "e5m2": {"dtype": "fp8_e5m2"},
    "e5m2-tokens": {"dtype": "fp8_e5m2", "scale": "token"},
    "int8": {"dtype": "int8"},
    "int8-tokens": {"dtype": "int8", "scale": "token"},
    "int4": {"dtype": "int4"},
    "int4-zero": {"dtype": "int4", "group_size": 64, "zero_point": True},
    "int4-scaled": {"dtype": "int4", "group_size": 128, "scale": "tensor"},
    "nvfp4": {"dtype": "nvfp4"},
    "mxfp4": {"dtype": "mxfp4"},
    "both": {"k_dtype": "int8", "v_dtype": "fp8_e4m3", "scale": "head"},
    "k-wide": {"v_dtype": "int4"},
}
# The widest heads, and the narrowest: fewer terms than some matrix products add up at least.
ENDS = {
    "e4m3": (256, {"kv": ag.Paged(page_size=16, dtype="fp8_e4m3")}),
    "int8-tokens": (256, {"kv": ag.Contiguous(dtype="int8", scale="token")}),
    "int4-zero": (256, {"kv": ag.Paged(page_size=64, dtype="int4", zero_point=True)}),
    "nvfp4": (256, {"kv": ag.Ragged(dtype="nvfp4")}),
    "mxfp4": (256, {"kv": ag.Paged(page_size=16, dtype="mxfp4")}),
    "narrow-nvfp4": (16, {"kv": ag.Paged(page_size=16, dtype="nvfp4")}),
    "narrow-e4m3-rope": (16, {"kv": ag.Paged(page_size=8, dtype="fp8_e4m3"), "rope": ag.Rope()}),
    "narrow-int8-pairs": (16, {"kv": ag.Ragged(dtype="int8"), "rope": ag.Rope(interleaved=True)}),
    "narrow-fp8-queries": (16, {"kv": ag.Paged(page_size=16), "dtype": "fp8_e4m3"}),
    "fp8-queries-heads": (128, {"kv": ag.Contiguous(scale="head"), "dtype": "fp8_e4m3"}),
    "fp8-queries": (256, {"kv": ag.Ragged(), "dtype": "fp8_e4m3", "score_mods": (ag.SoftCap(cap=5.0),)}),
}

# Packed keys that turn by halves: head dim, what turns, and storage. Blocks are halves, reach over both, or are cut.
TURNED = {
    "int4": (64, {"rope": ag.Rope()}, {"dtype": "int4"}),
    "int4-zero": (64, {"rope": ag.Rope()}, {"dtype": "int4", "group_size": 64, "zero_point": True}),
    "int4-scaled": (128, {"rope": ag.Rope()}, {"dtype": "int4", "group_size": 128, "scale": "tensor"}),
    "nvfp4-part": (128, {"rope": ag.Rope(dim=64)}, {"dtype": "nvfp4"}),
    "int4-96": (96, {"rope": ag.Rope()}, {"dtype": "int4", "zero_point": True}),
    "mxfp4-norm": (64, {"rope": ag.Rope(dim=32), "qk_norm": ag.QKNorm(k_weight="w")}, {"dtype": "mxfp4"}),
    "k-only": (64, {"rope": ag.Rope(table="cos_sin")}, {"k_dtype": "nvfp4", "v_dtype": "int4"}),
}


def stored_cases(dtypes: tuple[str, ...]) -> Iterator[Case]:
    """Each storage of keys and values in each layout, with what scales could be confused with."""
    layouts = (
        (ag.Contiguous, {}, "table"),
        (ag.Paged, {"page_size": 16}, "table"),
        (ag.Ragged, {}, "table"),
        (ag.Paged, {"page_size": 3, "layout": "HND"}, "csr"),
        (ag.Paged, {"page_size": 64}, "stacked"),
        (ag.Paged, {"page_size": 8, "layout": "HND", "stack_dim": 0}, "stacked"),
    )
    extras = (
        {},
        {"score_mods": (ag.SoftCap(cap=5.0),)},
        {"normalizer": ag.Softmax(sink=True), "output_gate": "gate"},
        {"score_mods": (ag.ALiBi("slopes"),)},
        {"normalizer": ag.Sigmoid(bias=-1.0)},
    )
    dtype, group, dims = cycle(dtypes), cycle(GROUPS), cycle(((128, 128), (64, 64), (128, 64)))
    for index, (name, fields) in enumerate(STORAGES.items()):
        width = (128, 128) if fields.get("group_size") == 128 else next(dims)
        for shift in range(2):
            make, place, way = layouts[(2 * index + shift) % 6]
            if way == "stacked" and (width[0] != width[1] or "k_dtype" in fields or "v_dtype" in fields):
                way = "table"
            mask = (ag.Causal(), MASKS["window"], ag.Full())[(index + shift) % 3]
            fixed = {"mask": mask, "kv": make(**place, **fields), "dtype": next(dtype)}
            spec = declare(next(group), width, **fixed, **extras[(index + shift) % 5])
            qo, kv = LENS[(index + shift) % len(LENS)]
            decode_qo, decode_kv = DECODE_LENS[(index + shift) % len(DECODE_LENS)]
            yield Case(f"storage-{name}-{shift}-decode", spec, "decode", decode_qo, decode_kv, way, seed=index)
            yield Case(f"storage-{name}-{shift}-prefill", spec, "prefill", qo, kv, way, seed=index)
    for index, (name, fields) in enumerate((("e4m3", {"dtype": "fp8_e4m3"}), ("int8", {"dtype": "int8"}))):
        for rotated in ({"rope": ag.Rope()}, {"qk_norm": ag.QKNorm(k_weight="w"), "rope": ag.Rope(dim=32)}):
            spec = declare(
                (4, 2), (64, 64), mask=ag.Causal(), kv=ag.Paged(page_size=16, **fields), dtype=next(dtype), **rotated
            )
            kind = "-".join(rotated)
            yield Case(f"storage-{name}-{kind}-decode", spec, "decode", *DECODE_LENS[index], seed=index)
            yield Case(f"storage-{name}-{kind}-prefill", spec, "prefill", *LENS[index], seed=index)
    for index, kv in enumerate((ag.Contiguous(), ag.Paged(page_size=16), ag.Ragged(scale="token"))):
        spec = declare((6, 2), (64, 64), mask=ag.Causal(), kv=kv, dtype="fp8_e4m3")
        yield Case(f"storage-fp8-queries-{kv.kind}-decode", spec, "decode", *DECODE_LENS[index], seed=index)
        yield Case(f"storage-fp8-queries-{kv.kind}-prefill", spec, "prefill", *LENS[index], seed=index)
    for index, (name, (head_dim, fields)) in enumerate(ENDS.items()):
        spec = declare(GROUPS[index % 6], (head_dim, head_dim), mask=ag.Causal(), **{"dtype": dtypes[1], **fields})
        yield Case(f"storage-{name}-{head_dim}-decode", spec, "decode", *DECODE_LENS[index % 3], seed=index)
        yield Case(f"storage-{name}-{head_dim}-prefill", spec, "prefill", *LENS[index % 3], seed=index)
    for index, (name, (head_dim, rotated, fields)) in enumerate(TURNED.items()):
        kv = ag.Contiguous(**fields) if index % 3 == 2 else ag.Paged(page_size=(16, 64)[index % 2], **fields)
        spec = declare(GROUPS[index % 6], (head_dim, head_dim), mask=ag.Causal(), kv=kv, dtype=next(dtype), **rotated)
        yield Case(f"storage-turned-{name}-decode", spec, "decode", *DECODE_LENS[index % 3], seed=index)
        yield Case(f"storage-turned-{name}-prefill", spec, "prefill", *LENS[index % 3], seed=index)
    mixed = declare((4, 4), (64, 64), mask=ag.Causal(), kv=ag.Paged(page_size=16, dtype="int4"), dtype="fp8_e4m3")
    yield Case("storage-fp8-queries-int4-decode", mixed, "decode", *DECODE_LENS[0], seed=3)


LATENTS = {
    "plain": {},
    "e4m3": {"dtype": "fp8_e4m3"},
    "int8-tokens": {"dtype": "int8", "scale": "token"},
    "int4": {"dtype": "int4"},
    "nvfp4": {"dtype": "nvfp4"},
}


def latent_cases(dtypes: tuple[str, ...]) -> Iterator[Case]:
    """Absorbed decode over latents, of several tokens too, and prefill and backward of what they are projected to."""
    dtype = cycle(dtypes)
    small = {"head_dim_ckv": 64, "head_dim_kpe": 32, "head_dim_nope": 48, "head_dim_vo": 40}
    layouts = (ag.Paged, {"page_size": 16}), (ag.Contiguous, {}), (ag.Paged, {"page_size": 64}), (ag.Ragged, {})
    for index, (name, fields) in enumerate(LATENTS.items()):
        for shift in range(2):
            make, place = layouts[(index + shift) % 4]
            heads = ag.MLA(num_qo_heads=(16, 5)[shift], **small) if shift else ag.MLA(num_qo_heads=16)
            spec = ag.AttentionSpec(heads=heads, mask=ag.Causal(), kv=make(**place, **fields), dtype=next(dtype))
            lens = DECODE_LENS[(index + shift) % 3]
            way = ("table", "stacked", "csr")[(index + shift) % 3]
            yield Case(f"latent-{name}-{shift}-decode", spec, "decode", *lens, way, seed=index)
    narrow = ag.MLA(num_qo_heads=8, **{**small, "head_dim_kpe": 16})
    tiny = ag.AttentionSpec(heads=narrow, mask=ag.Causal(), kv=ag.Paged(16, dtype="nvfp4"), dtype=dtypes[1])
    yield Case("latent-narrow-decode", tiny, "decode", *DECODE_LENS[0], seed=2)
    heads = ag.MLA(num_qo_heads=128, **small)
    wide = ag.AttentionSpec(heads=heads, mask=ag.Causal(), kv=ag.Paged(64, dtype="fp8_e4m3"), dtype=dtypes[1])
    yield Case("latent-128-heads-decode", wide, "decode", *DECODE_LENS[1], "stacked", seed=4)
    many = ag.AttentionSpec(heads=ag.MLA(num_qo_heads=3, **small), mask=ag.Causal(), kv=ag.Paged(16), dtype=next(dtype))
    yield Case("latent-chunk-decode", many, "decode", (70, 9, 0), (130, 9, 20), seed=1)
    absorbed = ag.MLA(num_qo_heads=8, absorbed=True, **small)
    for index, kv in enumerate((ag.Paged(64), ag.Ragged(dtype="int4"), ag.Paged(16, dtype="fp8_e4m3"))):
        spec = ag.AttentionSpec(heads=absorbed, mask=ag.Causal(), kv=kv, dtype=next(dtype))
        yield Case(f"latent-absorbed-{index}-prefill", spec, "prefill", *LENS[index], seed=index)
    for index, kv in enumerate((ag.Contiguous(), ag.Ragged(), ag.Paged(page_size=16, dtype="fp8_e4m3"))):
        spec = ag.AttentionSpec(heads=ag.MLA(num_qo_heads=2), mask=ag.Causal(), kv=kv, dtype=next(dtype))
        op = "prefill" if kv.kind == "paged" else "backward"
        yield Case(f"latent-projected-{kv.kind}-{op}", spec, op, *LENS[index], seed=index)
