"""Finds built kernels on disk, and builds the ones that are missing.

Correct by one rename: an entry appears complete or not at all. Locks only keep processes from doing the same work
twice, so a lock that cannot be had is done without. Looking an entry up takes no lock, and writes nothing
but, once an hour, the time of a folder in the user's own root: when its entry was last used.

Below a root: ``<digest>/<fingerprint>/`` entries, ``tuned/`` what tunings have found, ``locks/``,
``building/`` private folders of builds,
``failed/<digest>.log``, and ``damaged-…`` entries that were moved aside.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from attngen.codegen.render import RenderedKernel
from attngen.codegen.toolchain import Toolchain
from attngen.errors import ArgumentError, AttngenError, BuildError, CacheMissError
from attngen.settings import Settings
from attngen.store import private
from attngen.store.artifact import Artifact, check, load, read
from attngen.store.build import Order, build_entry
from attngen.store.key import slug, source_digest
from attngen.store.manifest import DamagedError

TUNED = "tuned"
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Root:
    """A folder of entries.

    Attributes:
        path: absolute.
        variable: the environment variable that names it; empty for a default, which may be passed over silently.
    """

    path: Path
    variable: str = ""

    def require_trust(self) -> None:
        """Make sure that nobody else can have written here; a missing folder is fine.

        Raises:
            AttngenError: the user named a folder that is not private.
            PermissionError: a default folder is not private.
        """
        try:
            reason = private.distrust(self.path, follow=True)
            if reason is None and not self.path.is_dir():
                reason = "it is not a folder"
        except FileNotFoundError:
            return
        if reason is None:
            return
        if not self.variable:
            raise PermissionError(errno.EPERM, reason, str(self.path))
        raise AttngenError(
            f"the cache folder {self.path} is refused",
            where=self.variable,
            why=f"{reason}; its content is executed, so it must belong to you or root, and nobody else may write to it",
            fix=f"point {self.variable} to a private folder (chmod 700), or to one that does not exist yet",
        )

    def candidates(self, digest: str, fingerprint: str | None, *, lenient: bool) -> list[Path]:
        """Where the entry may lie: under its own fingerprint or, if ``lenient``, under any."""
        folder = self.path / digest
        exact = [] if fingerprint is None else [folder / slug(fingerprint)]
        if not lenient:
            return exact
        with suppress(FileNotFoundError, NotADirectoryError):
            return exact + [path for path in sorted(folder.iterdir()) if path not in exact]
        return exact

    def folders(self) -> list[Path]:
        """Every entry, intact or not."""
        with suppress(FileNotFoundError):
            digests = [path for path in sorted(self.path.iterdir()) if _DIGEST.fullmatch(path.name)]
            return [entry for digest in digests if digest.is_dir() for entry in sorted(digest.iterdir())]
        return []


class Store:
    """The cache: shipped roots, then the user's own, then this process's temporary one."""

    def __init__(self, root: Root | None, shipped: tuple[Root, ...], *, require_cached: bool, lock_timeout: float):
        self.root = root
        self.shipped = shipped
        self._require_cached = require_cached
        self._lock_timeout = lock_timeout
        self._flights: dict[tuple[int, str, str | None], Future[Artifact]] = {}

    @staticmethod
    def from_settings(settings: Settings) -> Store:
        """The store that ``settings`` describe; touches nothing on disk."""
        given = settings.cache_dir
        return Store(
            Root(_absolute(given), "ATTNGEN_CACHE_DIR") if given else _default_root(),
            tuple(Root(_absolute(path), "ATTNGEN_CACHE_PATH") for path in settings.cache_path),
            require_cached=settings.require_cached,
            lock_timeout=settings.lock_timeout,
        )

    def shipped_only(self) -> Store:
        """The same without the user's own root."""
        return Store(None, self.shipped, require_cached=True, lock_timeout=self._lock_timeout)

    def find(self, kernel: RenderedKernel, fingerprint: str | None) -> Artifact | None:
        """The intact entry of ``kernel``, if there is one.

        In shipped roots, and where ``fingerprint`` is ``None``, text and target decide, and any toolchain's entry will
        do.
        """
        return self._search(source_digest(kernel), fingerprint)[0]

    def get_or_build(self, kernel: RenderedKernel, toolchain: Toolchain, about: Mapping[str, str]) -> Artifact:
        """The entry of ``kernel``, built now if no root has it.

        Args:
            kernel: text, flags and target.
            toolchain: builds it.
            about: kept in the manifest: the spec's name, the op, the command that prints the source again.

        Raises:
            BuildError: the toolchain failed; ``where`` names the kept log. The next call tries again.
            CacheMissError: the settings forbid building.
            AttngenError: a folder that the user named is not private.
        """
        order = Order(kernel, source_digest(kernel), toolchain, toolchain.fingerprint(kernel.target), about)
        artifact, problems = self._search(order.digest, order.fingerprint)
        if artifact is not None:
            return artifact
        if self._require_cached:
            raise self._miss(order, problems)
        return self._build_once(order)

    def entries(self) -> Iterator[Artifact]:
        """Every entry with a readable manifest, root by root; only :meth:`verify` reads the other files."""
        for folder in self._folders():
            with suppress(DamagedError, OSError):
                yield read(folder)

    def verify(self) -> dict[Path, str]:
        """Check every file of every entry; the damaged entries and what is wrong with them."""
        damaged = {}
        for folder in self._folders():
            try:
                check(read(folder), folder.parent.name, every_file=True)
            except (DamagedError, OSError) as error:
                damaged[folder] = str(error)
        return damaged

    @property
    def size(self) -> int:
        """Bytes of all entries."""
        return sum(artifact.size for artifact in self.entries())

    def own_entries(self) -> list[Artifact]:
        """Those of :meth:`entries` that lie in the user's own root."""
        if self.root is None:
            return []
        return [artifact for artifact in self.entries() if artifact.folder.parents[1] == self.root.path]

    def entry(self, name: str) -> Artifact:
        """The one entry that ``name`` means: a path, the start of a digest, or that and the start of a toolchain's name.

        Raises:
            ArgumentError: none is called so, or several are, or it cannot be read.
        """
        digest, _, toolchain = name.partition("/")
        found = [
            folder
            for folder in self._folders()
            if (folder.parent.name.startswith(digest) and folder.name.startswith(toolchain) and digest)
            or folder == _absolute(name)
        ]
        if len(found) != 1:
            listed = ", ".join(f"{folder.parent.name[:12]}/{folder.name}" for folder in found)
            raise ArgumentError(
                f"{name!r} names {len(found) or 'no'} entries",
                where="cache",
                why=listed or "no folder in any cache is called so",
                fix="write more of the name" if found else "see `attngen cache ls`",
            )
        try:
            return read(found[0])
        except (DamagedError, OSError) as error:
            raise ArgumentError(f"{name!r} cannot be read", where=str(found[0]), why=str(error)) from None

    def collect(self) -> int:
        """Remove what builds left behind in the user's own root: dead builds, damaged entries, logs of failures."""
        if self.root is None or not self.root.path.is_dir():
            return 0
        self.root.require_trust()
        path = self.root.path
        with self.changing(path):
            waste = [*path.glob("damaged-*"), *(path / "failed").glob("*.log")]
            return private.discard(path, waste) + private.collect_leftovers(path)

    def clear(self) -> int:
        """Remove every entry of the user's own root, and return how many there were; tunings go too, running builds go on."""
        self.collect()
        if self.root is None or not self.root.path.is_dir():
            return 0
        with self.changing(self.root.path):
            private.discard(self.root.path, [self.root.path / TUNED])
        return self._discard(self.root, self.root.folders())

    def trim(self, *, max_size: int | None, max_age: float | None) -> list[Artifact]:
        """Remove entries of the user's own root, and return them.

        Args:
            max_size: bytes that the rest may have; those used least recently go first.
            max_age: seconds without use after which an entry goes in any case.
        """
        if self.root is None:
            return []
        ages: list[tuple[float, Artifact]] = []
        for artifact in self.own_entries():
            with suppress(FileNotFoundError):  # somebody else has removed it
                ages.append((artifact.idle, artifact))
        removed, size = [], 0
        for idle, artifact in sorted(ages, key=lambda pair: pair[0]):
            size += artifact.size
            if (max_age is not None and idle > max_age) or (max_size is not None and size > max_size):
                removed.append(artifact)
        self._discard(self.root, [artifact.folder for artifact in reversed(removed)])
        return removed

    @contextmanager
    def shipping(self) -> Iterator[None]:
        """Inside, kernels are built into the user's own root; then it holds entries and nothing else, readable by everybody.

        Raises:
            AttngenError: it cannot be written.
        """
        assert self.root is not None
        path = self.root.path
        with self.changing(path):
            private.make_folder(path)
            self.root.require_trust()
            with private.private_folder(path) as folder:
                private.require_room(folder)
        yield
        with self.changing(path):
            private.collect_leftovers(path)
            private.open_for_reading(path, [*self.root.folders(), *(path / TUNED).glob("*")])

    def _discard(self, root: Root, folders: list[Path]) -> int:
        with self.changing(root.path):
            removed = private.discard(root.path, folders)
        for parent in {folder.parent for folder in folders}:
            with suppress(OSError):  # another toolchain's entry is here, or a build has just put one here
                parent.rmdir()
        return removed

    @contextmanager
    def changing(self, path: Path) -> Iterator[None]:
        """Inside, what is wrong with a folder that is to be written is an error for people."""
        try:
            yield
        except OSError as error:
            raise AttngenError(
                f"the cache folder {path} cannot be changed",
                where="ATTNGEN_CACHE_DIR",
                why=str(error),
                fix="run this as its owner, where it is mounted writable",
            ) from error

    def roots(self) -> list[Root]:
        """Where entries are looked for, in this order."""
        temporary = private.temporary_root()
        own = () if self.root is None else (self.root,)
        return [*self.shipped, *own, *(() if temporary is None else (Root(temporary),))]

    def _folders(self) -> Iterator[Path]:
        for root in self.roots():
            with suppress(OSError):  # a root nobody can read has no entries
                root.require_trust()
                yield from root.folders()

    def _search(self, digest: str, fingerprint: str | None) -> tuple[Artifact | None, list[str]]:
        """The first intact entry, and what was wrong with the ones before it."""
        problems = []
        for root in self.roots():
            lenient = fingerprint is None or root in self.shipped
            try:
                root.require_trust()
                folders = root.candidates(digest, fingerprint, lenient=lenient)
            except OSError as error:
                problems.append(str(error))
                continue
            for folder in folders:
                try:
                    if (artifact := load(folder, digest)) is not None:
                        if root is self.root:
                            artifact.note_use()
                        return artifact, problems
                except (DamagedError, OSError) as error:
                    problems.append(f"{folder}: {error}")
        return None, problems

    def _miss(self, order: Order, problems: list[str]) -> CacheMissError:
        kernel = order.kernel
        spec, op = order.about.get("spec") or "SPEC", order.about.get("op")
        command = f"attngen compile {shlex.quote(spec)} --target {kernel.target}" + (f" --ops {op}" if op else "")
        if self.shipped:
            command += f" --into {shlex.quote(str(self.shipped[0].path))}"
        searched = ", ".join(str(root.path) for root in (*self.shipped, self.root) if root is not None)
        return CacheMissError(
            f"kernel {kernel.entry} for {kernel.target} is not in any cache",
            where=f"digest {order.digest}, searched {searched or 'no folder'}",
            why="; ".join(["ATTNGEN_REQUIRE_CACHED is set, so nothing is built here", *problems]),
            fix=f"run `{command}` where the toolchain is, or unset ATTNGEN_REQUIRE_CACHED",
        )

    def _build_once(self, order: Order) -> Artifact:
        """One build per process and key; its result, or its error, goes to every thread that waits for it."""
        key = (os.getpid(), order.digest, order.fingerprint)  # a forked child must not wait for its parent's threads
        mine: Future[Artifact] = Future()
        flight = self._flights.setdefault(key, mine)
        if flight is not mine:
            return flight.result()
        try:
            artifact = self._build(order)
        except BaseException as error:
            del self._flights[key]
            mine.set_exception(error)
            raise
        del self._flights[key]
        mine.set_result(artifact)
        return artifact

    def _build(self, order: Order) -> Artifact:
        """Build in the user's own root or, where that cannot be written, in a temporary one."""
        trouble = OSError("HOME names no usable folder")
        if self.root is not None:
            try:
                self.root.require_trust()
                private.make_folder(self.root.path)
                self.root.require_trust()  # somebody else may have made it since
                return build_entry(self.root.path, order, self._lock_timeout)
            except OSError as error:
                trouble = error
        try:
            temporary = private.make_temporary_root(str(trouble))
        except OSError as error:
            raise BuildError(
                f"kernel {order.kernel.entry} cannot be built: there is no folder to put it in",
                where="ATTNGEN_CACHE_DIR",
                why=f"{trouble}; and no temporary folder either: {error}",
                fix="set ATTNGEN_CACHE_DIR, or TMPDIR, to a private, writable folder",
            ) from error
        return build_entry(temporary, order, self._lock_timeout)


def _absolute(path: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))  # noqa: PTH100, PTH111  # Path.expanduser raises without HOME


def _default_root() -> Root | None:
    """The platform's cache folder for this user; ``None`` where the user has no home to put it in."""
    try:
        if not os.environ.get("XDG_CACHE_HOME"):
            home = Path(os.environ.get("HOME", ""))
            if not home.is_absolute() or home == Path("/") or not home.is_dir():
                return None
        path = Path(platformdirs.user_cache_dir("attngen"))
    except (OSError, RuntimeError):  # a home that cannot be looked at, or none at all
        return None
    return Root(path) if path.is_absolute() else None
