"""The element types attngen stores tensors in, one row each, and how caches of few bits hold numbers."""

# ruff: noqa: PLC0415 - torch is imported where numbers are computed: everything up to rendered text works without it

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

DTypeName = Literal["fp32", "bf16", "fp16"]
QueryDTypeName = Literal["fp32", "bf16", "fp16", "fp8_e4m3"]
KVDTypeName = Literal["fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "nvfp4", "mxfp4"]
Scale = Literal["tensor", "head", "token"]


@dataclass(frozen=True)
class DType:
    """One storage type.

    Attributes:
        name: attngen's name, as written in specs.
        torch_name: attribute of ``torch`` that holds the dtype.
        itemsize: bytes an element of that torch dtype.
        triton_name: element name in Triton signatures and ``tl``.
        packed: values that an element holds, low bits first.
        largest: largest magnitude of a quantized value; 0 where nothing is quantized.
        block: values that share a block scale; 0 where there is none.
        block_scale: dtype of block scales.
        scales: factors that a cache of this type may have, the default first; empty where it has none.
    """

    name: str
    torch_name: str
    itemsize: int
    triton_name: str
    packed: int = 1
    largest: float = 0.0
    block: int = 0
    block_scale: str = ""
    scales: tuple[str, ...] = ()

    @property
    def bits(self) -> int:
        """Bits a value."""
        return 8 * self.itemsize // self.packed


_FACTORS = ("tensor", "head", "token")
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
        DType("fp8_e4m3", "float8_e4m3fn", 1, "fp8e4nv", largest=448.0, scales=_FACTORS),
        DType("fp8_e5m2", "float8_e5m2", 1, "fp8e5", largest=57344.0, scales=_FACTORS),
        DType("int8", "int8", 1, "i8", largest=127.0, scales=("head", "token", "tensor")),
        DType("int4", "uint8", 1, "u8", packed=2, largest=7.0, block=32, block_scale="fp16", scales=("", "tensor")),
        DType(
            "nvfp4", "uint8", 1, "u8", packed=2, largest=6.0, block=16, block_scale="fp8_e4m3", scales=("tensor", "")
        ),
        DType("mxfp4", "uint8", 1, "u8", packed=2, largest=6.0, block=32, block_scale="u8", scales=("", "tensor")),
    )
}


def widened(dtype: str) -> str:
    """The dtype that numbers of a query's dtype are computed and given back in: bf16 for fp8, which holds too few bits."""
    return "bf16" if DTYPES[dtype].largest else dtype


@dataclass(frozen=True)
class Storage:
    """How keys, or values, lie in memory.

    A stored number stands for ``data * block scale * scale``, with ``data - zero point`` in place of ``data`` where there is one.

    Attributes:
        dtype: a row of :data:`DTYPES`.
        scale: what one fp32 factor serves: the whole ``tensor``, a key ``head``, a ``token`` of a head; empty without factors.
        block: values along the head dim that share a block scale; 0 without block scales.
        zero_point: block scales come as pairs of scale and zero point.
    """

    dtype: str
    scale: Literal["", "tensor", "head", "token"] = ""
    block: int = 0
    zero_point: bool = False

    @property
    def row(self) -> DType:
        """The dtype's row."""
        return DTYPES[self.dtype]

    @property
    def packed(self) -> int:
        """Values an element holds."""
        return self.row.packed

    @property
    def is_quantized(self) -> bool:
        """Whether numbers are not simply their elements."""
        return self.row.largest > 0

    @property
    def block_scale_bytes(self) -> int:
        """Bytes of one block scale, or zero point; 0 without block scales."""
        return DTYPES[self.row.block_scale].itemsize if self.block else 0

    def block_bytes(self, head_dim: int) -> int:
        """Bytes of the block scales, and zero points, of one token of one head."""
        if not self.block:
            return 0
        return head_dim // self.block * (2 if self.zero_point else 1) * self.block_scale_bytes

    def bytes_per_token(self, head_dim: int) -> float:
        """Bytes of one token of one head, scales of tokens and blocks included."""
        return head_dim * self.row.bits / 8 + self.block_bytes(head_dim) + (4 if self.scale == "token" else 0)


def alignment_of(row_bytes: int) -> int:
    """Bytes, 16 at most, of which addresses of rows of so many bytes are multiples."""
    return min(row_bytes & -row_bytes, 16)


