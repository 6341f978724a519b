"""The command line. Every command is a thin layer over one function of the package."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import typer
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

import attngen as ag
from attngen import demo as encoder_demo
from attngen.backends import registry
from attngen.builds import BuildReport, Job, build_all
from attngen.compiler import plan_op
from attngen.doctor import examine, local_backend, local_target
from attngen.errors import ArgumentError, AttngenError, UnsupportedError
from attngen.explain import Request, Section, Stage, declared, explain, others
from attngen.picture import TileMap, read_parameter, sample_parameters, save_png, telling_length, terminal_picture
from attngen.settings import Settings
from attngen.spec import AttentionSpec, load_spec, shipped_specs
from attngen.store import Artifact, Store
from attngen.target import CPU_ARCHS, CUDA_ARCHS, HIP_ARCHS, Target
from attngen.variant import OPS, OpName

_WIDE = 1000
_PREFIX = 12
_FACTS = ("shared", "registers", "spills")
_Choice = TypeVar("_Choice", bound=str)


class _Group(TyperGroup):
    """Errors raised on purpose print their text, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except AttngenError as error:
            _print_error(error)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=_Group, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)
cache = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(cache, name="cache", help="Look at the cache of built kernels, or clear it.")

SpecArgument = Annotated[
    str, typer.Argument(metavar="SPEC", help="A shipped name (see list), or a .toml or .json file.")
]
TargetOption = Annotated[
    str, typer.Option("--target", metavar="TARGET", help="cpu, cuda:sm90a, hip:gfx942, ... This machine by default.")
]
BackendOption = Annotated[
    str, typer.Option("--backend", metavar="BACKEND", help="reference, cpp or triton. The fastest by default.")
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
    console = _out()
    table = _table("name", "heads", "head dim", "mask", "score mods", "other", "kv", "dtype")
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
    table = _table("backend", "targets")
    for name in registry.NAMES:
        backend = registry.backend(name)
        built = [str(Target(kind, arch)) for kind, archs in targets.items() for arch in archs]  # type: ignore[arg-type]
        kinds = () if backend is None else backend.kinds
        shown = [target for target in built if target in kinds or target.partition(":")[0] in kinds]
        table.add_row(name, ", ".join(shown) or "wherever torch runs; builds nothing")
    console.print(table)


@app.command("compile")
def compile_specs(
    specs: Annotated[list[str], typer.Argument(metavar="SPEC", help="Shipped names, or .toml or .json files.")],
    target: Annotated[
        list[str] | None, typer.Option("--target", metavar="TARGET,...", help="This machine by default.")
    ] = None,
    ops: Annotated[str, typer.Option("--ops", metavar="OP,...", help="Every op that a spec has, by default.")] = "",
    backend: BackendOption = "",
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, metavar="N", help="Ops to build side by side.")] = None,
) -> None:
    """Build kernels ahead of time. Needs no GPU."""
    named = [text for part in target or () for text in part.split(",") if text]
    targets = [Target.parse(text) for text in named] or [local_target()]
    wanted = tuple(_op(text.strip()) for text in ops.split(",") if text.strip())
    loaded = {source: load_spec(source) for source in dict.fromkeys(specs)}
    todo = [
        Job(_name(spec, source), spec, place, op, backend or local_backend(place))
        for source, spec in loaded.items()
        for place in dict.fromkeys(targets)
        for op in wanted or OPS
    ]
    report = build_all(todo, _err(), jobs or min(8, os.cpu_count() or 1), every_op=bool(wanted))
    _print_report(report)
    if report.failures:
        raise typer.Exit(1)


def _print_report(report: BuildReport) -> None:
    console = _out()
    if report.kernels:
        known = [name for name in _FACTS if any(name in kernel.metadata for kernel in report.kernels)]
        table = _table("spec", "kernel", "target", "", ">seconds", ">size", *(f">{name}" for name in known))
        for kernel in report.kernels:
            facts = [str(kernel.metadata.get(name, "")) for name in known]
            state = "built" if kernel.built else "cached"
            seconds = f"{kernel.seconds:.2f}" if kernel.built else ""
            table.add_row(kernel.spec, kernel.entry, str(kernel.target), state, seconds, _size(kernel.size), *facts)
        console.print(table)
    for line in report.notes:
        console.print(Text(line, "dim"), soft_wrap=True)
    built = sum(kernel.built for kernel in report.kernels)
    states = f"{built} built, {len(report.kernels) - built} cached"
    console.print(f"{_number(len(report.kernels), 'kernel')}: {states}, in {report.seconds:.2f} s")
    for error in report.failures:
        _print_error(error)


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
        return explain(Request(load_spec(name), _op(op), place, backend or local_backend(place), kernel), wanted)

    found = sections(source)
    if diff:
        theirs = sections(diff)
        lines = difflib.unified_diff(_lines(found), _lines(theirs), source, diff)
        found = [Section(f"{source} and {diff}", "".join(lines), "diff")]
    console = _console()
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
    plan = plan_op(spec, "prefill", place, backend or local_backend(place))
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
    console = _console()
    console.print(terminal_picture(tiles, console.width, colour=console.color_system is not None), soft_wrap=True)
    if drawn:
        console.print(f"sample values of {', '.join(drawn)}: pass others with --param", soft_wrap=True)
    if output is not None:
        save_png(tiles, output, _name(spec, source))
        console.print(f"wrote {output}", soft_wrap=True)


