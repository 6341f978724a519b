"""Many processes and one cache: builds that are killed, locks that nobody frees, odd places, forks and threads."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import attngen as ag
from attngen.backends import cpp, cuda, triton
from attngen.settings import Settings
from attngen.store import Artifact, Store, private
from attngen.store.manifest import FILE_NAME
from attngen.target import Target
from tests.acceptance.test_c53 import started
from tests.store.children import DECODE_KERNELS, DECODED, build, decode, start
from tests.store.test_artifact import flip
from tests.store.toolchains import KERNEL, FakeToolchain, other_kernel

# 200 of them by hand: ATTNGEN_KILLS=200 pytest tests/store/test_processes.py -k killed
KILLS = int(os.environ.get("ATTNGEN_KILLS", "12"))
BUILD_TIME = 0.4


def test_builds_killed_at_random_moments(tmp_path: Path) -> None:
    """Whatever a dead build has left, the next process builds or finds the right kernel, and says nothing."""
    env = {"ATTNGEN_CACHE_DIR": str(tmp_path / "cache")}
    store = Store.from_settings(Settings(cache_dir=env["ATTNGEN_CACHE_DIR"]))
    moments = random.Random(KILLS)
    outcomes = {"built again": 0, "found": 0}
    for turn in range(KILLS):
        marker = tmp_path / f"marker{turn}"
        victim = started(start(build, env=env, compiler=True, number=turn, linger=60, marker=marker), marker)
        time.sleep(moments.uniform(0, BUILD_TIME))
        victim.kill_group()
        assert store.verify() == {}
        survivor = start(build, env=env, compiler=True, number=turn).report(timeout=30)
        assert (survivor["result"], survivor["warnings"]) == (turn, [])
        outcomes["built again" if survivor["builds"] else "found"] += 1
    store.collect()
    assert list((tmp_path / "cache" / "building").iterdir()) == []
    assert list((tmp_path / "cache").glob("damaged-*")) == []
    assert len(list(store.entries())) == KILLS
    assert min(outcomes.values()) > 0, outcomes


def swap(path: Path, other: Path) -> None:
    path.unlink()
    shutil.copy(other, path)


FILES = ("build.log", f"{KERNEL.entry}.cpp", f"{KERNEL.entry}.so", "stages/kernel.ptx", FILE_NAME)
DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "truncated": lambda path, other: os.truncate(path, path.stat().st_size // 2),
    "flipped": lambda path, other: flip(path),
    "emptied": lambda path, other: path.write_bytes(b""),
    "swapped": swap,
    "opened": lambda path, other: path.chmod(0o666),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_every_file_of_an_entry_damaged(tmp_path: Path, name: str, damage: str) -> None:
    store = Store.from_settings(Settings(cache_dir=str(tmp_path / "cache")))
    toolchain = FakeToolchain()
    artifact, other = (store.get_or_build(kernel, toolchain, {}) for kernel in (KERNEL, other_kernel(1)))
    whole = artifact.binary.read_bytes()
    before = (artifact.folder / name).read_bytes()
    DAMAGES[damage](artifact.folder / name, other.folder / name)
    spoiled = damage == "opened" or (artifact.folder / name).read_bytes() != before
    assert (artifact.folder in store.verify()) == spoiled
    after = store.get_or_build(KERNEL, toolchain, {})
    assert after.binary.read_bytes() == whole
    loaded_anyway = name not in (FILE_NAME, artifact.binary.name) and damage in ("flipped", "swapped")
    if spoiled and not loaded_anyway:  # only sizes are looked at of files that nobody loads
        assert len(toolchain.built) == 3
        assert store.verify() == {}


def hold(path: Path, marker: Path) -> dict[str, Any]:
    with private.key_lock(path, 60.0):
        marker.touch()
        time.sleep(60)
    return {}


def test_a_lock_holder_that_never_answers(tmp_path: Path) -> None:
    env = {"ATTNGEN_CACHE_DIR": str(tmp_path / "cache"), "ATTNGEN_LOCK_TIMEOUT": "0.3"}
    start(build, env=env, compiler=True).report()
    (lock,) = (tmp_path / "cache" / "locks").iterdir()
    Store.from_settings(Settings(cache_dir=env["ATTNGEN_CACHE_DIR"])).clear()
    holder = started(start(hold, path=lock, marker=tmp_path / "marker"), tmp_path / "marker")
    report = start(build, env=env, compiler=True).report()
    holder.kill_group()
    assert (report["result"], report["builds"]) == (7, 1)
    assert report["warnings"] == [f"attngen waits up to 0 s for another build, which holds {lock}"]


def test_cache_on_another_file_system_than_temporary_folders(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        assert Path(memory).stat().st_dev != tmp_path.stat().st_dev
        for cache, tmp in ((Path(memory), tmp_path), (tmp_path, Path(memory))):
            env = {"ATTNGEN_CACHE_DIR": str(cache / "cache"), "TMPDIR": str(tmp)}
            report = start(build, env=env, compiler=True).report()
            assert (report["result"], report["warnings"]) == (7, [])


PROGRAM = "import json; from tests.store.children import decode; print(json.dumps(decode()))"


def test_a_long_path_with_spaces_and_letters_in_the_c_locale(tmp_path: Path) -> None:
    """Its letters are no characters of that locale; a second process finds what the first has built."""
    cache = tmp_path / "für alle  " / "ελληνικά" / ("x" * 200)
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join([str(Path(ag.__file__).parents[1]), str(Path(__file__).parents[2])]),
        "ATTNGEN_CACHE_DIR": str(cache),
        "LC_ALL": "C",
        "LANG": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    for report, builds in ((json.loads(done.stdout), DECODE_KERNELS), (start(decode, env=env).report(), 0)):
        assert report.items() >= DECODED.items()
        assert (len(report["builds"]), report["warnings"]) == (builds, [])
    assert len(list(cache.glob("*/*/manifest.json"))) == DECODE_KERNELS


SPEC = ag.AttentionSpec(heads=ag.GQA(4, 2, 64), mask=ag.Causal(), dtype="fp32")


def call(ops: ag.Ops) -> list[Any]:
    gen = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 40, n, 64, generator=gen) for n in (4, 2, 2))
    return [ops.prefill(q, k, v).sum().item(), ops.decode(q[:, 0], k, v).sum().item()]


def in_a_fork(ops: ag.Ops) -> list[Any]:
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(sender, json.dumps(call(ops)).encode())
        os._exit(0)
    os.close(sender)
    with os.fdopen(receiver, "rb") as file:
        answer = file.read()
    assert os.waitpid(child, 0)[1] == 0
    return json.loads(answer)  # type: ignore[no-any-return]


def everywhere(ops: bytes, threads: int) -> dict[str, Any]:
    """Results of ops that were pickled: here, in a fork before and after the first call, and in threads."""
    torch.set_num_threads(threads)
    unpickled = pickle.loads(ops)  # noqa: S301
    results = [in_a_fork(unpickled), call(unpickled), in_a_fork(unpickled)]
    outcomes: list[Any] = [None] * 8

    def run(number: int) -> None:
        outcomes[number] = call(unpickled)

    workers = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return {"results": results + outcomes}


@pytest.mark.parametrize("threads", [1, 2])
def test_ops_in_forks_other_processes_and_threads(tmp_path: Path, threads: int) -> None:
    env = {"ATTNGEN_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": str(threads)}
    report = start(everywhere, env=env, ops=pickle.dumps(ag.compile(SPEC)), threads=threads).report(60)
    assert len(report["results"]) == 11
    assert all(result == report["results"][0] for result in report["results"])


VERSIONS: dict[str, Callable[[pytest.MonkeyPatch, Path, str], str | None]] = {}


def version(make: Callable[[pytest.MonkeyPatch, Path, str], str | None]) -> None:
    VERSIONS[make.__name__] = make


@version
def triton_package(patch: pytest.MonkeyPatch, tmp: Path, which: str) -> str | None:
    patch.setattr(triton, "triton_version", lambda: f"3.{which}.0")
    return triton.TritonBackend().fingerprint(Target.parse("hip:gfx942"))


@version
def ptxas(patch: pytest.MonkeyPatch, tmp: Path, which: str) -> str | None:
    program = tmp / "ptxas"
    program.write_bytes(f"Cuda compilation tools, release 13.{which}, V13.{which}.33".encode())
    patch.setenv("ATTNGEN_PTXAS", str(program))
    return triton.TritonBackend().fingerprint(Target.parse("cuda:sm90a"))


@version
def nvrtc(patch: pytest.MonkeyPatch, tmp: Path, which: str) -> str | None:
    patch.setattr(cuda, "version", lambda name: f"13.{which}")
    cuda.nvrtc_version.cache_clear()
    try:
        return cuda.CudaBackend().fingerprint(Target.parse("cuda:sm90a"))
    finally:
        cuda.nvrtc_version.cache_clear()


@version
def compiler(patch: pytest.MonkeyPatch, tmp: Path, which: str) -> str | None:
    program = tmp / "c++"
    program.write_text(f"#!/bin/sh\n# {which * int(which)}\n")
    program.chmod(0o755)
    patch.setenv("CXX", str(program))
    return cpp.CppBackend().fingerprint(Target.parse("cpu"))


@pytest.mark.parametrize("tool", VERSIONS)
def test_two_versions_of_a_toolchain_share_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str) -> None:
    store = Store.from_settings(Settings(cache_dir=str(tmp_path / "cache")))

    def entry(which: str) -> Artifact:
        fingerprint = VERSIONS[tool](monkeypatch, tmp_path, which)
        assert fingerprint is not None
        found = store.find(KERNEL, fingerprint)
        built = store.get_or_build(KERNEL, FakeToolchain(fingerprint), {"by": which})
        assert built.manifest.about == {"by": which}
        assert found in (None, built)
        return built

    first, second = entry("6"), entry("7")
    assert first.folder != second.folder
    assert store.verify() == {}


def test_two_versions_of_attngen_share_a_cache(tmp_path: Path) -> None:
    """Another version renders another text, or the same, and then the same kernel will do."""
    store = Store.from_settings(Settings(cache_dir=str(tmp_path / "cache")))
    built = [store.get_or_build(other_kernel(number), FakeToolchain(), {}) for number in (1, 2, 1)]
    assert built[0] == built[2] != built[1]


WARM = ("gpt2", "llama2-7b-streaming", "t5-small-encoder", "swin-v2-tiny", "bloom-7b", "whisper-large-cross")


def find_twenty_ops(builds: bool) -> dict[str, Any]:
    """Compile ops for Triton's interpreter, whose kernels are quickly built; without builds, nothing may be started."""
    started: list[str] = []
    if not builds:

        def forbidden(*arguments: object, **options: object) -> None:
            started.append(str(arguments))

        subprocess.Popen.__init__ = forbidden  # type: ignore[method-assign, assignment]
        os.fork = forbidden  # type: ignore[assignment]
    number, began = 0, time.process_time()
    for name in WARM:
        spec = ag.load_spec(name).model_copy(update={"dtype": "fp32"})
        number += len(ag.compile(spec, target="interpret").artifacts)
    seconds = time.process_time() - began
    compilers = [name for name in ("triton", "cuda.bindings.nvrtc", "cuda.core") if name in sys.modules]
    return {"ops": number, "started": started, "compilers": compilers, "seconds": seconds}


