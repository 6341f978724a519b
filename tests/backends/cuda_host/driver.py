"""What the launcher asks of NVIDIA's driver to make tensor maps, with its conditions; such a map is read by ``async.h``."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class DataType(IntEnum):
    CU_TENSOR_MAP_DATA_TYPE_UINT8 = 0
    CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6
    CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9


class Interleave(IntEnum):
    CU_TENSOR_MAP_INTERLEAVE_NONE = 0


class Promotion(IntEnum):
    CU_TENSOR_MAP_L2_PROMOTION_L2_128B = 2


class Fill(IntEnum):
    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0


@dataclass(frozen=True)
class EncodedMap:
    """The bytes of a map."""

    words: Any

    def getPtr(self) -> int:  # the driver's name
        """Their address."""
        return ctypes.addressof(self.words)


class HostDriver:
    """Maps of four dims, of numbers of 8 or 16 bits."""

    CUtensorMapDataType = DataType
    CUtensorMapSwizzle = int
    CUtensorMapInterleave = Interleave
    CUtensorMapL2promotion = Promotion
    CUtensorMapFloatOOBfill = Fill
    cuuint64_t = int
    cuuint32_t = int

    def cuTensorMapEncodeTiled(  # the driver's name
        self,
        kind: DataType,
        rank: int,
        address: int,
        sizes: Sequence[int],
        pitches: Sequence[int],
        box: Sequence[int],
        steps: Sequence[int],
        *options: int,
    ) -> tuple[int, EncodedMap]:
        """A map, or an error where the driver's manual says so."""
        swizzle = options[1]
        itemsize = 1 if kind == DataType.CU_TENSOR_MAP_DATA_TYPE_UINT8 else 2
        taken = (
            rank == 4
            and address % 16 == 0
            and all(0 < size <= 2**32 for size in sizes)
            and all(pitch % 16 == 0 and 0 <= pitch < 2**40 for pitch in pitches)
            and all(0 < rows <= 256 for rows in box)
            and box[0] * itemsize <= 128
            and set(steps) == {1}
        )
        packed = struct.pack("9Q5I", address, *sizes, itemsize, *pitches, *box, swizzle) if taken else b""
        return int(not taken), EncodedMap(ctypes.create_string_buffer(packed, 128))
