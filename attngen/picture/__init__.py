"""Pictures of masks and their tiles, for the terminal and as PNG."""

from attngen.picture.png import save_png
from attngen.picture.samples import sample_parameters
from attngen.picture.terminal import terminal_picture
from attngen.picture.tiles import TileMap, read_parameter, telling_length

__all__ = ["TileMap", "read_parameter", "sample_parameters", "save_png", "telling_length", "terminal_picture"]
