"""What groups of numeric cases share: masks, ugly lengths, numbers of heads."""

from __future__ import annotations

import attngen as ag


@ag.mask_mod
def same_parity(b, h, q, k):
    return (q - k) % 2 == 0


@ag.mask_mod
def sinks_or_near(b, h, q, k):
    return (k < 3) | (abs(q - k) <= 9)


@ag.mask_mod
def same_block(b, h, q, k, block: ag.Tensor("batch", dtype="i32")):
    return q // 24 == (k + block[b]) // 24


MASKS = {
    "full": ag.Full(),
    "causal": ag.Causal(),
    "window": ag.Causal() & ag.SlidingWindow(left=17),
    "band": ag.SlidingWindow(left=5, right=11),
    "anticausal": ~ag.Causal(),
    "parity": ag.Causal() & same_parity,
    "sinks": ag.Causal() & sinks_or_near,
    "either": ag.SlidingWindow(left=3) | same_block,
}


# Empty requests, one token, more queries than keys, no multiples of a tile.
LENS = (
    ((37, 0, 1, 9, 70), (37, 0, 5, 3, 70)),
    ((65, 3, 33), (130, 3, 0)),
    ((12, 12), (77, 77)),
)
DECODE_LENS = (((1, 1, 1, 1), (1, 63, 0, 200)), ((3, 3), (5, 131)), ((1, 1), (1300, 40)))
GROUPS = ((2, 2), (3, 1), (10, 2), (7, 1), (24, 2), (6, 2))


def declare(heads: tuple[int, int], dims: tuple[int, int], **fields: object) -> ag.AttentionSpec:
    qo, kv = heads
    return ag.AttentionSpec(
        heads=ag.GQA(num_qo_heads=qo, num_kv_heads=kv, head_dim=dims[0], head_dim_vo=dims[1]), **fields
    )
