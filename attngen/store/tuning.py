"""What tunings have found: tiles for the kernels of an op, as JSON beside the entries of a cache.

A record lies at ``tuned/<digest>/<fingerprint>.json``. The digest covers the text of the kernels that the tuning started from,
those of the shipped table; so a record ends with the table, the templates and the declaration that it was made for, and, by their
fingerprint, with the toolchains. Records hold numbers, no code; kernels of these tiles are entries like any other.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from attngen.codegen.render import RenderedKernel
from attngen.errors import AttngenError
from attngen.schedule.launch import Tiles
from attngen.store import private
from attngen.store.disk import TUNED, Store
from attngen.store.key import SCHEMA, slug, source_digest
from attngen.store.manifest import DamagedError

LOG = logging.getLogger("attngen")


@dataclass(frozen=True)
class TuningKey:
    """What a tuning is found by.

    Attributes:
        digest: SHA-256, in hex, of the kernels that it started from.
        fingerprint: who builds them; ``None`` where a toolchain is absent: then records of any will do.
    """

    digest: str
    fingerprint: str | None

    @staticmethod
    def of(kernels: Sequence[RenderedKernel], fingerprints: Sequence[str | None]) -> TuningKey:
        """That of an op with these kernels, made by these toolchains."""
        text = "\n".join(map(source_digest, kernels))
        present = [fingerprint for fingerprint in fingerprints if fingerprint is not None]
        joined = "; ".join(present) if len(present) == len(fingerprints) else None
        return TuningKey(hashlib.sha256(text.encode("ascii")).hexdigest(), joined)


@dataclass(frozen=True)
class Tuning:
    """One record.

    Attributes:
        schema: number of this format.
        digest, fingerprint: its key.
        spec: the spec's name, for people.
        declaration: the spec as JSON, which tells whether the record is still what its op would look for.
        op, target, backend: what was tuned.
        tiles: by the kernel's role, where they differ from the table's.
        shapes: what was measured, as ``attngen tune --shapes`` takes it.
        device: what it was measured on.
        candidates: how many plans were measured.
        speedup: time by the table over time by these tiles, the geometric mean over the shapes.
        seal: checksum of all fields above.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    schema: int
    digest: str
    fingerprint: str
    spec: str
    declaration: str
    op: str
    target: str
    backend: str
    tiles: Mapping[str, Tiles]
    shapes: tuple[str, ...]
    device: str
    candidates: int
    speedup: float
    seal: str = ""

    def sealed(self) -> Tuning:
        """The same record with the checksum of its fields."""
        fields = asdict(self)
        del fields["seal"]
        text = json.dumps(fields, sort_keys=True, allow_nan=False)
        return replace(self, seal=hashlib.sha256(text.encode("ascii")).hexdigest())

    @property
    def gain(self) -> str:
        """What it brings, in words."""
        return f"{self.speedup:.2f} times as fast as the table's tiles, for {'; '.join(self.shapes)} on {self.device}"


