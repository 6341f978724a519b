"""A deployment: what is compiled, by several processes, into a cache that is shipped to machines without toolchains."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import signal
import stat
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import attngen as ag
from attngen import builds, compiler, target, workers
from attngen.builds import Job, build_all
from attngen.deployment import wanted
from tests.store.children import start
from tests.test_cli import fail, paged, rows, run, spec_file, succeed

# On Hopper, decode of int8 caches is CUDA's, and the merge of its parts Triton's.
SPEC = ag.AttentionSpec(
    name="mixed", heads=ag.GQA(4, 2, 64), mask=ag.Causal(), dtype="bf16", kv=ag.Paged(page_size=16, dtype="int8")
)
CPU = str(target.Target.parse("cpu"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATTNGEN_BACKEND", "ATTNGEN_CACHE_PATH", "ATTNGEN_OVERRIDE_DIR", "CXX", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "cache"))


def decoded() -> torch.Tensor:
    """Decode of fixed data on the CPU."""
    gen = torch.Generator().manual_seed(7)
    q = torch.randn(2, 4, 64, generator=gen).bfloat16()
    k, v = (torch.randint(-128, 128, (5, 16, 2, 64), generator=gen, dtype=torch.int8) for _ in range(2))
    scale = torch.full((2,), 0.01)
    pages = torch.tensor([[4, 1], [0, 3]], dtype=torch.int32)
    lens = torch.tensor([20, 9], dtype=torch.int32)
    return ag.compile(SPEC).decode(q, (k, v), page_table=pages, kv_lens=lens, k_scale=scale, v_scale=scale)


class _Hidden:
    """An import hook that knows no toolchain."""

    def find_spec(self, name: str, path: Any = None, module: Any = None) -> ModuleSpec | None:
        if name.split(".", maxsplit=1)[0] in ("triton", "cuda", "nvidia"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def on_a_machine_without_toolchains() -> dict[str, Any]:
    """Decode on the CPU, and find kernels for Hopper, where nothing can be built or started."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("triton", "cuda", "nvidia")]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Hidden())  # type: ignore[arg-type]
    from attngen.backends import cuda

    def no_package(name: str) -> str:
        raise PackageNotFoundError(name)

    def forbidden(*arguments: object, **options: object) -> None:
        raise AssertionError("nothing is started here")

    cuda.version = no_package  # type: ignore[assignment]
    shutil.which = lambda *_, **__: None  # type: ignore[assignment]
    compiler.os.cpu_count = lambda: 2
    import subprocess

    subprocess.Popen.__init__ = forbidden  # type: ignore[method-assign, assignment]
    os.fork = forbidden  # type: ignore[assignment]
    log: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("attngen").addHandler(handler)
    logging.getLogger("attngen").setLevel(logging.INFO)
    hopper = ag.compile(SPEC, target="cuda:sm90a", ops=("decode",)).op("decode")
    try:
        ag.compile(SPEC, target="cuda:sm80", ops=("decode",))
        missing = ""
    except ag.CacheMissError as error:
        missing = str(error)
    return {
        "decoded": decoded().tolist(),
        "hopper": [(kernel.plan.backend, str(kernel.folder)) for kernel in hopper.kernels],
        "missing": missing,
        "log": log,
    }


def test_a_shipped_cache_needs_no_toolchain(tmp_path: Path) -> None:
    """Built by processes into one folder; moved; then used where triton, nvcc, NVRTC and C compilers are hidden."""
    made, moved = tmp_path / "made", tmp_path / "moved here, später"
    file = spec_file(tmp_path, SPEC)
    said = run("compile", file, "--target", "cpu,cuda:sm90a", "--ops", "decode", "--jobs", "2", "--into", made)
    assert said.exit_code == 0, said.output
    header, *kernels, total = rows(said.stdout)
    assert header == ["spec", "kernel", "target", "seconds", "size", "threads", "shared", "registers", "spills"]
    assert [kernel[2] for kernel in kernels] == [CPU, CPU, "cuda:sm90a", "cuda:sm90a"]
    assert total[0].startswith("4 kernels: 4 built, 0 cached, in ")
    assert sorted(said.stderr.splitlines()) == sorted(f"building {kernel[1]} for {kernel[2]}" for kernel in kernels)

    assert not (tmp_path / "cache").exists()
    assert all(len(path.name) == 64 for path in made.iterdir())  # entries, and nothing else
    for path in (made, *made.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644)
        if path.is_file():
            assert str(tmp_path).encode() not in path.read_bytes()

    exact = decoded()
    made.rename(moved)
    for path in (*moved.rglob("*"), moved):
        path.chmod(0o555 if path.is_dir() else 0o444)
    env = {"ATTNGEN_CACHE_PATH": str(moved), "ATTNGEN_REQUIRE_CACHED": "1", "HOME": "/", "PATH": "/nowhere"}
    report = start(on_a_machine_without_toolchains, env=env).report()
    moved.chmod(0o755)
    assert report["decoded"] == exact.tolist()
    assert [backend for backend, _ in report["hopper"]] == ["cuda", "triton"]
    assert all(Path(folder).is_relative_to(moved) for _, folder in report["hopper"])
    assert report["log"] == []
    assert "for cuda:sm80 is not in any cache" in report["missing"]
    assert f"attngen compile mixed --target cuda:sm80 --ops decode --into '{moved}'" in report["missing"]


