"""Stored keys and values: every code and scale widens to exactly the number it stands for, and factors count once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import attngen as ag
from attngen.dtypes import Storage, dequantize, quantize
from attngen.ops.checks import torch_dtype
from attngen.ops.storage import Extras, unpack
from attngen.variant import normalize
from tests.acceptance.probes import Place
from tests.numerics.harness import Case, run_case

DIM = 128
STORAGES = {
    "fp32": {"dtype": "fp32"},
    "bf16": {"dtype": "bf16"},
    "fp16": {"dtype": "fp16"},
    "e4m3-tensor": {"dtype": "fp8_e4m3"},
    "e4m3-head": {"dtype": "fp8_e4m3", "scale": "head"},
    "e4m3-token": {"dtype": "fp8_e4m3", "scale": "token"},
    "e5m2-tensor": {"dtype": "fp8_e5m2"},
    "e5m2-head": {"dtype": "fp8_e5m2", "scale": "head"},
    "e5m2-token": {"dtype": "fp8_e5m2", "scale": "token"},
    "int8-tensor": {"dtype": "int8", "scale": "tensor"},
    "int8-head": {"dtype": "int8"},
    "int8-token": {"dtype": "int8", "scale": "token"},
    "int4-32": {"dtype": "int4"},
    "int4-64": {"dtype": "int4", "group_size": 64},
    "int4-128-tensor": {"dtype": "int4", "group_size": 128, "scale": "tensor"},
    "int4-32-zero": {"dtype": "int4", "zero_point": True},
    "int4-128-zero": {"dtype": "int4", "group_size": 128, "zero_point": True},
    "nvfp4": {"dtype": "nvfp4", "scale": "tensor"},
    "mxfp4": {"dtype": "mxfp4"},
    "mxfp4-tensor": {"dtype": "mxfp4", "scale": "tensor"},
    "int8-int4": {"k_dtype": "int8", "v_dtype": "int4", "scale": "tensor"},
    "mxfp4-bf16": {"k_dtype": "mxfp4", "v_dtype": "bf16"},
}


def all_codes(storage: Storage, tokens: int, dim: int, *, finite: bool) -> tuple[Any, torch.Tensor | None]:
    """Data ``[tokens, 1, 1, dim]`` of every bit pattern, with every block scale; and powers of two as factors."""
    generator = torch.Generator().manual_seed(5)
    shape = (tokens, 1, 1, dim)
    if not storage.is_quantized:
        data = torch.randn(shape, generator=generator).to(torch_dtype(storage.dtype))
        return data, None
    count = torch.Size((*shape[:-1], dim // storage.packed)).numel()
    data = (torch.arange(count) * 37 % 256).to(torch.uint8).view(*shape[:-1], -1)
    if storage.dtype.startswith("fp8"):
        data = data.view(torch_dtype(storage.dtype))
        data = torch.where(data.float().isfinite(), data.float(), 0.0).to(data.dtype) if finite else data
    elif storage.dtype == "int8":
        data = data.view(torch.int8)
    scale = None
    if storage.scale:
        scale = {"tensor": torch.tensor(0.25), "head": torch.tensor([4.0])}.get(storage.scale)
        scale = torch.exp2(torch.arange(tokens) % 7 - 3.0).view(tokens, 1, 1) if scale is None else scale
    if not storage.block:
        return data, scale
    blocks_shape = (*shape[:-1], dim // storage.block, *((2,) if storage.zero_point else ()))
    number = torch.arange(torch.Size(blocks_shape).numel()).view(blocks_shape)
    if storage.dtype == "mxfp4":
        exponents = number % (128 if finite else 256)
        return (data, exponents.to(torch.uint8)), scale
    if storage.dtype == "nvfp4":
        codes = (number % 127).to(torch.uint8) if finite else (number % 256).to(torch.uint8)
        return (data, codes.view(torch.float8_e4m3fn)), scale
    blocks = (torch.randn(blocks_shape, generator=generator) * torch.exp2(number % 20 - 18.0)).half()
    if storage.zero_point:
        blocks[..., 1] = torch.randint(0, 16, blocks_shape[:-1], generator=generator).half()
    return (data, blocks), scale


def numbers(given: Any, storage: Storage, scale: torch.Tensor | None) -> torch.Tensor:
    if not storage.is_quantized:
        return given.float()
    data, blocks = given if isinstance(given, tuple) else (given, None)
    return dequantize(data, storage, blocks, scale)


def scales_of(**scales: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {name: scale for name, scale in scales.items() if scale is not None}


@pytest.mark.parametrize("op", ["prefill", "decode"])
@pytest.mark.parametrize("name", STORAGES)
def test_one_visible_key_gives_its_number_exactly(name: str, op: str) -> None:
    """Its values as out, and for queries of one 1 its elements as lse."""
    spec = ag.AttentionSpec(heads=ag.MHA(1, DIM), sm_scale=1.0, dtype="fp32", kv=ag.Contiguous(**STORAGES[name]))
    k_storage, v_storage = spec.kv.storages("fp32")
    tokens = 64
    k, k_scale = all_codes(k_storage, tokens, DIM, finite=True)
    v, v_scale = all_codes(v_storage, tokens, DIM, finite=False)
    q = torch.eye(DIM).expand(tokens, DIM, DIM)[:, :, None]
    ops = ag.compile(spec, backend="cpp")
    scales = scales_of(k_scale=k_scale, v_scale=v_scale)
    out, lse = getattr(ops, op)(q, k, v, return_lse=True, **scales)
    expected = numbers(k, k_storage, k_scale)[:, 0, 0]
    assert torch.equal(lse[..., 0], expected)
    assert expected.unique().numel() > 100
    exact = numbers(v, v_storage, v_scale)[:, 0, 0, :].expand(tokens, DIM)
    torch.testing.assert_close(out[:, 0, 0], exact, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(out[:, -1, 0], exact, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scale", ["head", "token"])
@pytest.mark.parametrize("op", ["prefill", "decode"])
@pytest.mark.parametrize("dtype", ["fp32", "fp8_e4m3"])
def test_norms_see_whole_numbers(kernels: Place, dtype: str, op: str, scale: str) -> None:
    """With an eps as large as the squares, a factor that reaches the norm too late, or twice, is far off."""
    storage = {"k_dtype": "int8", "v_dtype": "fp8_e5m2", "scale": scale}
    spec = ag.AttentionSpec(
        heads=ag.GQA(4, 2, 64),
        mask=ag.Causal(),
        dtype=dtype,
        kv=ag.Paged(page_size=16, **storage),
        qk_norm=ag.QKNorm(eps=0.5),
        rope=ag.Rope(),
    )
    case = Case("normed", spec, op, (3, 2), (70, 131))
    verdict = run_case(case, kernels.compile(spec), kernels.device)
    assert not verdict.failures, verdict


@pytest.mark.parametrize("name", ["e4m3-token", "int4-32-zero", "nvfp4"])
@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_pages_do_not_change_a_bit(kernels: Place, name: str, op: str) -> None:
    """Whatever the size of pages and the order of their dims, and next to one contiguous cache."""
    fields = STORAGES[name]
    spec = ag.AttentionSpec(heads=ag.GQA(4, 2, 64), mask=ag.Causal(), dtype="bf16", kv=ag.Contiguous(**fields))
    storage = spec.kv.storages("bf16")[0]
    torch.manual_seed(2)
    q, lens = torch.randn(2, 5, 4, 64).bfloat16(), torch.tensor([96, 61], dtype=torch.int32)
    factor = torch.tensor(0.1) if storage.scale == "tensor" else None
    rows = [quantize(torch.randn(2, 96, 2, 64), storage, factor) for _ in "kv"]

    q, lens = q.to(kernels.device), lens.to(kernels.device)

    def call(kv: Any, parts: Any, **where: torch.Tensor) -> torch.Tensor:
        ops = kernels.compile(spec.model_copy(update={"kv": kv}))
        where = {name: x.to(kernels.device) for name, x in where.items()}
        parts = [[None if x is None else x.to(kernels.device) for x in part] for part in parts]
        k, v = ((data, blocks) if blocks is not None else data for data, blocks, _ in parts)
        scales = (
            scales_of(k_scale=parts[0][2], v_scale=parts[1][2])
            if factor is None
            else {"k_scale": factor.to(kernels.device), "v_scale": factor.to(kernels.device)}
        )
        args = ((k, v),) if kv.kind == "paged" else (k, v)
        if op == "prefill" and kv.kind == "paged":
            where["qo_indptr"] = torch.tensor([0, 5, 10], dtype=torch.int32, device=kernels.device)
            return ops.prefill(q.flatten(0, 1), *args, **where, **scales).view(q.shape)
        return getattr(ops, op)(q, *args, **where, **scales).view(q.shape)

    whole = call(spec.kv, rows, kv_lens=lens)
    for size, layout in ((16, "NHD"), (3, "NHD"), (3, "HND")):
        parts = [[None if t is None else _paged(t, size, layout) for t in part] for part in rows]
        table = torch.arange(2 * 96 // size, dtype=torch.int32).flip(0).view(2, -1)
        paged = call(ag.Paged(page_size=size, layout=layout, **fields), parts, page_table=table, kv_lens=lens)
        assert torch.equal(paged, whole)


def test_an_omitted_factor_is_one_tensor_of_every_call() -> None:
    spec = ag.AttentionSpec(heads=ag.GQA(4, 2, 64), dtype="fp32", kv=ag.Contiguous(dtype="int8", scale="tensor"))
    cache = torch.zeros(1, 8, 2, 64, dtype=torch.int8)
    q = torch.zeros(1, 1, 4, 64)
    calls = [unpack(normalize(spec, "decode"), spec.kv, q, cache, cache, Extras())[3] for _ in range(2)]
    assert calls[0].k_scale is calls[0].v_scale is calls[1].k_scale
    assert calls[0].k_scale.tolist() == [1.0]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        traced = unpack(normalize(spec, "decode"), spec.kv, mode.from_tensor(q), cache, cache, Extras())[3]
    assert traced.k_scale is not calls[0].k_scale


def _paged(x: torch.Tensor, size: int, layout: str) -> torch.Tensor:
    """``[2, 96, heads, ...]`` as pages from last to first."""
    pages = x.reshape(2 * 96 // size, size, *x.shape[2:])
    pages = pages.view(torch.uint8).flip(0).view(x.dtype) if x.element_size() == 1 else pages.flip(0)
    return pages.transpose(1, 2).contiguous() if layout == "HND" else pages


@pytest.mark.parametrize("latent", [False, True], ids=["heads", "latents"])
def test_caches_of_blocks_of_another_form_are_explained(latent: bool) -> None:
    heads = ag.MLA(num_qo_heads=2, head_dim_ckv=64, head_dim_kpe=32) if latent else ag.MHA(2, 64)
    spec = ag.AttentionSpec(heads=heads, dtype="fp32", kv=ag.Paged(page_size=4, dtype="int4"))
    q, ops = torch.randn(1, 2, 96 if latent else 64), ag.compile(spec, backend="reference")
    pages = {"page_table": torch.zeros(1, 1, dtype=torch.int32), "kv_lens": torch.ones(1, dtype=torch.int32)}
    data, blocks = torch.zeros(3, 3, 4, 2, 32, dtype=torch.uint8), torch.ones(3, 3, 4, 2, 2, dtype=torch.float16)
    bad: list[tuple[Any, str]] = [
        (None, "kv_cache is missing"),
        ((), "kv_cache has 0 members"),
        (3, "kv_cache is a int"),
        ((data[:, :2],), "kv_cache has 1 members"),
    ]
    if not latent:
        ops.decode(q, (data[:, :2], blocks[:, :2]), **pages)
        bad += [
            ((data[:, :2], blocks[:, :2], data), "kv_cache has 3 members"),
            ((data[:, :1], blocks[:, :1]), r"kv_cache\[0\] has shape \[3, 1, 4, 2, 32\]"),
            ((data, blocks), r"kv_cache\[0\] has shape \[3, 3, 4, 2, 32\]"),
            ((data[:, :2], blocks), r"kv_cache\[1\] has shape \[3, 3, 4, 2, 2\]"),
            ((data[0, 0, 0, 0, 0], blocks), r"kv_cache\[0\] has shape \[\]"),
        ]
    for cache, what in bad:
        with pytest.raises(ag.ArgumentError, match=what) as error:
            ops.decode(q, cache, **pages)
        assert error.value.why
        assert error.value.fix


def test_a_factor_is_no_truth_value() -> None:
    spec = ag.AttentionSpec(heads=ag.MHA(2, 64), dtype="fp32", kv=ag.Contiguous(dtype="fp8_e4m3"))
    q, stored = torch.randn(1, 2, 64), torch.zeros(1, 4, 2, 64).to(torch.float8_e4m3fn)
    with pytest.raises(ag.ArgumentError, match="k_scale is a bool"):
        ag.compile(spec, backend="reference").decode(q, stored, stored, k_scale=True)
