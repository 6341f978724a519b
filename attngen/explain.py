"""What each stage of a compile made of a spec, as text."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal

from attngen.backends.triton_compile import triton_folder
from attngen.choice import chosen_plan, table_plan, tuning_of
from attngen.compiler import compile as compile_spec
from attngen.compiler import render_kernel
from attngen.errors import SpecError, UnsupportedError
from attngen.ir.expr import Expr, Load
from attngen.ir.hoist import hoist
from attngen.ir.intervals import Span, position_axes
from attngen.ir.simplify import of_product
from attngen.ir.text import to_text
from attngen.ops.op import BuiltKernel
from attngen.schedule import KernelPlan, OpPlan
from attngen.settings import Settings
from attngen.spec import AttentionSpec, Softmax
from attngen.store import Store, Tuning
from attngen.target import Target
from attngen.variant import OpName, Variant, normalize

Stage = Literal["spec", "variant", "plan", "source", "asm"]
_WIDTH = 14
_ASSEMBLY = ("*.ptx", "*.amdgcn")


@dataclass(frozen=True)
class Section:
    """One text of a stage; ``source`` and ``asm`` have one a kernel.

    Attributes:
        title: what it is, for people; not part of the text.
        text: whole lines.
        language: name of the Pygments lexer.
    """

    title: str
    text: str
    language: str


@dataclass(frozen=True)
class Request:
    """What to explain.

    Attributes:
        spec, op, target: as for :func:`attngen.compile`.
        backend: likewise; what :func:`attngen.compile` would choose where it is empty.
        kernel: only this kernel (``forward``, ``forward_short``, ``merge``, ``delta``, ``dkdv``, ``dq``, ``append``); all if empty.
    """

    spec: AttentionSpec
    op: OpName
    target: Target
    backend: str = ""
    kernel: str = ""


def explain(request: Request, stage: Stage) -> list[Section]:
    """The texts of a stage.

    Raises:
        AttngenError: the op does not compile this far.
    """
    name = request.spec.name or "spec"
    if stage == "spec":
        return [Section(name, request.spec.to_toml(), "toml")]
    if stage == "variant":
        return [
            Section(f"{request.op} of {name}", variant_text(normalize(request.spec, request.op), request.spec), "text")
        ]
    plan = chosen_plan(request.spec, request.op, request.target, request.backend)
    if stage == "plan":
        kernels = _chosen(request, plan.kernels) if request.kernel else plan.kernels
        return [Section(f"{request.op} of {name}", plan_text(plan, kernels, _tuning(request)), "text")]
    if not plan.kernels:
        raise UnsupportedError(
            f"{plan.backend} has no kernels",
            where="backend",
            why="it evaluates the variant directly",
            fix="see --stage variant, or use another --backend",
        )
    if stage == "source":
        return [source_section(kernel) for kernel in _chosen(request, plan.kernels)]
    ops = compile_spec(request.spec, target=request.target, ops=(request.op,), backend=request.backend or None)
    wanted = {kernel.role for kernel in _chosen(request, plan.kernels)}
    return [asm_section(built.present()) for built in ops.op(request.op).kernels if built.plan.role in wanted]


def variant_text(variant: Variant, spec: AttentionSpec) -> str:
    """Every field of a variant of ``spec``, its expressions as Python: as declared, then what they become."""
    lines = []
    for field in fields(variant):
        value = getattr(variant, field.name)
        if isinstance(value, Expr):
            declared_expr = spec.mask.expr() if field.name == "mask" else value
            lines += [_line(field.name, expr_text(declared_expr)), *_algebra(field.name, value, variant, declared_expr)]
        elif field.name == "params":
            shown = [f"{param.name} {param.dtype} [{', '.join(map(str, param.dims))}]" for param in variant.params]
            lines.append(_line(field.name, "; ".join(shown) or "none"))
        else:
            lines.append(_line(field.name, str(value)))
    return "".join(lines)


def _algebra(name: str, expr: Expr, variant: Variant, declared_expr: Expr) -> list[str]:
    """What a declared mask or logit becomes: simplified, the logit in base 2 of the raw dot product and taken apart."""
    if name == "mask":
        return [] if expr == declared_expr else [_line("  simplified", expr_text(expr))]
    if name != "score":
        return []
    logit = of_product(expr, variant.sm_scale, base_2=True)
    lines = [_line("  in base 2", f"{expr_text(logit)}, of the raw dot product")]
    hoisted = hoist((logit,), split_positions=variant.dtype != "fp32")
    places = (
        ("a head", hoisted.uniform),
        ("a query", hoisted.rows),
        ("a key", hoisted.columns),
        ("a pair", hoisted.shared),
    )
    named = [
        _line(f"  {often}", f"{local.name} = {expr_text(value)}") for often, part in places for local, value in part
    ]
    return [*lines, *named, _line("  a pair", expr_text(hoisted.bodies[0]))] if named else lines


def _tuning(request: Request) -> Tuning | None:
    plan = table_plan(request.spec, request.op, request.target, request.backend)
    return tuning_of(plan, Store.from_settings(Settings.from_env()))


def plan_text(plan: OpPlan, kernels: Iterable[KernelPlan], tuning: Tuning | None = None) -> str:
    """Kernels in launch order, with everything that was decided about them."""
    number = len(plan.kernels)
    parts = [f"{plan.op} for {plan.target} by {plan.backend}: {number} kernel{'' if number == 1 else 's'}\n"]
    parts += [] if tuning is None else [f"tuned: {', '.join(tuning.tiles)}: {tuning.gain}\n"]
    return "\n".join([*parts, *map(kernel_text, kernels)])


def kernel_text(kernel: KernelPlan) -> str:
    """One kernel of a plan."""
    tiles, variant = kernel.tiles, kernel.variant
    resources = f", {tiles.num_warps} warps, {tiles.num_stages} stages" if tiles.num_warps else ""
    rows = f"rows (token, head in group of {variant.group_size})" if kernel.packed else "queries"
    lines = [f"{kernel.role}: {kernel.entry}\n", _line("grid", grid_rule(kernel))]
    if kernel.schedule in ("merge", "delta", "append"):
        lines.append(_line("tile", f"{tiles.q} rows of (token, head){resources}"))
    else:
        apart = f", the last {variant.head_dim_pe} in {kernel.block_pe}" if variant.head_dim_pe else ""
        dims = f"qk {variant.head_dim_main} in {kernel.block_qk}{apart}, vo {variant.head_dim_vo} in {kernel.block_vo}"
        lines += [_line("tile", f"{tiles.q} {rows} x {tiles.kv} keys{resources}"), _line("head dims", dims)]
        if kernel.split:
            lines.append(_line("splits", f"clamp(keys // {kernel.min_split}, 1, {kernel.max_splits}) parts a request"))
        lines += _span_lines("queries", kernel.queries) if kernel.by_key else _span_lines("keys", kernel.keys)
        lines += [_line("tile any", expr_text(kernel.tile.any)), _line("tile all", expr_text(kernel.tile.all))]
        if kernel.lists:
            loads = "; ".join(f"{expr_text(load)} by {' and '.join(_axes(load))}" for load in kernel.tile.loads)
            lines.append(_line("tile lists", f"from the extents (lo, hi) of {loads}"))
    width = max(len(arg.name) for arg in kernel.args)
    lines += [
        _line("args" if not index else "", f"{arg.name:<{width}}  {arg.type}") for index, arg in enumerate(kernel.args)
    ]
    return "".join(lines)


def grid_rule(kernel: KernelPlan) -> str:
    """How many programs run, in the names of the kernel's arguments."""
    variant, tiles = kernel.variant, kernel.tiles
    if kernel.schedule == "append":
        return f"ceil(num_tokens * {variant.num_kv_heads} / {tiles.q})"
    if kernel.schedule in ("merge", "delta"):
        return f"ceil(num_tokens * {variant.num_qo_heads} / {tiles.q})"
    by_key = kernel.by_key
    heads = variant.num_kv_heads if by_key or kernel.packed else variant.num_qo_heads
    tile, layout = (tiles.kv, variant.kv_layout) if by_key else (tiles.q, variant.q_layout)
    rows = f" * {variant.group_size}" if kernel.packed else ""
    padded, ragged = ("kv_len", "nnz_kv") if by_key else ("qo_len", "nnz_q")
    number = f"{ragged}{rows} // {tile} + batch" if layout == "ragged" else f"batch * ceil({padded}{rows} / {tile})"
    return f"num_tiles * {heads}{' * num_splits' if kernel.split else ''}, num_tiles = {number}"


