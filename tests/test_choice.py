"""Which backend an op gets where several serve the target: toolchains that are here, and caches that hold kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

import attngen as ag
from attngen.backends.cuda import CudaBackend
from attngen.backends.triton import TritonBackend
from attngen.choice import chosen_plan
from attngen.codegen.render import RenderedKernel
from attngen.codegen.toolchain import BuildResult
from attngen.errors import BuildError, SlowKernelError
from attngen.explain import Request, explain
from attngen.ops import Op
from attngen.target import Target

# Decode of stored caches is CUDA's; the merge of its parts is Triton's.
SPEC = ag.AttentionSpec(
    name="gqa", heads=ag.GQA(8, 2, 128), mask=ag.Causal(), dtype="bf16", kv=ag.Paged(page_size=16, dtype="int8")
)
TARGET = Target.parse("cuda:sm90a")


class Machine:
    """Toolchains that are here, and what they have built: kernels without content."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.set, self.own = monkeypatch.setenv, tmp_path / "own"
        self.has: tuple[str, ...] = ("cuda", "triton")
        self.slow = ""
        self.built: list[str] = []
        machine = self
        self.set("ATTNGEN_CACHE_DIR", str(self.own))
        monkeypatch.delenv("ATTNGEN_BACKEND", raising=False)

        def fingerprint(backend: CudaBackend | TritonBackend, target: Target) -> str | None:
            return f"{backend.name} 1" if backend.name in machine.has else None

        def build(backend: CudaBackend | TritonBackend, kernel: RenderedKernel, folder: Path) -> BuildResult:
            if backend.name not in machine.has:
                raise BuildError(f"there is no {backend.name}")
            machine.built.append(backend.name)
            if machine.slow and machine.slow in kernel.source:
                raise SlowKernelError(f"{kernel.entry} is slow", why="300 bytes of registers spill")
            (folder / "kernel.cubin").write_bytes(b"code")
            return BuildResult("kernel.cubin", {"threads": 128, "shared": 0})

        for backend in (CudaBackend, TritonBackend):
            monkeypatch.setattr(backend, "fingerprint", fingerprint)
            monkeypatch.setattr(backend, "build", build)

    def compile(self, *has: str, spec: ag.AttentionSpec = SPEC, op: str = "decode", **options: str) -> Op:
        self.has, self.built = has, []
        return ag.compile(spec, target=TARGET, ops=(op,), **options).op(op)  # type: ignore[arg-type]

    def ship(self, folder: Path) -> None:
        """What was built so far becomes an image's cache, and this machine's own is empty."""
        self.own.rename(folder)
        self.set("ATTNGEN_CACHE_PATH", str(folder))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def backends(op: Op) -> list[str]:
    return [kernel.plan.backend for kernel in op.kernels]


def test_the_fastest_backend_whose_toolchain_is_here(machine: Machine) -> None:
    assert set(backends(machine.compile("cuda", "triton"))) == {"cuda", "triton"}
    assert sorted(machine.built) == ["cuda", "triton"]


@pytest.mark.parametrize("has", [("cuda", "triton"), ("triton",)])
@pytest.mark.parametrize("shipped", [True, False])
def test_without_any_toolchain_what_was_built_is_found(
    machine: Machine, tmp_path: Path, has: tuple[str, ...], shipped: bool
) -> None:
    before = machine.compile(*has)
    if shipped:
        machine.ship(tmp_path / "shipped")
    machine.set("ATTNGEN_REQUIRE_CACHED", "1")
    after = machine.compile()
    assert after.plan == before.plan
    assert [kernel.folder.name for kernel in after.kernels] == [kernel.folder.name for kernel in before.kernels]
    assert machine.compile("triton").plan == before.plan
    assert machine.compile("cuda").plan == before.plan
    assert machine.built == []


def test_an_image_is_run_as_it_was_built(machine: Machine, tmp_path: Path) -> None:
    """Toolchains that happen to be on the machine change nothing."""
    before = machine.compile("triton")
    machine.ship(tmp_path / "shipped")
    assert machine.compile("cuda", "triton").plan == before.plan
    assert machine.built == []
    assert machine.compile("cuda", "triton", backend="cuda").plan.backend == "cuda"


def test_own_caches_do_not_hold_a_faster_toolchain_back(machine: Machine) -> None:
    machine.compile("triton")
    assert "cuda" in backends(machine.compile("cuda", "triton"))
    machine.set("ATTNGEN_REQUIRE_CACHED", "1")
    assert "cuda" in backends(machine.compile())


def test_where_one_toolchain_of_a_mixed_op_is_missing(machine: Machine) -> None:
    """Half of the kernels could be built: an op is taken whole."""
    assert backends(machine.compile("triton")) == ["triton", "triton"]
    assert machine.compile("cuda").plan.backend == "triton"
    assert machine.built == []


def test_nothing_anywhere_is_an_error_that_tells_how(machine: Machine, tmp_path: Path) -> None:
    machine.set("ATTNGEN_REQUIRE_CACHED", "1")
    machine.set("ATTNGEN_CACHE_PATH", str(tmp_path / "shipped"))
    with pytest.raises(ag.CacheMissError, match="attngen compile gqa --target cuda:sm90a --ops decode") as caught:
        machine.compile()
    assert f"--into {tmp_path / 'shipped'}" in str(caught.value)


def test_rejected_tiles_are_remembered(machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A kernel that came out slow is neither built again nor taken where nothing can be built."""
    spec = ag.AttentionSpec(heads=ag.MHA(4, 128), mask=ag.Document("ids") & ag.Causal(), dtype="bf16")
    machine.slow = "TILE_KV = 128;"
    before = machine.compile("cuda", "triton", spec=spec, op="prefill")
    assert before.plan.kernel("forward").tiles.kv == 64
    assert caplog.text.count("others are tried") == 1
    for has in (("cuda", "triton"), ()):
        assert machine.compile(*has, spec=spec, op="prefill").plan == before.plan
        assert machine.built == []
    machine.ship(tmp_path / "shipped")
    assert machine.compile(spec=spec, op="prefill").plan == before.plan
    assert caplog.text.count("others are tried") == 1


def test_explain_tells_what_compile_would_choose(machine: Machine, tmp_path: Path) -> None:
    def by() -> str:
        (section,) = explain(Request(SPEC, "decode", TARGET), "plan")
        return section.text.split(" by ")[1].partition(":")[0]

    assert backends(machine.compile("triton")) == ["triton", "triton"]
    machine.has = ("cuda", "triton")
    assert by() == "cuda"
    machine.has = ()  # what lies in the cache decides
    assert by() == "triton"
    assert chosen_plan(SPEC, "decode", TARGET).backend == "triton"
    machine.ship(tmp_path / "image")
    machine.has = ("cuda", "triton")
    assert by() == "triton"  # an image's kernels run wherever it is
    machine.set("ATTNGEN_BACKEND", "cuda")
    assert by() == "cuda"
