"""Tile bounds against the mask itself, by brute force, and the exact bounds of the masks that matter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attngen.ir.evaluate import evaluate, extents
from attngen.ir.expr import Coord, Extent, H, K, Local, Q, substitute
from attngen.ir.intervals import (
    UNIFORM,
    classify,
    data_loads,
    evaluate_scalar,
    key_span,
    position_axes,
    query_span,
)
from attngen.ir.text import parse, to_text
from tests.ir.expressions import PARAMS, TENSORS, Trees, element, stable

START, STOP = -24, 40
GRID = torch.arange(START, STOP)
POINT = {"b": 1, "qo_len": 5, "kv_len": 9}
HEADS = range(3)
PACKED = UNIFORM - {"h"}
MASKS = Trees((Q, K, Q, K, H, Coord("kv_len")), st.integers(-4, 6), st.just(0.5), truncation=False)
TILES = [(0, 0, 0, 0), (0, 3, 0, 3), (2, 9, 1, 3), (-3, 4, 5, 12), (4, 7, 4, 7), (8, 15, 0, 7), (1, 2, 9, 10)]


def grid(mask, h, tensors=TENSORS):
    """``mask[q, k]`` of one head, positions from START."""
    env = {**POINT, "h": h, "q": GRID[:, None], "k": GRID[None, :]}
    return evaluate(mask, env, tensors).expand(len(GRID), len(GRID))


# Two pieces that read data by position, in every combination.
READS = st.sampled_from(
    [
        "(doc_ids[b, q] == doc_ids[b, k])",
        "(doc_ids[b, k] >= 0)",
        "(doc_ids[b, doc_ids[b, q]] < doc_ids[b, k])",
        "pattern[q // 2, k // 2]",
        "pattern[q // 4, k]",
        "((bits[q, k >> 3] >> (k % 8)) % 2 == 1)",
        "bool((bits[q // 2, k // 4] >> (k % 4)) % 4)",
        "(abs(doc_ids[b, q] - doc_ids[b, k]) <= 1)",
        "(q >= k)",
    ]
)
DATA = st.builds(
    lambda template, x, y: parse(template.format(x, y), PARAMS),
    st.sampled_from(["{} & {}", "{} | {}", "~{} & {}", "{} == {}", "where({}, {}, h < 2)"]),
    READS,
    READS,
)


def reader(tensors):
    """``loads`` of the scalar evaluator."""
    return lambda name, indices: element(name, indices, tensors)


def pairs(q0, q1, k0, k1, heads):
    """All pairs of a tile."""
    h, q, k = torch.tensor(heads).view(-1, 1, 1), torch.arange(q0, q1 + 1)[:, None], torch.arange(k0, k1 + 1)
    return {**POINT, "h": h, "q": q, "k": k}


def part(table, first, last):
    return table[first - START : last + 1 - START]


def number(expr, env, default):
    return default if expr is None else evaluate_scalar(expr, env, element)


def check_classes(mask, uniform=UNIFORM, tensors=TENSORS):
    """Returns how many tiles were decided."""
    tile, decided = classify(mask, uniform), 0
    for h in HEADS:
        visible = grid(mask, h, tensors)
        for q0, q1, k0, k1 in TILES:
            env = {"b": 1, "qo_len": 5, "kv_len": 9, "q0": q0, "q1": q1, "k0": k0, "k1": k1}
            env |= {"h": h} if "h" in uniform else {}
            env |= extents(tile.loads, pairs(q0, q1, k0, k1, h if "h" in uniform else HEADS), tensors)
            some, every = (evaluate_scalar(answer, env, reader(tensors)) for answer in (tile.any, tile.all))
            block = part(part(visible, q0, q1).T, k0, k1)
            assert some or not block.any()
            assert block.all() or not every
            decided += every or not some
    return decided


def check_span(span, visible, first, last, names, h):
    """One tile ``first .. last`` of the rows of ``visible``."""
    env = {**POINT, names[0]: first, names[1]: last}
    env |= {} if h is None else {"h": h}
    rows = part(visible, first, last)
    lo, hi = number(span.lo, env, START), number(span.hi, env, STOP - 1)
    seen, shared = rows.any(0), rows.all(0)
    inside = (lo <= GRID) & (hi >= GRID)
    if span.hole_lo is not None:
        hole_lo, hole_hi = number(span.hole_lo, env, 0), number(span.hole_hi, env, 0)
        assert hole_hi >= hole_lo - 1
        inside &= (hole_lo > GRID) | (hole_hi < GRID)
    assert not (seen & ~inside).any()
    if span.exact and h is not None:
        assert torch.equal(seen, inside)
    if span.has_full:
        full_lo, full_hi = number(span.full_lo, env, START), number(span.full_hi, env, STOP - 1)
        assert shared[(full_lo <= GRID) & (full_hi >= GRID)].all()


def check_spans(mask):
    keys, queries = key_span(mask), query_span(mask)
    packed_keys, packed_queries = key_span(mask, PACKED), query_span(mask, PACKED)
    for h in HEADS:
        visible = grid(mask, h)
        for first, last in [(0, 0), (0, 3), (2, 9), (-3, 4), (8, 15), (12, 30)]:
            check_span(keys, visible, first, last, ("q0", "q1"), h)
            check_span(queries, visible.T, first, last, ("k0", "k1"), h)
            check_span(packed_keys, visible, first, last, ("q0", "q1"), None)
            check_span(packed_queries, visible.T, first, last, ("k0", "k1"), None)


@stable(300)
@given(MASKS.boolean(4))
def test_classes_never_contradict_the_mask(mask):
    check_classes(mask)
    check_classes(mask, PACKED)


@stable(150)
@given(st.one_of(DATA, MASKS.boolean(3)), st.integers(0, 2**16))
def test_classes_never_contradict_random_data(mask, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        **TENSORS,
        "doc_ids": torch.randint(-1, 3, (2, 24), generator=generator, dtype=torch.int32).sort().values,
        "pattern": torch.rand(12, 12, generator=generator) < 0.5,
        "bits": torch.tensor([0, 255, 255, 129], dtype=torch.uint8)[torch.randint(4, (16, 3), generator=generator)],
    }
    check_classes(mask, UNIFORM, tensors)
    check_classes(mask, PACKED, tensors)


@stable(300)
@given(MASKS.boolean(4))
def test_spans_never_contradict_the_mask(mask):
    check_spans(mask)


BAND = st.builds(
    "({}*q - {}*k {} {})".format,
    st.sampled_from([1, 1, 1, -1, 2, 3, 0]),
    st.sampled_from([1, 1, 1, -1, 2]),
    st.sampled_from(["<", "<=", ">", ">=", "==", "!="]),
    st.sampled_from(["0", "3", "-2", "5", "lengths[b]", "h"]),
)
PIECES = st.one_of(
    BAND,
    BAND,
    st.sampled_from(
        [
            "(q // 4 == k // 4)",
            "(q // 3 >= k // 5)",
            "((q + 2) // 4 <= k)",
            "(abs(q - k) <= 3)",
            "(abs(q - k) > 2)",
            "(maximum(q, 4) >= k)",
            "(minimum(q, k) < lengths[b])",
            "((q - k) % 3 == 0)",
            "(k < lengths[b])",
            "(q < 4)",
            "(h < 2)",
            "flags[h]",
            "where(h < 1, q >= k, q - k <= 2)",
            "(doc_ids[b, q] == doc_ids[b, k])",
            "(doc_ids[b, q] >= 2)",
            "(doc_ids[b, k] - doc_ids[b, q] < 2)",
            "(doc_ids[b, doc_ids[b, q]] <= doc_ids[b, k // 2])",
            "pattern[q // 2, k // 3]",
            "(pattern[h, q] == pattern[h, k])",
            "((bits[q, k >> 3] >> (k % 8)) % 2 == 1)",
            "((bits[q, k // 4] >> (k % 4)) % 4 != 3)",
            "(bits[q, 0] >> 5 < (bits[k, 1] >> h))",
            "((q - k >= 0) == (h < 1))",
            "bool(maximum(0, q - k))",
            "(q * q >= k)",
        ]
    ),
)
COMBINED = st.recursive(
    PIECES,
    lambda inner: st.one_of(
        st.builds("({} & {})".format, inner, inner),
        st.builds("({} | {})".format, inner, inner),
        st.builds("~{}".format, inner),
    ),
    max_leaves=5,
)


@stable(300)
@given(COMBINED)
def test_combined_masks(text):
    mask = parse(text, PARAMS)
    check_classes(mask)
    check_spans(mask)


def text_of(expr):
    return None if expr is None else to_text(expr)


def shown(span):
    full = (text_of(span.full_lo), text_of(span.full_hi)) if span.has_full else "none"
    return (text_of(span.lo), text_of(span.hi)), full, span.exact


@pytest.mark.parametrize(
    ("text", "visible", "full", "exact"),
    [
        ("True", (None, None), (None, None), True),
        ("False", ("0", "-1"), "none", True),
        ("q >= k", (None, "q1"), (None, "q0"), True),
        ("k - q <= 0", (None, "q1"), (None, "q0"), True),
        ("q - q + k <= q", (None, "q1"), (None, "q0"), True),
        ("~(q >= k)", ("q0 + 1", None), ("q1 + 1", None), True),
        ("(q - 128 <= k) & (k <= q)", ("q0 - 128", "q1"), ("q1 - 128", "q0"), True),
        ("(q >= k) & (q - k <= 128)", ("q0 - 128", "q1"), ("q1 - 128", "q0"), True),
        ("(q >= k) & (q - k <= 128) & (k <= q + 5)", ("q0 - 128", "q1"), ("q1 - 128", "q0"), True),
        ("abs(q - k) <= 3", ("q0 - 3", "q1 + 3"), ("q1 - 3", "q0 + 3"), True),
        ("~((q - k > 3) | (k - q > 3))", ("q0 - 3", "q1 + 3"), ("q1 - 3", "q0 + 3"), True),
        ("(q >= k) | (k < h)", (None, "maximum(q1, h - 1)"), (None, "maximum(q0, h - 1)"), True),
        ("(q // 64 == k // 64) & (q >= k)", ("q0 // 64 * 64", "q1"), ("q1 // 64 * 64", "q0"), True),
        ("(q >= k) & (doc_ids[b, q] == doc_ids[b, k])", (None, "q1"), "none", False),
        ("(q >= k) & ((q - k) % 2 == 0)", (None, "q1"), "none", False),
        ("q == k", ("q0", "q1"), ("q1", "q0"), True),
        ("2 * k <= q", (None, "q1 // 2"), (None, "q0 // 2"), True),
        ("(k <= q) & (q - k <= lengths[b])", ("q0 - lengths[b]", "q1"), ("q1 - lengths[b]", "q0"), False),
        ("where(h < 2, k <= q, k < 9)", (None, "where(h <= 1, q1, 8)"), (None, "where(h <= 1, q0, 8)"), True),
        ("q * 1.0 < k", (None, None), "none", False),
    ],
)
def test_key_spans_are_tight(text, visible, full, exact):
    mask = parse(text, PARAMS)
    assert shown(key_span(mask)) == (visible, full, exact)
    if "1.0" not in text:
        check_spans(mask)


@pytest.mark.parametrize(
    ("text", "visible", "full", "exact"),
    [
        ("q >= k", ("k0", None), ("k1", None), True),
        ("(q >= k) & (q - k <= 128)", ("k0", "k1 + 128"), ("k1", "k0 + 128"), True),
        ("~(q >= k)", (None, "k1 - 1"), (None, "k0 - 1"), True),
        ("q // 64 == k // 64", ("k0 // 64 * 64", "k1 // 64 * 64 + 63"), ("k1 // 64 * 64", "k0 // 64 * 64 + 63"), True),
    ],
)
def test_query_spans_are_tight(text, visible, full, exact):
    assert shown(query_span(parse(text, PARAMS))) == (visible, full, exact)


@pytest.mark.parametrize(
    ("text", "some", "every"),
    [
        ("q >= k", "q1 >= k0", "q0 >= k1"),
        ("q - k <= 128", "k1 + 128 >= q0", "k0 + 128 >= q1"),
        ("~(q >= k)", "q0 < k1", "q1 < k0"),
        ("(q >= k) & (q - k <= 8)", "(q1 >= k0) & (k1 + 8 >= q0)", "(q0 >= k1) & (k0 + 8 >= q1)"),
        ("abs(q - k) <= 8", "(k1 + 8 >= q0) & (q1 + 8 >= k0)", "(k0 + 8 >= q1) & (q0 + 8 >= k1)"),
        ("k < lengths[b]", "lengths[b] > k0", "lengths[b] > k1"),
        ("(h < 4) | (q >= k)", "(h <= 3) | (q1 >= k0)", "(h <= 3) | (q0 >= k1)"),
        ("flags[h]", "flags[h]", "flags[h]"),
        ("bias[h] < 0.5", "bias[h] < 0.5", "bias[h] < 0.5"),
        ("q * 1.0 < k", "True", "False"),
        ("q - q >= 0", "True", "True"),
    ],
)
def test_classes_are_tight(text, some, every):
    tile = classify(parse(text, PARAMS))
    assert (text_of(tile.any), text_of(tile.all)) == (some, every)


@pytest.mark.parametrize("text", ["q >= k", "abs(q - k) <= 3", "q // 4 == k // 4", "(q >= k) & (q - k <= 5)"])
def test_classes_are_exact(text):
    """Every tile of these masks is decided where it is empty or full."""
    mask = parse(text)
    tile, visible = classify(mask), grid(mask, 0)
    for q0, q1, k0, k1 in TILES:
        env = {"q0": q0, "q1": q1, "k0": k0, "k1": k1}
        block = part(part(visible, q0, q1).T, k0, k1)
        assert evaluate_scalar(tile.any, env) == bool(block.any())
        assert evaluate_scalar(tile.all, env) == bool(block.all())


def test_nesting_does_not_explode():
    text = "q >= k"
    for n in range(60):
        text = f"(({text}) == (k < {n}))"
    deep = parse(text)
    tile, span = classify(deep), key_span(deep)
    assert to_text(tile.any)
    assert not span.exact
    many = parse(" | ".join(f"((k >= q - {9 * n}) & (k <= q + {n}))" for n in range(1, 60)))
    assert len(to_text(key_span(many).full_lo)) < 4000
    check_spans(many)


def spelled(expr):
    """Text of a bound: extents as ``<parameter>_<axes>_<end>``."""
    nodes = {node for node in expr.walk() if isinstance(node, Extent)}
    names = {e: Local(f"{e.load.param}_{''.join(sorted(position_axes(e.load)))}_{e.end}", "i32") for e in nodes}
    return to_text(substitute(expr, names))


@pytest.mark.parametrize(
    ("text", "some", "every"),
    [
        (
            "doc_ids[b, q] == doc_ids[b, k]",
            "(doc_ids_q_hi >= doc_ids_k_lo) & (doc_ids_k_hi >= doc_ids_q_lo)",
            "(doc_ids_q_lo >= doc_ids_k_hi) & (doc_ids_k_lo >= doc_ids_q_hi)",
        ),
        ("doc_ids[b, k] >= 0", "doc_ids_k_hi >= 0", "doc_ids_k_lo >= 0"),
        ("~pattern[q // 8, k // 8]", "pattern_kq_lo == 0", "pattern_kq_hi == 0"),
        (
            "(bits[q, k >> 3] >> (k % 8)) % 2 == 1",
            "~((bits_kq_lo >= 0) & (bits_kq_hi <= 0))",
            "(bits_kq_lo > 254) & (bits_kq_hi <= 255)",
        ),
        ("doc_ids[b, doc_ids[b, k]] != 1", "~((doc_ids_k_lo > 0) & (doc_ids_k_hi <= 1))", None),
        ("bias[q] < 0.5", "True", "False"),
    ],
)
def test_classes_of_data_are_tight(text, some, every):
    tile = classify(parse(text, PARAMS))
    assert spelled(tile.any) == some
    assert every is None or spelled(tile.all) == every
    assert classify(parse(text, PARAMS), extents=False).loads == ()


def test_loads_that_decide():
    mask = parse("(doc_ids[b, q] == doc_ids[b, k]) & (k < lengths[b]) & (pattern[q, k] | (bias[k] > 0.0))", PARAMS)
    loads = data_loads(mask)
    assert [(to_text(load), "".join(sorted(position_axes(load)))) for load in loads] == [
        ("doc_ids[b, q]", "q"),
        ("doc_ids[b, k]", "k"),
        ("pattern[q, k]", "kq"),
    ]
    assert extents(loads[:2], {"b": 1, "q": torch.arange(4, 9), "k": torch.arange(0, 3)}, TENSORS) == {
        Extent(loads[0], "lo"): 0,  # outside the table
        Extent(loads[0], "hi"): 4,
        Extent(loads[1], "lo"): 0,
        Extent(loads[1], "hi"): 1,
    }


@pytest.mark.parametrize("size", [8, 16])
def test_packed_bits_are_decided_by_the_byte(size):
    """Tiles of a packed mask whose bytes are all zeros or all ones are skipped and taken whole."""
    bits = torch.zeros(64, 8, dtype=torch.uint8)
    bits[:32, :4], bits[32:, 4:] = 255, 255
    bits[0, 0] = 254
    tile = classify(parse("(bits[q, k >> 3] >> (k % 8)) % 2 == 1", PARAMS))
    found = {"none": 0, "some": 0, "all": 0}
    for q0 in range(0, 64, size):
        for k0 in range(0, 64, size):
            env = {"q0": q0, "q1": q0 + size - 1, "k0": k0, "k1": k0 + size - 1}
            env |= extents(tile.loads, pairs(q0, q0 + size - 1, k0, k0 + size - 1, 0), {"bits": bits})
            some, every = evaluate_scalar(tile.any, env), evaluate_scalar(tile.all, env)
            found["all" if every else "some" if some else "none"] += 1
    half = (64 // size) ** 2 // 2
    assert found == {"none": half, "some": 1, "all": half - 1}