def source_section(kernel: KernelPlan) -> Section:
    """The source of a kernel, byte for byte as it is built."""
    rendered = render_kernel(kernel)
    language = {".py": "python", ".cpp": "cpp", ".cu": "cuda"}.get(rendered.suffix, "text")
    return Section(f"{rendered.entry}{rendered.suffix}", rendered.source, language)


def asm_section(built: BuiltKernel) -> Section:
    """The machine code of a kernel: the assembly in its cache folder, or its library or cubin disassembled.

    Raises:
        UnsupportedError: there is none, or no tool that shows it.
    """
    for pattern in _ASSEMBLY:
        for path in sorted(built.folder.glob(pattern)):
            return Section(path.name, path.read_text(encoding="utf-8"), "ptx" if path.suffix == ".ptx" else "gas")
    if built.binary.suffix == ".cubin":
        return _disassembled(
            built, "nvdisasm", ("-c",), fix="install the CUDA toolkit, or attngen[triton], which has one"
        )
    if built.plan.target.kind == "cpu":
        return _disassembled(built, "objdump", ("-d", "-C", "--no-show-raw-insn"), fix="install binutils")
    raise UnsupportedError(
        f"{built.plan.entry} has no machine code",
        where=f"target {built.plan.target}",
        why="it is run from its source",
        fix="see --stage source",
    )


