"""C55: no home, an unknown user, a read-only cache: the cache is an optimization, and nothing depends on it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import attngen
from tests.store.children import DECODE_KERNELS, DECODED, build, decode, open_folder, start


def assert_temporary(report: dict[str, Any], tmp: Path) -> None:
    """It worked in a private temporary folder, said so once, and left nothing."""
    assert report.get("result") == 7, report
    assert report["builds"] == 1
    (warning,) = report["warnings"]
    root = Path(report["folder"]).parents[1]
    assert root.parent == tmp
    assert warning.startswith(f"attngen keeps compiled kernels in {root}, until this process ends: ")
    assert "Set ATTNGEN_CACHE_DIR" in warning
    assert list(tmp.iterdir()) == []


@pytest.mark.parametrize("env", [{}, {"HOME": ""}, {"HOME": "/"}, {"HOME": "/nonexistent"}, {"HOME": "not/absolute"}])
def test_c55_a_b_without_a_home(tmp_path: Path, env: dict[str, str]) -> None:
    report = start(build, env=env | {"TMPDIR": str(tmp_path)}, compiler=True).report()
    assert_temporary(report, tmp_path)
    assert not Path("/nonexistent").exists()


def test_c55_first_call_without_a_home(tmp_path: Path) -> None:
    report = start(decode, env={"TMPDIR": str(tmp_path)}).report()
    assert report.items() >= DECODED.items()
    assert len(report["builds"]) == DECODE_KERNELS
    assert len(report["warnings"]) == 1
    assert list(tmp_path.iterdir()) == []


def test_c55_import_never_fails() -> None:
    program = (
        "import pwd\n"
        "def unknown(uid):\n"
        "    raise KeyError(f'getpwuid(): uid not found: {uid}')\n"
        "pwd.getpwuid = unknown\n"
        "import attngen\n"
    )
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(attngen.__file__).parents[1])}
    subprocess.run([sys.executable, "-W", "error", "-c", program], env=env, check=True)


def test_c55_c_unknown_user() -> None:
    with open_folder() as open_tmp:
        report = start(build, env={"TMPDIR": str(open_tmp)}, compiler=True, stranger=True).report()
        assert_temporary(report, open_tmp)


def test_c55_d_read_only_and_warm() -> None:
    with open_folder() as open_tmp:
        cache = open_tmp / "cache"
        warm = start(build, env={"ATTNGEN_CACHE_DIR": str(cache)}, compiler=True).report()
        make_read_only(cache)
        before = listing(cache)
        env = {"ATTNGEN_CACHE_DIR": str(cache), "TMPDIR": str(open_tmp)}
        report = start(build, env=env, compiler=True, stranger=True).report()
        assert report["result"] == 7
        assert report["folder"] == warm["folder"]
        assert (report["builds"], report["warnings"]) == (0, [])
        assert listing(cache) == before


def test_c55_e_read_only_and_cold() -> None:
    with open_folder() as open_tmp:
        cache, tmp = open_tmp / "cache", open_tmp / "tmp"
        cache.mkdir()
        make_read_only(cache)
        tmp.mkdir()
        tmp.chmod(0o1777)
        env = {"ATTNGEN_CACHE_DIR": str(cache), "TMPDIR": str(tmp)}
        report = start(build, env=env, compiler=True, stranger=True).report()
        assert_temporary(report, tmp)
        assert "Permission denied" in report["warnings"][0]
        assert list(cache.iterdir()) == []


def make_read_only(folder: Path) -> None:
    """Nobody but root may write, and the child is not root."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_mode) for path in folder.rglob("*")}
