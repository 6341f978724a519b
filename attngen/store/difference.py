"""Why two entries are two: which parts of their keys differ."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import PurePath

from attngen.store.artifact import Artifact

_NONE = "(none)"


def differences(first: Artifact, second: Artifact) -> list[tuple[str, str, str]]:
    """Every part of the key that differs, by name, with what it is in each of the two."""
    ours, theirs = first.manifest, second.manifest
    parts = [
        ("schema", str(ours.schema), str(theirs.schema)),
        ("target", ours.target, theirs.target),
        ("entry", ours.entry, theirs.entry),
        ("suffix", PurePath(ours.source).suffix, PurePath(theirs.source).suffix),
        *_flags(ours.flags, theirs.flags),
        *_source(first, second),
        ("toolchain", ours.fingerprint, theirs.fingerprint),
    ]
    return [part for part in parts if part[1] != part[2]]


def _flags(ours: Sequence[str], theirs: Sequence[str]) -> list[tuple[str, str, str]]:
    """One part a flag, matched by the name before ``=``; their order, if that is all."""
    names = dict.fromkeys(flag.partition("=")[0] for flag in (*ours, *theirs))
    parts = [(f"flag {name}", _named(name, ours), _named(name, theirs)) for name in names]
    if any(mine != other for _, mine, other in parts):
        return parts
    return [("order of flags", " ".join(ours), " ".join(theirs))]


def _named(name: str, flags: Sequence[str]) -> str:
    return " ".join(flag for flag in flags if flag.partition("=")[0] == name) or _NONE


def _source(first: Artifact, second: Artifact) -> list[tuple[str, str, str]]:
    """The first line that differs, and how many do."""
    ours, theirs = (artifact.source.read_bytes().decode(errors="replace") for artifact in (first, second))
    if ours == theirs:
        return []
    pairs = list(zip_longest(ours.split("\n"), theirs.split("\n"), fillvalue=_NONE))
    different = [number for number, (mine, other) in enumerate(pairs) if mine != other]
    number = different[0]
    return [(f"source, line {number + 1}, the first of {len(different)} that differ", *pairs[number])]
