"""The README's examples run, and the kernel it shows is the one that is generated."""

from __future__ import annotations

import re
from pathlib import Path

from attngen.compiler import plan_op, render_kernel
from attngen.target import Target

TEXT = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")


def blocks() -> tuple[list[str], str]:
    """Examples in order, and the kernel."""
    kernel = re.search(r"<!-- kernel -->\n```python\n(.*?)```", TEXT, re.DOTALL)
    assert kernel is not None
    return re.findall(r"```python\n(.*?)```", TEXT.replace(kernel.group(0), ""), re.DOTALL), kernel.group(1)


def test_examples_run_and_show_the_generated_kernel(tmp_path: Path) -> None:
    examples, shown = blocks()
    script = tmp_path / "readme.py"
    script.write_text("\n".join(examples))
    names: dict[str, object] = {"__name__": "readme"}
    exec(compile(script.read_text(), str(script), "exec"), names)  # noqa: S102
    plan = plan_op(names["h200"], "prefill", Target.parse("cuda:sm90a"), "triton")
    assert shown == render_kernel(plan.kernels[0]).source
    assert names["dparams"]["slopes"].shape == (8,)
