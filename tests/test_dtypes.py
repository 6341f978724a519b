"""Quantization by its definition: known codes, ties, zeros, clamps, and numbers that come back."""

from __future__ import annotations

import pytest
import torch

from attngen.dtypes import DTYPES, Storage, dequantize, quantize

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
STORAGES = {
    "fp8_e4m3": Storage("fp8_e4m3", "tensor"),
    "fp8_e5m2": Storage("fp8_e5m2", "head"),
    "fp8-token": Storage("fp8_e4m3", "token"),
    "int8": Storage("int8", "head"),
    "int8-token": Storage("int8", "token"),
    "int4": Storage("int4", "", 32),
    "int4-wide": Storage("int4", "tensor", 128),
    "int4-zero": Storage("int4", "", 64, zero_point=True),
    "nvfp4": Storage("nvfp4", "tensor", 16),
    "nvfp4-bare": Storage("nvfp4", "", 16),
    "mxfp4": Storage("mxfp4", "", 32),
    "mxfp4-tensor": Storage("mxfp4", "tensor", 32),
}


def packed(codes: list[int]) -> torch.Tensor:
    """Codes two a byte, the first in the low nibble."""
    return torch.tensor([low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)], dtype=torch.uint8)


def factor(storage: Storage) -> torch.Tensor | None:
    return {"tensor": torch.tensor(0.03), "head": torch.tensor([0.02, 0.04])}.get(storage.scale)


def test_every_e2m1_code_under_every_power_of_two() -> None:
    data = packed(list(range(16)) * 2).expand(256, 1, 16)
    found = dequantize(data, STORAGES["mxfp4"], torch.arange(256, dtype=torch.uint8).view(256, 1, 1))
    steps = torch.tensor((E2M1 + [-x for x in E2M1]) * 2, dtype=torch.float64)
    exact = (steps * torch.exp2(torch.arange(256, dtype=torch.float64) - 127)[:, None]).float()
    assert torch.equal(found[:255, 0], exact[:255])
    assert torch.equal(torch.signbit(found[:255, 0, :16]), torch.arange(16).expand(255, 16) > 7)


def test_int4_codes() -> None:
    data, half = packed(list(range(16)) * 2).view(1, 16), torch.tensor([[0.5]], dtype=torch.float16)
    signed = [0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1] * 2
    assert dequantize(data, STORAGES["int4"], half).tolist() == [[0.5 * x for x in signed]]
    storage, pair = Storage("int4", "", 32, zero_point=True), torch.tensor([[[0.5, 3.0]]], dtype=torch.float16)
    assert dequantize(data, storage, pair).tolist() == [[0.5 * (x % 16 - 3) for x in range(32)]]


def test_factors_multiply_what_they_serve() -> None:
    ones = torch.ones(3, 2, 4, dtype=torch.int8)
    heads, tokens = torch.tensor([2.0, 3.0]), torch.arange(6.0).view(3, 2)
    assert torch.equal(dequantize(ones, Storage("int8", "head"), None, heads), heads[:, None].expand(3, 2, 4))
    assert torch.equal(dequantize(ones, Storage("int8", "token"), None, tokens), tokens[..., None].expand(3, 2, 4))
    assert torch.equal(dequantize(ones, Storage("int8", "tensor"), None, torch.tensor(5.0)), torch.full((3, 2, 4), 5.0))


@pytest.mark.parametrize("name", STORAGES)
def test_quantized_numbers_come_back_and_stay(name: str) -> None:
    """Errors are within half a step, and what has been quantized once does not change again."""
    storage = STORAGES[name]
    torch.manual_seed(4)
    x = torch.randn(50, 2, 128) * torch.exp2(torch.randint(-4, 1, (50, 2, 1)))
    data, blocks, tokens = quantize(x, storage, factor(storage))
    scale = factor(storage) if tokens is None else tokens
    once = dequantize(data, storage, blocks, scale)
    again = dequantize(*quantize_with(once, storage, scale), scale)
    torch.testing.assert_close(again, once, rtol=3e-3 if storage.dtype == "int4" else 3e-7, atol=1e-7)
    relative = (once - x).norm() / x.norm()
    assert (
        relative
        < {"fp8_e4m3": 0.04, "fp8_e5m2": 0.08, "int8": 0.15, "int4": 0.15, "nvfp4": 0.15, "mxfp4": 0.2}[storage.dtype]
    )


def quantize_with(
    x: torch.Tensor, storage: Storage, scale: torch.Tensor | None
) -> tuple[torch.Tensor, Storage, torch.Tensor | None]:
    data, blocks, _ = quantize(x, storage, scale)
    return data, storage, blocks


