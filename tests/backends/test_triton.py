"""The Triton backend as the store and the ops see it."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

import attngen as ag
from attngen.backends.triton import TritonBackend
from attngen.codegen.render import RenderedKernel
from attngen.codegen.toolchain import BuildResult
from attngen.target import Target
from attngen.variant import Variant, normalize
from tests.backends.triton_kernels import GPUS, PRODUCT, PRODUCT_ARGS, SCALE, SCALE_ARGS, build, make_plan, run_python

BACKEND = TritonBackend()
CUDA_MACHINE, AMDGPU_MACHINE = 190, 224


def _variant(dtype: str) -> Variant:
    return normalize(ag.AttentionSpec(heads=ag.MHA(num_heads=4, head_dim=64), dtype=dtype), "prefill")


@pytest.mark.triton_compile
@pytest.mark.parametrize("target", GPUS)
def test_builds_for_every_target_without_its_device(target: str, tmp_path: Path) -> None:
    result = build(SCALE, make_plan("scale", SCALE_ARGS, target), tmp_path)
    cuda = target.startswith("cuda")
    binary = (tmp_path / result.binary).read_bytes()
    assert binary[:4] == b"\x7fELF"
    assert int.from_bytes(binary[18:20], "little") == (CUDA_MACHINE if cuda else AMDGPU_MACHINE)
    names = {"scale.cubin", "scale.ptx"} if cuda else {"scale.hsaco", "scale.amdgcn", "scale.json"}
    assert {path.name for path in tmp_path.iterdir()} == {"scale.py"} | names
    assert {name: result.metadata[name] for name in ("num_warps", "warp_size", "shared", "spills")} == {
        "num_warps": 4,
        "warp_size": 32 if cuda else 64,
        "shared": 0,
        "spills": 0,
    }
    assert 8 <= result.metadata["registers"] <= 255
    for path in tmp_path.iterdir():
        assert str(tmp_path).encode() not in path.read_bytes()


@pytest.mark.triton_compile
def test_a_binary_depends_on_neither_folder_nor_environment_nor_earlier_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan("scale", SCALE_ARGS, "cuda:sm80")
    build(SCALE, plan, tmp_path / "one")
    build(PRODUCT, make_plan("product", PRODUCT_ARGS, "cuda:sm80"), tmp_path / "between")
    variables = ("TRITON_INTERPRET", "TRITON_DEBUG", "DISABLE_PTXAS_OPT", "TRITON_KERNEL_DUMP", "MLIR_ENABLE_DUMP")
    for name in variables:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    build(SCALE, plan, tmp_path / "two")
    for name in ("scale.cubin", "scale.ptx"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert not (tmp_path / "home").exists()


@pytest.mark.triton_compile
def test_kernels_built_at_once_do_not_mix(tmp_path: Path) -> None:
    plans = [
        make_plan(f"scale{i}", SCALE_ARGS, target) for i, target in enumerate(("cuda:sm80", "cuda:sm90a", "hip:gfx942"))
    ]
    results: dict[str, BuildResult] = {}
    start = threading.Barrier(len(plans))

    def work(entry: str, index: int) -> None:
        start.wait()
        results[entry] = build(SCALE.replace("def scale", f"def {entry}"), plans[index], tmp_path / entry)

    threads = [threading.Thread(target=work, args=(plan.entry, i)) for i, plan in enumerate(plans)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for plan in plans:
        assert plan.entry.encode() in (tmp_path / plan.entry / results[plan.entry].binary).read_bytes()
    assert ".target sm_80" in (tmp_path / "scale0" / "scale0.ptx").read_text()
    assert ".target sm_90a" in (tmp_path / "scale1" / "scale1.ptx").read_text()


@pytest.mark.triton_compile
def test_promised_alignment_becomes_vector_loads(tmp_path: Path) -> None:
    plan = make_plan("scale", SCALE_ARGS, "cuda:sm80")
    build(SCALE, plan, tmp_path / "aligned")
    flags = tuple(flag.removesuffix(":16").removesuffix(":4") for flag in BACKEND.flags(plan))
    kernel = RenderedKernel("scale", SCALE, ".py", flags, plan.target)
    (tmp_path / "any").mkdir()
    (tmp_path / "any" / "scale.py").write_text(SCALE)
    BACKEND.build(kernel, tmp_path / "any")
    assert "ld.global.v4" in (tmp_path / "aligned" / "scale.ptx").read_text()
    assert "ld.global.v4" not in (tmp_path / "any" / "scale.ptx").read_text()


def test_flags_spell_out_what_the_kernel_is_compiled_for() -> None:
    plan = make_plan("scale", SCALE_ARGS, "cuda:sm90a", num_warps=8, num_stages=3)
    assert BACKEND.flags(plan) == (
        "num_warps=8",
        "num_stages=3",
        "ptx_options=--regAllocOptLevel=2",
        "arg:q=*fp32:16",
        "arg:q_stride_b=i64:4",
        "arg:q_stride_t=i64:4",
        "arg:q_stride_h=i64:4",
        "arg:out=*fp32:16",
        "arg:out_stride_b=i64:4",
        "arg:out_stride_t=i64:4",
        "arg:out_stride_h=i64:4",
        "arg:lse=*fp32",
        "arg:num_tokens=i32",
        "arg:num_tiles=i64",
    )
    halves = make_plan("product", PRODUCT_ARGS, "hip:gfx942")
    assert BACKEND.flags(halves)[2:4] == ("arg:q=*fp16:16", "arg:q_stride_b=i64:8")


def test_bool_pointers_have_tritons_name() -> None:
    plan = make_plan("scale", SCALE_ARGS, "cuda:sm80")
    flags = BACKEND.flags(replace(plan, args=(replace(SCALE_ARGS[0], name="visible", type="*bool"),)))
    assert flags[-1] == "arg:visible=*i1"


def test_fingerprint_names_triton_and_ptxas_and_starts_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    fake = tmp_path / "ptxas"
    fake.write_bytes(b"...Cuda compilation tools, release 13.9, V13.9.7\n...")
    plain = BACKEND.fingerprint(Target.parse("hip:gfx942"))
    assert plain is not None
    assert plain.startswith("triton-3.")
    assert BACKEND.fingerprint(Target.parse("interpret")) == plain
    found = BACKEND.fingerprint(Target.parse("cuda:sm80"))
    assert found is not None
    assert found.startswith(f"{plain} ptxas-")
    monkeypatch.setenv("ATTNGEN_PTXAS", str(fake))
    assert BACKEND.fingerprint(Target.parse("cuda:sm80")) == f"{plain} ptxas-13.9.7"
    assert BACKEND.fingerprint(Target.parse("hip:gfx942")) == plain


def test_without_triton_the_backend_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert BACKEND.fingerprint(Target.parse("cuda:sm80")) is None
    with pytest.raises(ag.BuildError, match="there is no triton") as error:
        build(SCALE, make_plan("scale", SCALE_ARGS, "cuda:sm80"), tmp_path)
    assert error.value.fix == "pip install attngen[triton]"


def test_importing_attngen_does_not_import_triton() -> None:
    script = "import sys, attngen.backends.triton; print('triton' in sys.modules)"
    assert run_python(script).strip() == "False"


def test_check_names_the_targets_it_serves() -> None:
    with pytest.raises(ag.UnsupportedError, match="backend triton does not build for cpu") as error:
        BACKEND.check(_variant("fp32"), "prefill", Target.parse("cpu:x86-64"))
    assert "interpret" in error.value.fix
    with pytest.raises(ag.UnsupportedError, match="interpreter cannot run bf16") as error:
        BACKEND.check(_variant("bf16"), "prefill", Target.parse("interpret"))
    assert "fp32 or fp16" in error.value.fix
    for target in (*GPUS, "interpret"):
        BACKEND.check(_variant("fp16"), "decode", Target.parse(target))


def test_an_unknown_name_in_a_kernel_is_shown_with_its_lines(tmp_path: Path) -> None:
    source = SCALE.replace("2.0 * x + shift[:, None]", "2.0 * x + nothing")
    with pytest.raises(ag.BuildError) as error:
        build(source, make_plan("scale", SCALE_ARGS, "cuda:sm80"), tmp_path)
    assert error.value.what == "scale does not compile for cuda:sm80"
    assert error.value.where == "scale.py, line 14"
    assert "nothing is not defined" in error.value.why
    assert "  >   14 |     tl.store(" in error.value.why
    assert "      13 |     shift = tl.load(" in error.value.why
    assert "nothing is not defined" in error.value.log
    assert [path.name for path in tmp_path.iterdir()] == ["scale.py"]


def test_source_that_is_no_python_is_shown_with_its_lines(tmp_path: Path) -> None:
    source = SCALE.replace("columns = tl.arange(0, 64)", "columns = tl.arange(0, 64")
    for target in ("cuda:sm80", "interpret"):
        with pytest.raises(ag.BuildError) as error:
            build(source, make_plan("scale", SCALE_ARGS, target), tmp_path)
        assert error.value.where == "scale.py, line 10"
        assert "'(' was never closed" in error.value.why
        assert "  >   10 |     columns = tl.arange(0, 64" in error.value.why


INTERPRET = """
import json, os, pathlib, sys
import torch
if sys.argv[2] == "late":
    import triton
