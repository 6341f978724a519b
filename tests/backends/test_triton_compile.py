"""Limits that a built kernel must keep, and the workers that build."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

import pytest

import attngen as ag
from attngen.backends import triton_workers
from attngen.backends.launcher import ArgumentLayout
from attngen.backends.triton import TritonBackend
from attngen.backends.triton_compile import SHARED_LIMITS, excerpt, parse_flags, require_parameters, require_resources
from attngen.codegen.render import RenderedKernel
from attngen.target import CUDA_ARCHS, HIP_ARCHS
from tests.backends.triton_kernels import PRODUCT, PRODUCT_ARGS, SCALE, SCALE_ARGS, build, make_plan, run_python

EIATTR_KPARAM_INFO = b"\x04\x17\x0c\x00"


def _parameters_of(cubin: bytes, entry: str) -> list[tuple[int, int]]:
    """Offset and size of each parameter, by the records that the driver reads: index, ordinal, offset, size << 18."""
    start, width, count, names = struct.unpack_from("<Q10xHHH", cubin, 0x28)
    headers = [struct.unpack_from("<IIQQQQ", cubin, start + i * width) for i in range(count)]
    strings = headers[names][4]
    for name, _, _, _, offset, size in headers:
        end = cubin.index(b"\0", strings + name)
        if cubin[strings + name : end].decode() == f".nv.info.{entry}":
            section = cubin[offset : offset + size]
            found = [match.end() for match in re.finditer(re.escape(EIATTR_KPARAM_INFO), section)]
            records = sorted(struct.unpack_from("<IHHI", section, position)[1:] for position in found)
            return [(offset, info >> 18) for _, offset, info in records]
    raise AssertionError("the cubin has no such kernel")


@pytest.mark.triton_compile
@pytest.mark.parametrize("target", ["cuda:sm80", "cuda:sm90a", "cuda:sm100"])
def test_parameters_lie_where_the_launcher_writes_them(target: str, tmp_path: Path) -> None:
    build(SCALE, make_plan("scale", SCALE_ARGS, target), tmp_path)
    layout = ArgumentLayout(SCALE_ARGS, trailing=2)
    found = _parameters_of((tmp_path / "scale.cubin").read_bytes(), "scale")
    assert tuple(offset for offset, _ in found) == layout.offsets
    assert [size for _, size in found] == [4 if arg.type == "i32" else 8 for arg in SCALE_ARGS] + [8, 8]


@pytest.mark.triton_compile
def test_a_kernel_that_needs_more_shared_memory_than_its_target_has_is_refused(tmp_path: Path) -> None:
    fits = build(PRODUCT, make_plan("product", PRODUCT_ARGS, "cuda:sm80", num_stages=5), tmp_path / "sm80")
    assert SHARED_LIMITS["sm86"] < fits.metadata["shared"] <= SHARED_LIMITS["sm80"]
    with pytest.raises(ag.BuildError) as error:
        build(PRODUCT, make_plan("product", PRODUCT_ARGS, "cuda:sm86", num_stages=5), tmp_path / "sm86")
    assert error.value.what == "product does not fit cuda:sm86"
    assert f"needs {fits.metadata['shared']} bytes of shared memory, and a block on sm86 has 101376" in error.value.why
    assert "num_stages=5" in error.value.where
    assert "smaller tiles or fewer stages" in error.value.fix


@pytest.mark.triton_compile
def test_an_error_in_a_function_the_kernel_calls_is_found(tmp_path: Path) -> None:
    helper = "@triton.jit\ndef double(x):\n    return x.to(tl.nothing)\n\n\n"
    source = SCALE.replace("@triton.jit", f"{helper}@triton.jit").replace("2.0 * x", "double(x)")
    with pytest.raises(ag.BuildError) as error:
        build(source, make_plan("scale", SCALE_ARGS, "cuda:sm80"), tmp_path)
    assert error.value.where == "scale.py, line 7"
    assert "  >    7 |     return x.to(tl.nothing)" in error.value.why


@pytest.mark.triton_compile
def test_python_that_triton_does_not_speak_is_found(tmp_path: Path) -> None:
    source = SCALE.replace("    valid = rows", "    first = second = columns\n    valid = rows")
    with pytest.raises(ag.BuildError) as error:
        build(source, make_plan("scale", SCALE_ARGS, "cuda:sm80"), tmp_path)
    assert error.value.where == "scale.py, line 11"
    assert "  >   11 |     first = second = columns" in error.value.why


def _kernel(target: str) -> RenderedKernel:
    plan = make_plan("scale", SCALE_ARGS, target)
    return RenderedKernel("scale", SCALE, ".py", TritonBackend().flags(plan), plan.target)


def test_every_target_has_a_limit() -> None:
    assert set(SHARED_LIMITS) == {*CUDA_ARCHS, *HIP_ARCHS}


def test_scratch_and_tensor_memory_are_refused() -> None:
    fits = {"shared": 1024, "tmem_size": 512, "global_scratch_size": 0, "profile_scratch_size": 0}
    require_resources(_kernel("cuda:sm100"), fits)
    with pytest.raises(ag.BuildError, match="513 columns of tensor memory"):
        require_resources(_kernel("cuda:sm100"), fits | {"tmem_size": 513})
    with pytest.raises(ag.BuildError, match=r"scratch memory \(\{'global_scratch_size': 128\}\)"):
        require_resources(_kernel("cuda:sm100"), fits | {"global_scratch_size": 128})


def test_other_parameters_than_planned_are_refused() -> None:
    text = ".visible .entry scale(\n .param .u64 .ptr .global .align 16 p0,\n .param .u32 p1,\n .param .u64 p2\n)"
    with pytest.raises(ag.BuildError, match="takes other parameters than its plan says") as error:
        require_parameters(_kernel("cuda:sm80"), ["*fp32", "i32"], text)
    assert "[8, 4, 8] bytes, the launcher passes [8, 4, 8, 8]" in error.value.why
    require_parameters(_kernel("cuda:sm80"), ["*fp32"], text.replace(".u32", ".u64"))


def test_a_tensor_map_comes_before_its_sizes_and_strides() -> None:
    words = [".align 64 .b8 p0[128]", ".u32 p1", ".u32 p2", ".u64 p3", ".u64 p4", ".u64 p5", ".u64 p6"]
    text = f".visible .entry scale(\n {', '.join(f'.param {word}' for word in words)}\n)"
    require_parameters(_kernel("cuda:sm90a"), ["tensordesc<bf16[64,64]>"], text)
    with pytest.raises(ag.BuildError, match="other parameters"):
        require_parameters(_kernel("cuda:sm90a"), ["tensordesc<bf16[1,64,64]>"], text)


def test_flags_are_read_back() -> None:
    flags = ("num_warps=4", "ptx_options=--x=2", "arg:q=*bf16:16", "arg:n=i32")
    assert parse_flags(flags) == (
        {"num_warps": 4, "ptx_options": "--x=2"},
        [("q", "*bf16", 16), ("n", "i32", 1)],
    )


def test_an_excerpt_marks_its_line() -> None:
    assert excerpt("a\nb\nc", 1) == ["  >    1 | a", "       2 | b", "       3 | c"]
    assert excerpt("a", None) == []


@pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), 9)"])
def test_a_crash_of_the_compiler_is_an_error_of_its_kernel_only(end: str, tmp_path: Path) -> None:
    plan = make_plan("scale", SCALE_ARGS, "cuda:sm80")
    build(SCALE, plan, tmp_path / "before")
    with pytest.raises(ag.BuildError, match=r"compiler crashed: (exit status 3|signal 9)") as error:
        build(f"import os\nprint('last words', flush=True)\n{end}\n", plan, tmp_path / "crash")
    assert "last words" in error.value.log
    build(SCALE, plan, tmp_path / "after")
    assert (tmp_path / "before" / "scale.cubin").read_bytes() == (tmp_path / "after" / "scale.cubin").read_bytes()


def test_a_worker_that_ended_while_idle_is_replaced(tmp_path: Path) -> None:
    plan = make_plan("scale", SCALE_ARGS, "cuda:sm80")
    build(SCALE, plan, tmp_path / "one")
    idle = [worker for _, worker in triton_workers._pool()._idle]
    assert idle
    for worker in idle:
        worker.kill()
    build(SCALE, plan, tmp_path / "two")


def test_trouble_with_storage_stays_an_oserror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan("scale", SCALE_ARGS, "cuda:sm80")
    (tmp_path / "scale.cubin").mkdir()
    with pytest.raises(IsADirectoryError):
        build(SCALE, plan, tmp_path)


FORK = """
import os, pathlib, sys
from attngen.backends import triton_workers
from tests.backends.triton_kernels import SCALE, SCALE_ARGS, build, make_plan
folder, plan = pathlib.Path(sys.argv[1]), make_plan("scale", SCALE_ARGS, "cuda:sm80")
build(SCALE, plan, folder / "parent")
[(_, worker)] = triton_workers._pool()._idle
child = os.fork()
build(SCALE, plan, folder / ("child" if child == 0 else "again"))
[(_, mine)] = triton_workers._pool()._idle
assert (mine.pid == worker.pid) == (child != 0)
if child:
    assert os.waitpid(child, 0)[1] == 0
    print("both built")