def test_failures_show_the_log_and_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler_file = tmp_path / "c++"
    compiler_file.write_text('#!/bin/sh\necho "kernel.cpp:3: error: no such thing" >&2\nexit 1\n')
    compiler_file.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler_file))
    result = run("compile", paged(tmp_path), "--target", "cpu,interpret", "--ops", "decode", "--jobs", "2")
    assert result.exit_code == 1
    assert result.stderr.count("does not compile for cpu") == 1
    assert result.stderr.rstrip().endswith("kernel.cpp:3: error: no such thing")
    assert "2 kernels: 2 built, 0 cached" in result.stdout


def _die(job: Job, say: workers.Say) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "_outcome", _die)
    jobs = [Job("mixed", SPEC, target.Target.parse("cpu"), op) for op in ("prefill", "decode")]
    report = build_all(jobs, Console(quiet=True), 2)
    assert report.kernels == []
    assert all("a process that builds kernels has died" in str(failure) for failure in report.failures)


def test_into_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch(mode=0o600)
    assert "cannot be changed" in fail("compile", paged(tmp_path), "--target", "cpu", "--into", tmp_path / "file")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert "is refused" in fail("compile", paged(tmp_path), "--target", "cpu", "--into", tmp_path / "open")


def test_into_comes_before_what_caches_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shipped cache is whole, even if its kernels lie elsewhere, too; a second time nothing is built."""
    options = (paged(tmp_path), "--target", "interpret", "--ops", "append", "--backend", "triton")
    succeed("compile", *options)
    monkeypatch.setenv("ATTNGEN_CACHE_PATH", str(tmp_path / "cache"))
    monkeypatch.setenv("ATTNGEN_REQUIRE_CACHED", "1")
    assert "1 kernel: 1 built, 0 cached" in succeed("compile", *options, "--into", tmp_path / "into")
    assert "1 kernel: 0 built, 1 cached" in succeed("compile", *options, "--into", tmp_path / "into")
    assert os.environ["ATTNGEN_CACHE_DIR"] == str(tmp_path / "cache")


def called(call: str) -> list[float]:
    """A call over a cache of further ops, on the CPU, after its warmup."""
    gen = torch.Generator().manual_seed(7)
    cache = tuple(torch.randint(-128, 128, (5, 16, 2, 64), generator=gen, dtype=torch.int8) for _ in range(2))
    q, k, v = (torch.randn(2, n, 64, generator=gen).bfloat16() for n in (4, 2, 2))
    pages = {"page_table": torch.tensor([[4, 1]], dtype=torch.int32), "kv_lens": torch.tensor([20], dtype=torch.int32)}
    indptr, scale = torch.tensor([0, 2], dtype=torch.int32), torch.full((2,), 0.01)
    given = {**pages, "qo_indptr": indptr, "k_scale": scale, "v_scale": scale}
    ops = ag.compile(SPEC)
    ops.warmup(call)  # type: ignore[arg-type]
    if call == "prefix":
        found = ops.prefill(q, k, v, kv_cache=cache, kv_indptr=indptr, **given)
    else:
        listed = torch.tensor([[3, 17], [19, -1]], dtype=torch.int32)
        found = ops.prefill(q, cache, key_indices=listed, **given)
    assert isinstance(found, torch.Tensor)
    return found.flatten().tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("call", ["prefix", "listed"])
def test_calls_that_take_further_ops_are_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    file, into = spec_file(tmp_path, SPEC), tmp_path / "into"
    succeed("compile", file, "--target", "cpu", "--ops", "prefill,decode", "--into", into)
    monkeypatch.setenv("ATTNGEN_CACHE_PATH", str(into))
    monkeypatch.setenv("ATTNGEN_REQUIRE_CACHED", "1")
    with pytest.raises(ag.CacheMissError) as error:
        called(call)
    command = f"attngen compile mixed --target {CPU} --ops {call} --into {shlex.quote(str(into))}"
    assert command in error.value.fix
    monkeypatch.delenv("ATTNGEN_REQUIRE_CACHED")
    succeed("compile", file, "--target", "cpu", "--ops", call, "--into", into)
    monkeypatch.setenv("ATTNGEN_REQUIRE_CACHED", "1")
    exact = called(call)
    ag.compile(SPEC, target="cpu", ops=(call,))  # type: ignore[arg-type]
    for name in ("ATTNGEN_REQUIRE_CACHED", "ATTNGEN_CACHE_PATH"):
        monkeypatch.delenv(name)
    assert called(call) == exact


def test_calls_that_a_spec_has_not_are_refused() -> None:
    spec = SPEC.model_copy(update={"kv": ag.Contiguous()})
    for call, why in (("prefix", "kv_cache has no meaning here"), ("listed", "key_indices need a paged cache")):
        with pytest.raises(ag.UnsupportedError, match=why):
            ag.compile(spec, target="cpu", ops=(call,))  # type: ignore[arg-type]
        with pytest.raises(ag.UnsupportedError, match=why):
            ag.compile(spec).warmup(call)  # type: ignore[arg-type]
        with pytest.raises(ag.UnsupportedError, match="no op"):
            ag.compile(spec).op(call)  # type: ignore[arg-type]


MANIFEST = """
targets = ["cuda:sm90a", "cpu:x86-64-v3"]

