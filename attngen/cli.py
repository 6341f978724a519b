"""The command line. Every command is a thin layer over one function of the package."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import typer
from rich.syntax import Syntax
from rich.text import Text
from typer.core import TyperGroup

import attngen as ag
from attngen import cache_commands
from attngen import demo as encoder_demo
from attngen.backends import registry
from attngen.builds import BuildReport, Job, build_all
from attngen.choice import chosen_plan
from attngen.deployment import wanted
from attngen.doctor import examine, local_target
from attngen.errors import ArgumentError, AttngenError, BuildError, UnsupportedError
from attngen.explain import Request, Section, Stage, declared, explain, others
from attngen.export_command import export_specs
from attngen.picture import TileMap, save_png, telling_length, terminal_picture
from attngen.signature import CALLS
from attngen.spec import AttentionSpec, load_spec, shipped_specs
from attngen.target import CPU_ARCHS, CUDA_ARCHS, HIP_ARCHS, Target
from attngen.terminal import console_for, count, err, out, print_error, size_text, table_of
from attngen.tune_command import tune_spec
from attngen.variant import OPS, OpName
from attngen.workload import read_parameter, sample_parameters

_FACTS = ("threads", "shared", "registers", "spills")
_LOG_LINES = 60
_Choice = TypeVar("_Choice", bound=str)


class _Group(TyperGroup):
    """Errors raised on purpose print their text, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except AttngenError as error:
            print_error(error)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=_Group, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)
app.command("export")(export_specs)
app.command("tune")(tune_spec)
app.add_typer(cache_commands.app, name="cache", help="Look at the cache of built kernels, or make it smaller.")

SpecArgument = Annotated[
    str, typer.Argument(metavar="SPEC", help="A shipped name (see list), or a .toml or .json file.")
]
TargetOption = Annotated[
    str, typer.Option("--target", metavar="TARGET", help="cpu, cuda:sm90a, hip:gfx942, ... This machine by default.")
]
BackendOption = Annotated[
    str, typer.Option("--backend", metavar="BACKEND", help="reference, cpp, triton or cuda. The fastest by default.")
]
OpOption = Annotated[str, typer.Option("--op", metavar="OP", help="prefill, decode, backward or append.")]


def main() -> None:
    """Run the command that ``sys.argv`` names."""
    app(prog_name="attngen")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"attngen {ag.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A compiler for attention variants."""


@app.command()
def demo() -> None:
    """Run a real encoder on compiled attention, then a custom variant."""
    encoder_demo.main()


@app.command("list")
def list_specs() -> None:
    """Shipped specs, backends and targets."""
    console = out()
    table = table_of("name", "heads", "head dim", "mask", "score mods", "other", "kv", "dtype")
    for name in shipped_specs():
        spec = load_spec(name)
        heads = spec.heads
        dims = {heads.head_dim_qk, heads.value_dim}
        table.add_row(
            name,
            f"{heads.kind} {heads.num_qo_heads}/{heads.num_kv_heads}",
            "/".join(map(str, sorted(dims, reverse=True))),
            declared(spec.mask),
            ", ".join(map(declared, spec.score_mods)) or "none",
            ", ".join(others(spec)) or "none",
            declared(spec.kv),
            spec.dtype,
        )
    console.print(table)
    console.print()
    targets = {"cpu": CPU_ARCHS, "cuda": CUDA_ARCHS, "hip": HIP_ARCHS, "interpret": ("",)}
    table = table_of("backend", "targets")
    for name in registry.NAMES:
        backend = registry.backend(name)
        built = [str(Target(kind, arch)) for kind, archs in targets.items() for arch in archs]  # type: ignore[arg-type]
        kinds = () if backend is None else backend.kinds
        shown = [target for target in built if target in kinds or target.partition(":")[0] in kinds]
        table.add_row(name, ", ".join(shown) or "wherever torch runs; builds nothing")
    console.print(table)


_OPS_HELP = "Every op that a spec has, by default; also prefix (prefill with kv_cache=), listed (key_indices=)."