def _disassembled(built: BuiltKernel, tool: str, options: Iterable[str], *, fix: str) -> Section:
    program = shutil.which(tool) or _bundled(tool)
    if program is None:
        raise UnsupportedError(
            f"{built.binary.name} cannot be disassembled", where="--stage asm", why=f"{tool} is not on PATH", fix=fix
        )
    command = [program, *options, str(built.binary)]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if result.returncode:
        why = result.stderr.strip()
        raise UnsupportedError(f"{tool} failed", where=str(built.binary), why=why, fix="see --stage source")
    return Section(built.binary.name, result.stdout.replace(str(built.binary), built.binary.name).lstrip(), tool)


def _bundled(tool: str) -> str | None:
    """A tool of the CUDA toolkit that Triton brings along."""
    triton = triton_folder()
    path = triton / "backends" / "nvidia" / "bin" / tool if triton is not None else None
    return str(path) if path is not None and path.is_file() else None


def declared(model: Any) -> str:
    """A mask, score mod or storage as a person would declare it."""
    kind = getattr(model, "kind", "")
    if kind in ("and", "or"):
        return (" & " if kind == "and" else " | ").join(
            f"({declared(part)})" if part.kind in ("and", "or") else declared(part) for part in model.operands
        )
    if kind == "not":
        return f"~({declared(model.operand)})"
    if kind == "custom":
        return f"{model.name}: {model.expression}"
    given = model.model_dump(exclude_defaults=True, exclude={"kind"})
    return f"{type(model).__name__}({', '.join(f'{name}={value}' for name, value in given.items())})"


def others(spec: AttentionSpec) -> list[str]:
    """What a spec declares beyond heads, mask, score mods and storage."""
    parts = [declared(part) for part in (spec.qk_norm, spec.rope) if part is not None]
    if spec.normalizer != Softmax():
        parts.append(declared(spec.normalizer))
    parts += [f"dropout={spec.dropout:g}"] if spec.dropout else []
    return parts + ([f"output_gate={spec.output_gate}"] if spec.output_gate else [])


def expr_text(expr: Expr | None) -> str:
    """An expression as Python; what has grown too large to be read is only measured."""
    if expr is None:
        return "unbounded"
    try:
        return to_text(expr)
    except SpecError:
        return f"an expression of {sum(1 for _ in expr.walk())} nodes"


def _span_lines(side: str, span: Span) -> list[str]:
    exact = "no part of it can be skipped" if span.exact else "its tiles are tested one by one"
    whole = _range(span.full_lo, span.full_hi) if span.has_full else "none"
    return [
        _line(side, f"{_range(span.lo, span.hi)} ({exact})"),
        *([] if span.hole_lo is None else [_line("hidden", _range(span.hole_lo, span.hole_hi))]),
        _line("unmasked", whole),
    ]


def _axes(load: Load) -> list[str]:
    return [side for axis, side in (("q", "query tile"), ("k", "key tile")) if axis in position_axes(load)]


def _range(first: Expr | None, last: Expr | None) -> str:
    if first is None and last is None:
        return "all"
    return f"{expr_text(first)} .. {expr_text(last)}"


def _chosen(request: Request, kernels: tuple[KernelPlan, ...]) -> tuple[KernelPlan, ...]:
    chosen = tuple(kernel for kernel in kernels if request.kernel in ("", kernel.role))
    if not chosen:
        raise UnsupportedError(
            f"{request.op} has no kernel {request.kernel!r}",
            where="--kernel",
            why=f"its kernels are {', '.join(kernel.role for kernel in kernels)}",
            fix="use one of them, or leave --kernel out",
        )
    return chosen


def _line(name: str, text: str) -> str:
    return f"  {name:<{_WIDTH}}{text}\n"
