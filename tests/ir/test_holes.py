"""Spans of masks that are unions of bands: the gap between them, against the mask by brute force."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attngen.ir.evaluate import evaluate
from attngen.ir.intervals import key_span
from attngen.ir.text import parse
from tests.ir.expressions import PARAMS, stable
from tests.ir.test_intervals import GRID, check_spans, number, part

HALF, Q_BLOCK, K_BLOCK = "kv_len // 2", *(f"where({x} < kv_len // 2, {x}, {x} - kv_len // 2) // 4" for x in "qk")
HOLED = {
    "streaming": ("(k <= q) & ((q - k <= 9) | (k < 4))", True, 55),
    "longformer": ("(abs(q - k) <= 5) | (k < 3) | (q < 3)", False, 84),
    "far": ("abs(q - k) > 16", True, 227),
    "block diffusion": (
        f"((q < {HALF}) == (k < {HALF})) & ({Q_BLOCK} == {K_BLOCK}) | ~(k < {HALF}) & ({K_BLOCK} < {Q_BLOCK})",
        False,
        80,
    ),
}


@pytest.mark.parametrize("name", HOLED)
def test_spans_keep_their_hole(name):
    """Nothing in the hole is visible, and the tiles of 40 positions skip the expected number of keys."""
    text, exact, expected = HOLED[name]
    span = key_span(parse(text))
    visible = evaluate(parse(text), {"kv_len": 40, "q": GRID[:, None], "k": GRID}, {})
    assert span.hole_lo is not None
    assert span.exact == exact
    check_spans(parse(text))
    skipped = 0
    for first in range(0, 36, 4):
        env = {"q0": first, "q1": first + 3, "kv_len": 40}
        lo, hi = number(span.hole_lo, env, 0), number(span.hole_hi, env, 0)
        assert not part(visible, first, first + 3)[:, (lo <= GRID) & (hi >= GRID)].any()
        skipped += max(0, min(hi, 39) - max(lo, 0) + 1)
    assert skipped == expected


PAIR = st.builds(
    "((k >= {}q {:+d}) & (k <= {}q {:+d}))".format,
    st.sampled_from(["", "0 * "]),
    st.integers(-20, 20),
    st.sampled_from(["", "0 * "]),
    st.integers(-20, 20),
)


@stable(300)
@given(
    st.builds(
        "({}) & (({} | {} | ({})) & ({}) | {})".format,
        st.sampled_from(["k <= q", "k >= 0", "k < lengths[b] + 9"]),
        PAIR,
        PAIR,
        st.sampled_from(["k > 30", "q < 2", "False", "k < q - 25"]),
        st.sampled_from(["True", "k >= -5", "q // 8 >= k // 8", "h < 2"]),
        st.one_of(PAIR, st.just("False")),
    )
)
def test_holes_never_hide_a_visible_position(text):
    check_spans(parse(text, PARAMS))
