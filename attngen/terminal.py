"""What commands print: consoles, tables, and numbers for people."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from attngen.errors import AttngenError

_WIDE = 1000


def out() -> Console:
    """Standard output, without breaks in lines: a narrow terminal wraps a table's row better than its cells."""
    return console_for(width=_WIDE)


def err() -> Console:
    """Standard error."""
    return console_for(stderr=True)


def console_for(width: int | None = None, *, stderr: bool = False) -> Console:
    """A console that prints what it is given: brackets, colons and numbers have no meaning."""
    return Console(width=width, stderr=stderr, markup=False, emoji=False, highlight=False)


def print_error(error: AttngenError) -> None:
    """Print the text of an error, without a traceback."""
    err().print(Text(str(error), "red"), soft_wrap=True)


def table_of(*columns: str) -> Table:
    """A table without lines; ``>`` before a column's name aligns it to the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left", no_wrap=True)
    return table


def progress_bar(console: Console) -> Progress:
    """A bar that is gone when all is done, and never there without a terminal."""
    columns = (
        SpinnerColumn(),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def count(number: int, noun: str) -> str:
    """``1 kernel``, ``2 kernels``, ``3 entries``."""
    plural = f"{noun.removesuffix('y')}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def size_text(size: int) -> str:
    """Bytes in KiB or MiB."""
    return f"{size / 1024:.1f} KiB" if size < 1 << 20 else f"{size / (1 << 20):.1f} MiB"


def age_text(seconds: float) -> str:
    """Seconds in the largest unit that fits."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
