"""Commands, through typer's runner: what they print, and their exit status."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

import attngen as ag
from attngen import compiler
from attngen.backends.cuda import CudaBackend
from attngen.builds import BuildReport, KernelReport
from attngen.cli import app
from attngen.errors import UnsupportedError
from attngen.explain import asm_section
from attngen.ops.op import BuiltKernel
from attngen.picture.png import PAIRS
from attngen.settings import Settings
from attngen.store import Store
from attngen.target import Target
from attngen.variant import OpName

CPU = str(Target.parse("cpu"))


def run(*arguments: str | Path, text: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=text)


def succeed(*arguments: str | Path) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def fail(*arguments: str | Path) -> str:
    result = run(*arguments)
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    return result.stderr


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATTNGEN_BACKEND", "ATTNGEN_CACHE_PATH", "ATTNGEN_OVERRIDE_DIR", "CXX", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds the kernels of :func:`small`."""
    return tmp_path_factory.mktemp("built") / "cache"


@pytest.fixture
def small(tmp_path: Path, built: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A spec whose kernels build quickly."""
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(built))
    spec = ag.AttentionSpec(
        name="small", heads=ag.GQA(num_qo_heads=4, num_kv_heads=2, head_dim=16), mask=ag.Causal(), dtype="fp32"
    )
    return spec_file(tmp_path, spec)


def spec_file(folder: Path, spec: ag.AttentionSpec) -> Path:
    path = folder / f"{spec.name}.toml"
    path.write_text(spec.to_toml())
    return path


def paged(folder: Path) -> Path:
    heads = ag.GQA(num_qo_heads=4, num_kv_heads=2, head_dim=16)
    return spec_file(folder, ag.AttentionSpec(name="pages", heads=heads, kv=ag.Paged(page_size=8), dtype="fp32"))


def rows(table: str) -> list[list[str]]:
    """Cells of a table, split where at least two blanks are."""
    return [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()]


def test_version():
    assert succeed("--version") == f"attngen {ag.__version__}\n"


def test_module_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["attngen", "--version"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("attngen", run_name="__main__")
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"attngen {ag.__version__}\n"


def test_demo_is_called(monkeypatch: pytest.MonkeyPatch):
    calls = []
    monkeypatch.setattr("attngen.demo.main", lambda: calls.append("called"))
    succeed("demo")
    assert calls == ["called"]


def test_list_shows_every_spec_and_backend():
    table = rows(succeed("list"))
    assert {row[0] for row in table} >= {*ag.shipped_specs(), "reference", "cpp", "triton"}
    assert [
        "mistral-7b",
        "gqa 32/8",
        "128",
        "Causal() & SlidingWindow(left=4095)",
        "none",
        "none",
        "Contiguous()",
        "bf16",
    ] in table
    assert ["qwen3-8b", "gqa 32/8", "128", "Causal()", "none", "none", "Paged(page_size=16)", "bf16"] in table
    norm = "QKNorm(q_weight=q_norm_weight, k_weight=k_norm_weight)"
    other = {row[0]: row[5] for row in table if len(row) == 8}
    assert other["qwen3-next-80b"] == f"{norm}, Rope(dim=64, theta=10000000.0), output_gate=gate"
    assert other["gpt-oss-20b-local"] == "Softmax(sink=True)"
    assert other["bert-base-training"] == "dropout=0.1"
    targets = dict(row for row in table if row[0] in ("cpp", "triton"))
    assert targets["cpp"] == "cpu:x86-64, cpu:x86-64-v2, cpu:x86-64-v3, cpu:x86-64-v4, cpu:armv8-a"
    assert targets["triton"].endswith("cuda:sm100, hip:gfx942, hip:gfx950, interpret")


def test_compile_builds_then_finds(small: Path, built: Path):
    entry = "prefill_causal_gqa2_fp32_d16"
    first = run("compile", small, "--target", "cpu", "--ops", "prefill")
    assert first.exit_code == 0, first.output
    entries = [entry, entry.replace("prefill", "prefill_short")]
    assert sorted(first.stderr.splitlines()) == [f"building {name} for {CPU}" for name in entries]
    header, *kernels, total = rows(first.stdout)
    assert header == ["spec", "kernel", "target", "seconds", "size"]
    assert [kernel[:4] for kernel in kernels] == [["small", name, CPU, "built"] for name in entries]
    assert all(float(kernel[4]) > 0 for kernel in kernels)
    assert total[0].startswith("2 kernels: 2 built, 0 cached, in ")
    sizes = {artifact.size for artifact in Store.from_settings(Settings.from_env()).entries()}
    assert {kernel[5] for kernel in kernels} == {f"{size / 1024:.1f} KiB" for size in sizes}

    second = run("compile", small, "--target", "cpu", "--ops", "prefill")
    assert (second.exit_code, second.stderr) == (0, "")
    assert rows(second.stdout)[1] == ["small", entry, CPU, "cached", kernels[0][5]]
    assert "2 kernels: 0 built, 2 cached" in second.stdout


def test_compile_tells_of_ops_that_a_spec_lacks(tmp_path: Path):
    report = succeed("compile", paged(tmp_path), "--target", "cpu")
    assert f"pages has no backward for {CPU}: backward does not read a paged cache" in report
    assert "5 kernels: 5 built, 0 cached" in report


def test_compile_fails_for_an_op_that_was_asked_for(tmp_path: Path):
    assert fail("compile", paged(tmp_path), "--target", "cpu", "--ops", "backward") == (
        "backward does not read a paged cache\n"
        "  where: spec.kv\n"
        "  why: gradients of k and v would need pages of their own\n"
        "  fix: train with kv=ag.Contiguous() or ag.Ragged()\n"
    )


def test_compile_fails_if_nothing_can_be_built(tmp_path: Path):
    error = fail("compile", paged(tmp_path), "--target", "cuda:sm90a", "--backend", "cpp")
    assert "backend cpp does not build for cuda:sm90a" in error


def test_compile_fails_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    error = fail("compile", paged(tmp_path), "--target", "cpu", "--ops", "prefill")
    assert "there is no C++ compiler" in error
    assert "'no-such-compiler'" in error


def test_compile_goes_on_after_a_failure(small: Path, tmp_path: Path):
    succeed("compile", small, "--target", "cpu", "--ops", "prefill")
    result = run("compile", small, paged(tmp_path), "--target", "cpu,interpret", "--ops", "prefill", "--backend", "cpp")
    assert result.exit_code == 1
    assert "backend cpp does not build for interpret" in result.stderr
    assert "4 kernels: " in result.stdout


def test_compile_shows_what_the_toolchain_says(small: Path, monkeypatch: pytest.MonkeyPatch):
    kernel = KernelReport(
        "[bold]small", "entry", Target.parse("cuda:sm90a"), True, 1.5, 2048, {"shared": 98304, "registers": 168}
    )
    monkeypatch.setattr("attngen.cli.build_all", lambda *_, **__: BuildReport(kernels=[kernel], seconds=2.0))
    header, row, total = rows(succeed("compile", small, "--target", "cuda:sm90a"))
    assert header == ["spec", "kernel", "target", "seconds", "size", "shared", "registers"]
    assert row == ["[bold]small", "entry", "cuda:sm90a", "built", "1.50", "2.0 KiB", "98304", "168"]
    assert total == ["1 kernel: 1 built, 0 cached, in 2.00 s"]


def test_compile_reference_builds_nothing(small: Path):
    assert "0 kernels: 0 built, 0 cached" in succeed("compile", small, "--target", "cpu", "--backend", "reference")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("compile", "nowhere"), "no spec 'nowhere'"),
        (("compile", "gpt2", "--ops", "sideways"), "no op 'sideways'\n  where: op\n  why: it does not exist"),
        (("compile", "gpt2", "--target", "cuda:sm33"), "unknown target 'cuda:sm33'"),
        (("compile", "gpt2", "--target", "cpu", "--backend", "nothing"), "no backend 'nothing'"),
        (("explain", "gpt2", "--stage", "poem"), "fix: use spec, variant, plan, source, asm"),
        (("explain", "gpt2", "--backend", "cpp", "--kernel", "dq"), "prefill has no kernel 'dq'"),
        (("explain", "gpt2", "--backend", "reference", "--stage", "source"), "reference has no kernels"),
        (("show", "gpt2", "--backend", "reference"), "reference has no tiles"),
        (("show", "gpt2", "--head", "99"), "there is no head 99"),
        (("show", "gpt2", "--kv-len", "0"), "qo_len is 0"),
        (("show", "gpt2", "--tile-kv", "0"), "tile_kv is 0"),
        (("show", "gpt2", "--param", "x"), "cannot read 'x'"),
    ],
)
def test_errors_print_their_text(arguments: tuple[str, ...], text: str):
    assert text in fail(*arguments)


def test_spec_errors_name_the_field(tmp_path: Path):
    path = tmp_path / "wrong.toml"
    path.write_text('[heads]\nkind = "mha"\nnum_heads = 2\nhead_dim = 7\n')
    assert "where: AttentionSpec.heads.mha.head_dim" in fail("explain", path, "--stage", "spec")


def rendered(path: Path, op: OpName, target: str = "cpu", name: str = "cpp") -> dict[str, str]:
    plan = compiler.plan_op(ag.load_spec(path), op, Target.parse(target), name)
    return {kernel.role: compiler.render_kernel(kernel).source for kernel in plan.kernels}


def test_explain_spec_can_be_read_back(small: Path, tmp_path: Path):
    copy = tmp_path / "copy.toml"
    copy.write_text(succeed("explain", small, "--stage", "spec"))
    assert ag.load_spec(copy) == ag.load_spec(small)


def test_explain_variant_shows_every_field(small: Path):
    lines = dict(row for row in rows(succeed("explain", "gemma2-9b-local", "--stage", "variant")))
    assert lines["mask"] == "(k <= q) & (q - 4095 <= k)"
    assert lines["score"] == "50.0 * tanh(score * 0.02)"
    assert lines["in base 2"] == "tanh(score * 0.00125) * 72.13475204444816, of the raw dot product"
    assert (lines["num_qo_heads"], lines["num_kv_heads"], lines["head_dim_vo"]) == ("16", "8", "256")
    assert (lines["q_layout"], lines["params"], lines["sm_scale"]) == ("padded", "none", "0.0625")


def test_explain_variant_shows_parameters(tmp_path: Path):
    slopes = ag.AttentionSpec(name="s", heads=ag.MHA(num_heads=2, head_dim=16), score_mods=(ag.ALiBi(slopes="slopes"),))
    lines = dict(rows(succeed("explain", spec_file(tmp_path, slopes), "--stage", "variant")))
    assert lines["params"] == "slopes fp32 [num_qo_heads]"
    assert lines["a head"] == "uniform_0 = slopes[h] * 1.4426950408889634"
    assert (lines["a query"], lines["a key"]) == ("row_0 = uniform_0 * q", "column_0 = uniform_0 * k")
    assert lines["a pair"] == "score * 0.36067376022224085 + (column_0 - row_0)"


def test_explain_plan(small: Path):
    text = succeed("explain", small, "--op", "decode", "--backend", "cpp", "--target", "cpu")
    assert f"decode for {CPU} by cpp: 2 kernels" in text
    assert "forward: decode_causal_gqa2_fp32_d16" in text
    plan = compiler.plan_op(ag.load_spec(small), "decode", Target.parse("cpu"), "cpp")
    tiles, forward = plan.kernel("forward").tiles, plan.kernel("forward")
    grid = f"num_tiles * 2 * num_splits, num_tiles = batch * ceil(qo_len * 2 / {tiles.q})"
    assert f"  grid          {grid}\n" in text
    assert f"  tile          {tiles.q} rows (token, head in group of 2) x {tiles.kv} keys\n" in text
    assert f"  splits        clamp(keys // {forward.min_split}, 1, {forward.max_splits}) parts a request\n" in text
    assert "  keys          unbounded .. q1 (no part of it can be skipped)\n" in text
    assert "  unmasked      unbounded .. q0\n" in text
    assert "  tile any      q1 >= k0\n" in text
    assert "  args          q              *fp32\n" in text
    merge = text.partition("\nmerge: ")[2]
    assert f"  grid          ceil(num_tokens * 4 / {plan.kernel('merge').tiles.q})\n" in merge
    only = succeed("explain", small, "--op", "decode", "--backend", "cpp", "--target", "cpu", "--kernel", "merge")
    assert only.endswith(f"\nmerge: {merge}")
    assert "forward: " not in only


@pytest.mark.parametrize("op", ["prefill", "decode", "backward"])
def test_explain_source_is_exact(small: Path, op: OpName):
    sources = rendered(small, op)
    options = ("--op", op, "--stage", "source", "--target", "cpu", "--backend", "cpp")
    result = run("explain", small, *options)
    assert result.stdout_bytes == "".join(sources.values()).encode()
    for schedule, source in sources.items():
        assert run("explain", small, *options, "--kernel", schedule).stdout_bytes == source.encode()


def test_explain_source_of_another_machine(small: Path):
    options = ("--stage", "source", "--target", "cuda:sm90a")
    sources = rendered(small, "prefill", "cuda:sm90a", "triton")
    assert run("explain", small, *options).stdout_bytes == "".join(sources.values()).encode()


def test_explain_asm_disassembles(small: Path):
    text = succeed("explain", small, "--stage", "asm", "--target", "cpu", "--backend", "cpp")
    assert text.startswith("prefill_causal_gqa2_fp32_d16.so:")
    assert "<prefill_causal_gqa2_fp32_d16>:" in text


@pytest.mark.parametrize(("target", "suffix"), [("cuda:sm90a", ".ptx"), ("hip:gfx942", ".amdgcn")])
def test_explain_asm_is_the_text_in_the_cache(small: Path, tmp_path: Path, target: str, suffix: str):
    plan = compiler.plan_op(ag.load_spec(small), "prefill", Target.parse(target), "triton").kernel("forward")
    (tmp_path / f"{plan.entry}{suffix}").write_text("add.s32 %r1, %r2, %r3;\n")
    section = asm_section(BuiltKernel(plan, tmp_path, tmp_path / "binary", {}, pytest.fail))
    assert (section.title, section.text) == (f"{plan.entry}{suffix}", "add.s32 %r1, %r2, %r3;\n")


def test_explain_asm_of_a_cubin_is_disassembled(tmp_path: Path):
    plan = compiler.plan_op(ag.load_spec("mistral-7b"), "prefill", Target.parse("cuda:sm90a"), "cuda").kernel("forward")
    built = CudaBackend().build(compiler.render_kernel(plan), tmp_path)
    section = asm_section(BuiltKernel(plan, tmp_path, tmp_path / built.binary, built.metadata, pytest.fail))
    assert section.title == f"{plan.entry}.cubin"
    assert "HGMMA" in section.text


def test_explain_asm_of_the_interpreter(small: Path, tmp_path: Path):
    plan = compiler.plan_op(ag.load_spec(small), "prefill", Target.parse("interpret"), "triton").kernel("forward")
    with pytest.raises(UnsupportedError, match="has no machine code"):
        asm_section(BuiltKernel(plan, tmp_path, tmp_path / "source.py", {}, pytest.fail))


def test_explain_colours_a_terminal(small: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "300")
    text = succeed("explain", small, "--op", "decode", "--stage", "source", "--target", "cpu", "--backend", "cpp")
    assert "\x1b[" in text
    plain = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    forward, merge = rendered(small, "decode").values()
    assert [line for line in plain if line and not line.startswith("─")] == [
        line.rstrip() for line in (forward + merge).splitlines() if line.strip()
    ]


def test_explain_asm_needs_objdump(small: Path, monkeypatch: pytest.MonkeyPatch):
    succeed("compile", small, "--target", "cpu", "--ops", "prefill")
    monkeypatch.setattr("attngen.explain.shutil.which", lambda name: None)
    error = fail("explain", small, "--stage", "asm", "--target", "cpu", "--backend", "cpp")
    assert "objdump is not on PATH" in error


def test_explain_diff(small: Path, tmp_path: Path):
    full = ag.AttentionSpec(name="full", heads=ag.load_spec(small).heads, dtype="fp32")
    options = ("--stage", "variant", "--diff")
    assert succeed("explain", small, *options, small) == ""
    text = succeed("explain", small, *options, spec_file(tmp_path, full))
    changed = [line for line in text.splitlines() if line.startswith(("-  ", "+  "))]
    assert changed == ["-  mask          k <= q", "+  mask          True"]


def test_show_counts_and_draws(tmp_path: Path):
    path = tmp_path / "mask.png"
    tiles = ("--qo-len", 512, "--kv-len", 512, "--tile-q", 128, "--tile-kv", 128)
    text = succeed("show", "gpt2", *map(str, tiles), "--output", path)
    assert text.startswith("k <= q\nprefill for ")
    assert "512 queries x 512 keys in tiles of 128 x 128, head 0" in text
    assert "16 tiles: 10 visited (62.5%), 6 skipped, 4 partial\n" in text
    assert "262144 pairs: 131328 visible (50.1%;" in text
    assert text.endswith(f"wrote {path}\n")
    with Image.open(path) as image:
        colours = {colour for _, colour in image.getcolors(1 << 24)}
    assert colours >= {PAIRS["none"][0], *PAIRS["some"], PAIRS["all"][1]}
    assert PAIRS["none"][1] not in colours


def test_show_takes_the_kernels_own_tiles_and_a_telling_length():
    text = succeed("show", "mistral-7b", "--target", "cuda:sm90a")
    plan = compiler.plan_op(ag.load_spec("mistral-7b"), "prefill", Target.parse("cuda:sm90a"), "cuda")
    tiles = plan.kernel("forward").tiles
    assert f"by cuda: 8192 queries x 8192 keys in tiles of {tiles.q} x {tiles.kv}, head 0" in text


def test_show_reads_parameters(tmp_path: Path):
    @ag.mask_mod
    def prefix(b, h, q, k, prefix_len: ag.Tensor("batch", dtype="i32")):
        return k < prefix_len[b]

    spec = ag.AttentionSpec(name="prefix", heads=ag.MHA(num_heads=2, head_dim=16), mask=prefix)
    path, tensor = spec_file(tmp_path, spec), tmp_path / "lengths.pt"
    size = ("--kv-len", "64", "--tile-q", "16", "--tile-kv", "16", "--backend", "cpp", "--target", "cpu")
    text = succeed("show", path, *size)
    assert "4096 pairs depend on prefix_len (not given): their tiles are drawn as some" in text
    assert "16 tiles: 16 visited (100.0%), 0 skipped, 16 partial" in text
    torch.save(torch.tensor([10, 40], dtype=torch.int32), tensor)
    text = succeed("show", path, *size, "--param", f"prefix_len={tensor}", "--request", "1")
    assert "16 tiles: 12 visited (75.0%), 4 skipped, 4 partial" in text
    assert "4096 pairs: 2560 visible" in text


def test_doctor_reports(tmp_path: Path):
    text = succeed("doctor")
    assert re.search(rf"✓ attngen +{re.escape(ag.__version__)} ", text)
    assert f"{torch.__version__}\n" in text
    assert re.search(r"✓ C\+\+ compiler +\S.*\d+\.\d+.* \(\S+\)", text)
    assert f"{CPU} (default on this machine)" in text or "cuda:" in text
    assert f"{tmp_path / 'cache'} (not made yet, writable)" in text


def test_doctor_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("attngen.doctor.triton_folder", lambda: None)
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    text = succeed("doctor")
    assert "CXX=no-such-compiler is no program" in text
    assert "→ pip install 'attngen[triton]'" in text
    assert f"{cache} is refused: others may write to it (mode 0777)" in text
    assert "→ point ATTNGEN_CACHE_DIR to a private folder" in text
    assert re.search(r"\d of \d+ want attention", text)


def test_show_draws_sample_values(tmp_path: Path):
    """Primitives that read data bring an example of it; a tensor that is passed comes first."""
    size = ("--kv-len", "64", "--tile-q", "16", "--tile-kv", "16", "--backend", "cpp", "--target", "cpu")
    text = succeed("show", "paligemma-3b", *size)
    assert "sample values of prefix_len: pass others with --param" in text
    assert f"4096 pairs: {sum(max(16, q + 1) for q in range(64))} visible" in text
    tensor = tmp_path / "lengths.pt"
    torch.save(torch.tensor([64], dtype=torch.int32), tensor)
    text = succeed("show", "paligemma-3b", *size, "--param", f"prefix_len={tensor}")
    assert "sample values" not in text
    assert "4096 pairs: 4096 visible" in text
