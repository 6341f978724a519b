"""Errors: their text, and their way through a process pool."""

from __future__ import annotations

import pickle

import pytest

import attngen as ag


def test_text_says_what_where_why_and_what_to_do() -> None:
    error = ag.ArgumentError("q has dtype torch.float16", where="q", why="the spec declares fp32", fix="pass q.float()")
    assert str(error) == "q has dtype torch.float16\n  where: q\n  why: the spec declares fp32\n  fix: pass q.float()"
    assert isinstance(error, ValueError)


@pytest.mark.parametrize(
    "kind", [ag.SpecError, ag.UnsupportedError, ag.ArgumentError, ag.BuildError, ag.CacheMissError]
)
def test_errors_survive_pickling(kind: type[ag.AttngenError]) -> None:
    error = kind("a", where="b", why="c", fix="d")
    error.log = "printed"
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert (type(copy), str(copy), copy.log) == (kind, str(error), "printed")