class Tunings:
    """The records of a store: the user's own before shipped ones, since who tunes knows the device."""

    def __init__(self, store: Store) -> None:
        self._store = store
        own = [root for root in store.roots() if root not in store.shipped]
        self._folders = [(root, root.path / TUNED) for root in (*own, *store.shipped)]

    def any(self) -> bool:
        """Whether there may be one; looks at one folder a root."""
        return any(folder.is_dir() for _, folder in self._folders)

    def find(self, key: TuningKey) -> Tuning | None:
        """The first intact record of ``key``; a damaged one is passed over, and a warning says so."""
        for root, folder in self._folders:
            try:
                root.require_trust()
                paths = self._candidates(folder / key.digest, key, lenient=root in self._store.shipped)
            except OSError:
                continue
            for path in paths:
                try:
                    record = _read(path)
                    if record.digest != key.digest:
                        raise DamagedError(f"it belongs to digest {record.digest}")
                    return record
                except (DamagedError, OSError) as error:
                    _warn(path, str(error))
        return None

    def refuse(self, key: TuningKey, reason: str) -> None:
        """Warn that the record of ``key`` is not used."""
        for _, folder in self._folders:
            if (folder / key.digest).is_dir():
                _warn(folder / key.digest, reason)
                return

    def put(self, record: Tuning) -> Path:
        """Store a record in the user's own root, in the place of an older one.

        Raises:
            AttngenError: it cannot be written.
        """
        root = self._store.root
        if root is None:
            raise AttngenError(
                "the tuning cannot be stored",
                where="ATTNGEN_CACHE_DIR",
                why="there is no home folder to keep it in",
                fix="set ATTNGEN_CACHE_DIR to a private, writable folder",
            )
        folder = root.path / TUNED / record.digest
        with self._store.changing(root.path):
            private.make_folder(root.path)
            root.require_trust()
            private.make_folder(folder)
            path = folder / f"{slug(record.fingerprint)}.json"
            draft = folder / f".{secrets.token_hex(8)}"
            private.write_file(
                draft, (json.dumps(asdict(record.sealed()), indent=2, allow_nan=False) + "\n").encode("ascii")
            )
            private.sync(draft)
            draft.replace(path)
            private.sync(folder)
        return path

    def forget(self, key: TuningKey) -> int:
        """Remove the records of a digest, made by any toolchain, from the user's own root, and count them."""
        root = self._store.root
        folder = None if root is None else root.path / TUNED / key.digest
        if root is None or folder is None or not folder.is_dir():
            return 0
        with self._store.changing(root.path):
            number = len(list(folder.glob("*.json")))
            private.discard(root.path, [folder])
        return number

    def remove(self, paths: Sequence[Path]) -> int:
        """Remove single records, as :meth:`all` gives them, from the user's own root, and count them."""
        root = self._store.root
        if root is None:
            return 0
        own = [path for path in paths if path.is_relative_to(root.path)]
        with self._store.changing(root.path):
            return private.discard(root.path, own)

    def all(self) -> Iterator[tuple[Path, Tuning]]:
        """Every intact record and its file, root by root."""
        for root, folder in self._folders:
            with suppress(OSError):
                root.require_trust()
                for path in sorted(folder.glob("*/*.json")):
                    with suppress(DamagedError, OSError):
                        yield path, _read(path)

    def damaged(self) -> dict[Path, str]:
        """Records that are passed over, and why."""
        found = {}
        for root, folder in self._folders:
            with suppress(OSError):
                root.require_trust()
                for path in sorted(folder.glob("*/*.json")):
                    try:
                        _read(path)
                    except (DamagedError, OSError) as error:
                        found[path] = str(error)
        return found

    def _candidates(self, folder: Path, key: TuningKey, *, lenient: bool) -> list[Path]:
        exact = [] if key.fingerprint is None else [folder / f"{slug(key.fingerprint)}.json"]
        others = sorted(folder.glob("*.json")) if lenient or key.fingerprint is None else []
        return [path for path in dict.fromkeys((*exact, *others)) if path.exists()]


def _warn(path: Path, reason: str) -> None:
    LOG.warning(
        "attngen does not use the tuning in %s, but the tiles of its table: %s; tune again, or remove it", path, reason
    )


def _read(path: Path) -> Tuning:
    """The record in a file.

    Raises:
        DamagedError: it is none, or somebody else can have written it.
    """
    for place in (path.parent, path):
        if reason := private.distrust(place):
            raise DamagedError(f"{place.name}: {reason}")
    try:
        record = _reader().validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise DamagedError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if record.schema != SCHEMA:
        raise DamagedError(f"it has schema {record.schema}, not {SCHEMA}")
    if record.seal != record.sealed().seal:
        raise DamagedError("it does not match its own checksum")
    return record


@cache
def _reader() -> TypeAdapter[Tuning]:
    return TypeAdapter(Tuning)
