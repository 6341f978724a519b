"""Which ptxas is chosen, and what is known of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import attngen as ag
from attngen.backends import ptxas


def _write(path: Path, version: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    banner = f"Cuda compilation tools, release {version.rpartition('.')[0]}, V{version}\n".encode()
    path.write_bytes(b"\x7fELF" + bytes(100) + banner + bytes(50) + b"Cuda compilation tools, release %s")
    path.chmod(0o700)
    return path


@pytest.fixture
def triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Triton with the assemblers of 3.6, and no other in sight."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(ptxas, "_TOOLKIT", tmp_path / "cuda" / "ptxas")
    monkeypatch.setattr(ptxas, "find_spec", lambda name: None)
    folder = tmp_path / "triton"
    _write(folder / "backends/nvidia/bin/ptxas", "12.8.93")
    _write(folder / "backends/nvidia/bin/ptxas-blackwell", "12.9.86")
    return folder


def test_the_newest_is_taken(triton: Path, tmp_path: Path) -> None:
    assert ptxas.choose_ptxas(None, triton).identity == "12.9.86"
    toolkit = _write(tmp_path / "cuda" / "ptxas", "13.0.88")
    assert ptxas.choose_ptxas(None, triton) == ptxas.Ptxas(toolkit, (13, 0, 88), "13.0.88")
    on_path = _write(tmp_path / "bin" / "ptxas", "13.10.1")
    assert ptxas.choose_ptxas(None, triton).path == on_path


def test_one_of_a_later_cuda_is_not_taken(triton: Path, tmp_path: Path) -> None:
    _write(tmp_path / "bin" / "ptxas", "14.0.1")
    assert ptxas.choose_ptxas(None, triton).identity == "12.9.86"


def test_a_script_is_taken_only_when_named(triton: Path, tmp_path: Path) -> None:
    script = tmp_path / "bin" / "ptxas"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\nexec elsewhere/ptxas\n")
    script.chmod(0o700)
    assert ptxas.choose_ptxas(None, triton).identity == "12.9.86"
    named = ptxas.choose_ptxas(str(script), triton)
    assert (named.path, named.version) == (script, ())


def test_the_identity_of_a_script_is_its_path_size_and_time(triton: Path, tmp_path: Path) -> None:
    script = tmp_path / "ptxas"
    script.write_text("#!/bin/sh\n")
    os.utime(script, ns=(1, 1))
    first = ptxas.identify(script).identity
    assert ptxas.identify(script).identity == first
    os.utime(script, ns=(1, 2))
    second = ptxas.identify(script).identity
    script.write_text("#!/bin/sh\n\n")
    os.utime(script, ns=(1, 2))
    assert len({first, second, ptxas.identify(script).identity}) == 3


def test_a_replaced_file_is_read_again(tmp_path: Path) -> None:
    path = _write(tmp_path / "ptxas", "13.0.88")
    assert ptxas.identify(path).version == (13, 0, 88)
    _write(path, "13.1.80")
    os.utime(path, ns=(5, 5))
    assert ptxas.identify(path).version == (13, 1, 80)


def test_a_missing_choice_is_an_error(triton: Path) -> None:
    with pytest.raises(ag.BuildError, match="there is no ptxas where ATTNGEN_PTXAS says") as error:
        ptxas.choose_ptxas("/nowhere/ptxas", triton)
    assert error.value.where == "ATTNGEN_PTXAS=/nowhere/ptxas"