def quantize(
    x: torch.Tensor, storage: Storage, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Numbers as a cache holds them: the definition that kernels follow bit for bit.

    Every step is one fp32 operation, rounded to nearest, ties to even. fp8 and int8: ``x / scale``, clamped and rounded. int4: a
    block's scale is fp16 of ``largest / 7``, or with zero points of ``(highest - lowest) / 15``, both widened to hold 0, and
    the zero point ``-lowest / scale``, rounded. nvfp4: a block's scale is e4m3 of ``largest / 6``. mxfp4 (OCP Microscaling
    1.0): the power of two ``2 ** (floor(log2(largest)) - 2)``, stored with a bias of 127. A scale of 0 holds zeros.

    Args:
        x: ``[..., heads, head_dim]``, floating.
        scale: factors of a ``tensor`` (scalar) or of ``head``\\ s ``[heads]``, 1 when omitted; those of tokens are made here:
            ``largest magnitude / largest`` of the dtype.

    Returns:
        data, block scales and the scales of tokens ``[..., heads]``; ``None`` for what the storage does not have.
    """
    import torch

    row, x = storage.row, x.float()
    tokens = None
    if storage.scale == "token":
        tokens = _over(x.abs().amax(-1), row.largest)
        scale = tokens
    if scale is not None:
        factor = scale.to(x)
        x = _divided(x, factor[..., None] if storage.scale in ("head", "token") else factor)
    if not storage.block:
        rounded = x.round() if row.name == "int8" else x
        if row.largest:
            rounded = rounded.clamp(-row.largest, row.largest)
        return rounded.to(getattr(torch, row.torch_name)), None, tokens
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // storage.block, storage.block)
    top = groups.abs().amax(-1)
    if row.name == "int4" and storage.zero_point:
        low, high = groups.amin(-1).clamp(max=0.0), groups.amax(-1).clamp(min=0.0)
        blocks = _over(high - low, 15.0).clamp(max=65504.0).half()
        zero = _divided(low.abs(), blocks.float()).round().clamp(0.0, 15.0)
        codes = (_divided(groups, blocks.float()[..., None]).round() + zero[..., None]).clamp(0.0, 15.0).to(torch.uint8)
        blocks = torch.stack([blocks, zero.half()], -1)
    elif row.name == "int4":
        blocks = _over(top, 7.0).clamp(max=65504.0).half()
        codes = (
            _divided(groups, blocks.float()[..., None]).round().clamp(-8.0, 7.0).to(torch.int8).view(torch.uint8) & 15
        )
    elif row.name == "nvfp4":
        blocks = _over(top, 6.0).clamp(max=448.0).to(torch.float8_e4m3fn)
        codes = _e2m1(_divided(groups, blocks.float()[..., None]))
    else:
        exponent = top.contiguous().view(torch.int32) >> 23  # floor(log2(top)) + 127; 255 of infinity
        blocks = (exponent - 2).clamp(0, 254).to(torch.uint8)
        codes = _e2m1(groups / _power_of_two(blocks)[..., None])
    codes = codes.flatten(-2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), blocks, tokens


def dequantize(
    data: torch.Tensor, storage: Storage, blocks: torch.Tensor | None = None, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """The numbers that a cache holds, fp32 ``[..., heads, head_dim]``; what kernels multiply by, bit for bit.

    ``data * block scale`` is exact in fp32; kernels for GPUs round it to the dtype of q, those for CPUs keep it. Factors of a
    tensor, head or token multiply logits and results in kernels, never elements, unless keys are normed.

    Args:
        data: ``[..., heads, head_dim]``, or packed ``[..., heads, head_dim / 2]``.
        blocks: block scales ``[..., heads, head_dim / block]``, and a last dim of 2 with zero points.
        scale: fp32 scalar, ``[heads]`` or ``[..., heads]``, as the storage says; 1 when omitted.
    """
    import torch

    row = storage.row
    if row.packed == 2:
        data = torch.stack([data & 15, data >> 4], -1).flatten(-2)
    if row.name == "int4" and not storage.zero_point:
        data = (data ^ 8).to(torch.int32) - 8
    if row.name in ("nvfp4", "mxfp4"):
        steps = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=data.device)
        x = torch.where(data > 7, -1.0, 1.0) * steps[(data & 7).long()]
    else:
        x = data.float()
    if storage.block:
        assert blocks is not None
        x = x.reshape(*x.shape[:-1], x.shape[-1] // storage.block, storage.block)
        if storage.zero_point:
            blocks, zero = blocks.float().unbind(-1)
            x = x - zero[..., None]
        factor = _power_of_two(blocks) if row.name == "mxfp4" else blocks.float()
        x = (x * factor[..., None]).flatten(-2)
    if scale is not None:
        factor = scale.to(x)
        x = x * (factor[..., None] if storage.scale in ("head", "token") else factor)
    return x


def _over(x: torch.Tensor, number: float) -> torch.Tensor:
    """``x / number``, rounded once: by a plain number torch divides on GPUs as it multiplies by the reciprocal."""
    import torch

    return x / torch.full_like(x, number)


def _divided(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``x / scale``, 0 where the scale is 0."""
    import torch

    return torch.where(scale == 0.0, 0.0, x / torch.where(scale == 0.0, 1.0, scale))


def _e2m1(x: torch.Tensor) -> torch.Tensor:
    """Codes of the nearest of 0, 1/2, 1, 3/2, 2, 3, 4, 6, ties to even codes; the sign in bit 3."""
    import torch

    size, up = x.abs(), torch.zeros_like(x, dtype=torch.uint8)
    for limit, inclusive in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        up += (size >= limit if inclusive else size > limit).to(torch.uint8)
    return up | (torch.signbit(x).to(torch.uint8) << 3)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """``2 ** (exponent - 127)`` of e8m0 scales, fp32."""
    import torch

    return torch.where(exponent == 0, 1 << 22, exponent.to(torch.int32) << 23).to(torch.int32).view(torch.float32)
