from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attngen.store import private
from tests.store.children import STRANGER, Child, start

IS_ROOT = os.geteuid() == 0


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("bits", [0o700, 0o500, 0o755, 0o555])
def test_trusts_what_only_its_user_can_write(tmp_path: Path, bits: int) -> None:
    tmp_path.chmod(bits)
    assert private.distrust(tmp_path) is None


@pytest.mark.parametrize("bits", [0o770, 0o702, 0o777, 0o1777])
def test_distrusts_what_others_can_write(tmp_path: Path, bits: int) -> None:
    tmp_path.chmod(bits)
    assert private.distrust(tmp_path) == f"others may write to it (mode {bits:04o})"


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Let ``path`` belong to another user than this process; the uids of both. Root alone can do so for real."""
    if IS_ROOT:
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
        return STRANGER, 0
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    return own, own + 1


def test_distrusts_foreign_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch(mode=0o600)
    owner, process = give_away(file, monkeypatch)
    assert private.distrust(file) == f"it belongs to uid {owner}, and this process runs as uid {process}"


def test_distrusts_links_where_none_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to("folder")
    assert private.distrust(link) == "it is a symbolic link"
    assert private.distrust(link, follow=True) is None
    (tmp_path / "folder").chmod(0o777)
    assert private.distrust(link, follow=True) == "others may write to it (mode 0777)"
    (tmp_path / "folder").rmdir()
    assert private.distrust(link, follow=True) == "it is a symbolic link that leads nowhere: No such file or directory"
    owner, _ = give_away(link, monkeypatch)
    assert private.distrust(link, follow=True) == f"it is a symbolic link that belongs to uid {owner}"


@pytest.mark.usefixtures("no_umask")
def test_folders_and_files_are_private_without_umask(tmp_path: Path) -> None:
    private.make_folder(tmp_path / "a" / "b" / "c")
    private.write_file(tmp_path / "a" / "file", b"1")
    assert [mode(tmp_path / name) for name in ("a", "a/b", "a/b/c", "a/file")] == [0o700, 0o700, 0o700, 0o600]


def test_make_folder_leaves_existing_ones(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(mode=0o755)
    private.make_folder(tmp_path / "a")
    assert mode(tmp_path / "a") == 0o755
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        private.make_folder(tmp_path / "file")
    with pytest.raises(NotADirectoryError):
        private.make_folder(tmp_path / "file" / "below")


def test_write_file_replaces_links_and_follows_none(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("gold")
    (tmp_path / "link").symlink_to("precious")
    private.write_file(tmp_path / "link", b"lead")
    assert (tmp_path / "precious").read_text() == "gold"
    assert not (tmp_path / "link").is_symlink()


@pytest.mark.usefixtures("no_umask")
def test_seal_folder(tmp_path: Path) -> None:
    build = tmp_path / "build"
    (build / "sub").mkdir(parents=True)
    (build / "sub" / "file").touch()
    (build / "program").touch(mode=0o777)
    (tmp_path / "outside").touch()
    (build / "link").symlink_to(tmp_path / "outside")
    os.mkfifo(build / "pipe")
    assert private.seal_folder(build) == [build / "program", build / "sub" / "file"]
    assert [mode(build / name) for name in ("sub", "program", "sub/file")] == [0o700, 0o700, 0o600]
    assert sorted(path.name for path in build.iterdir()) == ["program", "sub"]
    assert mode(tmp_path / "outside") == 0o666


def test_private_folder_is_gone_afterwards(tmp_path: Path) -> None:
    with private.private_folder(tmp_path) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").touch()
        assert mode(folder) == 0o700
    assert list((tmp_path / "building").iterdir()) == []
    with pytest.raises(ZeroDivisionError), private.private_folder(tmp_path) as folder:
        raise ZeroDivisionError
    assert list((tmp_path / "building").iterdir()) == []


def test_private_folder_may_be_renamed_away(tmp_path: Path) -> None:
    with private.private_folder(tmp_path) as folder:
        folder.rename(tmp_path / "published")
    assert (tmp_path / "published").is_dir()
    assert list((tmp_path / "building").iterdir()) == []


def test_private_folder_needs_a_private_place(tmp_path: Path) -> None:
    (tmp_path / "building").mkdir()
    (tmp_path / "building").chmod(0o777)
    with pytest.raises(PermissionError, match="others may write to it"), private.private_folder(tmp_path):
        pass


def hold_private_folder(root: Path, marker: Path) -> dict[str, Any]:
    with private.private_folder(root) as folder:
        (folder / "half").touch()
        marker.touch()
        time.sleep(60)
    return {}


def test_collects_the_dead_and_spares_the_living(tmp_path: Path) -> None:
    children: list[Child] = []
    for number in range(2):
        children.append(start(hold_private_folder, root=tmp_path, marker=tmp_path / f"marker{number}"))
        while not (tmp_path / f"marker{number}").exists():
            time.sleep(0.005)
    with private.private_folder(tmp_path) as own:
        assert private.collect_leftovers(tmp_path) == 0
        children[0].kill_group()
        assert private.collect_leftovers(tmp_path) == 1
        assert len(list((tmp_path / "building").iterdir())) == 4
        assert own.is_dir()
    children[1].kill_group()
    assert private.collect_leftovers(tmp_path) == 1
    assert list((tmp_path / "building").iterdir()) == []


def test_collects_a_guard_whose_folder_was_never_made(tmp_path: Path) -> None:
    (tmp_path / "building").mkdir()
    (tmp_path / "building" / "0123.lock").touch()
    assert private.collect_leftovers(tmp_path) == 0
    assert list((tmp_path / "building").iterdir()) == []


def test_making_and_collecting_at_once(tmp_path: Path) -> None:
    """A collector never takes the folder of a live build, not even one that is just being made."""
    stop = threading.Event()

    def collect() -> None:
        while not stop.is_set():
            private.collect_leftovers(tmp_path)

    collector = threading.Thread(target=collect)
    collector.start()
    try:
        for number in range(200):
            with private.private_folder(tmp_path) as folder:
                (folder / "file").write_text(str(number))
                assert (folder / "file").read_text() == str(number)
    finally:
        stop.set()
        collector.join()
    assert list((tmp_path / "building").iterdir()) == []


def test_key_lock_excludes_and_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "attngen")
    path = tmp_path / "locks" / "key.lock"
    with private.key_lock(path, 60.0):
        assert mode(path) == 0o600
        waited = impatient(path)
    assert waited == "went ahead"
    assert [record.getMessage() for record in caplog.records] == [
        f"attngen waits up to 0 s for another build, which holds {path}",
        f"attngen builds without {path}, held by another process for over 0 s",
    ]
    assert path.exists()
    caplog.clear()
    assert impatient(path) == "went ahead"
    assert caplog.records == []


def impatient(path: Path) -> str:
    """Take the lock in another thread, but wait next to nothing."""
    outcome = []

    def take() -> None:
        with private.key_lock(path, 0.1):
            outcome.append("went ahead")

    thread = threading.Thread(target=take)
    thread.start()
    thread.join(10)
    return outcome[0]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_file_systems_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    with private.key_lock(tmp_path / "key.lock", 1.0), private.private_folder(tmp_path) as folder:
        assert private.collect_leftovers(tmp_path) == 0
        assert folder.is_dir()
    assert not folder.exists()


def test_locks_that_cannot_be_made_are_errors(tmp_path: Path) -> None:
    (tmp_path / "locks").touch()
    with pytest.raises(FileExistsError), private.key_lock(tmp_path / "locks" / "key.lock", 1.0):
        pass


@pytest.fixture
def own_temporary_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(private, "_temporary", {})


@pytest.mark.usefixtures("own_temporary_folders")
def test_one_temporary_root_and_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert private.temporary_root() is None
    root = private.make_temporary_root("the disk is full")
    assert mode(root) == 0o700
    assert private.make_temporary_root("another reason") == private.temporary_root() == root
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (
            logging.WARNING,
            f"attngen keeps compiled kernels in {root}, until this process ends: the disk is full. "
            "Set ATTNGEN_CACHE_DIR to a private, writable folder to keep them.",
        )
    ]


def make_root_and_fork(tmp: Path) -> dict[str, Any]:
    """A fork neither shares this process's temporary root nor removes it."""
    private.LOG.setLevel(logging.ERROR)
    mine = private.make_temporary_root("test")
    (mine / "kernel").touch()
    child = os.fork()
    if child == 0:
        other = private.temporary_root() is None and private.make_temporary_root("test") != mine
        private.shutil.rmtree(private.make_temporary_root("test"))
        os._exit(0 if other else 1)
    _, status = os.waitpid(child, 0)
    return {"status": status, "kept": (mine / "kernel").exists(), "root": mine}


def test_a_fork_has_its_own_temporary_root(tmp_path: Path) -> None:
    report = start(make_root_and_fork, env={"TMPDIR": str(tmp_path)}, tmp=tmp_path).report()
    assert report["status"] == 0
    assert report["kept"]
    assert list(tmp_path.iterdir()) == []
