"""``attngen tune``: measures plans on this machine, and says what came of it."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from rich.text import Text

from attngen.doctor import local_target
from attngen.errors import ArgumentError
from attngen.signature import OPS, OpName
from attngen.spec import load_spec
from attngen.target import Target
from attngen.terminal import count, err, out, progress_bar, table_of
from attngen.tuning import Measured, TunedOp, forget, tiles_text, tune
from attngen.workload import read_parameter


def tune_spec(
    source: Annotated[str, typer.Argument(metavar="SPEC", help="A shipped name (see list), or a .toml or .json file.")],
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            "--shapes", metavar="SHAPE", help="batch=64,kv_len=8192 or batch=64,kv_len=8192,qo_len=1; repeat for more."
        ),
    ] = None,
    ops: Annotated[str, typer.Option("--ops", metavar="OP,...", help="Every op but append, by default.")] = "",
    target: Annotated[str, typer.Option("--target", metavar="TARGET", help="This machine's.")] = "",
    backend: Annotated[str, typer.Option("--backend", metavar="BACKEND", help="The fastest by default.")] = "",
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, metavar="N", help="Plans to build side by side.")] = None,
    param: Annotated[
        list[str] | None, typer.Option("--param", metavar="NAME=FILE.pt", help="Tensor of a parameter.")
    ] = None,
    forgets: Annotated[bool, typer.Option("--forget", help="Return to the shipped table's tiles.")] = False,
) -> None:
    """Measure other tiles on this machine, at your shapes, and keep the fastest in the cache."""
    spec, place = load_spec(source), Target.parse(target) if target else local_target()
    named = [_op(text.strip()) for text in ops.split(",") if text.strip()]
    if forgets:
        if shapes:
            raise ArgumentError(
                "shapes are given", where="--forget", why="nothing is measured", fix="leave --shapes out"
            )
        removed = forget(spec, ops=named or None, target=place, backend=backend or None)
        out().print(f"removed {count(removed, 'tuning')}")
        return
    given = dict(read_parameter(text) for text in param or ())
    console = err()
    with progress_bar(console) as bar:
        task = bar.add_task("looking in the cache", total=None)

        def show(line: str, done: int, steps: int) -> None:
            bar.update(task, description=line, completed=done, total=steps)

        found = tune(
            spec,
            shapes=shapes or (),
            ops=named or None,
            target=place,
            backend=backend or None,
            params=given,
            jobs=jobs or min(8, os.cpu_count() or 1),
            progress=show,
        )
    for tuned in found:
        _print(tuned)


def _print(tuned: TunedOp) -> None:
    console = out()
    console.print(Text(f"{tuned.op} for {tuned.target} by {tuned.backend}", "bold"))
    table = table_of("kernel", "tiles", *(f">ms, {shape}" for shape in tuned.shapes), ">faster", "")
    for measured in sorted(tuned.measured, key=lambda measured: -measured.speedup):
        role, tiles = _what(measured)
        blank = [""] * len(tuned.shapes)
        times = [f"{ms:.4f}" for ms in measured.times] or blank
        faster = f"x {measured.speedup:.2f}" if measured.times else ""
        remark = measured.dropped or ("chosen" if _is_chosen(measured, tuned) else "")
        table.add_row(role, tiles, *times, faster, remark, style="dim" if measured.dropped else "")
    console.print(table)
    if tuned.chosen:
        together = ", ".join(f"{role} {tiles_text(tiles)}" for role, tiles in tuned.chosen.items())
        console.print(f"stored: {together}; measured again, x {tuned.speedup:.2f}")
    else:
        console.print("the table's tiles stay: nothing that was measured again was faster by 2 %")


def _what(measured: Measured) -> tuple[str, str]:
    if not measured.changed:
        return "", "the table's"
    role, tiles = measured.changed[0]
    return role, tiles_text(tiles)


def _is_chosen(measured: Measured, tuned: TunedOp) -> bool:
    if not measured.changed:
        return not tuned.chosen
    role, tiles = measured.changed[0]
    return tuned.chosen.get(role) == tiles


def _op(text: str) -> OpName:
    for op in OPS:
        if op == text:
            return op
    raise ArgumentError(f"no op {text!r}", where="--ops", why="it does not exist", fix=f"use {', '.join(OPS)}")
