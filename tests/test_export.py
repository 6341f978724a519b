"""Packages that `attngen export` writes: installed, imported without attngen, bit for bit the same."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import attngen as ag
from attngen import export as module
from attngen.backends import launcher
from attngen.errors import ArgumentError, UnsupportedError
from attngen.export import export, imported_modules, runtime_modules
from attngen.ops import packaged
from attngen.schedule import choose_schedule
from attngen.schedule.launch import KernelLaunch
from attngen.signature import OPS, Signature
from attngen.target import CPU_ARCHS, Target, native_cpu_arch
from attngen.variant import normalize

CPU = Target.parse("cpu")
HEADS = ag.GQA(num_qo_heads=4, num_kv_heads=2, head_dim=32)

TRAINED = ag.AttentionSpec(
    heads=HEADS,
    mask=ag.Causal() & ag.SlidingWindow(left=63),
    score_mods=(ag.RelativeBias(num_buckets=8, max_distance=32),),
    normalizer=ag.Softmax(sink=True),
    dtype="fp32",
)
SERVED = ag.AttentionSpec(
    heads=HEADS, mask=ag.Causal(), dtype="bf16", kv=ag.Paged(page_size=8, layout="HND", dtype="int8")
)

# Runs in a process of its own, which refuses everything that a package must not need.
PRELUDE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("attngen", "triton", "jinja2", "pydantic", "typer", "rich"):
            raise ImportError(f"{name} is refused")
sys.meta_path.insert(0, Refuse())
import torch
given = torch.load(sys.argv[1])
"""


