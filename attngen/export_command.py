"""``attngen export``: builds a package, and says what is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attngen.doctor import local_target
from attngen.errors import ArgumentError
from attngen.export import export
from attngen.signature import OPS, OpName
from attngen.spec import load_spec
from attngen.target import Target
from attngen.terminal import count, err, size_text


def export_specs(
    specs: Annotated[list[str], typer.Argument(metavar="SPEC", help="Shipped names, or .toml or .json files.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="An empty folder, or a new one.")],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="What Python imports.")],
    target: Annotated[
        list[str] | None, typer.Option("--target", metavar="TARGET,...", help="This machine by default.")
    ] = None,
    ops: Annotated[str, typer.Option("--ops", metavar="OP,...", help="Every op that a spec has, by default.")] = "",
    backend: Annotated[str, typer.Option("--backend", metavar="BACKEND", help="The fastest by default.")] = "",
) -> None:
    """Write kernels as a Python package that needs torch, and neither attngen nor a compiler."""
    named = [text for part in target or () for text in part.split(",") if text]
    targets = [Target.parse(text) for text in named] or [local_target()]
    wanted = [_op(text.strip()) for text in ops.split(",") if text.strip()]
    loaded = {source: load_spec(source) for source in dict.fromkeys(specs)}
    by_name = {Path(source).stem: spec for source, spec in loaded.items()}
    if len(by_name) < len(loaded):
        raise ArgumentError(
            "two specs have one name",
            where="SPEC",
            why="each is found by its file's name",
            fix="rename one of the files",
        )
    console = err()

    def say(line: str) -> None:
        console.print(f"building {line}", soft_wrap=True)

    targets = list(dict.fromkeys(targets))
    done = export(by_name, output, name, targets, ops=list(dict.fromkeys(wanted)), backend=backend, progress=say)
    for line in done.absent:
        console.print(line, style="dim", soft_wrap=True)
    typer.echo(f"{count(done.kernels, 'kernel')}, {size_text(done.size)}; install them with: pip install {output}")


def _op(text: str) -> OpName:
    for op in OPS:
        if op == text:
            return op
    raise ArgumentError(f"no op {text!r}", where="--ops", why="it does not exist", fix=f"use {', '.join(OPS)}")
