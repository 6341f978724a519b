"""Whatever text a spec or an expression is made of: it is read, or refused with a SpecError, in little time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attngen.errors import SpecError, UnsupportedError
from attngen.ir.text import parse, to_text
from attngen.spec import load_spec, shipped_specs
from attngen.spec.loading import MAX_BYTES
from attngen.variant import normalize
from tests.ir.expressions import PARAMS

# More of them by hand: ATTNGEN_FUZZ=200000 pytest tests/spec/test_fuzz.py
EXAMPLES = int(os.environ.get("ATTNGEN_FUZZ", "150"))
SECONDS = 5.0

fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="ATTNGEN_FUZZ" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)

TOKENS = (
    *"()[]{},.:;=<>+-*/%&|^~!@#'\"\\ \t\n\0",
    *(
        "q",
        "k",
        "h",
        "b",
        "score",
        "qo_len",
        "inf",
        "nan",
        "True",
        "None",
        "0",
        "1",
        "-1",
        "1.5",
        "1e400",
        "0x7f",
        "9" * 30,
    ),
    *(
        "//",
        "**",
        ">>",
        "<<",
        "<=",
        "==",
        "!=",
        ":=",
        "->",
        "...",
        " and ",
        " or ",
        " not ",
        " if ",
        " else ",
        " for ",
        " in ",
    ),
    *(
        "lambda:",
        "await ",
        "yield ",
        "import os",
        "f'{q}'",
        "b'q'",
        "1j",
        "\N{GREEK SMALL LETTER EPSILON}",
        "\ud800",
        "\u202e",
    ),
    *("exp(", "tanh(", "where(", "minimum(", "abs(", "i32(", "f32(", "bool(", "bias[", "doc_ids[", "scale.shape["),
    *("__import__('os')", "q.__class__", "().__class__", "{{ 7*7 }}", "{% raw %}", "*/", "//", "${x}"),
)
texts = st.one_of(
    st.lists(st.sampled_from(TOKENS), max_size=60).map("".join),
    st.text(max_size=200),
    st.builds(
        lambda opening, middle, closing, depth: opening * depth + middle + closing * depth,
        st.sampled_from(["(", "[", "-", "~", "exp(", "where(True, ", "q + (", "q ** ", "maximum(q, ", "not "]),
        st.sampled_from(["q", "score", "", "1", "q < k"]),
        st.sampled_from([")", "]", "", " ", ", q)"]),
        st.integers(0, 20_000),
    ),
)


@contextmanager
def in_little_time() -> Iterator[None]:
    began = time.process_time()
    yield
    assert time.process_time() - began < SECONDS


@fuzz
@given(texts, st.sampled_from([None, "bool", "f32"]))
def test_expressions_are_read_or_refused(text: str, result: str | None) -> None:
    with in_little_time():
        try:
            expr = parse(text, PARAMS, result=result)  # type: ignore[arg-type]
        except SpecError:
            return
        assert parse(to_text(expr), PARAMS) == expr


SHIPPED = [path.read_text() for path in shipped_specs().values()]
WORDS = sorted({word for text in SHIPPED for word in text.replace("=", " ").split()})
ends = st.floats(0.0, 1.0)


def edited(text: str, cuts: list[tuple[float, float, str]]) -> str:
    """The text with stretches of it replaced."""
    for start, length, other in cuts:
        at = int(start * len(text))
        text = text[:at] + other + text[at + int(length * 20) :]
    return text


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.sampled_from(WORDS),
    st.sampled_from(TOKENS),
    st.text(max_size=20),
)
fields = [
    "name",
    "heads",
    "mask",
    "score_mods",
    "kv",
    "kind",
    "expression",
    "parameters",
    "dims",
    "masks",
    "left",
    "dtype",
]
trees = st.recursive(
    leaves.filter(lambda leaf: leaf is not None),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.sampled_from(fields), st.text(max_size=8)), inner, max_size=5),
    ),
    max_leaves=20,
)


def written(tree: object) -> str:
    try:
        return tomli_w.dumps(tree)  # type: ignore[arg-type]
    except (TypeError, ValueError, UnicodeError):
        return repr(tree)


documents = st.one_of(
    st.builds(
        edited,
        st.sampled_from(SHIPPED),
        st.lists(
            st.tuples(ends, ends, st.one_of(st.just(""), st.sampled_from(WORDS), st.sampled_from(TOKENS))), max_size=6
        ),
    ),
    st.dictionaries(st.sampled_from(fields), trees, max_size=6).map(written),
    st.text(max_size=300),
    st.builds(
        lambda start, opening, middle, closing, depth: start + opening * depth + middle + closing * depth,
        st.sampled_from(["", "mask = ", 'name = "x"\nmask = ', "[heads]\nkind = "]),
        st.sampled_from(["[", "{a=", "a.", "[[", '{kind="not",mask=', '{kind="and",masks=[']),
        st.sampled_from(["", "1", '{kind="causal"}']),
        st.sampled_from(["]", "}", "", "]}"]),
        st.integers(0, 5_000),
    ),
)


def read(folder: Path, suffix: str, text: str) -> None:
    path = folder / f"spec{suffix}"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with in_little_time():
        try:
            spec = load_spec(path)
        except SpecError:
            return
        for op in ("prefill", "decode"):
            with suppress(SpecError, UnsupportedError):
                normalize(spec, op)  # type: ignore[arg-type]


@fuzz
@given(documents)
def test_spec_files_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.getbasetemp()
    read(folder, ".toml", text)
    read(folder, ".json", text)


@pytest.mark.parametrize("suffix", [".toml", ".json"])
@pytest.mark.parametrize(
    "text",
    [
        "mask = " + "[" * 100_000,
        "[" * 100_000,
        "a." * 50_000 + "b = 1",
        "[" + '"a" .' * 40_000 + "b]",
        '{"a":' * 40_000,
        "x = " + "{a=" * 50_000,
        "a" * 200_000,
        "\x00" * 9,
    ],
)
def test_deep_nesting_is_refused(tmp_path: Path, suffix: str, text: str) -> None:
    path = tmp_path / f"deep{suffix}"
    path.write_text(text)
    with in_little_time(), pytest.raises(SpecError):
        load_spec(path)


def test_a_spec_file_is_small(tmp_path: Path) -> None:
    path = tmp_path / "large.toml"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a file without content; reading it would take all memory
    with pytest.raises(SpecError, match=f"has {1 << 40} bytes") as caught:
        load_spec(path)
    assert f"at most {MAX_BYTES}" in str(caught.value)
