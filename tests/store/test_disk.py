from __future__ import annotations

import ctypes
import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attngen.errors import AttngenError, BuildError, CacheMissError
from attngen.settings import Settings
from attngen.store import Artifact, Store, private, source_digest
from tests.store.children import become_stranger, build, open_folder, start
from tests.store.toolchains import KERNEL, FakeToolchain, other_kernel


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's temporary root appears, if any."""
    folder = tmp_path / "tmp"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setattr(private, "_temporary", {})
    return folder


def store_at(root: Path | None, *shipped: Path, require_cached: bool = False) -> Store:
    return Store.from_settings(
        Settings(
            cache_dir=None if root is None else str(root),
            cache_path=tuple(str(path) for path in shipped),
            require_cached=require_cached,
        )
    )


def ship(root: Path, toolchain: FakeToolchain) -> Artifact:
    return store_at(root).get_or_build(KERNEL, toolchain, {"shipped": root.name})


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_mode) for path in (folder, *folder.rglob("*"))}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_builds_once_then_finds(root: Path) -> None:
    toolchain = FakeToolchain()
    built = store_at(root).get_or_build(KERNEL, toolchain, {})
    assert store_at(root).get_or_build(KERNEL, toolchain, {"other": "words"}) == built
    assert store_at(root).find(KERNEL, toolchain.name) == built
    assert toolchain.built == [KERNEL.entry]


def test_looking_up_takes_no_lock_writes_nothing_and_starts_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = store_at(root).get_or_build(KERNEL, FakeToolchain(), {})
    before = snapshot(root)

    def forbidden(*arguments: object, **options: object) -> None:
        raise AssertionError("not on the warm path")

    for name in ("filelock.FileLock.acquire", "subprocess.Popen", "os.fork", "os.mkdir", "os.rename", "os.fsync"):
        monkeypatch.setattr(name, forbidden)
    assert store_at(root, require_cached=True).get_or_build(KERNEL, FakeToolchain(), {}) == built
    assert snapshot(root) == before


def test_looking_up_is_fast(root: Path) -> None:
    class Large(FakeToolchain):
        def build(self, kernel: Any, folder: Path) -> Any:
            result = super().build(kernel, folder)
            (folder / result.binary).write_bytes(os.urandom(100_000))
            return result

    kernel = replace(KERNEL, source="x" * 20_000)
    store = store_at(root)
    store.get_or_build(kernel, Large(), {})
    seconds = []
    for _ in range(50):
        began = time.perf_counter()
        assert store.find(kernel, "fake 1.0") is not None
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.002


def test_nothing_is_created_before_the_first_build(root: Path) -> None:
    store = store_at(root)
    assert store.find(KERNEL, "fake 1.0") is None
    assert list(store.entries()) == []
    assert (store.size, store.verify(), store.collect(), store.clear()) == (0, {}, 0, 0)
    assert not root.exists()


def test_another_toolchain_is_another_entry(root: Path) -> None:
    old = store_at(root).get_or_build(KERNEL, FakeToolchain("fake 1.0"), {})
    new = store_at(root).get_or_build(KERNEL, FakeToolchain("fake 2.0"), {})
    assert old.folder != new.folder
    assert old.folder.parent == new.folder.parent
    assert store_at(root).find(KERNEL, "fake 3.0") is None


def test_absent_toolchain_accepts_any_fingerprint(root: Path) -> None:
    built = store_at(root).get_or_build(KERNEL, FakeToolchain("fake 1.0"), {})
    absent = FakeToolchain(None)
    assert store_at(root).get_or_build(KERNEL, absent, {}) == built
    assert store_at(root).find(KERNEL, None) == built
    assert absent.built == []
    assert store_at(root).find(other_kernel(1), None) is None


def test_absent_toolchain_skips_damaged_entries(root: Path) -> None:
    entries = [store_at(root).get_or_build(KERNEL, FakeToolchain(name), {}) for name in ("a", "b", "c")]
    entries[0].binary.unlink()
    assert store_at(root).find(KERNEL, None) == entries[1]


def test_absent_toolchain_that_must_build_says_so(root: Path) -> None:
    absent = FakeToolchain(None, failure=BuildError("no compiler", fix="install g++"))
    with pytest.raises(BuildError, match="no compiler"):
        store_at(root).get_or_build(KERNEL, absent, {})


