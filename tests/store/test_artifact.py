from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from attngen.settings import Settings
from attngen.store import Artifact, Store
from attngen.store.manifest import FILE_NAME, Manifest
from tests.store.toolchains import KERNEL, FakeToolchain, other_kernel


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def replace_by_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("in the way")


def other_entry(artifact: Artifact) -> None:
    """A whole and sound entry of another kernel in the place of this one."""
    store = Store.from_settings(Settings(cache_dir=str(artifact.folder.parents[2] / "other")))
    other = store.get_or_build(other_kernel(1), FakeToolchain(), {})
    shutil.rmtree(artifact.folder)
    shutil.copytree(other.folder, artifact.folder)


DAMAGES: dict[str, tuple[Callable[[Artifact], object], str]] = {
    "binary shortened": (lambda a: a.binary.write_bytes(b""), " has 0 bytes instead of "),
    "binary flipped": (lambda a: flip(a.binary), ".so does not match its checksum"),
    "binary missing": (lambda a: a.binary.unlink(), ".so is missing"),
    "binary writable": (lambda a: a.binary.chmod(0o666), ".so: others may write to it (mode 0666)"),
    "binary link": (lambda a: replace_by_link(a.binary), ".so: it is a symbolic link"),
    "source shortened": (lambda a: a.source.write_text("x"), ".cpp has 1 bytes instead of "),
    "source missing": (lambda a: a.source.unlink(), ".cpp is missing"),
    "log missing": (lambda a: (a.folder / "build.log").unlink(), "build.log is missing"),
    "stage missing": (lambda a: shutil.rmtree(a.folder / "stages"), "stages/kernel.ptx is missing"),
    "manifest missing": (lambda a: (a.folder / FILE_NAME).unlink(), "manifest.json is missing"),
    "manifest empty": (lambda a: (a.folder / FILE_NAME).write_bytes(b""), "manifest.json cannot be read"),
    "manifest flipped": (lambda a: flip(a.folder / FILE_NAME), "manifest.json "),
    "manifest of old schema": (
        lambda a: (a.folder / FILE_NAME).write_bytes(
            Manifest(**{**vars(a.manifest), "schema": 0}).to_json(),
        ),
        "manifest.json has schema 0, not 1",
    ),
    "folder empty": (lambda a: [shutil.rmtree(a.folder), a.folder.mkdir()], "manifest.json is missing"),
    "folder writable": (lambda a: a.folder.chmod(0o777), "others may write to it (mode 0777)"),
    "folder link": (lambda a: replace_by_link(a.folder), "it is a symbolic link"),
    "folder a file": (lambda a: replace_by_file(a.folder), "manifest.json is missing"),
    "parent writable": (lambda a: a.folder.parent.chmod(0o777), "others may write to it (mode 0777)"),
    "parent a file": (lambda a: replace_by_file(a.folder.parent), "is not a folder"),
    "another entry": (other_entry, "manifest.json belongs to digest "),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entry_is_moved_aside_and_built_again(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "cache"
    store = Store.from_settings(Settings(cache_dir=str(root)))
    toolchain = FakeToolchain()
    before = store.get_or_build(KERNEL, toolchain, {"spec": "x"})
    spoil, reason = DAMAGES[damage]
    spoil(before)

    assert store.find(KERNEL, toolchain.name) is None
    assert list(root.glob("damaged-*")) == []  # looking changes nothing
    caplog.clear()
    after = store.get_or_build(KERNEL, toolchain, {"spec": "x"})
    assert len(toolchain.built) == 2
    assert after.folder == before.folder
    assert after.binary.read_bytes() == b"whole " + KERNEL.source.encode()
    assert store.find(KERNEL, toolchain.name) == after
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    (aside,) = root.glob("damaged-*")
    assert warning.startswith(f"attngen found a damaged cache entry, moved it to {aside} and builds it again: ")
    assert reason in warning
    assert after.folder not in store.verify()


def test_verify_reads_every_file(tmp_path: Path) -> None:
    store = Store.from_settings(Settings(cache_dir=str(tmp_path / "cache")))
    artifact = store.get_or_build(KERNEL, FakeToolchain(), {})
    assert store.verify() == {}
    flip(artifact.folder / "stages" / "kernel.ptx")
    assert store.find(KERNEL, "fake 1.0") == artifact  # not what is loaded
    assert store.verify() == {artifact.folder: "stages/kernel.ptx does not match its checksum"}


def test_an_artifact_is_a_folder_a_person_can_read(tmp_path: Path) -> None:
    store = Store.from_settings(Settings(cache_dir=str(tmp_path / "cache")))
    artifact = store.get_or_build(KERNEL, FakeToolchain(), {"spec": "x"})
    assert sorted(path.relative_to(artifact.folder).as_posix() for path in artifact.folder.rglob("*")) == [
        "build.log",
        f"{KERNEL.entry}.cpp",
        f"{KERNEL.entry}.so",
        "manifest.json",
        "stages",
        "stages/kernel.ptx",
    ]
    assert artifact.source.read_text() == KERNEL.source
    assert (artifact.folder / "build.log").read_text() == "fake: all went well\n"
    assert artifact.size == sum(
        path.stat().st_size for path in artifact.folder.rglob("*") if path.is_file() and path.name != FILE_NAME
    )
    assert 0 <= artifact.age < 60
