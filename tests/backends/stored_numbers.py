"""With one visible key, results are the stored numbers themselves: every decoder against :func:`attngen.dtypes.dequantize`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

import attngen as ag
from attngen.dtypes import DTYPES, Storage, dequantize
from attngen.ops.checks import torch_dtype
from attngen.variant import normalize

STORAGES: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "fp32"},
    "bf16": {"dtype": "bf16"},
    "fp16": {"dtype": "fp16"},
    "fp8_e4m3": {"dtype": "fp8_e4m3"},
    "fp8_e5m2": {"dtype": "fp8_e5m2", "scale": "head"},
    "int8": {"dtype": "int8"},
    "int8-token": {"dtype": "int8", "scale": "token"},
    "int4-32": {"dtype": "int4"},
    "int4-64": {"dtype": "int4", "group_size": 64},
    "int4-128": {"dtype": "int4", "group_size": 128, "scale": "tensor"},
    "int4-zero": {"dtype": "int4", "zero_point": True},
    "nvfp4": {"dtype": "nvfp4"},
    "mxfp4": {"dtype": "mxfp4"},
    "both": {"k_dtype": "int4", "v_dtype": "fp8_e4m3"},
}
BATCH, GROUP, HEADS = 3, 4, 2
# A weight is exp2(s * c - round(s * c)), and on a GPU the difference is fused: what the product was rounded by is left, so that the
# weight p of an only key is not 1 (by 5e-6 at a logit of 200). Out is then (p * v) * (1 / p): two roundings by 2 ** -24 each, and a
# quotient near 1 (div.full) that is off by 2 of its ulps, 2 * 2 ** -23. In 16 bits it is rounded to v, in fp32 it is not.
FUSED_ERROR = 3 * 2.0**-23


def _stored(storage: Storage, dim: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Any finite numbers ``[BATCH, 1, HEADS, ..]``, and scales of their blocks."""
    shape = (BATCH, 1, HEADS, dim // storage.packed)
    if not storage.is_quantized:
        return torch.randn(shape, generator=generator).to(torch_dtype(storage.dtype)), None
    data = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(torch_dtype(storage.dtype))
    if storage.dtype.startswith("fp8"):
        data = torch.where(data.float().isfinite(), data.float(), 0.0).to(data.dtype)
    if not storage.block:
        return data, None
    shape = (BATCH, 1, HEADS, dim // storage.block, *((2,) if storage.zero_point else ()))
    if storage.dtype == "mxfp4":
        return data, torch.randint(112, 138, shape, generator=generator, dtype=torch.uint8)
    scale = torch.rand(shape, generator=generator) * 2.0 ** torch.randint(-9, 5, shape, generator=generator)
    if storage.zero_point:
        scale[..., 1] = torch.rand(shape[:-1], generator=generator) * 15.0
    return data, scale.to(torch_dtype(DTYPES[storage.row.block_scale].name))


def mismatches(
    target: str | None, dtype: str, device: str, names: Iterable[str] = tuple(STORAGES), dim: int = 128
) -> list[str]:
    """Storages whose numbers a decode kernel, or a prefill kernel, reads otherwise than they are defined.

    Numbers must be equal; those of fp32 on a GPU within :data:`FUSED_ERROR`.
    """
    found = []
    for name in names:
        fields = STORAGES[name]
        heads = ag.GQA(num_qo_heads=GROUP * HEADS, num_kv_heads=HEADS, head_dim=dim)
        spec = ag.AttentionSpec(heads=heads, dtype=dtype, kv=ag.Contiguous(**fields), sm_scale=1.0)
        ops = ag.compile(spec, target=target, backend="triton", ops=())
        variant = normalize(spec, "decode")
        generator = torch.Generator().manual_seed(len(name))
        sides = []
        scales: dict[str, torch.Tensor] = {}
        for side, storage in (("k", variant.k_storage), ("v", variant.v_storage)):
            data, blocks = _stored(storage, dim, generator)
            number = dequantize(data, storage, blocks).to(torch_dtype(variant.compute_dtype)).float()
            if storage.scale:
                shape = {"tensor": (), "head": (HEADS,), "token": (BATCH, 1, HEADS)}[storage.scale]
                scales[f"{side}_scale"] = torch.full(shape, 0.5, device=device)
            exact = number * (0.5 if storage.scale else 1.0)
            given = data.to(device) if blocks is None else (data.to(device), blocks.to(device))
            sides.append((given, exact.to(device)))
        (k, keys), (v, values) = sides
        # Query head h of a group is the unit vector of a dim: its logit is that dim of the key.
        dims = torch.arange(GROUP * HEADS, device=device) * 7 % dim
        q = torch.nn.functional.one_hot(dims, dim).to(torch_dtype(dtype)).expand(BATCH, -1, -1)
        logits = keys[:, 0].repeat_interleave(GROUP, 1).gather(-1, dims.expand(BATCH, -1)[..., None])[..., 0]
        expected = values.to(torch_dtype(variant.out_dtype)).repeat_interleave(GROUP, 2)
        calls = (("decode", ops.decode, q), ("prefill", ops.prefill, q[:, None]))
        for op, call, query in calls:
            out, lse = call(query.contiguous(), k, v, return_lse=True, **scales)
            bound = FUSED_ERROR if out.is_cuda and out.dtype == torch.float32 else 0.0
            wrong = ~((out.view(expected.shape) - expected).abs() <= bound * expected.abs())
            if wrong.any():
                found.append(f"{name} {op}: {wrong.sum()} values of {out.numel()}")
            if not torch.allclose(lse.view(logits.shape), logits, rtol=1e-6, atol=1e-6):
                found.append(f"{name} {op}: logits off by {(lse.view(logits.shape) - logits).abs().max()}")
    return found
