from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from attngen.store.key import SCHEMA
from attngen.store.manifest import DamagedError, FileRecord, Manifest

MANIFEST = Manifest(
    schema=SCHEMA,
    digest="d" * 64,
    entry="decode_causal",
    target="cuda:sm90a",
    flags=("num_warps=4", "-O3"),
    fingerprint="triton 3.7.1",
    source="decode_causal.py",
    binary="decode_causal.cubin",
    files={
        "decode_causal.py": FileRecord(10, "a" * 64),
        "decode_causal.cubin": FileRecord(20, "b" * 64),
        "stages/decode_causal.ptx": FileRecord(0, "c" * 64),
    },
    metadata={"num_warps": 4, "shared": [1, 2], "name": "ü", "ratio": 0.1, "none": None, "nested": {"x": True}},
    build_seconds=1.25,
    about={"spec": "gemma2-local", "op": "decode"},
)


def test_round_trip() -> None:
    read = Manifest.from_json(MANIFEST.to_json())
    assert read == MANIFEST.sealed()
    assert read.to_json() == MANIFEST.to_json()


def test_is_readable_by_people() -> None:
    text = MANIFEST.to_json().decode()
    assert '\n  "entry": "decode_causal",\n' in text
    assert text.endswith("}\n")


def forged(**changes: Any) -> bytes:
    """A manifest with ``changes`` whose seal fits, as far as types allow."""
    fields = asdict(MANIFEST) | changes
    fields = {name: value for name, value in fields.items() if value is not ...}
    return json.dumps(fields).encode()


@pytest.mark.parametrize("field", [name for name in asdict(MANIFEST) if name != "seal"])
def test_missing_field(field: str) -> None:
    with pytest.raises(DamagedError, match=rf"^manifest.json cannot be read: {field}: Field required$"):
        Manifest.from_json(forged(**{field: ...}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schema", "1"),
        ("schema", True),
        ("entry", 3),
        ("flags", "-O3"),
        ("flags", [1]),
        ("files", {"x": {"size": "3", "sha256": ""}}),
        ("files", {"x": {"size": 3}}),
        ("metadata", []),
        ("build_seconds", "1.0"),
        ("build_seconds", None),
        ("about", {"spec": 1}),
        ("extra", 1),
    ],
)
def test_ill_typed_or_unknown_field(field: str, value: object) -> None:
    with pytest.raises(DamagedError, match=rf"^manifest.json cannot be read: {field}"):
        Manifest.from_json(forged(**{field: value}))


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"{", MANIFEST.to_json()[:-20], b"\xff\xfe", b"[" * 100_000])
def test_not_a_manifest_at_all(data: bytes) -> None:
    with pytest.raises(DamagedError, match=r"^manifest.json cannot be read: "):
        Manifest.from_json(data)


@pytest.mark.parametrize(("old", "new"), [(b'"num_warps": 4', b'"num_warps": 8'), (b"1.25", b"1.35"), (b"-O3", b"-O2")])
def test_one_changed_byte(old: bytes, new: bytes) -> None:
    data = MANIFEST.to_json()
    assert data.count(old) == 1
    with pytest.raises(DamagedError, match="does not match its own checksum"):
        Manifest.from_json(data.replace(old, new))


def test_other_schema() -> None:
    with pytest.raises(DamagedError, match=f"has schema {SCHEMA + 1}, not {SCHEMA}"):
        Manifest.from_json(replace(MANIFEST, schema=SCHEMA + 1).to_json())


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "./x", "a//b"])
def test_file_outside_the_entry(name: str) -> None:
    files = MANIFEST.files | {name: FileRecord(0, "")}
    with pytest.raises(DamagedError, match="which is not a file of the entry"):
        Manifest.from_json(replace(MANIFEST, files=files).to_json())


def test_binary_must_be_listed() -> None:
    with pytest.raises(DamagedError, match=r"does not list decode_causal.py and other.cubin"):
        Manifest.from_json(replace(MANIFEST, binary="other.cubin").to_json())


def test_metadata_must_be_json() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        replace(MANIFEST, metadata={"x": float("nan")}).to_json()
