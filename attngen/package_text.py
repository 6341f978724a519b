"""What the README of an exported package says of an op: its formula, and the tensors that it takes and gives."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from attngen.dtypes import DTYPES, Storage
from attngen.explain import expr_text
from attngen.signature import OpName, Signature
from attngen.spec import AttentionSpec, Paged
from attngen.variant import Variant


def op_facts(op: OpName, spec: AttentionSpec, variant: Variant) -> dict[str, Any]:
    """What the README says of an op."""
    computes = op != "append"
    softmax = "weights are a softmax over the visible keys" + (", with a sink" if variant.has_sink else "")
    return {
        "name": op,
        "mask": plain(expr_text(variant.mask)) if computes else None,
        "logit": plain(expr_text(variant.score)) if computes else None,
        "sm_scale": f"{variant.sm_scale:.9g}",
        "weights": softmax if variant.is_softmax else "the logit, as it is written here, is the weight itself",
        "tensors": list(_tensors(op, spec, variant.signature)),
    }


def _tensors(op: OpName, spec: AttentionSpec, signature: Signature) -> Iterator[dict[str, str]]:
    """Names, shapes and dtypes of what goes into an op and comes out."""

    def tensor(name: str, shape: Sequence[object], dtype: str) -> dict[str, str]:
        return {"name": plain(name), "shape": plain(f"[{', '.join(map(str, shape))}]"), "dtype": _torch_name(dtype)}

    padded = signature.q_layout == "padded"
    rows: list[object] = ["batch", "qo_len"] if padded else ["tokens"]
    q, dtype = [*rows, signature.num_qo_heads], signature.dtype
    sides = (("k", signature.k_storage, signature.head_dim_qk), ("v", signature.v_storage, signature.head_dim_vo))
    latent = signature.value_source == "keys"
    if op == "append":
        for name, _, width in sides[: 1 if latent else 2]:
            yield tensor(f"new {name}", ["tokens", *([] if latent else [signature.num_kv_heads]), width], dtype)
    else:
        yield tensor("q", [*q, signature.head_dim_qk], dtype)
    for name, storage, width in (("latents", *sides[0][1:]),) if latent else sides:
        lead = _lead(spec, signature)
        yield tensor(name, [*lead, width // storage.packed], storage.dtype)
        if storage.block:
            pair = (2,) if storage.zero_point else ()
            yield tensor(f"{name} block scales", [*lead, width // storage.block, *pair], storage.row.block_scale)
        if storage.scale:
            yield tensor(f"{name[0] if not latent else 'k'}_scale", _factor(storage, lead, signature), "fp32")
    for param in signature.params:
        yield tensor(f"params[{param.name}]", param.dims, param.dtype)
    if signature.gate:
        yield tensor(f"params[{signature.gate}]", [*q, signature.head_dim_vo], signature.compute_dtype)
    if op in ("prefill", "decode"):
        yield tensor("out", [*q, signature.head_dim_vo], signature.out_dtype)
        if signature.is_softmax:
            yield tensor("lse", q, "fp32")


def _lead(spec: AttentionSpec, signature: Signature) -> list[object]:
    """Dims of a cache before a head's numbers."""
    if signature.kv_layout == "paged":
        lead: list[object] = ["num_pages", signature.page_size]
    else:
        lead = ["batch", "kv_len"] if signature.kv_layout == "padded" else ["nnz_kv"]
    if signature.value_source == "values":
        first = signature.kv_layout == "paged" and isinstance(spec.kv, Paged) and spec.kv.layout == "HND"
        lead.insert(1 if first else len(lead), signature.num_kv_heads)
    return lead


def _factor(storage: Storage, lead: list[object], signature: Signature) -> list[object]:
    return lead if storage.scale == "token" else [signature.num_kv_heads if storage.scale == "head" else 1]


def _torch_name(dtype: str) -> str:
    row = DTYPES[dtype]
    return f"torch.{row.torch_name}" + (f", {row.packed} numbers of {dtype} each" if row.packed > 1 else "")


def plain(text: str) -> str:
    """Text that ends neither its line, nor its cell, nor its span of code."""
    return re.sub(r"[^\x20-\x7e]", " ", text).replace("`", "'").replace("|", "or")
