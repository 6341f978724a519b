"""Plan -> source text."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.codegen.emit import Emit
from attngen.codegen.environment import environment
from attngen.codegen.printer import Dialect
from attngen.schedule.plan import KernelPlan
from attngen.target import Target


@dataclass(frozen=True)
class RenderedKernel:
    """Everything a toolchain needs, byte-identical on every run.

    Attributes:
        entry: name of the kernel, also its symbol in the binary.
        source: the whole source file.
        suffix: file suffix of the source, ``.cpp`` or ``.py``.
        flags: build options in order, each ``name=value`` or a compiler flag; part of the cache key.
        target: what it is built for.
    """

    entry: str
    source: str
    suffix: str
    flags: tuple[str, ...]
    target: Target


def render(plan: KernelPlan, dialect: Dialect, suffix: str, flags: tuple[str, ...]) -> RenderedKernel:
    """The source text of a kernel: template ``<schedule><suffix>.jinja`` of the plan's backend, with ``plan`` and ``emit``."""
    template = environment(plan.backend).get_template(f"{plan.schedule}{suffix}.jinja")
    source = template.render(plan=plan, emit=Emit(plan, dialect))
    return RenderedKernel(entry=plan.entry, source=source, suffix=suffix, flags=flags, target=plan.target)
