"""Tile tables: measured choices, as data. The first row that fits is taken."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.schedule.plan import Tiles
from attngen.target import Target
from attngen.variant import Variant


@dataclass(frozen=True)
class Row:
    """``tiles`` for kernels of ``schedule`` whose head dims (the larger of both, padded) are at most ``head_dim``.

    Attributes:
        schedule: ``prefill``, ``decode``, ``merge``, ``delta``, ``dkdv``, ``dq``.
        head_dim: largest padded head dim the row serves.
        tiles: the choice.
        itemsize: bytes an element it was chosen for; 0 fits all.
        archs: architectures it was chosen for; empty fits all.
        plain: only where the score is unmodified (``True``), only where it is modified (``False``), or both (``None``).
    """

    schedule: str
    head_dim: int
    tiles: Tiles
    itemsize: int = 0
    archs: tuple[str, ...] = ()
    plain: bool | None = None


TRITON = (
    Row("prefill", 64, Tiles(128, 128, 8, 3), itemsize=2, archs=("sm90a", "sm100")),
    Row("prefill", 128, Tiles(128, 64, 8, 3), itemsize=2, archs=("sm90a", "sm100")),
    Row("prefill", 64, Tiles(128, 64, 4, 2), itemsize=2),
    Row("prefill", 128, Tiles(64, 64, 4, 2), itemsize=2),
    Row("prefill", 256, Tiles(64, 32, 4, 2), itemsize=2),
    Row("prefill", 64, Tiles(64, 32, 4, 2), itemsize=4),
    Row("prefill", 256, Tiles(32, 16, 4, 2), itemsize=4),
    Row("decode", 128, Tiles(16, 64, 4, 3), itemsize=2),
    Row("decode", 256, Tiles(16, 32, 4, 2)),
    Row("merge", 256, Tiles(16, 16, 4, 1)),
    Row("delta", 256, Tiles(16, 16, 4, 1)),
    Row("dkdv", 64, Tiles(64, 64, 4, 2), itemsize=2),
    Row("dkdv", 128, Tiles(64, 64, 8, 2), itemsize=2),
    Row("dkdv", 256, Tiles(32, 32, 8, 1)),
    Row("dq", 128, Tiles(64, 64, 4, 2), itemsize=2),
    Row("dq", 256, Tiles(32, 32, 8, 1)),
)

INTERPRET = (
    Row("prefill", 256, Tiles(64, 64, 4, 1)),
    Row("decode", 256, Tiles(16, 64, 4, 1)),
    Row("merge", 256, Tiles(16, 16, 4, 1)),
    Row("delta", 256, Tiles(64, 16, 4, 1)),
    Row("dkdv", 256, Tiles(64, 64, 4, 1)),
    Row("dq", 256, Tiles(64, 64, 4, 1)),
)

# Measured on a Zen 5 core with AVX-512: sizes around these differ by a few percent. A tile of the decode kernel costs no more than
# the rows it has.
CPP = (
    Row("prefill", 256, Tiles(128, 64)),
    Row("decode", 256, Tiles(64, 64)),
    Row("merge", 256, Tiles(16, 16)),
    Row("delta", 256, Tiles(16, 16)),
    Row("dkdv", 256, Tiles(64, 128)),
    Row("dq", 256, Tiles(128, 64)),
)

_ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}


def choose_tiles(backend: str, schedule: str, variant: Variant, target: Target) -> Tiles:
    """The first fitting row of the backend's table.

    Args:
        schedule: as in :class:`Row`.
    """
    table = CPP if backend == "cpp" else INTERPRET if target.kind == "interpret" else TRITON
    head_dim = max(padded(variant.head_dim_qk, backend), padded(variant.head_dim_vo, backend))
    for row in table:
        if (
            row.schedule == schedule
            and head_dim <= row.head_dim
            and row.itemsize in (0, _ITEMSIZE[variant.dtype])
            and (not row.archs or target.arch in row.archs)
            and row.plain in (None, not variant.has_score_mod)
        ):
            return row.tiles
    raise LookupError(f"no {backend} tiles for {schedule} with head dim {head_dim}")


def padded(head_dim: int, backend: str) -> int:
    """The head dim as the backend tiles it: Triton needs powers of two, C++ takes it as it is."""
    return head_dim if backend == "cpp" else max(16, 1 << (head_dim - 1).bit_length())
