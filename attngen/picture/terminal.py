"""A tile map in the terminal: with colours, two pixels a character; without, one shade of text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise

from rich.console import Group
from rich.style import Style
from rich.text import Text

from attngen.ir.text import to_text
from attngen.picture.tiles import CLASSES, ClassName, TileMap

Colour = tuple[int, int, int]

MEANING: dict[ClassName, str] = {
    "all": "taken whole, the mask is not evaluated",
    "some": "evaluated pair by pair",
    "none": "skipped",
}
SKIPPED: Colour = (52, 58, 70)
WHOLE: Colour = (59, 130, 246)
VISIBLE: Colour = (245, 158, 11)
HIDDEN: Colour = (92, 72, 36)
UNDECIDED: Colour = (168, 85, 247)
TALLEST = 160
_SHADES = "░▒▓"


@dataclass(frozen=True)
class _Pixel:
    """A class, and the shares of its pairs that are visible and undecided."""

    name: ClassName
    visible: float
    undecided: float

    @property
    def colour(self) -> Colour:
        if self.name != "some":
            return WHOLE if self.name == "all" else SKIPPED
        return blend(blend(HIDDEN, VISIBLE, self.visible), UNDECIDED, self.undecided)

    @property
    def shade(self) -> str:
        if self.name != "some":
            return "█" if self.name == "all" else "·"
        return "?" if self.undecided > 0 else _SHADES[min(2, int(3 * self.visible))]


def terminal_picture(tiles: TileMap, width: int, *, colour: bool) -> Group:
    """The picture, its legend and its counts.

    Args:
        tiles: what to draw.
        width: columns of the terminal.
        colour: whether it has colours; else shades of text stand for them.
    """
    gutter = len(str(tiles.kv_len)) + 2
    scale = max(tiles.kv_len / max(8, width - gutter), tiles.qo_len / TALLEST)
    rows = pixel_edges(tiles.qo_len, tiles.tile_q, scale if colour else 2 * scale)
    columns = pixel_edges(tiles.kv_len, tiles.tile_kv, scale)
    lines = list(_picture(tiles, rows, columns, gutter, colour=colour))
    return Group(
        *headline(tiles), Text(), _ruler(columns, tiles.tile_kv, gutter), *lines, Text(), *legend(tiles, colour=colour)
    )


def headline(tiles: TileMap) -> list[Text]:
    """What is drawn: the mask's expression and the kernel."""
    plan = tiles.plan
    request = f", request {tiles.request}" if tiles.params else ""
    return [
        Text(to_text(tiles.variant.mask), "bold"),
        Text(
            f"{plan.op} for {plan.target} by {plan.backend}: {tiles.qo_len} queries x {tiles.kv_len} keys"
            f" in tiles of {tiles.tile_q} x {tiles.tile_kv}, head {tiles.head}{request}"
        ),
    ]


def counts(tiles: TileMap) -> list[str]:
    """The picture in numbers."""
    skipped, partial = tiles.number("none"), tiles.number("some")
    visited, pairs = tiles.tiles - skipped, tiles.pairs
    visible, total = int(pairs.visible), int(pairs.total)
    share = f"{visible / tiles.visited_pairs:.1%} of the pairs in visited tiles" if visited else "no tile is visited"
    lines = [
        f"{tiles.tiles} tiles: {visited} visited ({visited / tiles.tiles:.1%}), {skipped} skipped, {partial} partial",
        f"{total} pairs: {visible} visible ({visible / total:.1%}; {share})",
    ]
    if tiles.missing:
        names = ", ".join(tiles.missing)
        lines.append(f"{int(pairs.undecided)} pairs depend on {names} (not given): their tiles are drawn as some")
    return lines


def legend(tiles: TileMap, *, colour: bool) -> list[Text]:
    """The classes with their numbers, then the counts."""
    swatches: dict[ClassName, Text] = {
        "all": Text("██", _style(WHOLE) if colour else ""),
        "some": Text.assemble(("█", _style(VISIBLE)), ("█", _style(HIDDEN))) if colour else Text("░▓"),
        "none": Text("██", _style(SKIPPED)) if colour else Text("··"),
    }
    lines = []
    for name in reversed(CLASSES):
        lines.append(Text.assemble(swatches[name], f" {name:<4} {tiles.number(name):>6}  {MEANING[name]}"))
    if tiles.missing:
        swatch = Text("██", _style(UNDECIDED)) if colour else Text("??")
        lines.append(Text.assemble(swatch, f" undecided    depends on {', '.join(tiles.missing)}"))
    return [*lines, *map(Text, counts(tiles))]


