"""The commands of ``attngen cache``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from rich.text import Text

from attngen.choice import is_in_use
from attngen.errors import ArgumentError
from attngen.settings import Settings
from attngen.store import Artifact, Store, Tunings, differences
from attngen.terminal import age_text, count, out, size_text, table_of

_PREFIX = 12
_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SECONDS = {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.command("ls")
def ls() -> None:
    """Every entry of every cache, and what tunings have found."""
    console, entries = out(), list(_store().entries())
    table = table_of("spec", "op", "entry", "target", ">size", ">age", "folder")
    for artifact in sorted(entries, key=lambda artifact: (artifact.manifest.entry, artifact.manifest.target)):
        about, manifest = artifact.manifest.about, artifact.manifest
        words = (about.get("spec", ""), about.get("op", ""), manifest.entry, manifest.target)
        table.add_row(*words, size_text(artifact.size), age_text(artifact.age), artifact.folder.parent.name[:_PREFIX])
    if entries:
        console.print(table)
    console.print(_total(entries))
    records = [record for _, record in Tunings(_store()).all()]
    tuned = table_of("tuned spec", "op", "backend", "target", "kernels", ">faster", "", "for", "on")
    for record in sorted(records, key=lambda record: (record.spec, record.op, record.target)):
        place = (record.spec, record.op, record.backend, record.target, ", ".join(record.tiles))
        state = "in use" if is_in_use(record, _store()) else "not in use"
        tuned.add_row(*place, f"x {record.speedup:.2f}", state, "; ".join(record.shapes), record.device)
    if records:
        console.print(tuned)


@app.command("why")
def why(
    first: Annotated[str, typer.Argument(metavar="A", help="An entry: what ls calls its folder, or a path.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
) -> None:
    """Which parts of their keys tell two entries apart."""
    store = _store()
    found = differences(store.entry(first), store.entry(second))
    console = out()
    for part, ours, theirs in found:
        console.print(Text(part, "bold"))
        console.print(f"  {ours}\n  {theirs}")
    if not found:
        console.print("nothing: they are the same kernel, made by the same toolchain")


@app.command("verify")
def verify() -> None:
    """Check every file of every entry, and every tuning, against its checksum."""
    damaged = _store().verify() | Tunings(_store()).damaged()
    for folder, reason in damaged.items():
        out().print(Text(f"{folder}: {reason}", "red"), soft_wrap=True)
    out().print(count(len(damaged), "damaged entry"))
    if damaged:
        raise typer.Exit(1)


@app.command("gc")
def gc(
    max_size: Annotated[
        str, typer.Option("--max-size", metavar="SIZE", help="Also remove entries until this is enough: 500M, 2G.")
    ] = "",
    max_age: Annotated[
        str, typer.Option("--max-age", metavar="TIME", help="Also remove entries not used for so long: 12h, 30d.")
    ] = "",
) -> None:
    """Remove what dead builds left behind, damaged entries, logs of failures, tunings that are out of date and, if asked to,
    entries of your own cache.

    Those that were used least recently go first. Use is noted once an hour.
    """
    size = _quantity("--max-size", max_size, _BYTES, "500M or 2G")
    age = _quantity("--max-age", max_age, _SECONDS, "12h or 30d")
    store = _store()
    out().print(f"removed {count(store.collect(), 'leftover')}")
    stale = [path for path, record in Tunings(store).all() if not is_in_use(record, store)]
    if removed_tunings := Tunings(store).remove(stale):
        out().print(f"removed {count(removed_tunings, 'tuning')} out of date")
    if size is not None or age is not None:
        removed = store.trim(max_size=size, max_age=age)
        out().print(f"removed {_total(removed)}; {_total(store.own_entries())} stay")


@app.command("clear")
def clear(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove every entry of your own cache, and what tunings have found; shipped ones stay."""
    store = _store()
    root = None if store.root is None else store.root.path
    entries = store.own_entries()
    if not yes:
        typer.confirm(f"Remove {_total(entries)} from {root}?", abort=True)
    removed = store.clear()
    out().print(f"removed {_total(entries)} from {root}", soft_wrap=True)
    if removed > len(entries):
        out().print(f"{removed - len(entries)} of the folders removed were damaged")


def _store() -> Store:
    return Store.from_settings(Settings.from_env())


def _total(entries: Sequence[Artifact]) -> str:
    size = sum(artifact.size for artifact in entries)
    return f"{count(len(entries), 'entry')}, {size} bytes ({size_text(size)})"


def _quantity(option: str, text: str, units: Mapping[str, int], example: str) -> int | None:
    """A number with a unit; ``None`` for no text."""
    if not text:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    unit = match[2] if match else ""
    if units is _BYTES:
        unit = unit.removesuffix("b").removesuffix("i")
    if match is None or unit not in units:
        raise ArgumentError(
            f"{option} is {text!r}", where=option, why="it is a number with a unit", fix=f"write {example}"
        )
    return int(float(match[1]) * units[unit])
