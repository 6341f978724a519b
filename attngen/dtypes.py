"""The element types attngen stores tensors in, one row each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DTypeName = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class DType:
    """One storage type.

    Attributes:
        name: attngen's name, as written in specs.
        torch_name: attribute of ``torch`` that holds the dtype.
        itemsize: bytes an element.
        triton_name: element name in Triton signatures and ``tl``.
    """

    name: str
    torch_name: str
    itemsize: int
    triton_name: str


DTYPES: dict[str, DType] = {
    row.name: row
    for row in (
        DType("fp32", "float32", 4, "fp32"),
        DType("bf16", "bfloat16", 2, "bf16"),
        DType("fp16", "float16", 2, "fp16"),
        DType("i32", "int32", 4, "i32"),
        DType("i64", "int64", 8, "i64"),
        DType("u8", "uint8", 1, "u8"),
        DType("bool", "bool", 1, "i1"),
    )
}