from attngen.backends.triton import TritonBackend
from tests.backends.triton_kernels import SCALE, SCALE_ARGS, build, make_plan
plan, folder = make_plan("scale", SCALE_ARGS, "interpret"), pathlib.Path(sys.argv[1])
result = build(SCALE, plan, folder)
assert result.binary == "scale.py", result
try:
    launch = TritonBackend().load(folder / result.binary, result.metadata, plan, torch.device("cpu"))
except Exception as error:
    print(type(error).__name__, error)
    sys.exit()
q, lse, out = torch.randn(37, 64), torch.randn(37), torch.full((40, 64), float("nan"))
values = (q, 0, q.stride(0), 0, out, 0, out.stride(0), 0, lse, 37, 3)
launch(0, values)
assert out.isnan().all()
launch(3, values)
assert torch.equal(out[:37], 2 * q + lse[:, None]), out
assert out[37:].isnan().all()
print(sorted(path.name for path in folder.iterdir()))
"""


def test_the_interpreter_runs_the_source(tmp_path: Path) -> None:
    assert run_python(INTERPRET, str(tmp_path), "early", TRITON_INTERPRET="0").strip() == "['scale.py']"
    assert run_python(INTERPRET, str(tmp_path), "late", TRITON_INTERPRET="1").strip() == "['scale.py']"


def test_the_interpreter_must_be_chosen_before_triton_is_imported(tmp_path: Path) -> None:
    printed = run_python(INTERPRET, str(tmp_path), "late", TRITON_INTERPRET="0")
    assert printed.startswith("UnsupportedError scale cannot be interpreted in this process")
    assert "start the process with TRITON_INTERPRET=1" in printed
