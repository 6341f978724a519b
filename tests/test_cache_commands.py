"""The commands of ``attngen cache``."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from attngen.settings import Settings
from attngen.store import Artifact, Store
from attngen.store.manifest import FILE_NAME, Manifest
from attngen.target import Target
from tests.store.children import become_stranger, open_folder, start
from tests.store.toolchains import KERNEL, FakeToolchain, other_kernel
from tests.test_cli import fail, rows, run, succeed

HOUR = 3600


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNGEN_CACHE_PATH", raising=False)
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def store() -> Store:
    """A cache with two entries."""
    store = Store.from_settings(Settings.from_env())
    about = {"spec": "tiny", "op": "decode"}
    for kernel in (KERNEL, other_kernel(7)):
        store.get_or_build(kernel, FakeToolchain(), about)
    return store


def test_cache_ls(store: Store):
    header, *entries, total = rows(succeed("cache", "ls"))
    assert header == ["spec", "op", "entry", "target", "size", "age", "folder"]
    assert len(entries) == 2
    folders = {artifact.folder.parent.name[:12] for artifact in store.entries()}
    assert {entry[-1] for entry in entries} == folders
    for entry in entries:
        assert entry[:4] == ["tiny", "decode", KERNEL.entry, str(KERNEL.target)]
        assert re.fullmatch(r"\d+ s", entry[5])
    assert total == [f"2 entries, {store.size} bytes ({store.size / 1024:.1f} KiB)"]


def test_cache_clear_asks(store: Store, tmp_path: Path):
    size = store.size
    result = run("cache", "clear", text="n\n")
    assert result.exit_code == 1
    assert f"Remove 2 entries, {size} bytes ({size / 1024:.1f} KiB) from {tmp_path / 'cache'}?" in result.output
    assert len(list(store.entries())) == 2
    assert run("cache", "clear", text="y\n").exit_code == 0
    assert list(store.entries()) == []


def test_cache_clear_says_what_it_removed(store: Store, tmp_path: Path):
    size = store.size
    said = succeed("cache", "clear", "--yes")
    assert said == f"removed 2 entries, {size} bytes ({size / 1024:.1f} KiB) from {tmp_path / 'cache'}\n"
    assert succeed("cache", "clear", "--yes").startswith("removed 0 entries, 0 bytes")


def test_cache_clear_leaves_shipped_entries(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ATTNGEN_CACHE_PATH", str(tmp_path / "cache"))
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "own"))
    assert succeed("cache", "clear", "--yes").startswith("removed 0 entries")
    assert succeed("cache", "ls").count("tiny") == 2


def test_cache_verify_finds_damage(store: Store):
    assert succeed("cache", "verify") == "0 damaged entries\n"
    artifact = next(iter(store.entries()))
    artifact.binary.write_bytes(b"other")
    result = run("cache", "verify")
    assert result.exit_code == 1
    assert str(artifact.folder) in result.stdout
    assert "1 damaged entry\n" in result.stdout


def test_cache_gc_removes_leftovers(store: Store, tmp_path: Path):
    (tmp_path / "cache" / "damaged-0").mkdir()
    assert succeed("cache", "gc") == "removed 1 leftover\n"
    assert len(list(store.entries())) == 2


def test_an_untrusted_cache_is_an_error(tmp_path: Path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    assert "the cache folder" in fail("cache", "gc")


def test_why_names_the_flags_that_differ(store: Store):
    flags = ("-O2", "-fopenmp", "num_warps=4")
    other = store.get_or_build(replace(KERNEL, flags=(*flags, "-g")), FakeToolchain(), {})
    mine = store.get_or_build(replace(KERNEL, flags=flags), FakeToolchain(), {})
    four = store.get_or_build(replace(KERNEL, flags=(*flags[:2], "num_warps=8")), FakeToolchain(), {})
    order = store.get_or_build(replace(KERNEL, flags=(flags[1], flags[0], flags[2])), FakeToolchain(), {})
    assert explained(mine, other) == ["flag -g", "  (none)", "  -g"]
    assert explained(mine, four) == ["flag num_warps", "  num_warps=4", "  num_warps=8"]
    assert explained(mine, order) == ["order of flags", f"  {' '.join(flags)}", "  -fopenmp -O2 num_warps=4"]


def test_why_names_everything_that_differs(store: Store):
    mine = store.get_or_build(replace(KERNEL, source="one\ntwo [bold]\nthree\n"), FakeToolchain(), {})
    other = replace(
        KERNEL, source="one\n2\n3\n", entry="other", suffix=".cu", target=Target("cuda", "sm90a"), flags=KERNEL.flags
    )
    theirs = store.get_or_build(other, FakeToolchain("fake 2.0"), {})
    assert explained(mine, theirs) == [
        *("target", "  cpu:x86-64-v3", "  cuda:sm90a"),
        *("entry", f"  {KERNEL.entry}", "  other"),
        *("suffix", "  .cpp", "  .cu"),
        *("source, line 2, the first of 2 that differ", "  two [bold]", "  2"),
        *("toolchain", "  fake 1.0", "  fake 2.0"),
    ]


def test_why_finds_the_toolchain(store: Store):
    mine, theirs = (store.get_or_build(KERNEL, FakeToolchain(name), {}) for name in ("gcc 1", "clang 2"))
    digest = mine.folder.parent.name[:12]
    said = succeed("cache", "why", f"{digest}/gcc", f"{digest}/clang")
    assert said == "toolchain\n  gcc 1\n  clang 2\n"
    assert explained(theirs, theirs) == ["nothing: they are the same kernel, made by the same toolchain"]
    assert "names 3 entries" in fail("cache", "why", digest, digest)
    assert f"{digest}/{theirs.folder.name}" in fail("cache", "why", digest, digest)


def test_why_of_an_old_schema(store: Store):
    artifact = next(iter(store.entries()))
    (artifact.folder / FILE_NAME).write_bytes(Manifest(**{**vars(artifact.manifest), "schema": 0}).to_json())
    assert "manifest.json has schema 0, not 1" in fail("cache", "why", artifact.folder, artifact.folder)


def test_why_of_nothing(store: Store):
    for name in ("0" * 64, "", "/", "/etc", "é"):
        assert f"{name!r} names no entries" in fail("cache", "why", name, name)


def explained(first: Artifact, second: Artifact) -> list[str]:
    return succeed("cache", "why", first.folder, second.folder).splitlines()


def used(artifact: Artifact, hours: float) -> Artifact:
    """The entry as if it had been used so long ago."""
    before = artifact.folder.stat().st_mtime - artifact.idle - hours * HOUR
    os.utime(artifact.folder, (before, before))
    return artifact


@pytest.fixture
def five(store: Store) -> list[Artifact]:
    """Entries last used 5, 4, .. 1 days ago, built in the opposite order."""
    built = [store.get_or_build(other_kernel(number), FakeToolchain(), {}) for number in range(1, 6)]
    store.clear()
    return [
        used(store.get_or_build(other_kernel(number), FakeToolchain(), {}), 24 * number)
        for number in range(len(built), 0, -1)
    ]


def left(store: Store) -> set[Path]:
    return {artifact.folder for artifact in store.entries()}


def test_gc_by_age(store: Store, five: list[Artifact]):
    size = sum(artifact.size for artifact in five[:2])
    rest = sum(artifact.size for artifact in five[2:])
    said = succeed("cache", "gc", "--max-age", "84h").splitlines()
    assert said[1].startswith(f"removed 2 entries, {size} bytes (")
    assert said[1].endswith(f"; 3 entries, {rest} bytes ({rest / 1024:.1f} KiB) stay")
    assert left(store) == {artifact.folder for artifact in five[2:]}
    assert not any(artifact.folder.parent.exists() for artifact in five[:2])


def test_gc_by_size_takes_those_used_least_recently(store: Store, five: list[Artifact]):
    room = five[3].size + five[4].size
    succeed("cache", "gc", "--max-size", str(room))
    assert left(store) == {artifact.folder for artifact in five[3:]}
    succeed("cache", "gc", "--max-size", "1 GiB", "--max-age", "9w")
    assert len(left(store)) == 2
    succeed("cache", "gc", "--max-size", "0")
    assert left(store) == set()


def test_looking_an_entry_up_counts_as_use(store: Store, five: list[Artifact]):
    """Whatever the file system does with access times: the time of the folder is set, at most once an hour."""
    oldest = five[0]
    assert store.find(other_kernel(5), "fake 1.0") == oldest
    assert oldest.idle < 60
    noted = oldest.folder.stat().st_mtime_ns
    assert store.find(other_kernel(5), "fake 1.0") == oldest
    assert oldest.folder.stat().st_mtime_ns == noted
    assert oldest.age < 60  # of the build, which is another thing
    succeed("cache", "gc", "--max-age", "2d")
    assert left(store) == {oldest.folder, five[4].folder}


def test_use_of_shipped_entries_is_not_noted(store: Store, five: list[Artifact], monkeypatch: pytest.MonkeyPatch):
    shipped = Store.from_settings(Settings(cache_path=(os.environ["ATTNGEN_CACHE_DIR"],)))
    assert shipped.find(other_kernel(5), "fake 1.0") == five[0]
    assert five[0].idle > 4 * 24 * HOUR


def look_up_and_trim(root: Path) -> dict[str, object]:
    become_stranger()
    store = Store.from_settings(Settings(cache_dir=str(root)))
    found = store.find(KERNEL, "fake 1.0")
    try:
        store.trim(max_size=0, max_age=None)
    except Exception as error:
        return {"found": found is not None, "error": str(error)}
    return {"found": found is not None, "error": ""}


def test_a_cache_that_cannot_be_written(tmp_path: Path):
    with open_folder() as folder:
        root = folder / "cache"
        artifact = used(
            Store.from_settings(Settings(cache_dir=str(root))).get_or_build(KERNEL, FakeToolchain(), {}), 48
        )
        for path in (root, *root.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        report = start(look_up_and_trim, root=root).report()
        assert report["found"]
        assert f"the cache folder {root} cannot be changed" in report["error"]
        assert artifact.idle > HOUR


@pytest.mark.parametrize(
    ("option", "text"),
    [("--max-size", "big"), ("--max-size", "-1"), ("--max-size", "3 days"), ("--max-age", "2G"), ("--max-age", "1e3s")],
)
def test_quantities(option: str, text: str):
    assert f"{option} is {text!r}" in fail("cache", "gc", f"{option}={text}")
