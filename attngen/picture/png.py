"""A tile map as PNG: every pixel is a pair or a square of pairs, over the grid of tiles.

Pillow is imported when something is drawn: nothing else needs it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attngen.errors import ArgumentError, AttngenError
from attngen.ir.text import to_text
from attngen.picture.terminal import MEANING, Colour, counts
from attngen.picture.tiles import CLASSES, ClassName, TileMap

if TYPE_CHECKING:
    from PIL import Image, ImageDraw, ImageFont

SIDE, LEAST = 1024, 96
LEFT, TOP, RIGHT, GAP = 96, 148, 48, 28
PAPER: Colour = (255, 255, 255)
INK: Colour = (31, 41, 55)
FAINT: Colour = (107, 114, 128)
# (hidden pair, visible pair) of each class. Red is never seen: it would be a bound that contradicts the predicate.
PAIRS: dict[ClassName, tuple[Colour, Colour]] = {
    "none": ((236, 239, 243), (220, 38, 38)),
    "some": ((254, 235, 200), (234, 128, 24)),
    "all": ((220, 38, 38), (52, 114, 217)),
}
UNDECIDED: Colour = (168, 120, 220)
_GRID = 0.30  # share of ink in the lines between tiles, fainter where tiles are small
_SMALLEST_TILE, _LARGE_TILE = 5, 24


@dataclass(frozen=True)
class Axis:
    """Positions along one side: whole pixels a position, or whole positions a pixel where there are more than pixels.

    Attributes:
        length: positions.
        pixels: pixels.
        tile: positions a tile.
    """

    length: int
    pixels: int
    tile: int

    @staticmethod
    def fit(length: int, longest: int, tile: int) -> Axis:
        """An axis at the scale that lets ``longest`` positions fit, but never a thin strip."""
        pixels = length * (SIDE // longest) if longest <= SIDE else -(-length * SIDE // longest)
        if pixels < LEAST:
            pixels = LEAST // length * length if length <= LEAST else LEAST
        return Axis(length, pixels, tile)

    @property
    def zoom(self) -> int:
        """Pixels a position, where there is at least one; else 1."""
        return max(1, self.pixels // self.length)

    @property
    def edges(self) -> list[int]:
        """Positions at which the cells of the image begin, and the length."""
        cells = self.pixels // self.zoom
        return [self.length * cell // cells for cell in range(cells + 1)]

    def pixel(self, position: int) -> int:
        """The first pixel of a position."""
        return position * self.pixels // self.length

    @property
    def tiles(self) -> list[int]:
        """Where tiles begin."""
        return list(range(0, self.length, self.tile))

    def ticks(self, room: int) -> list[int]:
        """Beginnings of tiles at least ``room`` pixels apart, and the end of the axis."""
        step = self.tile * max(1, -(-room * self.length // (self.pixels * self.tile)))
        if step > self.tile:
            step = self.tile * (1 << (step // self.tile - 1).bit_length())
        ticks = [*range(0, self.length, step)]
        if self.pixels - self.pixel(ticks[-1]) < room and len(ticks) > 1:
            ticks.pop()
        return [*ticks, self.length]


@dataclass(frozen=True)
class Canvas:
    """Where things lie in the image."""

    rows: Axis
    columns: Axis

    @staticmethod
    def of(tiles: TileMap) -> Canvas:
        longest = max(tiles.qo_len, tiles.kv_len)
        return Canvas(Axis.fit(tiles.qo_len, longest, tiles.tile_q), Axis.fit(tiles.kv_len, longest, tiles.tile_kv))

    def centre(self, row: int, column: int) -> tuple[int, int]:
        """The pixel ``(x, y)`` in the middle of a pair."""
        half_x, half_y = self.columns.zoom // 2, self.rows.zoom // 2
        return LEFT + self.columns.pixel(column) + half_x, TOP + self.rows.pixel(row) + half_y


def save_png(tiles: TileMap, path: Path, title: str) -> None:
    """Draw a tile map into a file.

    Raises:
        AttngenError: Pillow is not installed.
        ArgumentError: the file cannot be written, or its name does not end in ``.png``.
    """
    if path.suffix.lower() != ".png":
        raise ArgumentError(f"{path} is no PNG file", where="output", why="pictures are PNG", fix="name it mask.png")
    image = draw(tiles, title)
    try:
        image.save(path, format="PNG", optimize=True)
    except OSError as error:
        raise ArgumentError(f"cannot write {path}", where="output", why=str(error), fix="pass another file") from None


def draw(tiles: TileMap, title: str) -> Image.Image:
    """The picture with title, axes, legend and counts."""
    if find_spec("PIL") is None:
        raise AttngenError(
            "pictures need Pillow", where="output", why="it is not installed", fix="pip install 'attngen[picture]'"
        )
    from PIL import Image, ImageDraw  # noqa: PLC0415

    canvas = Canvas.of(tiles)
    height, width = canvas.rows.pixels, canvas.columns.pixels
    lines = [*_legend(tiles), *((None, text) for text in counts(tiles))]
    size = (LEFT + max(width, 620) + RIGHT, TOP + height + GAP + 30 * len(lines) + GAP)
    image = Image.new("RGB", size, PAPER)
    image.paste(Image.frombytes("RGB", (width, height), mask_bytes(tiles, canvas)), (LEFT, TOP))
    pen = ImageDraw.Draw(image)
    pen.rectangle((LEFT - 1, TOP - 1, LEFT + width, TOP + height), outline=FAINT)
    _title(pen, tiles, title, size[0] - LEFT - RIGHT)
    _axes(pen, tiles, canvas)
    y = TOP + height + GAP
    for swatch, text in lines:
        if swatch is not None:
            pen.rectangle((LEFT, y, LEFT + 18, y + 18), fill=swatch[0], outline=FAINT)
            pen.polygon(((LEFT + 1, y + 17), (LEFT + 17, y + 17), (LEFT + 17, y + 1)), fill=swatch[1])
        pen.text((LEFT + (30 if swatch else 0), y + 9), text, fill=INK, font=_font(17), anchor="lm")
        y += 30
    return image


def mask_bytes(tiles: TileMap, canvas: Canvas) -> bytes:
    """The mask and its tile grid as RGB bytes."""
    rows, columns = canvas.rows, canvas.columns
    found = tiles.count(rows.edges, columns.edges)
    visible, undecided = (found.visible / found.total).unsqueeze(-1), (found.undecided / found.total).unsqueeze(-1)
    number = torch.tensor([[CLASSES.index(name) for name in row] for row in tiles.classes])
    of_row, of_column = (torch.tensor(axis.edges[:-1]) // axis.tile for axis in (rows, columns))
    palette = torch.tensor([PAIRS[name] for name in CLASSES], dtype=torch.float32)
    pair = palette[number[of_row][:, of_column]]
    decided = torch.lerp(pair[..., 0, :], pair[..., 1, :], visible)
    colour = torch.lerp(decided, torch.tensor(UNDECIDED).float(), undecided)
    image = colour.repeat_interleave(rows.zoom, 0).repeat_interleave(columns.zoom, 1)
    for axis, dim in ((rows, 0), (columns, 1)):
        size = axis.pixel(axis.tile)
        if size >= _SMALLEST_TILE:
            grid = _GRID * min(1.0, size / _LARGE_TILE)
            lines = torch.tensor([axis.pixel(start) for start in axis.tiles[1:]], dtype=torch.int64)
            darker = image.index_select(dim, lines) * (1 - grid) + torch.tensor(INK) * grid
            image.index_copy_(dim, lines, darker)
    pixels = image.round().to(torch.uint8).contiguous()
    return ctypes.string_at(pixels.data_ptr(), pixels.numel())


def _legend(tiles: TileMap) -> Iterator[tuple[tuple[Colour, Colour] | None, str]]:
    for name in reversed(CLASSES):
        hidden, visible = PAIRS[name]
        swatch = {"all": (visible, visible), "some": (hidden, visible), "none": (hidden, hidden)}[name]
        yield swatch, f"{name}: {tiles.number(name)} tiles, {MEANING[name]}"
    if tiles.missing:
        yield (UNDECIDED, UNDECIDED), f"undecided: depends on {', '.join(tiles.missing)}"


def _title(pen: ImageDraw.ImageDraw, tiles: TileMap, title: str, width: int) -> None:
    plan = tiles.plan
    size = f"tiles of {tiles.tile_q} x {tiles.tile_kv}"
    kernel = f"{plan.op} for {plan.target} by {plan.backend}, {size}, head {tiles.head}"
    lines = ((title, 26, INK), (to_text(tiles.variant.mask), 18, INK), (kernel, 15, FAINT))
    y = 18
    for text, points, colour in lines:
        font = _font(points)
        shown = text
        while len(shown) > 3 and font.getlength(shown) > width:
            shown = shown.removesuffix("...")[:-1] + "..."
        pen.text((LEFT, y), shown, fill=colour, font=font)
        y += points + 8


def _axes(pen: ImageDraw.ImageDraw, tiles: TileMap, canvas: Canvas) -> None:
    """Positions at the beginnings of tiles: keys above, queries at the left."""
    font = _font(15)
    for position in canvas.columns.ticks(64):
        x = LEFT + canvas.columns.pixel(position)
        pen.line((x, TOP - 7, x, TOP - 2), fill=FAINT)
        pen.text((x, TOP - 10), str(position), fill=INK, font=font, anchor="ms")
    for position in canvas.rows.ticks(32):
        y = TOP + canvas.rows.pixel(position)
        pen.line((LEFT - 7, y, LEFT - 2, y), fill=FAINT)
        pen.text((LEFT - 11, y), str(tiles.first_q_pos + position), fill=INK, font=font, anchor="rm")
    pen.text((LEFT - 11, TOP - 32), "queries", fill=FAINT, font=font, anchor="rm")
    pen.text((LEFT, TOP - 32), "keys", fill=FAINT, font=font, anchor="lm")


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    from PIL import ImageFont  # noqa: PLC0415

    return ImageFont.load_default(size)
