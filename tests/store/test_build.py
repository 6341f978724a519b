from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from attngen.codegen.render import RenderedKernel
from attngen.codegen.toolchain import BuildResult
from attngen.errors import BuildError
from attngen.settings import Settings
from attngen.store import Store, entry_path, source_digest
from attngen.store.key import SCHEMA
from tests.store.toolchains import KERNEL, FakeToolchain


def store_at(root: Path, lock_timeout: float = 60.0) -> Store:
    return Store.from_settings(Settings(cache_dir=str(root), lock_timeout=lock_timeout))


def test_manifest_tells_all(tmp_path: Path) -> None:
    about = {"spec": "gemma2-local", "op": "decode", "explain": "attngen explain gemma2-local --op decode"}
    artifact = store_at(tmp_path / "cache").get_or_build(KERNEL, FakeToolchain(delay=0.05), about)
    manifest = artifact.manifest
    assert artifact.folder == entry_path(tmp_path / "cache", KERNEL, "fake 1.0")
    assert manifest.schema == SCHEMA
    assert manifest.digest == source_digest(KERNEL)
    assert (manifest.entry, manifest.target, manifest.flags) == (KERNEL.entry, str(KERNEL.target), KERNEL.flags)
    assert manifest.fingerprint == "fake 1.0"
    assert manifest.metadata == {"num_warps": 4, "shape": [64, 128]}
    assert manifest.about == about
    assert 0.05 <= manifest.build_seconds < 5
    assert set(manifest.files) == {"build.log", f"{KERNEL.entry}.cpp", f"{KERNEL.entry}.so", "stages/kernel.ptx"}


def test_toolchain_finds_only_the_source(tmp_path: Path) -> None:
    seen = {}

    class Curious(FakeToolchain):
        def build(self, kernel: RenderedKernel, folder: Path) -> BuildResult:
            seen.update({path.name: path.read_text() for path in folder.iterdir()})
            seen["root"] = str(folder.parents[1])
            return super().build(kernel, folder)

    store_at(tmp_path / "cache").get_or_build(KERNEL, Curious(), {})
    assert seen == {f"{KERNEL.entry}.cpp": KERNEL.source, "root": str(tmp_path / "cache")}


@pytest.mark.parametrize("log", ["error: expected ';'\n", ""])
def test_failed_build_keeps_its_log_and_nothing_else(tmp_path: Path, log: str) -> None:
    failure = BuildError("the compiler failed", where="kernel.cpp:3", why="expected ';'", fix="report it")
    failure.log = log
    root = tmp_path / "cache"
    with pytest.raises(BuildError) as caught:
        store_at(root).get_or_build(KERNEL, FakeToolchain(failure=failure), {})
    kept = root / "failed" / f"{source_digest(KERNEL)}.log"
    message = "the compiler failed\n  where: kernel.cpp:3{}\n  why: expected ';'\n  fix: report it"
    assert str(caught.value) == message.format(f"; build log {kept}")
    assert kept.read_text() == (log or message.format(""))
    assert kept.stat().st_mode & 0o077 == 0
    assert list((root / "building").iterdir()) == []
    assert store_at(root).find(KERNEL, "fake 1.0") is None
    assert store_at(root).get_or_build(KERNEL, FakeToolchain(), {}).binary.exists()


def test_bug_in_a_toolchain_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        store_at(tmp_path).get_or_build(KERNEL, FakeToolchain(failure=ZeroDivisionError()), {})
    assert list((tmp_path / "building").iterdir()) == []
    assert not (tmp_path / "failed").exists()


def test_toolchain_that_cannot_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    failure = FileNotFoundError(errno.ENOENT, "No such file or directory", "c++")
    with pytest.raises(BuildError, match=r"the toolchain of cpu:x86-64-v3 cannot run(.|\n)*No such file.*'c\+\+'"):
        store_at(tmp_path).get_or_build(KERNEL, FakeToolchain(failure=failure), {})
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_binary_that_was_never_written(tmp_path: Path) -> None:
    class Forgetful(FakeToolchain):
        def build(self, kernel: RenderedKernel, folder: Path) -> BuildResult:
            return BuildResult("kernel.cubin")

    with pytest.raises(BuildError, match=r"the toolchain left no 'kernel.cubin' for decode_causal"):
        store_at(tmp_path).get_or_build(KERNEL, Forgetful(), {})
    assert store_at(tmp_path).find(KERNEL, "fake 1.0") is None


@dataclass
class OvertakenToolchain(FakeToolchain):
    """While it builds, another builder, which did not wait for the lock, publishes the same entry."""

    root: Path = Path()
    after: Callable[[Path], object] = field(default=lambda folder: None)

    def build(self, kernel: RenderedKernel, folder: Path) -> BuildResult:
        def overtake() -> None:
            hasty = store_at(self.root, lock_timeout=0.0)
            self.after(hasty.get_or_build(kernel, FakeToolchain(), {"by": "other"}).folder)

        thread = threading.Thread(target=overtake)
        thread.start()
        thread.join(10)
        return super().build(kernel, folder)


def test_loser_of_a_race_uses_the_winner(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    artifact = store_at(tmp_path).get_or_build(KERNEL, OvertakenToolchain(root=tmp_path), {"by": "me"})
    assert artifact.manifest.about == {"by": "other"}
    assert list((tmp_path / "building").iterdir()) == []
    assert list(tmp_path.glob("damaged-*")) == []
    (warning,) = [record.getMessage() for record in caplog.records if "for another build" in record.getMessage()]
    assert str(next((tmp_path / "locks").iterdir())) in warning


def test_loser_of_a_race_replaces_a_damaged_winner(tmp_path: Path) -> None:
    toolchain = OvertakenToolchain(root=tmp_path, after=lambda folder: (folder / "manifest.json").unlink())
    artifact = store_at(tmp_path).get_or_build(KERNEL, toolchain, {"by": "me"})
    assert artifact.manifest.about == {"by": "me"}
    assert len(list(tmp_path.glob("damaged-*"))) == 1
    assert store_at(tmp_path).verify() == {}


def test_every_build_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "attngen")
    for _ in range(3):
        store_at(tmp_path).get_or_build(KERNEL, FakeToolchain(), {})
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == f"attngen build {KERNEL.entry} for cpu:x86-64-v3 ({source_digest(KERNEL)})"
    assert lines[1].startswith(f"attngen built {KERNEL.entry} in ")
    assert len(lines) == 2