@app.command("compile")
def compile_specs(
    specs: Annotated[
        list[str],
        typer.Argument(metavar="SPEC", help="Shipped names, .toml or .json files, directories, or an attngen.toml."),
    ],
    target: Annotated[
        list[str] | None, typer.Option("--target", metavar="TARGET,...", help="This machine by default.")
    ] = None,
    ops: Annotated[str, typer.Option("--ops", metavar="OP,...", help=_OPS_HELP)] = "",
    backend: BackendOption = "",
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, metavar="N", help="Ops to build side by side.")] = None,
    into: Annotated[
        Path | None,
        typer.Option("--into", metavar="DIR", help="A cache to ship: name it in ATTNGEN_CACHE_PATH where it is used."),
    ] = None,
) -> None:
    """Build kernels ahead of time. Needs no GPU."""
    named = tuple(text for part in target or () for text in part.split(",") if text)
    given = tuple(_one_of("op", text.strip(), CALLS) for text in ops.split(",") if text.strip())
    todo = {
        Job(one.name, one.spec, place, op, backend or one.backend, required=bool(given or one.ops)): None
        for one in wanted(specs)
        for place in [Target.parse(text) for text in named or one.targets] or [local_target()]
        for op in given or one.ops or OPS
    }
    report = build_all(list(todo), err(), jobs or min(8, os.cpu_count() or 1), into)
    _print_report(report)
    if report.failures:
        raise typer.Exit(1)


def _print_report(report: BuildReport) -> None:
    console = out()
    if report.kernels:
        known = [name for name in _FACTS if any(name in kernel.metadata for kernel in report.kernels)]
        table = table_of("spec", "kernel", "target", "", ">seconds", ">size", *(f">{name}" for name in known))
        for kernel in report.kernels:
            facts = [str(kernel.metadata.get(name, "")) for name in known]
            state = "built" if kernel.built else "cached"
            seconds = f"{kernel.seconds:.2f}" if kernel.built else ""
            table.add_row(kernel.spec, kernel.entry, str(kernel.target), state, seconds, size_text(kernel.size), *facts)
        console.print(table)
    for line in report.notes:
        console.print(Text(line, "dim"), soft_wrap=True)
    built = sum(kernel.built for kernel in report.kernels)
    states = f"{built} built, {len(report.kernels) - built} cached"
    console.print(f"{count(len(report.kernels), 'kernel')}: {states}, in {report.seconds:.2f} s")
    for error in report.failures:
        print_error(error)
        if isinstance(error, BuildError) and error.log:
            err().print(Text("\n".join(error.log.splitlines()[-_LOG_LINES:]), "dim"), soft_wrap=True)


@app.command("explain")
def explain_spec(
    source: SpecArgument,
    op: OpOption = "prefill",
    stage: Annotated[
        str, typer.Option("--stage", metavar="STAGE", help="spec, variant, plan, source or asm.")
    ] = "plan",
    target: TargetOption = "",
    backend: BackendOption = "",
    kernel: Annotated[str, typer.Option("--kernel", metavar="NAME", help="One kernel: forward, merge, ...")] = "",
    diff: Annotated[str, typer.Option("--diff", metavar="SPEC2", help="Show what differs from this spec.")] = "",
) -> None:
    """Show what a stage of the compiler makes of a spec. Piped, the text is exact: source | g++ is possible."""
    wanted = _stage(stage)
    place = Target.parse(target) if target else local_target()

    def sections(name: str) -> list[Section]:
        return explain(Request(load_spec(name), _op(op), place, backend, kernel), wanted)

    found = sections(source)
    if diff:
        theirs = sections(diff)
        lines = difflib.unified_diff(_lines(found), _lines(theirs), source, diff)
        found = [Section(f"{source} and {diff}", "".join(lines), "diff")]
    console = console_for()
    for section in found:
        if not console.is_terminal:
            typer.echo(section.text, nl=False)
            continue
        if len(found) > 1:
            console.rule(section.title)
        console.print(Syntax(section.text.rstrip("\n"), section.language, theme="ansi_dark", word_wrap=True))


