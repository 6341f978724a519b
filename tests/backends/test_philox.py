"""Dropout's random words against published vectors, and where they leave weights."""

from __future__ import annotations

import pytest
import torch

from attngen.backends.philox import block, kept

# Known answers of Philox4x32-10 from Random123: counter, key, block.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), VECTORS)
def test_published_vectors(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    assert tuple(int(word) for word in block([torch.tensor(word) for word in counter], list(key))) == words


def test_the_share_that_stays() -> None:
    row, q, k = torch.arange(8)[:, None, None], torch.arange(100)[:, None], torch.arange(200)
    stays = kept(round(0.3 * 2**32), seed=5, offset=9, row=row, q=q, k=k)
    assert abs(float(stays.double().mean()) - 0.7) < 4 * (0.3 * 0.7 / stays.numel()) ** 0.5
    for other in (kept(round(0.3 * 2**32), 6, 9, row, q, k), kept(round(0.3 * 2**32), 5, 10, row, q, k)):
        agreement = float((stays == other).double().mean())
        assert abs(agreement - (0.49 + 0.09)) < 0.01  # independent
    for axis in range(3):
        neighbours = stays.narrow(axis, 0, stays.shape[axis] - 1) == stays.narrow(axis, 1, stays.shape[axis] - 1)
        assert abs(float(neighbours.double().mean()) - 0.58) < 0.01


def test_high_bits_of_seed_and_offset_count() -> None:
    row, q, k = torch.tensor(0), torch.tensor(0), torch.arange(4096)
    base = kept(1 << 31, 1, 1, row, q, k)
    for seed, offset in ((1 + (1 << 40), 1), (1, 1 + (1 << 40)), (-1, 1)):
        assert not torch.equal(base, kept(1 << 31, seed, offset, row, q, k))
