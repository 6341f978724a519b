"""A built kernel as it lies on disk, and what makes it fit to be loaded."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from attngen.store import private
from attngen.store.manifest import FILE_NAME, DamagedError, FileRecord, Manifest

REJECTED = "rejected"
_NOTE_EVERY = 3600.0


@dataclass(frozen=True)
class Artifact:
    """A built kernel: a folder a person can read."""

    folder: Path
    manifest: Manifest

    @property
    def binary(self) -> Path:
        return self.folder / self.manifest.binary

    @property
    def source(self) -> Path:
        return self.folder / self.manifest.source

    @property
    def rejected(self) -> str:
        """Why other tiles are to be tried, where the build found that these make a slow kernel; else empty."""
        return str(self.manifest.metadata.get(REJECTED, ""))

    @property
    def size(self) -> int:
        """Bytes of all its files but the manifest."""
        return sum(record.size for record in self.manifest.files.values())

    @property
    def age(self) -> float:
        """Seconds since it was built."""
        return time.time() - (self.folder / FILE_NAME).stat().st_mtime

    @property
    def idle(self) -> float:
        """Seconds since it was used, as far as that is noted."""
        return time.time() - self.folder.stat().st_mtime

    def note_use(self) -> None:
        """Set the time of its folder, at most once an hour, where that can be written.

        File systems keep no access times, or only some: many are mounted so that reading leaves no trace.
        """
        with suppress(OSError):
            if abs(self.idle) > _NOTE_EVERY:
                os.utime(self.folder)


def read(folder: Path) -> Artifact:
    """The entry in ``folder`` by its manifest alone.

    Raises:
        DamagedError: there is no manifest to go by, or somebody else can have written it.
    """
    try:
        for path in (folder.parent, folder, folder / FILE_NAME):
            if reason := private.distrust(path):
                raise DamagedError(f"{path.name}: {reason}")
        return Artifact(folder, Manifest.from_json((folder / FILE_NAME).read_bytes()))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise DamagedError(f"{FILE_NAME} is missing") from None


def check(artifact: Artifact, digest: str, *, every_file: bool = False) -> None:
    """Compare an entry with its manifest: all sizes, and the checksum of the binary or of ``every_file``.

    Raises:
        DamagedError: they differ.
    """
    manifest = artifact.manifest
    if manifest.digest != digest:
        raise DamagedError(f"{FILE_NAME} belongs to digest {manifest.digest}")
    for name, record in manifest.files.items():
        path = artifact.folder / name
        try:
            if reason := private.distrust(path):
                raise DamagedError(f"{name}: {reason}")
            if (size := path.stat().st_size) != record.size:
                raise DamagedError(f"{name} has {size} bytes instead of {record.size}")
            if (every_file or name == manifest.binary) and FileRecord.of(path) != record:
                raise DamagedError(f"{name} does not match its checksum")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise DamagedError(f"{name} is missing") from None


def load(folder: Path, digest: str) -> Artifact | None:
    """The checked entry in ``folder``; ``None`` if nothing is there.

    Raises:
        DamagedError: something else is there.
    """
    try:
        folder.lstat()
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise DamagedError(f"{folder.parent.name} is not a folder") from None
    artifact = read(folder)
    check(artifact, digest)
    return artifact