def test_shipped_roots_come_first_in_order_and_accept_any_fingerprint(root: Path, tmp_path: Path) -> None:
    second = ship(tmp_path / "second", FakeToolchain("other 9"))
    own = store_at(root).get_or_build(KERNEL, FakeToolchain(), {})
    paths = (tmp_path / "first", tmp_path / "second")
    before = snapshot(tmp_path)
    assert store_at(root, *paths).get_or_build(KERNEL, FakeToolchain(), {}) == second
    assert snapshot(tmp_path) == before
    first = ship(tmp_path / "first", FakeToolchain("other 1"))
    assert store_at(root, *paths).get_or_build(KERNEL, FakeToolchain(), {}) == first
    assert store_at(root).get_or_build(KERNEL, FakeToolchain(), {}) == own


def test_shipped_root_prefers_the_exact_toolchain(root: Path, tmp_path: Path) -> None:
    for name in ("a", "z", "m"):
        ship(tmp_path / "shipped", FakeToolchain(name))
    found = store_at(root, tmp_path / "shipped").find(KERNEL, "m")
    assert found is not None
    assert found.manifest.fingerprint == "m"


def test_damaged_shipped_entry_is_left_alone_and_built_elsewhere(root: Path, tmp_path: Path) -> None:
    shipped = ship(tmp_path / "shipped", FakeToolchain())
    shipped.binary.write_bytes(b"")
    before = snapshot(tmp_path / "shipped")
    built = store_at(root, tmp_path / "shipped").get_or_build(KERNEL, FakeToolchain(), {})
    assert built.folder.is_relative_to(root)
    assert snapshot(tmp_path / "shipped") == before


def test_shipped_root_open_to_others_is_refused(root: Path, tmp_path: Path) -> None:
    ship(tmp_path / "shipped", FakeToolchain())
    (tmp_path / "shipped").chmod(0o777)
    with pytest.raises(AttngenError) as caught:
        store_at(root, tmp_path / "shipped").get_or_build(KERNEL, FakeToolchain(), {})
    assert str(caught.value) == (
        f"the cache folder {tmp_path / 'shipped'} is refused\n  where: ATTNGEN_CACHE_PATH\n"
        "  why: others may write to it (mode 0777); its content is executed, so it must belong to you or root, and "
        "nobody else may write to it\n"
        "  fix: point ATTNGEN_CACHE_PATH to a private folder (chmod 700), or to one that does not exist yet"
    )


def test_a_file_is_no_cache_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch(mode=0o600)
    with pytest.raises(AttngenError, match="it is not a folder"):
        store_at(tmp_path / "file").get_or_build(KERNEL, FakeToolchain(), {})


