"""Templates: what they ask for is what they are given."""

from __future__ import annotations

from pathlib import Path

import pytest
from jinja2 import meta, nodes

import attngen as ag
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