[[compile]]
specs = ["llama3-8b", "mine.toml"]

[[compile]]
specs = ["gpt2"]
targets = ["hip:gfx942"]
ops = ["prefill", "backward"]
backend = "triton"
"""


def test_a_manifest_is_a_deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.toml").write_text(SPEC.to_toml())
    (tmp_path / "attngen.toml").write_text(MANIFEST)
    for source in (tmp_path, tmp_path / "attngen.toml"):
        found = wanted([str(source)])
        assert [one.name for one in found] == ["llama3-8b", "mixed", "gpt2"]
        assert found[1].spec == SPEC
        assert [one.targets for one in found] == [("cuda:sm90a", "cpu:x86-64-v3")] * 2 + [("hip:gfx942",)]
        assert [one.ops for one in found] == [(), (), ("prefill", "backward")]
        assert [one.backend for one in found] == ["", "", "triton"]

    jobs: list[Job] = []
    monkeypatch.setattr("attngen.cli.build_all", lambda todo, *_: jobs.extend(todo) or builds.BuildReport())
    succeed("compile", tmp_path)
    assert len(jobs) == 2 * 2 * 4 + 2
    assert {(job.op, job.backend, job.required) for job in jobs if job.name == "gpt2"} == {
        ("prefill", "triton", True),
        ("backward", "triton", True),
    }
    jobs.clear()
    succeed("compile", tmp_path, "--target", "cpu", "--ops", "decode", "--backend", "cpp")
    assert [(job.name, str(job.target), job.op, job.backend) for job in jobs] == [
        (name, CPU, "decode", "cpp") for name in ("llama3-8b", "mixed", "gpt2")
    ]


def test_a_directory_of_specs(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.toml").write_text(SPEC.model_copy(update={"name": None}).to_toml())
    (tmp_path / "notes.md").touch()
    assert [one.name for one in wanted([str(tmp_path)])] == ["a", "b"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ag.SpecError, match="no specs in"):
        wanted([str(tmp_path / "empty")])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Manifest.compile"),
        ("compile = []", "Manifest.compile"),
        ("[[compile]]\nspecs = []", "Manifest.compile.0.specs"),
        ('[[compile]]\nspecs = ["gpt2"]\nops = ["sideways"]', "Manifest.compile.0.ops.0"),
        ('[[compile]]\nspecs = ["gpt2"]\nrun = "rm -rf"', "Manifest.compile.0.run"),
        ('[[compile]]\nspecs = ["nowhere"]', "no spec 'nowhere'"),
        ("[[compile]", "is no TOML"),
    ],
)
def test_manifests_that_are_wrong(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "attngen.toml").write_text(text)
    assert message in fail("compile", tmp_path)