"""


def test_a_forked_child_starts_workers_of_its_own(tmp_path: Path) -> None:
    assert run_python(FORK, str(tmp_path), PYTHONWARNINGS="ignore").strip() == "both built"
    assert (tmp_path / "child" / "scale.cubin").exists()


def test_workers_end_with_their_process(tmp_path: Path) -> None:
    script = FORK.split("child = ", maxsplit=1)[0] + "print(worker.pid)"
    pid = int(run_python(script, str(tmp_path)))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_idle_workers_end_by_themselves(tmp_path: Path) -> None:
    script = FORK.split("build(", maxsplit=1)[0] + "\n".join(
        [
            "from attngen.backends import triton_worker",
            "path = folder / 'worker.py'",
            "folder.mkdir(exist_ok=True)",
            "text = pathlib.Path(triton_worker.__file__).read_text()",
            "path.write_text(text.replace('IDLE_SECONDS = 20.0', 'IDLE_SECONDS = 0.2'))",
            "triton_worker.__file__ = str(path)",
            "build(SCALE, plan, folder / 'one')",
            "[(_, worker)] = triton_workers._pool()._idle",
            "assert worker.wait(timeout=20) == 0",
            "build(SCALE, plan, folder / 'two')",
            "print('rebuilt')",
        ]
    )
    assert run_python(script, str(tmp_path / "f")).strip() == "rebuilt"
