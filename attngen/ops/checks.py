"""Checks of arguments, before anything is launched. Every failure is an :class:`ArgumentError` that names the tensor."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from attngen.dtypes import DTYPES, alignment_of
from attngen.errors import ArgumentError

Size = int | None


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of one of :data:`DTYPES`."""
    dtype = getattr(torch, DTYPES[name].torch_name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def check_tensor(
    name: str, tensor: object, *, dtype: str, shape: Sequence[Size], axes: str, device: torch.device | None = None
) -> torch.Tensor:
    """A tensor of the right kind, dtype, shape (``None`` fits any size) and device, with unit last stride.

    Args:
        axes: the shape in words, for the message.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(
            f"{name} is missing" if tensor is None else f"{name} is a {type(tensor).__name__}",
            where=name,
            why=f"a tensor {axes} is needed",
            fix="pass one",
        )
    expected = torch_dtype(dtype)
    if tensor.dtype != expected:
        raise ArgumentError(
            f"{name} has dtype {tensor.dtype}",
            where=name,
            why=f"the spec declares {dtype}",
            fix=f"pass {name}.to({expected}), or change the spec",
        )
    fits = tensor.dim() == len(shape) and all(
        want in (None, got) for want, got in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        raise ArgumentError(
            f"{name} has shape {list(tensor.shape)}", where=name, why=f"expected {axes} = [{wanted}]", fix="reshape it"
        )
    if device is not None and tensor.device != device:
        raise ArgumentError(
            f"{name} is on {tensor.device}", where=name, why=f"q is on {device}", fix=f"pass {name}.to({str(device)!r})"
        )
    return tensor


def check_strides(name: str, tensor: torch.Tensor, alignment: int = 16) -> torch.Tensor:
    """Unit last stride; on a GPU also rows aligned to ``alignment`` bytes, which vector loads rely on."""
    if not has_unit_stride(tensor):
        raise ArgumentError(
            f"{name} has stride {tensor.stride(-1)} in its last dim",
            where=name,
            why="kernels read a head's elements one after another",
            fix=f"pass {name}.contiguous()",
        )
    if tensor.device.type != "cpu" and (what := misalignment(tensor, alignment)):
        raise ArgumentError(
            f"{name} has {what}, not aligned to {alignment} bytes",
            where=name,
            why=f"GPU kernels load {alignment} bytes at a time",
            fix=f"pass {name}.contiguous(), or a view whose rows start at multiples of "
            f"{max(alignment // tensor.element_size(), 1)} elements",
        )
    return tensor


def has_unit_stride(tensor: torch.Tensor) -> bool:
    """Whether a head's elements lie one after another."""
    return not tensor.numel() or tensor.shape[-1] == 1 or tensor.stride(-1) == 1


def misalignment(tensor: torch.Tensor, alignment: int = 16) -> str | None:
    """The stride or address, in words, that keeps rows from starting at multiples of ``alignment`` bytes.

    While a graph is traced there are no addresses: :func:`check_addresses` looks at them when it runs.
    """
    if not tensor.numel():
        return None
    unit = max(alignment // tensor.element_size(), 1)
    for stride, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True):
        if size > 1 and stride % unit:
            return f"stride {stride}"
    if torch.compiler.is_compiling():
        return None
    return f"address {tensor.data_ptr():#x}" if tensor.data_ptr() % alignment else None


def check_addresses(**tensors: torch.Tensor | None) -> None:
    """What :func:`check_strides` cannot see of tensors while a graph is traced; all may be parts of the same rows."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in given.items():
        check_strides(name, tensor, min(alignment_of(x.shape[-1] * x.element_size()) for x in given.values()))


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where kernels cannot read it in place: gradients come with the strides that autograd gave them."""
    if has_unit_stride(tensor) and (tensor.device.type == "cpu" or misalignment(tensor) is None):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def check_writable(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Strides as kernels need them, and :func:`check_owned`."""
    return check_strides(name, check_owned(name, tensor))


def check_owned(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """An element of memory for each of the tensor, and no history that writing would falsify."""
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ArgumentError(
            f"{name} has stride 0",
            where=name,
            why="several of its elements share one place in memory",
            fix=f"pass a tensor that is not expanded, like torch.empty_like({name})",
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            f"{name} requires grad",
            where=name,
            why="kernels write into it unseen by autograd",
            fix=f"pass {name}.detach(), or use ops.attention for gradients",
        )
    return tensor


def check_index(name: str, tensor: object, length: int, device: torch.device) -> torch.Tensor:
    """An int32 vector of ``length`` elements on ``device``; a strided one is copied."""
    return check_tensor(name, tensor, dtype="i32", shape=(length,), axes="[batch]", device=device).contiguous()


def check_indptr(name: str, tensor: object, total: int | None, device: torch.device, *, read: bool) -> torch.Tensor:
    """An int32 ``[batch + 1]`` vector that starts at 0 and does not decrease.

    Args:
        total: what its last element must be; ``None`` leaves it free.
        read: look at the values (a synchronization on a GPU).
    """
    indptr = check_tensor(name, tensor, dtype="i32", shape=(None,), axes="[batch + 1]", device=device).contiguous()
    if not len(indptr):
        raise ArgumentError(
            f"{name} is empty", where=name, why="it has batch + 1 elements", fix="pass [0] for no request"
        )
    if not read:
        return indptr
    values = indptr.tolist()
    if values[0] != 0:
        raise ArgumentError(
            f"{name}[0] is {values[0]}", where=name, why="the first request starts at 0", fix="start at 0"
        )
    for b, (start, stop) in enumerate(pairwise(values)):
        if stop < start:
            raise ArgumentError(
                f"{name} decreases from {start} to {stop} at request {b}",
                where=f"{name}[{b + 1}]",
                why="it holds running totals of the requests' lengths",
                fix="pass the cumulative sum of the lengths, with a leading 0",
            )
    if total is not None and values[-1] != total:
        raise ArgumentError(
            f"{name} ends at {values[-1]}",
            where=f"{name}[{len(values) - 1}]",
            why=f"the tensor it divides has {total} rows",
            fix="make its last element the number of rows",
        )
    return indptr


def check_lengths(
    name: str, tensor: object, batch: int, limit: int, device: torch.device, *, read: bool, why: str
) -> torch.Tensor:
    """An int32 ``[batch]`` vector of lengths within ``0 .. limit``.

    Args:
        why: what sets the limit.
        read: look at the values (a synchronization on a GPU).
    """
    lengths = check_index(name, tensor, batch, device)
    if read and batch:
        low, high = int(lengths.min()), int(lengths.max())
        if low < 0:
            raise ArgumentError(f"{name} holds {low}", where=name, why="a length is not negative", fix="correct it")
        if high > limit:
            raise ArgumentError(
                f"{name} holds {high}",
                where=name,
                why=f"{why} {limit} tokens",
                fix=f"lower {name} or enlarge the storage",
            )
    return lengths
