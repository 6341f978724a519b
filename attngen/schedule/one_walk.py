"""What a kernel that makes all gradients in one walk needs of a multiprocessor: shared memory, and registers of its warpgroups."""

from __future__ import annotations

from attngen.schedule.launch import Tiles, in_pieces
from attngen.variant import Variant

_SHARED = 227 << 10  # bytes that a block may have
_TOLD = 224  # bytes of barriers and of what warps tell each other
_REGISTERS = 512  # that threads of all warpgroups have together, one of each
_LOADING, _MOST = 24, 240  # of a thread that loads, and that a thread may have
_STEP = 8  # they are given by
# Registers beside sums and operands of products: for weights, with the mask and the score; for dscore; for addresses of dq.
_BESIDE_WEIGHTS, _BESIDE_DSCORE, _BESIDE_DQ = 40, 32, 32


def shared_bytes(variant: Variant, tiles: Tiles) -> int:
    """Keys, values, stages of queries and dout, of lse and delta, and of what warpgroups exchange: dscore, and weights."""
    width = in_pieces(variant.head_dim_qk) + in_pieces(variant.head_dim_vo)
    loaded = (tiles.kv + tiles.num_stages * tiles.q) * width * 2
    exchanged = (2 if tiles.by_product else 1) * tiles.q * tiles.kv * 2
    return loaded + tiles.num_stages * (exchanged + 2 * tiles.q * 4) + _TOLD


def registers(variant: Variant, tiles: Tiles) -> tuple[int, ...]:
    """Registers of a thread of each warpgroup: the one that loads, then those that multiply.

    Where these divide products, that of dq has two parts of 64 dims, that of dk its sums and those of dout . v, and that of dv
    what is left.
    """
    if not tiles.by_product:
        return (_LOADING, *(tiles.kv // 64 * (_MOST,)))
    dq = _given(tiles.q + _BESIDE_DQ)
    dk = _given(in_pieces(variant.head_dim_qk) // 2 + tiles.q // 2 + _BESIDE_DSCORE)
    return _LOADING, min(_REGISTERS - _LOADING - dk - dq, _MOST), dk, dq


def fits(variant: Variant, tiles: Tiles) -> bool:
    """Whether a multiprocessor has room for it. A few registers more or less the assembler decides."""
    qk, vo = in_pieces(variant.head_dim_qk), in_pieces(variant.head_dim_vo)
    _, first, *others = registers(variant, tiles)
    sums = vo + tiles.q if tiles.by_product else qk + vo + 2 * tiles.q  # of 64 keys
    needed = sums // 2 + (_BESIDE_WEIGHTS if tiles.by_product else _BESIDE_DSCORE)
    return shared_bytes(variant, tiles) <= _SHARED and needed <= first and max(others) <= _MOST


def _given(number: int) -> int:
    return -(-number // _STEP) * _STEP
