"""Pictures of masks and their tiles, for the terminal and as PNG."""

from attngen.picture.png import save_png
from attngen.picture.terminal import terminal_picture
from attngen.picture.tiles import TileMap, telling_length

__all__ = ["TileMap", "save_png", "telling_length", "terminal_picture"]