@app.command()
def doctor() -> None:
    """What attngen finds on this machine, what is missing, and how to get it."""
    console = _out()
    findings = examine()
    width = max(len(finding.name) for finding in findings) + 2
    for finding in findings:
        mark = ("!", "bold yellow") if finding.fix else ("✓", "green")
        console.print(Text.assemble(mark, f" {finding.name:<{width}}{finding.value}"), soft_wrap=True)
        if finding.fix:
            console.print(Text(f"  {'':<{width}}→ {finding.fix}", "yellow"), soft_wrap=True)
    missing = sum(bool(finding.fix) for finding in findings)
    console.print(Text(f"{missing} of {len(findings)} want attention" if missing else "nothing is missing", "bold"))


@cache.command("ls")
def cache_ls() -> None:
    """Every entry of every cache."""
    console, entries = _out(), list(_store().entries())
    table = _table("spec", "op", "entry", "target", ">size", ">age", "folder")
    for artifact in sorted(entries, key=lambda artifact: (artifact.manifest.entry, artifact.manifest.target)):
        about, manifest = artifact.manifest.about, artifact.manifest
        words = (about.get("spec", ""), about.get("op", ""), manifest.entry, manifest.target)
        table.add_row(*words, _size(artifact.size), _age(artifact.age), artifact.folder.parent.name[:_PREFIX])
    if entries:
        console.print(table)
    console.print(_total(entries))


@cache.command("clear")
def cache_clear(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove every entry of your own cache; shipped ones stay."""
    store = _store()
    root = None if store.root is None else store.root.path
    entries = [artifact for artifact in store.entries() if root is not None and root in artifact.folder.parents]
    if not yes:
        typer.confirm(f"Remove {_total(entries)} from {root}?", abort=True)
    removed = store.clear()
    _out().print(f"removed {_total(entries)} from {root}", soft_wrap=True)
    if removed > len(entries):
        _out().print(f"{removed - len(entries)} of the folders removed were damaged")


@cache.command("verify")
def cache_verify() -> None:
    """Check every file of every entry against its checksum."""
    damaged = _store().verify()
    for folder, why in damaged.items():
        _out().print(Text(f"{folder}: {why}", "red"), soft_wrap=True)
    _out().print(_number(len(damaged), "damaged entry"))
    if damaged:
        raise typer.Exit(1)


@cache.command("gc")
def cache_gc() -> None:
    """Remove what dead builds left behind, damaged entries, and logs of failures."""
    _out().print(f"removed {_number(_store().collect(), 'leftover')}")


def _store() -> Store:
    return Store.from_settings(Settings.from_env())


def _out() -> Console:
    """Standard output, without breaks in lines: a narrow terminal wraps a table's row better than its cells."""
    return _console(width=_WIDE)


def _console(width: int | None = None, *, stderr: bool = False) -> Console:
    """A console that prints what it is given: brackets, colons and numbers have no meaning."""
    return Console(width=width, stderr=stderr, markup=False, emoji=False, highlight=False)


def _err() -> Console:
    return _console(stderr=True)


def _print_error(error: AttngenError) -> None:
    _err().print(Text(str(error), "red"), soft_wrap=True)


def _table(*columns: str) -> Table:
    """A table without lines; ``>`` before a column's name aligns it to the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left", no_wrap=True)
    return table


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


def _total(entries: Sequence[Artifact]) -> str:
    size = sum(artifact.size for artifact in entries)
    return f"{_number(len(entries), 'entry')}, {size} bytes ({_size(size)})"


def _number(number: int, noun: str) -> str:
    plural = f"{noun.removesuffix('y')}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def _size(size: int) -> str:
    return f"{size / 1024:.1f} KiB" if size < 1 << 20 else f"{size / (1 << 20):.1f} MiB"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