@pytest.mark.parametrize("name", STORAGES)
def test_zeros_stay_zeros(name: str) -> None:
    storage = STORAGES[name]
    data, blocks, tokens = quantize(torch.zeros(3, 2, 128), storage, factor(storage))
    found = dequantize(data, storage, blocks, factor(storage) if tokens is None else tokens)
    assert torch.equal(found, torch.zeros(3, 2, 128))
    one = torch.zeros(1, 2, 128)
    one[0, 0, 5] = 1.0
    data, blocks, tokens = quantize(one, storage, factor(storage))
    found = dequantize(data, storage, blocks, factor(storage) if tokens is None else tokens)
    assert found.count_nonzero() == 1
    assert torch.isclose(found[0, 0, 5], torch.tensor(1.0), rtol=0.3)


@pytest.mark.parametrize("name", STORAGES)
def test_no_tokens_are_stored_as_none(name: str) -> None:
    storage = STORAGES[name]
    data, blocks, tokens = quantize(torch.zeros(0, 2, 128), storage, factor(storage))
    assert data.shape[:2] == (0, 2)
    scale = tokens if storage.scale == "token" else factor(storage)
    assert dequantize(data, storage, blocks, scale).shape == (0, 2, 128)


def test_ties_go_to_even() -> None:
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 3.0]])
    assert quantize(x, Storage("int8", "tensor"))[0].tolist() == [[0, 2, 2, 0, -2, -2, 126, 3]]
    # The block's largest number makes its scale 1; codes of 1/4, 3/4, 5/4, 7/4, 5/2, 7/2, 5 are ties.
    middles = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    block = torch.tensor([[*middles, 6.0, *(-m for m in middles), -6.0]])
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    for storage, given in ((STORAGES["nvfp4-bare"], block), (STORAGES["mxfp4"], block.repeat(1, 2))):
        data, blocks, _ = quantize(given, storage)
        assert (dequantize(data, storage, blocks).flatten()[:8]).tolist() == expected
        assert (-dequantize(data, storage, blocks).flatten()[8:16]).tolist() == expected
    int4 = torch.tensor([[0.5, 1.5, 2.5, 7.0, -0.5, -1.5, -3.5, *[0.0] * 25]])
    data, blocks, _ = quantize(int4, STORAGES["int4"])
    assert dequantize(data, STORAGES["int4"], blocks)[0, :7].tolist() == [0.0, 2.0, 2.0, 7.0, 0.0, -2.0, -4.0]


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_what_is_too_large_is_clamped(dtype: str) -> None:
    largest, infinity = DTYPES[dtype].largest, float("inf")
    x = torch.tensor([[1e30, -1e30, infinity, -infinity, largest]])
    found = dequantize(quantize(x, Storage(dtype, "tensor"))[0], Storage(dtype, "tensor"))
    assert found.tolist() == [[largest, -largest, largest, -largest, largest]]


def test_mxfp4_keeps_infinity() -> None:
    data, blocks, _ = quantize(torch.tensor([[float("inf"), *[1.0] * 31]]), STORAGES["mxfp4"])
    assert blocks.item() == 253
    assert dequantize(data, STORAGES["mxfp4"], blocks)[0, :2].tolist() == [float("inf"), 0.0]


def test_mxfp4_scales_are_powers_of_two_of_the_largest_number() -> None:
    tops = torch.tensor([0.0, 4.0, 6.0, 7.9, 8.0, 0.124, 2.0**-126, 3.0e38])
    data, blocks, _ = quantize(tops[:, None, None].expand(-1, 1, 32), STORAGES["mxfp4"])
    assert blocks.flatten().tolist() == [0, 127, 127, 127, 128, 121, 0, 252]
    found = dequantize(data, STORAGES["mxfp4"], blocks)[1:, 0, 0]
    assert torch.all((found / tops[1:] - 1).abs() < 0.34)


def test_bytes_per_token() -> None:
    assert Storage("bf16").bytes_per_token(128) == 256
    assert Storage("int8", "token").bytes_per_token(128) == 132
    assert Storage("int4", "", 32).bytes_per_token(128) == 64 + 8
    assert Storage("int4", "", 32, zero_point=True).bytes_per_token(128) == 64 + 16
    assert Storage("nvfp4", "tensor", 16).bytes_per_token(128) == 64 + 8
    assert Storage("mxfp4", "", 32).bytes_per_token(128) == 64 + 4