@app.command()
def show(
    source: SpecArgument,
    qo_len: Annotated[
        int | None, typer.Option("--qo-len", metavar="N", help="Queries; as many as keys by default.")
    ] = None,
    kv_len: Annotated[
        int | None, typer.Option("--kv-len", metavar="N", help="Keys; enough to see the mask by default.")
    ] = None,
    tile_q: Annotated[int | None, typer.Option("--tile-q", metavar="N", help="The kernel's own by default.")] = None,
    tile_kv: Annotated[int | None, typer.Option("--tile-kv", metavar="N", help="The kernel's own by default.")] = None,
    head: Annotated[int, typer.Option("--head", metavar="H", help="Query head.")] = 0,
    request: Annotated[int, typer.Option("--request", metavar="B", help="Request, for masks with parameters.")] = 0,
    param: Annotated[
        list[str] | None, typer.Option("--param", metavar="NAME=FILE.pt", help="Tensor of a parameter.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE.png", help="Also draw a PNG.")] = None,
    target: TargetOption = "",
    backend: BackendOption = "",
) -> None:
    """Draw a mask and what the prefill kernel does with its tiles."""
    spec = load_spec(source)
    place = Target.parse(target) if target else local_target()
    plan = chosen_plan(spec, "prefill", place, backend)
    if not plan.kernels:
        raise UnsupportedError(
            f"{plan.backend} has no tiles",
            where="backend",
            why="it evaluates the variant directly",
            fix="use cpp or triton",
        )
    kernel = plan.kernel("forward")
    keys = max(qo_len or 0, telling_length(plan.variant.mask)) if kv_len is None else kv_len
    queries = keys if qo_len is None else qo_len
    given = dict(read_parameter(text) for text in param or ())
    samples = sample_parameters(spec, queries, keys, request + 2) if queries > 0 else {}
    drawn = sorted(samples.keys() - given.keys())
    tiles = TileMap(
        kernel,
        queries,
        keys,
        kernel.tiles.q if tile_q is None else tile_q,
        kernel.tiles.kv if tile_kv is None else tile_kv,
        head,
        request,
        samples | given,
    )
    console = console_for()
    console.print(terminal_picture(tiles, console.width, colour=console.color_system is not None), soft_wrap=True)
    if drawn:
        console.print(f"sample values of {', '.join(drawn)}: pass others with --param", soft_wrap=True)
    if output is not None:
        save_png(tiles, output, _name(spec, source))
        console.print(f"wrote {output}", soft_wrap=True)


@app.command()
def doctor() -> None:
    """What attngen finds on this machine, what is missing, and how to get it."""
    console = out()
    findings = examine()
    width = max(len(finding.name) for finding in findings) + 2
    for finding in findings:
        mark = ("!", "bold yellow") if finding.fix else ("✓", "green")
        console.print(Text.assemble(mark, f" {finding.name:<{width}}{finding.value}"), soft_wrap=True)
        if finding.fix:
            console.print(Text(f"  {'':<{width}}→ {finding.fix}", "yellow"), soft_wrap=True)
    missing = sum(bool(finding.fix) for finding in findings)
    console.print(Text(f"{missing} of {len(findings)} want attention" if missing else "nothing is missing", "bold"))


def _lines(sections: Iterable[Section]) -> list[str]:
    return "".join(section.text for section in sections).splitlines(keepends=True)


def _name(spec: AttentionSpec, source: str) -> str:
    return spec.name or Path(source).stem


def _op(text: str) -> OpName:
    return _one_of("op", text, OPS)


def _stage(text: str) -> Stage:
    return _one_of("stage", text, get_args(Stage))


def _one_of(what: str, text: str, choices: Sequence[_Choice]) -> _Choice:
    for choice in choices:
        if choice == text:
            return choice
    raise ArgumentError(f"no {what} {text!r}", where=what, why="it does not exist", fix=f"use {', '.join(choices)}")
