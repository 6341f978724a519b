"""Templates: what they ask for is what they are given."""

from __future__ import annotations

from pathlib import Path

import pytest
from jinja2 import meta, nodes

import attngen as ag
from attngen.codegen import environment as environments
from attngen.codegen.environment import environment
from attngen.compiler import plan_op, render_kernel
from attngen.resources import resource_folder
from attngen.target import Target
from attngen.variant import OPS

FILES = sorted(
    path for backend in ("cpp", "triton") for path in (resource_folder("templates") / backend).glob("*.jinja")
)
ENTRIES = {"forward", "merge", "delta", "dkdv", "dq"}
MORE_ENTRIES = {"dparams", "key_lists", "query_lists", "append"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_templates_see_plan_and_emit_only(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    tree = environment(path.parent.name).parse(source)
    own = {name.name for node in tree.find_all((nodes.Assign, nodes.AssignBlock)) for name in node.find_all(nodes.Name)}
    assert meta.find_undeclared_variables(tree) - own <= {"plan", "emit"}
    assert source.startswith("{#"), "a template opens with the symbols it uses"


@pytest.mark.parametrize("backend", ["cpp", "triton"])
def test_each_folder_has_a_template_for_each_schedule(backend: str) -> None:
    names = {path.name.split(".")[0] for path in FILES if path.parent.name == backend}
    entries = {name for name in names if not name.startswith("_")}
    assert entries - MORE_ENTRIES == ENTRIES


@pytest.mark.parametrize("name", sorted(ag.shipped_specs()))
@pytest.mark.parametrize(
    ("backend", "target"),
    [("cpp", "cpu:x86-64-v3"), ("triton", "cuda:sm90a"), ("triton", "hip:gfx942"), ("cuda", "cuda:sm90a")],
)
def test_every_spec_renders_for_every_op(name: str, backend: str, target: str) -> None:
    spec = ag.load_spec(name)
    for op in OPS:
        if (op == "backward" and spec.kv.kind == "paged" and spec.heads.kind != "mla") or (
            op == "decode" and spec.dropout
        ):
            continue
        plan = plan_op(spec, op, Target.parse(target), backend)
        sources = [render_kernel(kernel) for kernel in plan.kernels]
        assert sources == [render_kernel(kernel) for kernel in plan.kernels]
        for kernel, rendered in zip(plan.kernels, sources, strict=True):
            assert rendered.source.count(f"{kernel.entry}(") == 1
            assert "{{" not in rendered.source
            assert "{%" not in rendered.source
            assert all(arg.name in rendered.source for arg in kernel.args)


def test_compiled_templates_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As bytecode beside that of modules; what is old, damaged or cannot be written is compiled anew."""
    package = tmp_path / "package"
    (package / "__pycache__").mkdir(parents=True)
    (tmp_path / "cpp").mkdir()
    monkeypatch.setattr(environments, "__file__", str(package / "environment.py"))
    monkeypatch.setattr(environments, "resource_folder", lambda name: tmp_path)
    make = environment.__wrapped__
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    compiled = []

    class Counting(environments.Environment):
        def compile(self, source, name=None, filename=None, raw=False, defer_init=False):  # type: ignore[no-untyped-def, override]
            compiled.append(name)
            return super().compile(source, name, filename, raw, defer_init)

    monkeypatch.setattr(environments, "Environment", Counting)

    def rendered(text: str) -> int:
        """How many templates were compiled to render this one."""
        compiled.clear()
        (tmp_path / "cpp" / "a.jinja").write_text(text)
        assert make("cpp").get_template("a.jinja").render(x=3) == text.replace("{{ x }}", "3")
        return len(compiled)

    assert [rendered("{{ x }} a"), rendered("{{ x }} a"), rendered("{{ x }} b"), rendered("{{ x }} b")] == [1, 0, 1, 0]
    (file,) = (package / "__pycache__").iterdir()
    whole = file.read_bytes()
    for damaged in (b"", b"garbage", whole[:20], whole[:-30]):
        file.write_bytes(damaged)
        assert rendered("{{ x }} b") == 1
        assert file.read_bytes() == whole
    file.unlink()
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    assert [rendered("{{ x }} b"), rendered("{{ x }} b")] == [1, 1]
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    (package / "__pycache__").rmdir()
    assert [rendered("{{ x }} b"), rendered("{{ x }} b")] == [1, 1]
