from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from attngen.store import entry_path, source_digest
from attngen.store.key import slug
from attngen.target import Target
from tests.store.toolchains import KERNEL


def test_digest_is_pinned() -> None:
    """A change of this number makes every cache in the world cold: raise ``SCHEMA`` if that is meant."""
    assert source_digest(KERNEL) == "4cafe5e1b410f253157838ed71bf444fed2c74346bbe8f329c491b2195964d4b"


@pytest.mark.parametrize(
    "other",
    [
        replace(KERNEL, source=KERNEL.source + " "),
        replace(KERNEL, entry="decode_causal_gqa4_fp16_d65"),
        replace(KERNEL, suffix=".c"),
        replace(KERNEL, flags=("-fopenmp", "-O3")),
        replace(KERNEL, flags=("-O3 -fopenmp",)),
        replace(KERNEL, flags=("-O3",)),
        replace(KERNEL, target=Target("cpu", "x86-64-v4")),
    ],
)
def test_digest_covers_every_field(other: object) -> None:
    assert source_digest(other) != source_digest(KERNEL)  # type: ignore[arg-type]


def test_digest_of_equal_kernels_is_equal() -> None:
    assert source_digest(replace(KERNEL)) == source_digest(KERNEL)
    assert len(source_digest(replace(KERNEL, source="// ε, 😀 and a lone \udc80"))) == 64


def test_entry_path_names_source_and_toolchain() -> None:
    path = entry_path(Path("/root"), KERNEL, "g++ 13.2 (Debian)")
    assert path.parent == Path("/root") / source_digest(KERNEL)
    assert path.name.startswith("g++-13.2-Debian-")


@pytest.mark.parametrize("fingerprint", ["", ".", "..", "../../etc", "/usr/bin/c++", "a" * 1000, "naïve\n\0"])
def test_slug_is_one_visible_file_name(fingerprint: str) -> None:
    name = slug(fingerprint)
    assert Path("/x", name).resolve().parent == Path("/x")
    assert not name.startswith(".")
    assert len(name) < 70
    assert name.isascii()


def test_slugs_of_different_fingerprints_differ() -> None:
    fingerprints = ["a b", "a-b", "a/b", "a" * 48 + "x", "a" * 48 + "y", "A B"]
    assert len({slug(fingerprint) for fingerprint in fingerprints}) == len(fingerprints)
