"""The corpus of numeric cases: every axis of the variant language and of the storage crossed with ugly lengths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle

import attngen as ag
from tests.numerics.axes import DECODE_LENS, GROUPS, LENS, MASKS, declare
from tests.numerics.harness import Case
from tests.numerics.stored_cases import latent_cases, stored_cases


@ag.score_mod
def distance_bias(score, b, h, q, k, slopes: ag.Tensor("num_qo_heads")):
    return score + slopes[h] * (k - q)


@ag.score_mod
def per_key_bias(score, b, h, q, k, bias: ag.Tensor(48), gain: ag.Tensor("batch", "num_qo_heads")):
    return score * (1.0 + 0.1 * gain[b, h]) + bias[k]


@ag.score_mod
def signed_root(score, b, h, q, k, slopes: ag.Tensor("num_qo_heads")):
    return score * ag.rsqrt(ag.abs(score)) * slopes[h]


@ag.score_mod
def log_distance(score, b, h, q, k, slopes: ag.Tensor("num_qo_heads")):
    return score * ag.log(2.0 + q - k) - slopes[h] * ag.log(1.0 + q - k)


SCORES = {
    "softcap": (ag.SoftCap(cap=5.0),),
    "alibi": (ag.ALiBi(),),
    "alibi-given": (ag.ALiBi(slopes="slopes"),),
    "distance": (distance_bias,),
    "bias-cap": (per_key_bias, ag.SoftCap(cap=8.0)),
    # Undefined where there is no pair: at score 0 of padding, and above the diagonal.
    "undefined-at-0": (signed_root,),
    "undefined-above": (log_distance,),
}
PRIMITIVE_MASKS = {
    "prefix": ag.PrefixLM("prefix_len"),
    "documents": ag.Causal() & ag.Document("doc_ids"),
    "chunked": ag.Causal() & ag.Chunked(24),
    "blocks-ahead": ag.Causal() | ag.Chunked(16),
    "dilated": ag.SlidingWindow(left=30, right=30) & ag.Dilated(3),
    "streaming": ag.Causal() & (ag.SlidingWindow(left=20) | ag.GlobalTokens(4)),
    "longformer": ag.SlidingWindow(left=9, right=9) | ag.GlobalTokens(3, both=True),
    "tree": ag.Causal() & ag.Tree("ancestors"),
    "tree-packed": ag.Causal() & ag.Tree("ancestors", packed=True),
    "dense": ag.Dense("mask"),
    "dense-packed": ag.Causal() & ag.Dense("mask", packed=True),
    "block-sparse": ag.Causal() & ag.BlockSparse("blocks", 16, 32),
    "block-sparse-each": ag.BlockSparse("blocks", 32, 16, per_request=True),
    "images": ag.Causal() | ag.ImageSpans("span_ids"),
    "diffusion": ag.BlockDiffusion(8),
    "neighborhood-1d": ag.Neighborhood((130,), 9, 2),
    "neighborhood-2d": ag.Neighborhood((10, 13), (3, 5)),
    "neighborhood-3d": ag.Neighborhood((5, 4, 7), (3, 3, 2), causal=(True, False, False)),
}
PRIMITIVE_SCORES = {
    "t5-encoder": (ag.RelativeBias(bidirectional=True), ag.Full()),
    "t5-decoder": (ag.RelativeBias(num_buckets=16, max_distance=50), ag.Causal()),
    "pair-bias": (ag.DenseBias("bias"), ag.Full()),
    "pair-bias-16bit": (ag.DenseBias("bias", dtype="bf16"), ag.Causal()),
    "forgetting": (ag.Forgetting("c"), ag.Causal()),
    "gain": (ag.Temperature("gain"), ag.Causal()),
    "llama4": (ag.Temperature(floor_scale=24), ag.Causal()),
    "log-n": (ag.Temperature(train_len=32), ag.Causal()),
    "kerple-log": (ag.Kerple("log"), ag.Causal()),
    "kerple-power": (ag.Kerple("power"), ag.Full()),
    "fire": (ag.Fire(4), ag.Causal()),
}
# One expression a head, so that one kernel checks eight spellings; the mask leaves each query one key, and lse is its logit.
SPELLINGS = (
    (
        "tanh(score) + 0.001 * score",
        "exp(0.2 * score) - exp2(-0.3 * score)",
        "log(1.5 + abs(score)) + log2(2.0 + score * score)",
        "sqrt(abs(score) + 0.1) * rsqrt(1.0 + score * score)",
        "sigmoid(3.0 * score) * 2.0",
        "sin(score) + cos(2.0 * score)",
        "floor(score * 3.0) * 0.25",
        "minimum(score, 0.2) + maximum(score, -0.1) - abs(score)",
    ),
    (
        "score + (q - 2 * k) // 3 - (k - q) // -4",
        "score + (q - k) % 5 - (k - q) % 7 + (q - k) % -3",
        "where((q > k) & ~(q % 2 == 0) | (k == 3), score, -score)",
        "score * (1.0 + b) + h - i32(2.5 * score)",
        "where(bool(q - k), score, 7.0) + f32(q < k)",
        "abs(q - k) * 0.05 - minimum(q, k) + maximum(q, 2)",
        "score / (1.0 + abs(q - k)) - (score - 1.0) / 3.0 - (2.0 - (score - 1.0))",
        "(abs(score) + 0.5) ** 1.5 + (q + 1) * 0.1 ** 2 + where(score >= 0.0, 1, 0)",
    ),
)
HEAD_DIMS = (
    (16, 16),
    (40, 40),
    (64, 64),
    (72, 72),
    (80, 80),
    (96, 96),
    (112, 112),
    (128, 128),
    (160, 160),
    (192, 128),
    (256, 256),
    (40, 72),
)
STORAGE = (
    ag.Contiguous(),
    ag.Ragged(),
    ag.Paged(page_size=16),
    ag.Paged(page_size=3, layout="HND"),
    ag.Paged(page_size=64),
    ag.Paged(page_size=1),
)


def corpus(dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")) -> list[Case]:
    """All cases, each with a unique name."""
    groups = (
        _mask_cases,
        _primitive_cases,
        _head_cases,
        _storage_cases,
        _normalizer_cases,
        _transform_cases,
        _dropout_cases,
        stored_cases,
        latent_cases,
        _shipped_cases,
    )
    return [case for group in groups for case in group(dtypes)]


def _ops(name: str, spec: ag.AttentionSpec, index: int, **options: object) -> Iterator[Case]:
    qo, kv = LENS[index % len(LENS)]
    decode_qo, decode_kv = DECODE_LENS[index % len(DECODE_LENS)]
    paged = spec.kv.kind == "paged"
    yield Case(f"{name}-decode", spec, "decode", decode_qo, decode_kv, seed=index, **options)
    yield Case(
        f"{name}-{'prefill' if paged else 'backward'}",
        spec,
        "prefill" if paged else "backward",
        qo,
        kv,
        seed=index,
        **options,
    )


def widened(cases: list[Case]) -> Iterator[Case]:
    """Gradients of masks, scores and normalizers at head dims of 64 and 128, where Hopper has kernels of its own."""
    for case in cases:
        heads = case.spec.heads
        if case.op == "backward" and case.name.startswith(("mask-", "score-", "normalizer-")):
            for dim in {64, 128} - {heads.head_dim}:
                wide = ag.GQA(num_qo_heads=heads.num_qo_heads, num_kv_heads=heads.num_kv_heads, head_dim=dim)
                spec = case.spec.model_copy(update={"heads": wide})
                yield replace(case, name=f"{case.name}-{dim}", spec=spec)


def _mask_cases(dtypes: tuple[str, ...]) -> Iterator[Case]:
    """Each mask and each score mod; backward cases check the forward pass too."""
    dtype = cycle(dtypes)
    for index, (name, mask) in enumerate(MASKS.items()):
        kv = (ag.Contiguous(), ag.Ragged())[index % 2]
        yield from _ops(f"mask-{name}", declare((4, 2), (64, 64), mask=mask, kv=kv, dtype=next(dtype)), index)
    for index, (name, mods) in enumerate(SCORES.items()):
        full = name == "undefined-at-0"
        mask = ag.Full() if full else (ag.Causal(), ag.Full(), MASKS["window"])[index % 3]
        kv = (ag.Ragged(), ag.Contiguous())[index % 2]
        yield from _ops(
            f"score-{name}", declare((3, 1), (32, 32), mask=mask, score_mods=mods, kv=kv, dtype=next(dtype)), index
        )


def _primitive_cases(dtypes: tuple[str, ...]) -> Iterator[Case]:
    """Each primitive in decode, and in chunked prefill with gradients or over pages."""
    storage = cycle((ag.Contiguous(), ag.Ragged(), ag.Paged(page_size=16)))
    variants = [(f"mask-{name}", mask, ()) for name, mask in PRIMITIVE_MASKS.items()]
    variants += [(f"score-{name}", mask, (mod,)) for name, (mod, mask) in PRIMITIVE_SCORES.items()]
    for index, (name, mask, mods) in enumerate(variants):
        kv = next(storage)
        spec = declare((2, 1), (16, 16), mask=mask, score_mods=mods, kv=kv, dtype=dtypes[index % len(dtypes)])
        yield from _ops(name, spec, index)
        if name == "mask-block-sparse":  # a mask of heads, for the only one
            yield Case(
                f"{name}-one-head",
                declare((1, 1), (64, 64), mask=mask, dtype=dtypes[-1]),
                "backward",
                *LENS[0],
                seed=index,
            )
        if mods and kv.kind == "paged" and any(param.dtype != "i32" for param in mods[0].params()):
            trained = declare((2, 1), (16, 16), mask=mask, score_mods=mods, dtype=dtypes[0])
            yield Case(f"{name}-training", trained, "backward", *LENS[1], seed=index)


def _head_cases(dtypes: tuple[str, ...]) -> Iterator[Case]:
    """Head dims and group sizes, contiguous and strided."""
    dtype, group = cycle(dtypes), cycle(GROUPS)
    for index, dims in enumerate(HEAD_DIMS):
        spec = declare(next(group), dims, mask=ag.Causal() if index % 2 else ag.Full(), dtype=next(dtype))
        yield from _ops(f"head-{dims[0]}x{dims[1]}", spec, index, strided=index % 3 == 0)


def _storage_cases(dtypes: tuple[str, ...]) -> Iterator[Case]:
    """Layouts and ways to pass them."""
    dtype = cycle(dtypes)
    for index, kv in enumerate(STORAGE):
        ways = ("table", "csr", "stacked") if kv.kind == "paged" else ("table",)
        for way in ways:
            label = f"{kv.kind}{getattr(kv, 'page_size', '')}{getattr(kv, 'layout', '')}"
            spec = declare(
                (6, 2), (48, 48), mask=MASKS["window"] if index % 2 else ag.Causal(), kv=kv, dtype=next(dtype)
            )
            yield from (replace(case, pages=way) for case in _ops(f"kv-{label}-{way}", spec, index))
    for index, parts in enumerate(SPELLINGS):
        text = parts[-1]
        for head in range(len(parts) - 2, -1, -1):
            text = f"where(h == {head}, {parts[head]}, {text})"
        mods = (ag.CustomScoreMod(name="spelled", expression=text),)
        mask = ag.CustomMask(name="one_key", expression="k == (q * 7 + 3) % kv_len")
        spec = declare((8, 2), (32, 32), mask=mask, score_mods=mods, dtype="fp32")
        yield Case(f"spelling-{index}", spec, "backward", (40, 33), (61, 33), seed=2 * index)  # even: with dlse
    negative = declare((2, 2), (32, 32), mask=ag.Causal(), sm_scale=-0.2, dtype=dtypes[0])
    yield from _ops("negative-scale", negative, 0)


NORMALIZERS = {
    "sink": {"normalizer": ag.Softmax(sink=True)},
    "sink-gate": {"normalizer": ag.Softmax(sink="sinks"), "output_gate": "gate"},
    "off-by-one": {"normalizer": ag.Softmax(off_by_one=True), "score_mods": (ag.SoftCap(cap=4.0),)},
    "sigmoid": {"normalizer": ag.Sigmoid()},
    "sigmoid-bias": {"normalizer": ag.Sigmoid(bias="bias"), "score_mods": (ag.ALiBi("slopes"),)},
    "relu": {"normalizer": ag.ReLU(), "output_gate": "gate"},
    "squared-relu": {"normalizer": ag.ReLU(power=2, length=9.0), "score_mods": (distance_bias,)},
    "silu": {"normalizer": ag.SiLU()},
    "gate": {"output_gate": "g"},
}
TRANSFORMS = {
    "rope": ((64, 64), {"rope": ag.Rope()}),
    "rope-pairs": ((40, 40), {"rope": ag.Rope(theta=500.0, interleaved=True)}),
    "rope-part": ((72, 40), {"rope": ag.Rope(dim=24)}),
    "rope-table": ((128, 128), {"rope": ag.Rope(dim=64, table="cos_sin", interleaved=True)}),
    "norm": ((96, 64), {"qk_norm": ag.QKNorm(eps=1e-5)}),
    "norm-weights": ((64, 64), {"qk_norm": ag.QKNorm(q_weight="q_norm", k_weight="k_norm")}),
    "norm-rope": ((128, 128), {"qk_norm": ag.QKNorm(q_weight="w", k_weight="w"), "rope": ag.Rope(dim=32)}),
}
DROPOUTS = {
    "plain": {"dropout": 0.1},
    "sink": {"dropout": 0.5, "normalizer": ag.Softmax(sink=True), "score_mods": (ag.ALiBi("slopes"),)},
    "pairs": {"dropout": 0.2, "mask": ag.Dense("mask")},
    "sigmoid": {"dropout": 0.25, "normalizer": ag.Sigmoid(bias=-0.5), "output_gate": "gate"},
}


def _normalizer_cases(dtypes: tuple[str, ...]) -> Iterator[Case]:
    """Each normalizer, sink and gate; some with gradients that are asked for exactly."""
    dtype, group = cycle(dtypes), cycle(GROUPS)
    for index, (name, fields) in enumerate(NORMALIZERS.items()):
        kv = (ag.Ragged(), ag.Contiguous(), ag.Paged(page_size=16))[index % 3]
        mask = (ag.Causal(), MASKS["window"], ag.Full())[index // 3 % 3]
        spec = declare(next(group), (64, 64), mask=mask, kv=kv, dtype=next(dtype), **fields)
        yield from _ops(f"normalizer-{name}", spec, index)
        if kv.kind == "paged":
            trained = declare(next(group), (32, 48), mask=mask, dtype=next(dtype), **fields)
            yield Case(
                f"normalizer-{name}-backward", trained, "backward", (37, 0, 1), (37, 5, 70), seed=index, exact=True
            )


def _transform_cases(dtypes: tuple[str, ...]) -> Iterator[Case]:
    """Rotations and norms of queries and keys."""
    dtype, group = cycle(dtypes), cycle(GROUPS)
    for index, (name, (dims, fields)) in enumerate(TRANSFORMS.items()):
        kv = (ag.Contiguous(), ag.Ragged(), ag.Paged(page_size=16))[index % 3]
        mask = (ag.Causal(), ag.Full())[index % 2]
        spec = declare(next(group), dims, mask=mask, kv=kv, dtype=next(dtype), **fields)
        yield from _ops(f"transform-{name}", spec, index, strided=index % 4 == 1)
        if kv.kind == "paged":
            trained = declare(next(group), dims, mask=mask, dtype=next(dtype), **fields)
            yield Case(f"transform-{name}-backward", trained, "backward", (37, 0, 1), (37, 5, 70), seed=index)


def _dropout_cases(dtypes: tuple[str, ...]) -> Iterator[Case]:
    """Dropout, whose masks the oracle draws from the same counters."""
    dtype, group = cycle(dtypes), cycle(GROUPS)
    for index, (name, fields) in enumerate(DROPOUTS.items()):
        kv = (ag.Contiguous(), ag.Ragged())[index % 2]
        spec = declare(next(group), (64, 64), **{"mask": ag.Causal(), **fields}, kv=kv, dtype=next(dtype))
        yield Case(f"dropout-{name}", spec, "backward", *LENS[index % len(LENS)], seed=index, exact=name == "sink")
    paged = declare((4, 2), (64, 64), mask=ag.Causal(), kv=ag.Paged(page_size=8), dtype=dtypes[0], dropout=0.3)
    yield Case("dropout-paged", paged, "prefill", (9, 30), (40, 30), seed=1)


def _shipped_cases(dtypes: tuple[str, ...]) -> Iterator[Case]:
    """Every op of every shipped spec, on few tokens; in fp16 where the suite has no bf16."""
    for index, name in enumerate(sorted(ag.shipped_specs())):
        spec = ag.load_spec(name)
        if spec.dtype not in dtypes:
            spec = ag.AttentionSpec.model_validate({**spec.model_dump(), "dtype": "fp16"})
        if not spec.dropout:
            yield Case(f"{name}-decode", spec, "decode", (1, 1), (70, 530), seed=index)
        op = "prefill" if spec.kv.kind == "paged" else "backward"
        yield Case(f"{name}-{op}", spec, op, (9, 0, 1), (21, 5, 70), seed=index)
