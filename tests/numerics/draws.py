"""Random variants at random lengths: what no list of cases thinks of."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import attngen as ag
from attngen.errors import AttngenError
from attngen.variant import OpName, normalize
from tests.numerics.axes import MASKS
from tests.numerics.cases import DROPOUTS, NORMALIZERS, PRIMITIVE_MASKS, PRIMITIVE_SCORES, SCORES, TRANSFORMS
from tests.numerics.harness import Case
from tests.numerics.stored_cases import STORAGES

SHAPES = 5  # of each variant, so that a kernel is built once for all of them
EDGES = (0, 1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 177, 255, 257)
# Scores that are numbers everywhere, under any mask.
MODS = [mod for name, mods in SCORES.items() if not name.startswith("undefined") for mod in mods]
MODS += [mod for mod, _ in PRIMITIVE_SCORES.values()]


def draws(variants: int, dtypes: tuple[str, ...] = ("bf16", "fp16")) -> list[Case]:
    """``SHAPES`` cases of each of so many variants; the same for the same arguments."""
    return [_case(index, shape, dtypes) for index in range(variants) for shape in range(SHAPES)]


def _case(index: int, shape: int, dtypes: tuple[str, ...]) -> Case:
    spec, op = _variant(index, dtypes)
    random = Random(f"shape {index} {shape}")
    count = random.choice((1, 2, 3, 5))
    kv_lens = [_length(random) for _ in range(count)]
    qo_lens = [_length(random) for _ in range(count)]
    if op == "decode":
        qo_lens = [random.choice((1, 1, 2, 5))] * count
        kv_lens[0] = random.choice((kv_lens[0], random.randint(500, 2600)))
    k, v = spec.kv.storages(spec.dtype)
    alike = k == v and spec.heads.head_dim == spec.heads.head_dim_vo
    ways = ("table", "csr", *(["stacked"] if alike else [])) if spec.kv.kind == "paged" else ("table",)
    return Case(
        f"draw-{index}-{shape}-{op}",
        spec,
        op,
        tuple(qo_lens),
        tuple(kv_lens),
        pages=random.choice(ways),
        strided=spec.kv.kind != "paged" and not (k.is_quantized or v.is_quantized) and random.random() < 0.3,
        seed=index * SHAPES + shape,
    )


def _length(random: Random) -> int:
    return random.choice(EDGES) if random.random() < 0.5 else random.randint(1, 300)


@cache
def _variant(index: int, dtypes: tuple[str, ...]) -> tuple[ag.AttentionSpec, OpName]:
    """A spec and an op that may be declared together: others are drawn again."""
    random = Random(f"variant {index}")
    while True:
        op: OpName = random.choice(("prefill", "decode", "backward"))
        try:
            spec = _spec(random, op, random.choice(dtypes))
            normalize(spec, op)
            if op == "backward":
                normalize(spec, "prefill")
        except AttngenError:
            continue
        return spec, op


def _spec(random: Random, op: OpName, dtype: str) -> ag.AttentionSpec:
    groups = random.choice((1, 1, 2, 4, 7, 8))
    kv_heads = random.choice((1, 2))
    dim = random.choice((16, 40, 64, 64, 96, 128, 128, 128, 160, 192, 256))
    vo = random.choice((dim, dim, dim, 64, 128))
    masks = [*MASKS.values(), *PRIMITIVE_MASKS.values()]
    mask: Any = random.choice(masks)
    if random.random() < 0.3:
        mask = mask & random.choice((ag.Causal(), ag.SlidingWindow(left=33), ag.Chunked(40), ag.Document("doc_ids")))
    fields: dict[str, Any] = {"mask": mask, "dtype": dtype}
    if op != "backward" and random.random() < 0.3:
        fields["out_dtype"] = random.choice(("fp16", "bf16", "fp32"))
    if random.random() < 0.5:
        fields["score_mods"] = tuple(random.sample(MODS, random.choice((1, 1, 2))))
    if random.random() < 0.3:
        fields |= random.choice(list(NORMALIZERS.values()))
    if random.random() < 0.15:
        fields |= random.choice([more for _, more in TRANSFORMS.values()])
    if op != "decode" and random.random() < 0.15:
        fields |= random.choice(list(DROPOUTS.values()))
    stored = random.choice(list(STORAGES.values())) if op != "backward" and random.random() < 0.4 else {}
    if op == "backward":
        kv: Any = random.choice((ag.Contiguous(), ag.Ragged()))
    else:
        page = ag.Paged(random.choice((1, 3, 8, 16, 16, 32, 64, 128)), layout=random.choice(("NHD", "HND")), **stored)
        kv = random.choice((ag.Contiguous(**stored), ag.Ragged(**stored), page, page))
    heads = ag.GQA(num_qo_heads=groups * kv_heads, num_kv_heads=kv_heads, head_dim=dim, head_dim_vo=vo)
    return ag.AttentionSpec(heads=heads, kv=kv, **fields)
