"""C61: a predictable shared folder lets another user plant code that is then executed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.store.children import DECODED, STRANGER, build, decode, open_folder, start

IS_ROOT = os.geteuid() == 0


def test_c61_a_private_whatever_the_umask(tmp_path: Path) -> None:
    home, tmp = tmp_path / "home", tmp_path / "tmp"
    home.mkdir(mode=0o700)
    tmp.mkdir(mode=0o700)
    env = {"HOME": str(home), "TMPDIR": str(tmp)}
    assert start(decode, env=env, umask=0).report().items() >= DECODED.items()
    assert list(home.glob(".cache/attngen/*/*/manifest.json")) != []
    made = list(home.rglob("*"))
    assert made
    for path in made:
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == 0o700 if path.is_dir() else mode & 0o022 == 0, (path, oct(mode))


@pytest.mark.parametrize("fault", ["mode", "owner"])
def test_c61_b_folder_open_to_others(tmp_path: Path, fault: str) -> None:
    home, tmp = tmp_path / "home", tmp_path / "tmp"
    cache = home / ".cache" / "attngen"
    cache.mkdir(parents=True, mode=0o700)
    tmp.mkdir(mode=0o700)
    spoil(cache, fault)

    as_default = start(build, env={"HOME": str(home), "TMPDIR": str(tmp)}, compiler=True).report()
    assert as_default["result"] == 7
    assert as_default["folder"].startswith(f"{tmp}/attngen-")
    assert len(as_default["warnings"]) == 1

    by_name = start(build, env={"ATTNGEN_CACHE_DIR": str(cache)}, compiler=True).report()
    assert by_name["error"].startswith(
        f"AttngenError: the cache folder {cache} is refused\n  where: ATTNGEN_CACHE_DIR\n"
    )
    assert "point ATTNGEN_CACHE_DIR to a private folder (chmod 700)" in by_name["error"]
    assert list(cache.iterdir()) == []


def spoil(cache: Path, fault: str) -> None:
    if fault == "owner" and IS_ROOT:
        os.chown(cache, STRANGER, STRANGER)
    else:  # only root can give a folder away
        cache.chmod(0o777)


@pytest.mark.parametrize("content", [b"precious", None])
def test_c61_c_link_to_elsewhere(tmp_path: Path, content: bytes | None) -> None:
    home, tmp, elsewhere = tmp_path / "home", tmp_path / "tmp", tmp_path / "elsewhere"
    tmp.mkdir(mode=0o700)
    if content is not None:
        elsewhere.write_bytes(content)
    cache = home / ".cache" / "attngen"
    cache.parent.mkdir(parents=True, mode=0o700)
    cache.symlink_to(elsewhere)

    as_default = start(build, env={"HOME": str(home), "TMPDIR": str(tmp)}, compiler=True).report()
    assert as_default["result"] == 7
    assert as_default["folder"].startswith(f"{tmp}/attngen-")
    by_name = start(build, env={"ATTNGEN_CACHE_DIR": str(cache)}, compiler=True).report()
    assert by_name["error"].startswith(f"AttngenError: the cache folder {cache} is refused\n")
    assert cache.is_symlink()
    assert elsewhere.read_bytes() == content if content is not None else not elsewhere.exists()


def test_c61_d_two_users_on_one_host() -> None:
    with open_folder() as open_tmp:
        env = {"TMPDIR": str(open_tmp)}
        first = start(build, env=env, compiler=True)
        second = start(build, env=env, compiler=True, stranger=True)
        reports = [first.report(), second.report()]
        assert [report["result"] for report in reports] == [7, 7]
        assert reports[0]["folder"] != reports[1]["folder"]
        assert list(open_tmp.iterdir()) == []
