"""Makes one entry: builds in a private folder, describes what came out, publishes it by one rename."""

from __future__ import annotations

import errno
import logging
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from attngen.codegen.render import RenderedKernel
from attngen.codegen.toolchain import BuildResult, Toolchain
from attngen.errors import BuildError, SlowKernelError
from attngen.store import private
from attngen.store.artifact import REJECTED, Artifact, load
from attngen.store.key import SCHEMA, entry_path
from attngen.store.manifest import BUILD_LOG, FILE_NAME, DamagedError, FileRecord, Manifest

LOG = logging.getLogger("attngen")

_STORAGE_TROUBLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})
# Between attempts to publish: a network file system may be late to show what another host has renamed.
_PAUSES = (0.0, 0.1, 1.0, 0.0)
_NAME_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR})


@dataclass(frozen=True)
class Order:
    """A kernel that somebody needs.

    Attributes:
        kernel: what to build.
        digest: its source digest.
        toolchain: who builds it.
        fingerprint: the toolchain's identity, ``None`` where it is absent.
        about: the caller's words for the manifest.
    """

    kernel: RenderedKernel
    digest: str
    toolchain: Toolchain
    fingerprint: str | None
    about: Mapping[str, str]


def build_entry(root: Path, order: Order, lock_timeout: float) -> Artifact:
    """The entry of ``order`` in ``root``, built unless another process has done so in the meantime.

    Raises:
        BuildError: the toolchain failed.
        OSError: ``root``, which exists, cannot be written.
    """
    entry = entry_path(root, order.kernel, order.fingerprint or "absent")
    with private.key_lock(root / "locks" / f"{order.digest}-{entry.name}.lock", lock_timeout):
        if (artifact := _existing(root, entry)) is not None:
            return artifact
        private.collect_leftovers(root)
        with private.private_folder(root) as folder:
            private.require_room(folder)
            _fill(folder, root, order)
            return _publish(folder, root, entry)


def _existing(root: Path, entry: Path) -> Artifact | None:
    """The intact entry; a damaged one is moved aside. Only for the holder of the key's lock."""
    digest = entry.parent.name
    try:
        return load(entry, digest)
    except DamagedError as error:
        aside = root / f"damaged-{digest[:12]}-{secrets.token_hex(8)}"
        sound_parent = entry.parent.is_dir() and private.distrust(entry.parent) is None
        try:
            (entry if sound_parent else entry.parent).rename(aside)
        except FileNotFoundError:  # another process, whose lock we did not wait for, was faster
            return None
        LOG.warning("attngen found a damaged cache entry, moved it to %s and builds it again: %s", aside, error)
        return None


def _fill(folder: Path, root: Path, order: Order) -> None:
    """Build ``order`` into the empty ``folder``: source, build log, binary and last of all the manifest."""
    kernel = order.kernel
    source = f"{kernel.entry}{kernel.suffix}"
    private.write_file(folder / source, kernel.source.encode())
    LOG.info("attngen build %s for %s (%s)", kernel.entry, kernel.target, order.digest)
    start = time.perf_counter()
    result = _run(folder, root, order)
    seconds = time.perf_counter() - start
    private.write_file(folder / BUILD_LOG, result.log.encode(errors="backslashreplace"))
    files = {path.relative_to(folder).as_posix(): FileRecord.of(path) for path in private.seal_folder(folder)}
    if not {source, result.binary} <= files.keys():
        raise BuildError(
            f"the toolchain left no {result.binary!r} for {kernel.entry}",
            where=f"target {kernel.target}",
            why=f"its folder holds {', '.join(files)}",
            fix="report this as a bug of attngen",
        )
    manifest = Manifest(
        schema=SCHEMA,
        digest=order.digest,
        entry=kernel.entry,
        target=str(kernel.target),
        flags=kernel.flags,
        fingerprint=order.fingerprint or "",
        source=source,
        binary=result.binary,
        files=files,
        metadata=dict(result.metadata),
        build_seconds=round(seconds, 3),
        about=dict(order.about),
    )
    private.write_file(folder / FILE_NAME, manifest.to_json())
    private.sync_tree(folder)
    LOG.info("attngen built %s in %.2f s", kernel.entry, seconds)


def _run(folder: Path, root: Path, order: Order) -> BuildResult:
    try:
        return order.toolchain.build(order.kernel, folder)
    except SlowKernelError as error:  # kept, so that nobody builds it again, here or where no toolchain is
        return BuildResult(f"{order.kernel.entry}{order.kernel.suffix}", {REJECTED: error.why or error.what}, error.log)
    except BuildError as error:
        log = root / "failed" / f"{order.digest}.log"
        with suppress(OSError):
            private.make_folder(log.parent)
            private.write_file(log, (error.log or str(error)).encode(errors="backslashreplace"))
            error.where = "; ".join(filter(None, (error.where, f"build log {log}")))
        raise
    except OSError as error:
        if error.errno in _STORAGE_TROUBLE:
            raise
        raise BuildError(
            f"the toolchain of {order.kernel.target} cannot run",
            where=order.kernel.entry,
            why=str(error),
            fix="run `attngen doctor`",
        ) from error


def _publish(folder: Path, root: Path, entry: Path) -> Artifact:
    """Rename a finished build to its final name, or use the entry of whoever came first."""
    for pause in _PAUSES:
        private.make_folder(entry.parent)
        try:
            folder.rename(entry)
            private.sync(entry.parent)
        except OSError as error:
            if error.errno not in _NAME_TAKEN:
                raise
        if (artifact := _existing(root, entry)) is not None:
            return artifact
        time.sleep(pause)
    raise FileExistsError(errno.EEXIST, "the name is taken, but nothing is there", str(entry))