def pixel_edges(length: int, tile: int, scale: float) -> list[int]:
    """Edges of pixels of about ``scale`` positions: whole parts of a tile, or whole numbers of tiles."""
    if scale > tile:
        step = tile * -int(-scale // tile)
        return [*range(0, length, step), length]
    edges = [0]
    for start in range(0, length, tile):
        size = min(tile, length - start)
        parts = max(1, int(size / scale)) if scale >= 1 else size
        edges += [start + size * part // parts for part in range(1, parts + 1)]
    return edges


def blend(start: Colour, end: Colour, share: float) -> Colour:
    """``share`` of the way from one colour to another."""
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(start, end, strict=True))
    return red, green, blue


def _picture(tiles: TileMap, rows: list[int], columns: list[int], gutter: int, *, colour: bool) -> Iterator[Text]:
    pixels = _pixels(tiles, rows, columns)
    step = 2 if colour else 1
    labels = _row_labels(rows, tiles.tile_q, step)
    for line, number in enumerate(range(0, len(pixels), step)):
        label = str(tiles.first_q_pos + labels[line]) if line in labels else ""
        text = Text(f"{label:>{gutter - 1}} ", no_wrap=True)
        if colour:
            below: list[_Pixel | None] = (
                [*pixels[number + 1]] if number + 1 < len(pixels) else [None] * len(pixels[number])
            )
            pairs = [
                (top.colour, bottom.colour if bottom else None)
                for top, bottom in zip(pixels[number], below, strict=True)
            ]
            for (top, bottom), run in groupby(pairs):
                style = Style(color=_rgb(top), bgcolor=None if bottom is None else _rgb(bottom))
                text.append("▀" * len(list(run)), style)
        else:
            text.append("".join(pixel.shade for pixel in pixels[number]))
        yield text


def _pixels(tiles: TileMap, rows: list[int], columns: list[int]) -> list[list[_Pixel]]:
    found = tiles.count(rows, columns)
    visible, undecided = (found.visible / found.total).tolist(), (found.undecided / found.total).tolist()

    def name(row: int, column: int) -> ClassName:
        covered = {
            tiles.classes[q][k]
            for q in range(rows[row] // tiles.tile_q, (rows[row + 1] - 1) // tiles.tile_q + 1)
            for k in range(columns[column] // tiles.tile_kv, (columns[column + 1] - 1) // tiles.tile_kv + 1)
        }
        return covered.pop() if len(covered) == 1 else "some"

    return [
        [_Pixel(name(row, column), visible[row][column], undecided[row][column]) for column in range(len(columns) - 1)]
        for row in range(len(rows) - 1)
    ]


def _row_labels(rows: list[int], tile: int, step: int) -> dict[int, int]:
    """Line -> row at which a tile begins in it, at least three lines apart."""
    return {number // step: rows[number] for number in _ticks(rows, tile, 3 * step)}


def _ruler(columns: list[int], tile: int, gutter: int) -> Text:
    """Key positions at which tiles begin, above their columns."""
    text = ""
    for column in _ticks(columns, tile, len(str(columns[-1])) + 2):
        if column + len(str(columns[column])) < len(columns):
            text = text.ljust(column) + str(columns[column])
    return Text(" " * gutter + text, "dim", no_wrap=True)


def _ticks(edges: list[int], tile: int, room: int) -> list[int]:
    """Indices of edges at the beginning of every tile, or every second, fourth, ..., at least ``room`` apart."""
    step = tile
    while True:
        ticks = [index for index, position in enumerate(edges[:-1]) if position % step == 0]
        if all(right - left >= room for left, right in pairwise(ticks)):
            return ticks
        step *= 2


def _style(colour: Colour) -> Style:
    return Style(color=_rgb(colour))


def _rgb(colour: Colour) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)
