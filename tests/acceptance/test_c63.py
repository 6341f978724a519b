"""C63: a failed compile shows hundreds of lines and no cause, and a compiler is demanded where nothing needs it.

The compiler here is that of C++, named by ``CXX``; no part of a CUDA toolkit is used, so ``CUDA_HOME`` means nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attngen as ag
from attngen.compiler import plan_op, render_kernel
from attngen.settings import Settings
from attngen.store import Store
from attngen.target import Target
from tests.acceptance.probes import declare

ROOT = Path(__file__).parents[2]
SPEC = declare(2, 1, dtype="fp32", mask=ag.Causal())
UNBUILT = declare(2, 1, 128, dtype="fp32", mask=ag.Causal())


@pytest.fixture(autouse=True)
def _cold_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "cache"))


def failure() -> ag.BuildError:
    with pytest.raises(ag.BuildError) as caught:
        ag.compile(SPEC, target="cpu", ops=("prefill",), backend="cpp")
    return caught.value


def log_of(error: ag.BuildError) -> str:
    """The text of the full log, whose path stands in the message."""
    path = Path(error.where.split("build log ")[1])
    assert str(path) in str(error)
    return path.read_text(encoding="utf-8")


def fake_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> Path:
    path = folder / "fake-cxx"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return path


def test_c63_a_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    message = str(failure())
    assert message.startswith("there is no C++ compiler\n")
    for part in ("CXX is not set", "g++", "PATH", "fix: install g++ or point CXX at a compiler"):
        assert part in message


def test_c63_b_malformed_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", ":/usr/local/bin/g++")
    assert "CXX is ':/usr/local/bin/g++'" in str(failure())
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("CUDA_HOME", ":/usr/local/cuda")
    ag.compile(SPEC, target="cpu", ops=("prefill",), backend="cpp")


def test_c63_c_compiler_with_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = ["note: hundreds of lines", "k.cpp:1:10: fatal error: x.h: No such file", "k.cpp:9:1: error: a later one"]
    path = fake_compiler(monkeypatch, tmp_path, "\n".join(f'echo "{line}" >&2' for line in lines) + "\nexit 1")
    error = failure()
    assert f"why: {lines[1]}\n" in str(error)
    assert str(path) in str(error)
    assert "exit status 1" in str(error)
    assert lines[0] not in str(error)
    assert all(line in log_of(error) for line in lines)


@pytest.mark.parametrize(
    "script", ["kill -9 $$", "exit 137", "echo 'c++: fatal error: Killed signal terminated program cc1plus'\nexit 1"]
)
def test_c63_d_compiler_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    path = fake_compiler(monkeypatch, tmp_path, script)
    error = failure()
    assert "fix: free some memory and try again" in str(error)
    assert str(path) in log_of(error)


def test_c63_e_nothing_is_installed(tmp_path: Path) -> None:
    ag.compile(SPEC, target="cpu", ops=("prefill",), backend="cpp")
    env = {name: value for name, value in os.environ.items() if name not in ("CXX", "CUDA_HOME")}
    env |= {"PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    program = "from tests.acceptance.test_c63 import work_without_toolchains as run; run()"
    child = subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr


def work_without_toolchains() -> None:
    """Everything but building, in a process that has neither a compiler nor triton."""
    sys.modules["triton"] = None  # type: ignore[assignment]
    assert ag.AttentionSpec.model_validate_json(SPEC.model_dump_json()) == SPEC
    for backend, target in (("cpp", "cpu"), ("triton", "cuda:sm90a")):
        for kernel in plan_op(SPEC, "prefill", Target.parse(target), backend).kernels:
            assert kernel.entry in render_kernel(kernel).source
    assert len(list(Store.from_settings(Settings.from_env()).entries())) == 2

    q, kv = torch.zeros(1, 3, 2, 64), torch.arange(3.0).view(1, 3, 1, 1).expand(1, 3, 1, 64).contiguous()
    out = ag.compile(SPEC, backend="cpp").prefill(q, kv, kv)
    assert torch.equal(out, torch.tensor([0.0, 0.5, 1.0]).view(1, 3, 1, 1).expand(out.shape))
    for backend, target, missing in (
        ("cpp", "cpu", "there is no C++ compiler"),
        ("triton", "cuda:sm90a", "there is no triton"),
    ):
        with pytest.raises(ag.BuildError, match=re.escape(missing)):
            ag.compile(UNBUILT, target=target, ops=("prefill",), backend=backend)