def test_link_to_a_private_folder_is_followed(root: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    root.symlink_to("real")
    store_at(root).get_or_build(KERNEL, FakeToolchain(), {})
    assert list((tmp_path / "real").glob("*/*/manifest.json")) != []
    (tmp_path / "real").chmod(0o777)
    with pytest.raises(AttngenError, match="others may write to it"):
        store_at(root).find(KERNEL, "fake 1.0")


def test_required_but_not_cached(root: Path, tmp_path: Path) -> None:
    store = store_at(root, tmp_path / "shipped", require_cached=True)
    toolchain = FakeToolchain()
    with pytest.raises(CacheMissError) as caught:
        store.get_or_build(KERNEL, toolchain, {"spec": "gemma2-local", "op": "decode"})
    assert str(caught.value) == (
        "kernel decode_causal_gqa4_fp16_d64 for cpu:x86-64-v3 is not in any cache\n"
        f"  where: digest {source_digest(KERNEL)}, searched {tmp_path / 'shipped'}, {root}\n"
        "  why: ATTNGEN_REQUIRE_CACHED is set, so nothing is built here\n"
        "  fix: run `attngen compile gemma2-local --target cpu:x86-64-v3 --ops decode --into "
        f"{tmp_path / 'shipped'}` where the toolchain is, or unset ATTNGEN_REQUIRE_CACHED"
    )
    assert toolchain.built == []
    assert not root.exists()


def test_required_but_damaged(root: Path) -> None:
    built = store_at(root).get_or_build(KERNEL, FakeToolchain(), {})
    built.binary.unlink()
    with pytest.raises(CacheMissError, match=f"nothing is built here; {built.folder}: {KERNEL.entry}.so is missing"):
        store_at(root, require_cached=True).get_or_build(KERNEL, FakeToolchain(), {})
    assert built.folder.exists()


def test_entries_size_and_clear(root: Path, tmp_path: Path) -> None:
    shipped = ship(tmp_path / "shipped", FakeToolchain())
    store = store_at(root, tmp_path / "shipped")
    built = [store.get_or_build(other_kernel(number), FakeToolchain(), {"spec": f"s{number}"}) for number in range(3)]
    entries = list(store.entries())
    assert entries[0] == shipped
    assert sorted(entries[1:], key=lambda entry: entry.manifest.about["spec"]) == built
    assert store.size == sum(entry.size for entry in entries)
    built[0].binary.unlink()
    (built[1].folder / "manifest.json").unlink()
    assert set(store.verify()) == {built[0].folder, built[1].folder}
    assert len(list(store.entries())) == 3
    assert store.clear() == 3
    assert list(store.entries()) == [shipped]
    assert sorted(path.name for path in root.iterdir()) == ["building", "locks"]
    assert store.clear() == 0


def test_collect_removes_waste_only(root: Path) -> None:
    store = store_at(root)
    built = store.get_or_build(KERNEL, FakeToolchain(), {})
    built.binary.unlink()
    assert store.get_or_build(KERNEL, FakeToolchain(), {}) is not None
    with pytest.raises(BuildError):
        store.get_or_build(other_kernel(1), FakeToolchain(failure=BuildError("no")), {})
    assert store.collect() == 2
    assert list(root.glob("damaged-*")) == []
    assert list((root / "failed").iterdir()) == []
    assert len(list(store.entries())) == 1


def test_clear_spares_running_builds(root: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    child = start(build, env={"ATTNGEN_CACHE_DIR": str(root)}, delay=0.5, marker=marker)
    while not marker.exists():
        time.sleep(0.005)
    assert store_at(root).clear() == 0
    report = child.report()
    assert report["warnings"] == []
    assert Path(report["folder"]).is_relative_to(root)


def in_threads(count: int, action: Callable[[int], object]) -> list[object]:
    """What ``action`` returns, or raises, in ``count`` threads that start together."""
    barrier = threading.Barrier(count)
    outcomes: list[object] = [None] * count

    def run(number: int) -> None:
        barrier.wait(10)
        try:
            outcomes[number] = action(number)
        except Exception as error:
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return outcomes


def test_sixteen_threads_build_once(root: Path) -> None:
    store = store_at(root)
    toolchain = FakeToolchain(delay=0.1)
    outcomes = in_threads(16, lambda number: store.get_or_build(KERNEL, toolchain, {}))
    assert toolchain.built == [KERNEL.entry]
    assert all(outcome == outcomes[0] and isinstance(outcome, Artifact) for outcome in outcomes)


def test_sixteen_stores_in_threads_build_once(root: Path) -> None:
    toolchain = FakeToolchain(delay=0.1)
    outcomes = in_threads(16, lambda number: store_at(root).get_or_build(KERNEL, toolchain, {}))
    assert toolchain.built == [KERNEL.entry]
    assert all(outcome == outcomes[0] and isinstance(outcome, Artifact) for outcome in outcomes)


def test_an_error_reaches_every_thread_and_the_next_call_tries_again(root: Path) -> None:
    store = store_at(root)
    failure = BuildError("the compiler failed")
    toolchain = FakeToolchain(delay=0.3, failure=failure)
    outcomes = in_threads(16, lambda number: store.get_or_build(KERNEL, toolchain, {}))
    assert all(outcome is failure for outcome in outcomes)
    assert toolchain.built == [KERNEL.entry]
    assert store.get_or_build(KERNEL, FakeToolchain(), {}).binary.exists()


@pytest.mark.usefixtures("temporary")
def test_threads_build_while_another_clears(root: Path) -> None:
    store = store_at(root)
    stop = threading.Event()

    def clear() -> None:
        while not stop.is_set():
            store.clear()
            time.sleep(0.002)

    cleaner = threading.Thread(target=clear)
    cleaner.start()
    try:
        outcomes = in_threads(
            8, lambda number: [store.get_or_build(other_kernel(number % 3), FakeToolchain(), {}) for _ in range(5)]
        )
    finally:
        stop.set()
        cleaner.join()
    for number, outcome in enumerate(outcomes):
        assert isinstance(outcome, list), outcome
        digests = {artifact.manifest.digest for artifact in outcome}
        assert digests == {source_digest(other_kernel(number % 3))}


def fork_during_a_build(root: Path) -> dict[str, Any]:
    """A child must not wait for a thread that only its parent has."""
    store = store_at(root)
    marker = root.with_name("marker")
    thread = threading.Thread(
        target=lambda: store.get_or_build(KERNEL, FakeToolchain(delay=0.5, marker=marker), {}),
    )
    thread.start()
    while not marker.exists():
        time.sleep(0.005)
    child = os.fork()
    if child == 0:
        artifact = store.get_or_build(KERNEL, FakeToolchain(failure=BuildError("built twice")), {})
        os._exit(0 if artifact.binary.exists() else 1)
    thread.join()
    return {"status": os.waitpid(child, 0)[1]}


def test_a_fork_does_not_wait_for_its_parents_threads(root: Path) -> None:
    assert start(fork_during_a_build, root=root).report(30) == {"status": 0}


def test_default_root_is_the_users_cache_folder(tmp_path: Path) -> None:
    home, xdg = tmp_path / "home", tmp_path / "xdg"
    home.mkdir(mode=0o700)
    by_home = start(build, env={"HOME": str(home)}).report()
    assert Path(by_home["folder"]).parents[1] == home / ".cache" / "attngen"
    by_xdg = start(build, env={"XDG_CACHE_HOME": str(xdg)}).report()
    assert Path(by_xdg["folder"]).parents[1] == xdg / "attngen"
    assert by_home["warnings"] == by_xdg["warnings"] == []


def test_relative_cache_dir_means_the_same_after_chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store.from_settings(Settings(cache_dir="cache"))
    monkeypatch.chdir("/")
    assert store.get_or_build(KERNEL, FakeToolchain(), {}).folder.parents[1] == tmp_path / "cache"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_toolchain_that_meets_a_full_disk(
    root: Path, temporary: Path, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    class Unlucky(FakeToolchain):
        def build(self, kernel: Any, folder: Path) -> Any:
            if folder.is_relative_to(root):
                raise OSError(number, os.strerror(number), str(folder))
            return super().build(kernel, folder)

    store = store_at(root)
    artifact = store.get_or_build(KERNEL, Unlucky(), {})
    assert artifact.folder.is_relative_to(temporary)
    assert store.get_or_build(KERNEL, FakeToolchain(), {}) == artifact
    assert store_at(root).get_or_build(other_kernel(1), Unlucky(), {}).folder.is_relative_to(temporary)
    (warning,) = warnings(caplog)
    assert os.strerror(number) in warning
    assert list((root / "building").iterdir()) == []
    assert len(list(store.entries())) == 2


class OpaqueCompiler(FakeToolchain):
    """Needs 1 MiB, and only says that it failed."""

    def build(self, kernel: Any, folder: Path) -> Any:
        try:
            (folder / "object").write_bytes(bytes(1 << 20))
        except OSError:
            raise BuildError("the compiler failed") from None
        return super().build(kernel, folder)


def build_on_a_full_disk(disk: Path) -> dict[str, Any]:
    """A warm and a cold kernel on a small disk without room; where mounts are not allowed, writes fail instead."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, recursive_private = 0x20000, 0x4000 | 0x40000
    real = (
        libc.unshare(new_mounts) == 0
        and libc.mount(b"none", b"/", None, recursive_private, None) == 0
        and libc.mount(b"tmpfs", str(disk).encode(), b"tmpfs", 0, b"size=6m") == 0
    )
    store = store_at(disk / "cache")
    store.get_or_build(KERNEL, FakeToolchain(), {})
    if real:
        with suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        os.truncate(disk / "filler", (disk / "filler").stat().st_size - (256 << 10))
    else:
        write = private.write_file

        def full(path: Path, data: bytes) -> None:
            if path.is_relative_to(disk):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            write(path, data)

        private.write_file = full
    warm = store.get_or_build(KERNEL, FakeToolchain(failure=BuildError("built twice")), {})
    report = build()
    return {"warm": warm.folder, "cold": store.get_or_build(other_kernel(1), OpaqueCompiler(), {}).folder, **report}


def test_full_disk(tmp_path: Path) -> None:
    disk, temporary = tmp_path / "disk", tmp_path / "tmp"
    disk.mkdir(mode=0o700)
    temporary.mkdir(mode=0o700)
    env = {"TMPDIR": str(temporary), "ATTNGEN_CACHE_DIR": str(disk / "cache")}
    report = start(build_on_a_full_disk, env=env, disk=disk).report()
    assert report["warm"].is_relative_to(disk)
    assert report["cold"].is_relative_to(temporary)
    assert list(temporary.iterdir()) == []


def build_without_any_folder(root: Path) -> dict[str, Any]:
    become_stranger()
    private.tempfile.tempdir = str(root / "nowhere")
    return build()


def test_no_folder_anywhere() -> None:
    with open_folder() as folder:
        folder.chmod(0o555)
        report = start(build_without_any_folder, env={"ATTNGEN_CACHE_DIR": str(folder)}, root=folder).report()
    assert report["error"].startswith(
        f"BuildError: kernel {KERNEL.entry} cannot be built: there is no folder to put it in"
    )
    assert "set ATTNGEN_CACHE_DIR, or TMPDIR, to a private, writable folder" in report["error"]
