"""What lies in a cache entry, as JSON beside the files it describes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from attngen.store.key import SCHEMA

FILE_NAME = "manifest.json"
BUILD_LOG = "build.log"

_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class DamagedError(Exception):
    """An entry is not what its manifest says, or has no readable manifest; never leaves the store."""


@dataclass(frozen=True, config=_STRICT)
class FileRecord:
    """Size in bytes and SHA-256 of one file."""

    size: int
    sha256: str

    @staticmethod
    def of(path: Path) -> FileRecord:
        data = path.read_bytes()
        return FileRecord(len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True, config=_STRICT)
class Manifest:
    """The description of one entry.

    Attributes:
        schema: number of this format.
        digest: what the entry was built from, see :func:`attngen.store.key.source_digest`.
        entry: name of the kernel, also its symbol in the binary.
        target: what it is built for, ``kind:arch``.
        flags: build options in order.
        fingerprint: the toolchain's identity.
        source: name of the source file.
        binary: name of the file to load.
        files: every other file of the entry by its path inside the folder.
        metadata: what the toolchain wants the launcher, or a person, to know.
        build_seconds: how long the build took.
        about: the caller's words: the spec's name, the op, the command that prints the source again.
        seal: checksum of all fields above.
    """

    schema: int
    digest: str
    entry: str
    target: str
    flags: tuple[str, ...]
    fingerprint: str
    source: str
    binary: str
    files: dict[str, FileRecord]
    metadata: dict[str, Any]
    build_seconds: float
    about: dict[str, str]
    seal: str = ""

    def sealed(self) -> Manifest:
        """The same manifest with the checksum of its fields."""
        fields = asdict(self)
        del fields["seal"]
        text = json.dumps(fields, sort_keys=True, allow_nan=False)
        return replace(self, seal=hashlib.sha256(text.encode("ascii")).hexdigest())

    def to_json(self) -> bytes:
        return (json.dumps(asdict(self.sealed()), indent=2, allow_nan=False) + "\n").encode("ascii")

    @staticmethod
    def from_json(data: bytes) -> Manifest:
        """Read a manifest that has exactly these fields, with these types, and an intact seal.

        Raises:
            DamagedError: anything else.
        """
        try:
            manifest = _READER.validate_json(data)
            if manifest.seal != manifest.sealed().seal:
                raise DamagedError(f"{FILE_NAME} does not match its own checksum")
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(str(part) for part in first["loc"])
            raise DamagedError(f"{FILE_NAME} cannot be read: {field}: {first['msg']}") from None
        if manifest.schema != SCHEMA:
            raise DamagedError(f"{FILE_NAME} has schema {manifest.schema}, not {SCHEMA}")
        if not {manifest.source, manifest.binary} <= manifest.files.keys():
            raise DamagedError(f"{FILE_NAME} does not list {manifest.source} and {manifest.binary}")
        for name in manifest.files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or path.as_posix() != name:
                raise DamagedError(f"{FILE_NAME} lists {name!r}, which is not a file of the entry")
        return manifest


_READER = TypeAdapter(Manifest)