def install(project: Path, site: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    command += ["--disable-pip-version-check", "--target", str(site), str(project)]
    subprocess.run(command, check=True, capture_output=True, cwd=site.parent)


def run(site: Path, code: str, given: Any, folder: Path) -> Any:
    """What ``code`` puts into ``found``, run without attngen on tensors ``given``."""
    torch.save(given, folder / "given.pt")
    script = f"{PRELUDE}\n{code}\ntorch.save(found, sys.argv[2])\n"
    environment = {"PATH": "/nonexistent", "PYTHONPATH": str(site), "PYTHONWARNINGS": "error", "HOME": str(folder)}
    arguments = [sys.executable, "-s", "-c", script, str(folder / "given.pt"), str(folder / "found.pt")]
    result = subprocess.run(arguments, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return torch.load(folder / "found.pt")


def same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found.view(torch.uint8), expected.detach().contiguous().view(torch.uint8))
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            same(found[name], value)
    else:
        for x, y in zip(found, expected, strict=True):
            same(x, y)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("with space, ünïcode")
    export({"trained": TRAINED, "served-int8": SERVED}, folder / "project", "two_kinds", [CPU])
    export({"trained": TRAINED}, folder / "single", "my_attention", [CPU], ops=("prefill", "backward"))
    for project in ("project", "single"):
        install(folder / project, folder / "site")
    return folder / "site"


def training_inputs() -> dict[str, Any]:
    torch.manual_seed(0)
    shapes = {"q": (2, 70, 4, 32), "k": (2, 90, 2, 32), "v": (2, 90, 2, 32), "dout": (2, 70, 4, 32)}
    given: dict[str, Any] = {name: torch.randn(shape) for name, shape in shapes.items()}
    params = normalize(TRAINED, "backward").params
    sizes = {"num_qo_heads": 4}
    given["params"] = {p.name: torch.randn([sizes.get(d, d) for d in p.dims]) for p in params}
    return given


TRAIN = """
q, k, v, dout, params = (given[name] for name in ("q", "k", "v", "dout", "params"))
out, lse = ops.prefill(q, k, v, params=params, return_lse=True)
grads = ops.backward(dout, q, k, v, out, lse, params=params)
leaves = [x.clone().requires_grad_() for x in (q, k, v, *params.values())]
traced = ops.attention(*leaves[:3], params=dict(zip(params, leaves[3:])))
traced.backward(dout)
found = {"out": out, "lse": lse, "grads": grads, "auto": [x.grad for x in leaves]}
"""


def test_prefill_backward_and_autograd_are_the_same_bit_for_bit(site: Path, tmp_path: Path) -> None:
    given = training_inputs()
    scope: dict[str, Any] = {"ops": ag.compile(TRAINED, target="cpu"), "given": given}
    exec(TRAIN, scope)  # noqa: S102 - the text above
    same(run(site, f"import my_attention as ops\n{TRAIN}", given, tmp_path), scope["found"])


SERVE = """
k, v, q = given["k"], given["v"], given["q"]
cache = (torch.zeros(12, 2, 8, 32, dtype=torch.int8), torch.zeros(12, 2, 8, 32, dtype=torch.int8))
scales = {"k_scale": torch.tensor([0.02, 0.03]), "v_scale": torch.tensor([0.05, 0.01])}
table, lens = torch.arange(12, dtype=torch.int32).flip(0).reshape(2, 6), torch.tensor([41, 33], dtype=torch.int32)
place = torch.cat([torch.arange(n, dtype=torch.int32) for n in (41, 33)])
batch = torch.tensor([0] * 41 + [1] * 33, dtype=torch.int32)
ops.append(k, v, cache, positions=place, batch_indices=batch, page_table=table, **scales)
paged = {"page_table": table, "kv_lens": lens, **scales}
found = {
    "cache": cache,
    "decode": ops.decode(q[:2], cache, return_lse=True, **paged),
    "prefill": ops.prefill(q, cache, qo_indptr=torch.tensor([0, 5, 9], dtype=torch.int32), return_max=True, **paged),
}
"""


def test_append_decode_and_prefill_of_a_cache_are_the_same_bit_for_bit(site: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    given = {name: torch.randn(n, h, 32).bfloat16() for name, n, h in (("q", 9, 4), ("k", 74, 2), ("v", 74, 2))}
    scope: dict[str, Any] = {"ops": ag.compile(SERVED, target="cpu"), "given": given, "torch": torch}
    exec(SERVE, scope)  # noqa: S102 - the text above
    same(run(site, f"from two_kinds import served_int8 as ops\n{SERVE}", given, tmp_path), scope["found"])


def test_ops_are_registered_with_fakes_and_pickle(site: Path, tmp_path: Path) -> None:
    code = """
import copy, io, pickle
import my_attention
from torch._subclasses.fake_tensor import FakeTensorMode
q, k, v, params = (given[name] for name in ("q", "k", "v", "params"))
class Module(torch.nn.Module):
    def forward(self, q, k, v, params):
        return my_attention.attention(q, k, v, params=params)
program = torch.export.export(Module(), (q, k, v, params))
names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
assert any(name.startswith("my_attention.forward") for name in names), names
with FakeTensorMode() as mode:
    fakes = [mode.from_tensor(x) for x in (q, k, v)]
    shape = my_attention.attention(*fakes, params={n: mode.from_tensor(x) for n, x in params.items()}).shape
assert shape == q.shape
my_attention.warmup("prefill")
again = pickle.loads(pickle.dumps(my_attention.ops))
found = [program.module()(q, k, v, params), again.prefill(q, k, v, params=params)]
"""
    given = training_inputs()
    out = ag.compile(TRAINED, target="cpu").prefill(given["q"], given["k"], given["v"], params=given["params"])
    same(run(site, code, given, tmp_path), [out, out])


def test_what_is_absent_is_refused_with_its_reason(site: Path, tmp_path: Path) -> None:
    code = """
import my_attention, two_kinds
def refusal(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except my_attention.UnsupportedError as error:
        return str(error)
    except two_kinds.UnsupportedError as error:
        return str(error)
q, k, v, params = (given[name] for name in ("q", "k", "v", "params"))
found = [
    refusal(my_attention.decode, q, k, v, params=params),
    refusal(my_attention.prefill, q, k, v, params=params, kv_cache=(k, v)),
    refusal(my_attention.prefill, q, k, v, params=params, key_indices=k),
    refusal(two_kinds.served_int8.backward, q, q, k, v, q),
]
"""
    decode, prefix, listed, backward = run(site, code, training_inputs(), tmp_path)
    assert "decode is not in this package" in decode
    assert "export it again with decode" in decode
    assert "kv_cache is not served here" in prefix
    assert "key_indices is not served here" in listed
    assert "backward does not read a paged cache" in backward


def test_damaged_binaries_and_other_machines_are_refused(site: Path, tmp_path: Path) -> None:
    code = """
import pathlib, shutil, sys
import my_attention
from my_attention._runtime.ops import packaged
from my_attention._runtime.target import Target
q, k, v, params = (given[name] for name in ("q", "k", "v", "params"))
def message(kind):
    try:
        packaged.load(pathlib.Path("copy/trained.json")).prefill(q, k, v, params=params)
    except kind as error:
        return str(error)
shutil.copytree(pathlib.Path(my_attention.__file__).parent, "copy")
packaged.native_cpu_arch = lambda: "x86-64-v2"
found = [message(my_attention.UnsupportedError)]
packaged.native_cpu_arch = lambda: sys.argv[3]
for binary in pathlib.Path("copy/kernels").rglob("prefill*.so"):
    binary.write_bytes(binary.read_bytes()[:-1] + b"x")
found += [message(my_attention.BuildError)]
""".replace("sys.argv[3]", repr(native_cpu_arch()))
    other, damaged = run(site, code, training_inputs(), tmp_path)
    assert "copy has no kernels for cpu:x86-64-v2" in other
    assert f"it was exported for {CPU}" in other
    assert "is damaged or missing" in damaged


def test_nothing_exported_tells_where_it_was_made(site: Path) -> None:
    root = Path(ag.__file__).resolve().parents[1]
    told = [str(root), str(Path.home()), os.environ["ATTNGEN_CACHE_DIR"], str(site.parent), "/tmp/"]
    files = [path for path in (site / "two_kinds").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.suffix for path in files} >= {".so", ".json", ".py", ".typed"}
    for path in [*files, *(site.parent / "project" / name for name in ("README.md", "pyproject.toml"))]:
        data = path.read_bytes()
        assert not [text for text in told if text.encode() in data], path


def test_sources_are_those_of_attngen_and_import_torch_alone(site: Path) -> None:
    allowed = {*sys.stdlib_module_names, "torch", "cuda", "two_kinds"}
    for name, source in runtime_modules().items():
        copy = (site / "two_kinds" / "_runtime").joinpath(*name.split(".")[1:]).with_suffix(".py").read_text()
        assert copy.replace("two_kinds._runtime.", "attngen.") == source
        assert imported_modules(copy) == []
        for node in ast.walk(ast.parse(copy)):
            found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {x.split(".")[0] for x in found} <= allowed


def test_import_is_fast(site: Path, tmp_path: Path) -> None:
    code = """
import time
start = time.process_time()
import two_kinds
found = torch.tensor(time.process_time() - start)
"""
    assert float(run(site, code, 0, tmp_path)) < 0.5


def test_requirements_are_those_of_attngen() -> None:
    project = tomllib.loads((Path(ag.__file__).resolve().parents[1] / "pyproject.toml").read_text())["project"]
    assert set(module.REQUIREMENTS) <= set(project["dependencies"])
    assert module.CUDA_REQUIREMENT in project["optional-dependencies"]["cuda"]


def test_descriptions_read_back_to_what_they_describe() -> None:
    for source in ag.shipped_specs():
        spec = ag.load_spec(source)
        for op in OPS:
            try:
                variant = normalize(spec, op)
            except UnsupportedError:
                continue
            signature = variant.signature
            assert Signature.from_json(json.loads(json.dumps(signature.to_json()))) == signature
            for name in ("compute_dtype", "head_dim_main", "group_size"):
                assert getattr(signature, name) == getattr(variant, name)
            for kernel in choose_schedule(variant, op, CPU, "cpp").kernels:
                back = KernelLaunch.from_json(json.loads(json.dumps(kernel.to_json())))
                assert back.to_json() == kernel.to_json()
                assert (back.role, back.is_resident, back.dq_sums) == (kernel.role, kernel.is_resident, kernel.dq_sums)


@pytest.mark.parametrize(
    "name", ["", "1a", "a-b", "a.b", "class", "a b", 'a"\nimport os', "../a", "_a", "é", "a" * 65, "torch", "json"]
)
def test_hostile_names_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError):
        export({"trained": TRAINED}, tmp_path / "out", name, [CPU])
    assert not list(tmp_path.iterdir())


def test_hostile_words_of_a_spec_inject_nothing(tmp_path: Path) -> None:
    evil = '`|"""\n\n# {{ 7*7 }}\n]\nimport os\\'

    @ag.score_mod
    def bias(score, b, h, q, k, table: ag.Tensor(evil)):
        __doc__ = evil  # noqa: F841
        return score + table[h]

    spec = ag.AttentionSpec(name=evil, heads=HEADS, score_mods=(bias,), dtype="fp32")
    done = export({evil: spec}, tmp_path / "out", "safe", [CPU], ops=("prefill",))
    assert done.modules[0].isidentifier()
    package = tmp_path / "out" / "safe"
    tree = ast.parse((package / "__init__.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert {node.module.removeprefix("safe._runtime.") for node in imports} == {
        *("pathlib", "errors", "ops.merge", "ops.packaged")
    }
    project = tomllib.loads((tmp_path / "out" / "pyproject.toml").read_text())
    assert project["project"]["name"] == "safe"
    assert "\n# {{" not in (tmp_path / "out" / "README.md").read_text()


def test_captured_tensors_travel(tmp_path: Path) -> None:
    slopes = torch.linspace(0.0, 1.0, 4, dtype=torch.float64)

    @ag.score_mod
    def bias(score, b, h, q, k):
        return score + slopes[h] * (k - q)

    spec = ag.AttentionSpec(heads=HEADS, score_mods=(bias,), dtype="fp32")
    export({"bias": spec}, tmp_path / "out", "captured_kernels", [CPU], ops=("prefill",))
    torch.manual_seed(2)
    q, k, v = (torch.randn(1, 20, h, 32) for h in (4, 2, 2))
    code = "import captured_kernels\nfound = captured_kernels.prefill(*given)"
    same(run(tmp_path / "out", code, [q, k, v], tmp_path), ag.compile(spec, target="cpu").prefill(q, k, v))


def test_several_targets_in_one_package(tmp_path: Path) -> None:
    level = CPU_ARCHS.index(native_cpu_arch())
    targets = [Target.parse(f"cpu:{arch}") for arch in CPU_ARCHS[max(level - 1, 0) : level + 1]]
    spec = ag.AttentionSpec(heads=HEADS, mask=ag.Causal(), dtype="fp32")
    export({"causal": spec}, tmp_path / "out", "levels", targets, ops=("prefill",))
    torch.manual_seed(3)
    given = [torch.randn(1, 20, h, 32) for h in (4, 2, 2)]
    code = """
import levels
from levels._runtime.ops import packaged
loaded = []
real = packaged.load_library
packaged.load_library = lambda path, kernel: loaded.append(str(kernel.target)) or real(path, kernel)
found = [levels.prefill(*given)]
assert set(loaded) == {BEST}, loaded
""".replace("BEST", repr(str(targets[-1])))
    same(run(tmp_path / "out", code, given, tmp_path), [ag.compile(spec, target="cpu").prefill(*given)])


def test_targets_that_a_package_cannot_run_are_refused(tmp_path: Path) -> None:
    for target, why in (("hip:gfx942", "the HIP driver is missing"), ("interpret", "part of Triton")):
        with pytest.raises(UnsupportedError, match=why):
            export({"trained": TRAINED}, tmp_path / "out", "refused", [Target.parse(target)])
    with pytest.raises(UnsupportedError, match="reference backend has no kernels"):
        export({"trained": TRAINED}, tmp_path / "out", "refused", [CPU], backend="reference")
    with pytest.raises(UnsupportedError, match="backward does not read a paged cache"):
        export({"served": SERVED}, tmp_path / "out", "refused", [CPU], ops=("backward",))
    assert not list(tmp_path.iterdir())


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ArgumentError, match="is in use"):
        export({"trained": TRAINED}, tmp_path, "my_attention", [CPU])
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_names_of_specs_do_not_collide(tmp_path: Path) -> None:
    for names in (("a-b", "a_b"), ("prefill", "other")):
        with pytest.raises(ArgumentError, match="two things would be called"):
            export(dict.fromkeys(names, TRAINED), tmp_path / "out", "twice", [CPU])


@pytest.mark.triton_compile
def test_packages_launch_kernels_for_nvidia_as_their_backends_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ag.AttentionSpec(heads=ag.GQA(4, 2, 64), mask=ag.Causal(), dtype="bf16")
    hopper = Target.parse("cuda:sm90a")
    done = export({"causal": spec}, tmp_path / "out", "on_gpu", [hopper], ops=("prefill", "decode"))
    assert done.kernels >= 3
    project = tomllib.loads((tmp_path / "out" / "pyproject.toml").read_text())["project"]
    assert module.CUDA_REQUIREMENT in project["dependencies"]
    loads: list[Any] = []
    monkeypatch.setattr(launcher, "load", lambda path, *args, **kwargs: loads.append((path.read_bytes(), args, kwargs)))
    ops, device = packaged.load(tmp_path / "out" / "on_gpu" / "causal.json"), torch.device("cuda", 0)
    compiled = ag.compile(spec, target=hopper, ops=("prefill", "decode"))
    monkeypatch.setattr(packaged, "device_target", lambda device: hopper)
    backends = set()
    for op in ("prefill", "decode"):
        backends |= {kernel.plan.backend for kernel in compiled.op(op).kernels}
        compiled.op(op).load(device)
        expected, loads[:] = json.loads(json.dumps([kwargs for _, _, kwargs in loads])), []
        binaries = [kernel.binary.read_bytes() for kernel in compiled.op(op).kernels]
        plans = [(kernel.plan.entry, kernel.plan.args, device) for kernel in compiled.op(op).kernels]
        ops.op(op, device).load(device)
        assert [(data, args) for data, args, _ in loads] == list(zip(binaries, plans, strict=True))
        assert [kwargs for _, _, kwargs in loads] == expected
        loads.clear()
    assert backends == {"cuda", "triton"}
    with pytest.raises(UnsupportedError, match=f"on_gpu has no kernels for {CPU}"):
        ops.op("prefill", torch.device("cpu"))
