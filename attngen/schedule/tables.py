"""Tile tables: measured choices, as data. The first row that fits is taken."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.dtypes import DTYPES
from attngen.ir.expr import TRUE
from attngen.schedule import one_walk
from attngen.schedule.plan import Tiles
from attngen.schedule.reading import smallest_depth
from attngen.target import Target
from attngen.variant import Variant


@dataclass(frozen=True)
class Row:
    """``tiles`` for kernels of ``schedule`` whose head dims (the larger of both, padded) are at most ``head_dim``.

    Columns in tensors of their own (``head_dim_pe``) are left out of the head dim.

    Attributes:
        schedule: ``prefill``, ``decode``, ``merge``, ``delta``, ``dkdv``, ``dq``, ``dqkv``, ``append``.
        head_dim: largest padded head dim the row serves.
        tiles: the choice.
        itemsize: bytes an element it was chosen for; 0 fits all.
        archs: architectures it was chosen for; empty fits all.
        group_size: smallest number of query heads a key head, times queries of a request where these share tiles.
        masked: only where the mask hides keys (``True``), only where it hides none (``False``), or both (``None``).
        windowed: only where the mask hides the first keys of a request from some tiles (``True``), only where it does not
            (``False``), or both (``None``).
        plain: only where a pair costs a product and an exponential (``True``), only where it costs more, by a score mod or
            dropout (``False``), or both (``None``).
        sloped: only where the slope of the logit is not 1 and backward keeps it for each pair (``True``), only where it is 1
            (``False``), or both (``None``).
        mask_data: only where the mask reads data by position (``True``), or wherever (``False``): rows meet few tiles.
        mask_pairs: only where the mask reads data of each pair (``True``), or wherever (``False``).
        transformed: only where queries and keys are normed or rotated (``True``), or wherever (``False``).
        table: only where rotations come from a table (``True``), or wherever (``False``).
        dropout: only where weights are dropped (``True``), or wherever (``False``).
        score_pairs: only where the score reads a parameter for each pair (``True``), or wherever (``False``): tiles of it are kept
            in shared memory as those of keys are.
        kv_bits: most bits of a stored number of keys and of values; 0 fits all.
        widened: only where queries have more bits than stored numbers (``True``), only where not (``False``), or both (``None``).
        kv_block: only where so many numbers, of keys or of values, share a scale; 0 fits all.

    A row whose tiles come by tensor maps serves only kernels that can use them: of adjacent keys, or of pages that tiles divide,
    with an unmasked loop. Those of the cuda backend copy tiles in parts.
    """

    schedule: str
    head_dim: int
    tiles: Tiles
    itemsize: int = 0
    archs: tuple[str, ...] = ()
    group_size: int = 1
    masked: bool | None = None
    windowed: bool | None = None
    plain: bool | None = None
    sloped: bool | None = None
    mask_data: bool = False
    mask_pairs: bool = False
    transformed: bool = False
    table: bool = False
    dropout: bool = False
    score_pairs: bool = False
    kv_bits: int = 0
    widened: bool | None = None
    kv_block: int = 0


_HOPPER = ("sm90a", "sm100")
_AMPERE = ("sm80", *_HOPPER)  # 160 KiB of shared memory
_CUDA = ("sm86", "sm89", *_AMPERE)
_AMD = ("gfx942", "gfx950")

# What sm90a takes for plain scores of 2-byte elements is measured on an H200 (decode up to 16 heads a group); everything else is
# only known to compile and to fit.
TRITON = (
    Row("prefill", 128, Tiles(128, 64, 8, 2), itemsize=2, archs=_HOPPER, transformed=True, table=True),
    Row("prefill", 128, Tiles(128, 64, 8, 3), itemsize=2, archs=_HOPPER, transformed=True),
    Row("prefill", 256, Tiles(64, 32, 4, 1), itemsize=2, archs=_CUDA, transformed=True),
    Row("prefill", 64, Tiles(64, 64, 4, 3), itemsize=2, archs=_HOPPER, mask_data=True),
    Row("prefill", 64, Tiles(64, 64, 4, 3), itemsize=2, archs=_HOPPER, plain=False),
    Row("prefill", 64, Tiles(128, 64, 8, 3, max_registers=128), itemsize=2, archs=("sm90a",)),
    Row(
        "prefill",
        128,
        Tiles(128, 64, 8, 2, max_registers=128, maps=True),
        itemsize=2,
        archs=("sm90a",),
        mask_pairs=True,
    ),
    Row("prefill", 128, Tiles(128, 32, 8, 3), itemsize=2, archs=_HOPPER, mask_pairs=True),
    Row("prefill", 256, Tiles(64, 32, 4, 2), itemsize=2, archs=_HOPPER, mask_pairs=True),
    Row(
        "prefill", 128, Tiles(64, 64, 4, 1, max_registers=168, maps=True), itemsize=2, archs=("sm90a",), mask_data=True
    ),
    Row("prefill", 128, Tiles(64, 64, 4, 3), itemsize=2, archs=_HOPPER, mask_data=True),
    Row("prefill", 128, Tiles(128, 64, 8, 2, max_registers=128, maps=True), itemsize=2, archs=("sm90a",)),
    Row("prefill", 128, Tiles(128, 64, 8, 2), itemsize=2, archs=_HOPPER, score_pairs=True),
    Row("prefill", 128, Tiles(128, 64, 8, 3), itemsize=2, archs=_HOPPER, plain=False),
    Row("prefill", 64, Tiles(128, 64, 4, 3), itemsize=2, archs=_CUDA),
    Row("prefill", 128, Tiles(128, 128, 8, 3), itemsize=2, archs=("sm90a",)),
    Row("prefill", 128, Tiles(128, 64, 8, 3), itemsize=2, archs=_AMPERE),
    Row("prefill", 128, Tiles(64, 64, 4, 2), itemsize=2, archs=_CUDA),
    Row("prefill", 256, Tiles(128, 64, 8, 2), itemsize=2, archs=_HOPPER),
    Row("prefill", 256, Tiles(64, 32, 4, 2), itemsize=2, archs=_CUDA),
    Row("prefill", 128, Tiles(128, 64, 4, 1), itemsize=2, archs=_AMD),
    Row("prefill", 256, Tiles(64, 32, 4, 1), itemsize=2, archs=_AMD),
    Row("prefill", 64, Tiles(64, 32, 8, 1), itemsize=4),
    Row("prefill", 128, Tiles(32, 32, 8, 1), itemsize=4),
    Row("prefill", 256, Tiles(32, 16, 8, 1), itemsize=4),
    Row("prefill", 256, Tiles(32, 32, 8, 1), itemsize=4),
    Row("decode", 128, Tiles(32, 32, 4, 3), itemsize=2, archs=_HOPPER, group_size=17, transformed=True),
    Row("decode", 128, Tiles(16, 32, 4, 3), itemsize=2, archs=_HOPPER, transformed=True),
    Row("decode", 128, Tiles(16, 16, 4, 2), itemsize=2, archs=_CUDA, transformed=True),
    Row("decode", 256, Tiles(16, 16, 4, 1), itemsize=2, archs=_CUDA, transformed=True),
    Row("decode", 128, Tiles(64, 64, 4, 3), itemsize=2, archs=_AMPERE, group_size=33),
    Row("decode", 128, Tiles(32, 32, 4, 6), itemsize=2, archs=("sm90a",), group_size=17, kv_bits=8),
    Row("decode", 128, Tiles(16, 32, 1, 5, keys_first=True), itemsize=2, archs=("sm90a",), group_size=9, kv_bits=8),
    Row("decode", 128, Tiles(8, 32, 1, 5, keys_first=True), itemsize=2, archs=("sm90a",), kv_bits=8),
    Row("decode", 128, Tiles(32, 32, 4, 6), itemsize=2, archs=_CUDA, group_size=17),
    Row("decode", 128, Tiles(16, 32, 4, 6), itemsize=2, archs=_CUDA),
    Row("decode", 256, Tiles(16, 32, 4, 4), itemsize=2, archs=_AMPERE),
    Row("decode", 256, Tiles(16, 32, 4, 2), itemsize=2),
    Row("decode", 512, Tiles(64, 64, 8, 2, maps=True), itemsize=2, archs=("sm90a",)),
    Row("decode", 512, Tiles(64, 64, 8, 2), itemsize=2, archs=("sm90a",)),
    Row("decode", 512, Tiles(64, 32, 8, 2), itemsize=2, archs=_AMPERE),
    Row("decode", 512, Tiles(32, 16, 8, 2), itemsize=2, archs=_CUDA),
    Row("decode", 512, Tiles(32, 16, 4, 1), itemsize=2),
    Row("decode", 128, Tiles(16, 32, 4, 1)),
    Row("decode", 256, Tiles(16, 16, 8, 1)),
    Row("decode", 512, Tiles(16, 16, 8, 1)),
    Row("decode", 512, Tiles(16, 32, 8, 1)),
    Row("append", 64, Tiles(16, 1, 4, 1)),
    Row("append", 128, Tiles(8, 1, 4, 1)),
    Row("append", 256, Tiles(4, 1, 4, 1)),
    Row("append", 512, Tiles(2, 1, 4, 1)),
    Row("merge", 256, Tiles(1, 16, 2, 1)),
    Row("merge", 512, Tiles(1, 16, 4, 1)),
    Row("delta", 256, Tiles(32, 16, 4, 1)),
    Row("dkdv", 128, Tiles(32, 64, 4, 2), itemsize=2, archs=_HOPPER, table=True),
    Row("dkdv", 128, Tiles(16, 64, 4, 1), itemsize=2, archs=_CUDA, table=True),
    Row("dkdv", 128, Tiles(64, 128, 8, 3), itemsize=2, archs=_HOPPER, transformed=True),
    Row("dkdv", 128, Tiles(32, 64, 4, 2), itemsize=2, archs=_HOPPER, score_pairs=True),
    Row("dkdv", 64, Tiles(32, 64, 4, 3), itemsize=2, archs=_HOPPER, dropout=True),
    Row("dkdv", 128, Tiles(32, 128, 8, 3), itemsize=2, archs=_HOPPER, dropout=True),
    Row("dkdv", 64, Tiles(64, 64, 4, 3), itemsize=2, archs=_HOPPER),
    Row("dkdv", 128, Tiles(64, 128, 8, 3), itemsize=2, archs=_HOPPER, masked=False),
    Row("dkdv", 128, Tiles(32, 64, 4, 3), itemsize=2, archs=("sm90a",)),
    Row("dkdv", 128, Tiles(32, 128, 8, 3), itemsize=2, archs=_HOPPER),
    Row("dkdv", 256, Tiles(32, 64, 8, 2), itemsize=2, archs=_HOPPER),
    Row("dkdv", 64, Tiles(64, 64, 4, 2), itemsize=2, archs=_CUDA),
    Row("dkdv", 128, Tiles(32, 64, 8, 2), itemsize=2, archs=_CUDA),
    Row("dkdv", 64, Tiles(32, 64, 4, 1), itemsize=2),
    Row("dkdv", 128, Tiles(32, 64, 8, 1), itemsize=2, archs=_AMD),
    Row("dkdv", 256, Tiles(16, 32, 8, 1), itemsize=2),
    Row("dkdv", 256, Tiles(32, 32, 8, 1), itemsize=2),
    Row("dkdv", 256, Tiles(16, 16, 8, 1)),
    Row("dq", 128, Tiles(64, 64, 4, 2), itemsize=2, archs=_HOPPER, table=True),
    Row("dq", 128, Tiles(64, 32, 4, 1), itemsize=2, archs=_CUDA, table=True),
    Row("dq", 256, Tiles(64, 16, 4, 1), itemsize=2, archs=_CUDA, table=True),
    Row("dq", 128, Tiles(128, 64, 8, 3), itemsize=2, archs=_HOPPER, transformed=True),
    Row("dq", 128, Tiles(64, 64, 4, 2), itemsize=2, archs=_HOPPER, score_pairs=True),
    Row("dq", 64, Tiles(64, 64, 4, 3), itemsize=2, archs=_HOPPER, mask_pairs=True),
    Row("dq", 128, Tiles(128, 32, 8, 3), itemsize=2, archs=_HOPPER, mask_pairs=True),
    Row("dq", 64, Tiles(64, 64, 4, 3), itemsize=2, archs=_HOPPER, plain=False),
    Row("dq", 64, Tiles(128, 64, 4, 3), itemsize=2, archs=_HOPPER),
    Row("dq", 128, Tiles(128, 64, 8, 3), itemsize=2, archs=_HOPPER),
    Row("dq", 256, Tiles(128, 32, 8, 2), itemsize=2, archs=_HOPPER),
    Row("dq", 64, Tiles(64, 64, 4, 2), itemsize=2, archs=_CUDA),
    Row("dq", 128, Tiles(64, 32, 4, 2), itemsize=2, archs=_CUDA),
    Row("dq", 128, Tiles(64, 32, 4, 1), itemsize=2, archs=_AMD),
    Row("dq", 128, Tiles(32, 16, 8, 1)),
    Row("dq", 256, Tiles(16, 16, 8, 1)),
    Row("dq", 256, Tiles(32, 32, 8, 1), itemsize=2),
)

PRODUCT_BYTES = 32  # of the terms that a product of Hopper's adds up: keys, where weights are multiplied by values

# Rows of 8 are half a step of the matrix units, which take keys first. Fewer keys at a time where numbers have more bits keep the
# bytes in flight the same.
CUDA = (
    Row("prefill", 128, Tiles(192, 80, 16, 2, maps=True, in_turns=True), kv_bits=8, widened=True),
    Row("prefill", 128, Tiles(128, 112, 12, 2, maps=True, in_turns=True), kv_bits=8, widened=True),
    Row("prefill", 128, Tiles(128, 64, 12, 2, maps=True, q_stages=2, in_turns=True), kv_bits=8, widened=True),
    Row("prefill", 192, Tiles(128, 64, 12, 2, maps=True, in_turns=True), kv_bits=8, widened=True),
    Row("prefill", 256, Tiles(128, 48, 12, 2, maps=True), kv_bits=8, widened=True),
    Row("prefill", 256, Tiles(128, 32, 12, 2, maps=True), kv_bits=8, widened=True),
    Row("prefill", 128, Tiles(192, 96, 16, 2, maps=True), kv_bits=8, widened=False),
    Row("prefill", 128, Tiles(128, 128, 12, 2, maps=True, q_stages=2, in_turns=True), kv_bits=8, widened=False),
    Row("prefill", 192, Tiles(128, 128, 12, 2, maps=True, in_turns=True), kv_bits=8, widened=False),
    Row("prefill", 256, Tiles(128, 64, 12, 2, maps=True), kv_bits=8, widened=False),
    Row("prefill", 128, Tiles(128, 128, 12, 2, maps=True, q_stages=2, in_turns=True), dropout=True, widened=False),
    Row("prefill", 64, Tiles(192, 128, 16, 2, maps=True, q_stages=2), masked=True, widened=False),
    Row("prefill", 64, Tiles(192, 128, 16, 2, maps=True, q_stages=2, in_turns=True), widened=False),
    Row("prefill", 128, Tiles(128, 176, 12, 2, maps=True, in_turns=True), masked=False, plain=True, widened=False),
    Row("prefill", 128, Tiles(192, 80, 16, 2, maps=True, in_turns=True), masked=True, windowed=False, widened=False),
    Row("prefill", 128, Tiles(128, 128, 12, 2, maps=True, q_stages=2, in_turns=True), widened=False),
    Row("prefill", 192, Tiles(128, 112, 12, 2, maps=True, in_turns=True), widened=False),
    Row("prefill", 256, Tiles(128, 80, 12, 2, maps=True), masked=False, plain=True, widened=False),
    Row("prefill", 256, Tiles(128, 64, 12, 2, maps=True), widened=False),
    Row("decode", 128, Tiles(8, 16, 4, 3, blocks=3), archs=("sm90a",), kv_block=16, group_size=5),
    Row("decode", 128, Tiles(4, 32, 4, 2, blocks=4), archs=("sm90a",), kv_bits=4, kv_block=16),
    Row("decode", 128, Tiles(4, 16, 4, 3, blocks=4), archs=("sm90a",), kv_block=16),
    Row("decode", 256, Tiles(8, 16, 4, 2, blocks=2), archs=("sm90a",), kv_block=16, group_size=5),
    Row("decode", 256, Tiles(4, 16, 4, 2, blocks=2), archs=("sm90a",), kv_block=16),
    Row("decode", 128, Tiles(8, 32, 4, 2, blocks=4), archs=("sm90a",), kv_bits=4),
    Row("decode", 128, Tiles(8, 16, 4, 3, blocks=4), archs=("sm90a",), kv_bits=8),
    Row("decode", 128, Tiles(8, 16, 4, 2, blocks=3), archs=("sm90a",)),
    Row("decode", 256, Tiles(8, 16, 4, 3, blocks=2), archs=("sm90a",), kv_bits=8),
    Row("decode", 256, Tiles(8, 16, 4, 2, blocks=1), archs=("sm90a",)),
    Row("dqkv", 64, Tiles(64, 128, 12, 2), archs=("sm90a",), sloped=True),
    Row("dqkv", 64, Tiles(128, 128, 12, 2), archs=("sm90a",), sloped=False),
    Row("dqkv", 128, Tiles(64, 128, 12, 2), archs=("sm90a",)),
    Row("dqkv", 192, Tiles(96, 64, 16, 2, by_product=True), archs=("sm90a",)),
    Row("dqkv", 192, Tiles(80, 64, 16, 2, by_product=True), archs=("sm90a",)),
    Row("dqkv", 256, Tiles(64, 64, 16, 2, by_product=True), archs=("sm90a",)),
)

INTERPRET = (
    Row("prefill", 256, Tiles(64, 64, 4, 1)),
    Row("decode", 512, Tiles(16, 64, 4, 1, maps=True), itemsize=2),
    Row("decode", 512, Tiles(16, 64, 4, 1)),
    Row("append", 512, Tiles(16, 1, 4, 1)),
    Row("merge", 512, Tiles(16, 16, 4, 1)),
    Row("delta", 256, Tiles(64, 16, 4, 1)),
    Row("dkdv", 256, Tiles(64, 64, 4, 1)),
    Row("dq", 256, Tiles(64, 64, 4, 1)),
)

# Measured on a Zen 5 core with AVX-512: sizes around these differ by a few percent. A tile of the decode kernel costs no more than
# the rows it has.
CPP = (
    Row("prefill", 256, Tiles(128, 64)),
    Row("decode", 512, Tiles(64, 64)),
    Row("append", 512, Tiles(1, 1)),
    Row("merge", 512, Tiles(16, 16)),
    Row("delta", 256, Tiles(16, 16)),
    Row("dkdv", 256, Tiles(64, 128)),
    Row("dq", 256, Tiles(128, 64)),
)


def fitting_tiles(
    backend: str,
    schedule: str,
    variant: Variant,
    target: Target,
    *,
    mappable: bool = False,
    windowed: bool = False,
    rows: int = 0,
) -> tuple[Tiles, ...]:
    """Tiles of the backend's table that fit, the first choice first.

    Args:
        schedule: as in :class:`Row`.
        mappable: whether the kernel can use tensor maps.
        windowed: as in :class:`Row`.
        rows: packed rows of a request, for rows of the table that ask for a ``group_size``; that of the variant by default.
    """
    table = {"cpp": CPP, "cuda": CUDA}.get(backend) or (INTERPRET if target.kind == "interpret" else TRITON)
    head_dim = max(padded(variant.head_dim_main, backend), padded(variant.head_dim_vo, backend))
    itemsize = max(DTYPES[variant.compute_dtype].itemsize, variant.stored_bits // 8)
    fits = tuple(
        row.tiles
        for row in table
        if (
            row.schedule == schedule
            and head_dim <= row.head_dim
            and row.itemsize in (0, itemsize)
            and (not row.archs or target.arch in row.archs)
            and (rows or variant.group_size) >= row.group_size
            and row.masked in (None, variant.mask != TRUE)
            and row.windowed in (None, windowed)
            and row.plain in (None, not (variant.has_score_mod or variant.dropout))
            and (row.sloped is None or row.sloped != variant.score_slope_is_one)
            and row.mask_data <= variant.mask_reads_data
            and row.mask_pairs <= variant.mask_reads_pairs
            and row.table <= (variant.rope is not None and variant.rope.table is not None)
            and row.transformed <= variant.is_transformed
            and row.dropout <= (variant.dropout > 0)
            and row.score_pairs <= variant.score_reads_pairs
            and (not row.kv_bits or variant.stored_bits <= row.kv_bits)
            and row.widened in (None, variant.widens)
            and row.kv_block in (0, variant.k_storage.block, variant.v_storage.block)
            and may_run(row.tiles, backend, schedule, variant, target, mappable=mappable)
        )
    )
    if not fits:
        raise LookupError(f"no {backend} tiles for {schedule} with head dim {head_dim}")
    return tuple(dict.fromkeys(fits))


def may_run(
    tiles: Tiles, backend: str, schedule: str, variant: Variant, target: Target, *, mappable: bool = False
) -> bool:
    """Whether kernels of these tiles would be right, be they fast or not; arguments as for :func:`fitting_tiles`."""
    keys, queries = (
        smallest_depth(variant, axis, target) if backend == "triton" else 0 for axis in ("keys", "queries")
    )
    # Lists of tiles are made by Triton.
    listed = backend == "cuda" and variant.mask_reads_data
    terms = PRODUCT_BYTES // DTYPES[variant.dtype].itemsize if backend == "cuda" and schedule == "prefill" else 1
    return (
        tiles.maps <= (mappable and (backend == "cuda" or variant.page_size % tiles.kv == 0))
        and (schedule != "dqkv" or one_walk.fits(variant, tiles))
        and not (listed and (tiles.q & (tiles.q - 1) or tiles.kv & (tiles.kv - 1)))
        and tiles.kv % terms == 0
        and (tiles.kv >= keys or schedule not in ("prefill", "decode", "dq"))
        and (tiles.q >= queries or schedule != "dkdv")
    )


def padded(head_dim: int, backend: str, smallest: int = 16) -> int:
    """The head dim as the backend tiles it: Triton needs powers of two, ``smallest`` at least; the others take it as it is."""
    return head_dim if backend in ("cpp", "cuda") else max(smallest, 1 << (head_dim - 1).bit_length())