_TWENTY = """
import time, torch
began = time.process_time()
import attngen as ag
number = 0
for name in NAMES:
    spec = ag.load_spec(name).model_copy(update={"dtype": "fp32"})
    number += len(ag.compile(spec, target="interpret").artifacts)
print(number, time.process_time() - began)
"""


def test_twenty_ops_are_found_in_half_a_second(tmp_path: Path) -> None:
    """Beside the import of torch: seconds of the CPU, which do not count what else it does; the first process makes bytecode."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", _TWENTY.replace("NAMES", repr(WARM))]
    cached = env | {"ATTNGEN_CACHE_DIR": str(tmp_path / "cache")}
    runs = [subprocess.run(command, env=cached, capture_output=True, text=True, check=True).stdout for _ in range(4)]
    assert int(runs[0].split()[0]) >= 20
    assert min(float(run.split()[1]) for run in runs[1:]) < 0.5


def test_a_warm_start_starts_nothing_and_imports_no_compiler(tmp_path: Path) -> None:
    env = {"ATTNGEN_CACHE_DIR": str(tmp_path / "cache")}
    start(find_twenty_ops, env=env, builds=True).report(90)
    report = start(find_twenty_ops, env=env | {"ATTNGEN_REQUIRE_CACHED": "1"}, builds=False).report()
    print(f"{report['ops']} ops in {report['seconds']:.2f} s")
    assert report["ops"] >= 20
    assert (report["started"], report["compilers"]) == ([], [])
