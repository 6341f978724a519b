"""Files and folders nobody else can write: entries are executed code.

Everything here works whatever the umask is, and nothing here decides what to do when it fails: the caller gets the
``OSError``.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from filelock import FileLock

LOG = logging.getLogger("attngen")

BUILDING = "building"
WAIT_BEFORE_NOTICE = 5.0

_SPARE_ROOM = 4 << 20
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_NO_LOCKS_HERE = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL})


def distrust(path: Path, *, follow: bool = False) -> str | None:
    """Why the content of ``path`` must not be executed; ``None`` if only its user, or root, can have written it.

    Args:
        path: an existing file or folder; a missing one raises ``FileNotFoundError``.
        follow: whether a symbolic link of a trusted owner may lead to it.
    """
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        if not follow:
            return "it is a symbolic link"
        if not _trusted_owner(status):
            return f"it is a symbolic link that belongs to uid {status.st_uid}"
        try:
            status = path.stat()
        except OSError as error:
            return f"it is a symbolic link that leads nowhere: {error.strerror}"
    if not _trusted_owner(status):
        return f"it belongs to uid {status.st_uid}, and this process runs as uid {os.geteuid()}"
    if status.st_mode & _WRITABLE_BY_OTHERS:
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def _trusted_owner(status: os.stat_result) -> bool:
    return status.st_uid in (0, os.geteuid())


def make_folder(path: Path) -> None:
    """Make ``path`` and its missing parents, each 0700; what exists stays as it is."""
    try:
        path.mkdir(mode=0o700)
    except FileNotFoundError:
        make_folder(path.parent)
        make_folder(path)
    except OSError:
        if not path.is_dir():
            raise


def write_file(path: Path, data: bytes) -> None:
    """Make ``path`` anew, 0600, never through a link."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def seal_folder(folder: Path) -> list[Path]:
    """Take from others every right to what a toolchain left in ``folder``, drop what is no file, return the files."""
    files = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            path.unlink()
        elif path.is_dir():
            path.chmod(0o700)
        else:
            path.chmod(stat.S_IMODE(path.stat().st_mode) & 0o700 | 0o600)
            files.append(path)
    return files


def sync_tree(folder: Path) -> None:
    """Put ``folder`` and all below it on the disk."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def sync(path: Path) -> None:
    """Put one file, or the names in one folder, on the disk; some file systems cannot do that for folders."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


@contextmanager
def key_lock(path: Path, timeout: float) -> Iterator[None]:
    """Hold the lock file ``path``, or go on without it after ``timeout`` seconds.

    The operating system frees the lock when its holder dies, and the file stays, because others may wait on it.
    """
    make_folder(path.parent)
    lock = _lock(path)
    notice = max(0.0, min(WAIT_BEFORE_NOTICE, timeout))
    held = _acquire(lock, notice)
    if held is False:
        LOG.warning("attngen waits up to %.0f s for another build, which holds %s", timeout, path)
        held = _acquire(lock, max(0.0, timeout - notice))
        if held is False:
            LOG.info("attngen builds without %s, held by another process for over %.0f s", path, timeout)
    try:
        yield
    finally:
        if held:
            lock.release()


@contextmanager
def private_folder(root: Path) -> Iterator[Path]:
    """An empty folder inside ``root`` for one build; whatever is still there at the end is removed.

    A lock file beside the folder is held as long as its process lives, so that :func:`collect_leftovers` can tell a
    dead build from a live one without trusting clocks, process ids or host names.
    """
    folder = root / BUILDING / secrets.token_hex(16)
    make_folder(folder.parent)
    if reason := distrust(folder.parent):
        raise PermissionError(errno.EPERM, reason, str(folder.parent))
    lock = _lock(_guard(folder))
    held = _acquire(lock, WAIT_BEFORE_NOTICE)
    try:
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        _remove(folder)
        if held:
            lock.release()


def collect_leftovers(root: Path) -> int:
    """Remove the private folders whose builders are dead, and count them."""
    removed = 0
    for guard in sorted((root / BUILDING).glob("*.lock")):
        lock = _lock(guard)
        with suppress(OSError):
            if _acquire(lock, 0.0):
                removed += _remove(guard.with_suffix(""))
                lock.release()
    return removed


def discard(root: Path, paths: Sequence[Path]) -> int:
    """Remove ``paths``, which lie in ``root``: each is gone at once, so that nobody finds half of it."""
    removed = 0
    if paths:
        with private_folder(root) as trash:
            for number, path in enumerate(paths):
                with suppress(FileNotFoundError):
                    path.rename(trash / str(number))
                    removed += 1
    return removed


def open_for_reading(root: Path, entries: Sequence[Path]) -> None:
    """Let everybody read the entries in ``root``, and nobody else write; what only builds need is removed."""
    shutil.rmtree(root / "locks", ignore_errors=True)
    for folder in (root / BUILDING, root / "failed"):
        with suppress(OSError):  # a build goes on, or a log is to be read
            folder.rmdir()
    for path in {root, *(entry.parent for entry in entries), *(p for e in entries for p in (e, *e.rglob("*")))}:
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)


def _remove(folder: Path) -> bool:
    """Remove a private folder, and then its guard, which the caller holds."""
    existed = folder.exists()
    shutil.rmtree(folder, ignore_errors=True)
    if not folder.exists():
        _guard(folder).unlink(missing_ok=True)
    return existed


def _guard(folder: Path) -> Path:
    return folder.with_suffix(".lock")


def _lock(path: Path) -> FileLock:
    from filelock import FileLock  # noqa: PLC0415  # a warm start locks nothing

    # Never a lock made of a file's mere existence, which would outlive its holder.
    return FileLock(path, mode=0o600, fallback_to_soft=False, preserve_lock_file=True)


def _acquire(lock: FileLock, timeout: float) -> bool | None:
    """Whether the lock is held now; ``None`` where the file system knows no locks."""
    try:
        lock.acquire(timeout=timeout)
    except TimeoutError:  # filelock's is one
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS_HERE:
            LOG.debug("attngen: no locks on the file system of %s", lock.lock_file)
            return None
        raise
    return True


def require_room(folder: Path) -> None:
    """Raise ``OSError`` if ``folder`` cannot take a few MiB more.

    A compiler that runs out of space only says that it failed.
    """
    probe = folder / "room"
    write_file(probe, bytes(_SPARE_ROOM))
    probe.unlink()


_temporary: dict[int, Path] = {}


def temporary_root() -> Path | None:
    """This process's temporary root, if it has one by now."""
    return _temporary.get(os.getpid())


def make_temporary_root(reason: str) -> Path:
    """A private root that lives as long as this process; says ``reason`` once, when it is made."""
    process = os.getpid()
    if (made := temporary_root()) is not None:
        return made
    folder = Path(tempfile.mkdtemp(prefix="attngen-"))
    made = _temporary.setdefault(process, folder)
    if made is not folder:  # another thread was faster
        folder.rmdir()
        return made
    # Unlike atexit, this also runs where multiprocessing forked the process, and never in a fork of this one.
    Finalize(None, shutil.rmtree, (folder, True), exitpriority=0)
    LOG.warning(
        "attngen keeps compiled kernels in %s, until this process ends: %s. "
        "Set ATTNGEN_CACHE_DIR to a private, writable folder to keep them.",
        folder,
        reason,
    )
    return folder
