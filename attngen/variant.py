"""Spec -> Variant: one meaning, whatever words the user chose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attngen.errors import SpecError, UnsupportedError
from attngen.ir.expr import SCORE, Expr, Load
from attngen.ir.params import Param
from attngen.spec import AttentionSpec

OpName = Literal["prefill", "decode", "backward"]
OPS: tuple[OpName, ...] = ("prefill", "decode", "backward")
Layout = Literal["padded", "ragged", "paged"]


@dataclass(frozen=True)
class Variant:
    """What one op of a spec computes.

    Attributes:
        num_qo_heads, num_kv_heads: query head ``h`` reads key head ``h // group_size``.
        head_dim_qk, head_dim_vo: widths of q/k and of v/out.
        q_layout: ``padded`` ``[batch, qo_len, heads, dim]`` or ``ragged`` ``[nnz, heads, dim]`` with ``qo_indptr``.
        kv_layout: the same for k and v, or ``paged``.
        page_size: tokens a page; 0 where the cache is not paged.
        dtype, kv_dtype, out_dtype: storage of q, of k and v, of out.
        mask: bool expression over ``b h q k qo_len kv_len``.
        score: f32 expression of the logit over ``score`` (the scaled dot product) and the same coordinates.
        params: run-time tensors of both expressions.
        normalizer: ``softmax``.
        sm_scale: factor on the dot product.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    q_layout: Layout
    kv_layout: Layout
    page_size: int
    dtype: str
    kv_dtype: str
    out_dtype: str
    mask: Expr
    score: Expr
    params: tuple[Param, ...]
    normalizer: str
    sm_scale: float

    @property
    def group_size(self) -> int:
        """Query heads that share one key head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def has_score_mod(self) -> bool:
        """Whether the logit is anything but the scaled dot product."""
        return self.score != SCORE

    @property
    def score_loads(self) -> tuple[Load, ...]:
        """Distinct parameter loads of the score."""
        return tuple(dict.fromkeys(node for node in self.score.walk() if isinstance(node, Load)))

    @property
    def gradient_params(self) -> tuple[Param, ...]:
        """Floating parameters of the score: those that have gradients."""
        loaded = {load.param for load in self.score_loads}
        return tuple(p for p in self.params if p.name in loaded and p.expr_type == "f32")


def normalize(spec: AttentionSpec, op: OpName) -> Variant:
    """The meaning of ``op`` of ``spec``.

    Raises:
        UnsupportedError: the op does not exist for this spec (backward over a paged cache, mixed dtypes).
        SpecError: two mods declare one parameter differently.
    """
    heads = spec.heads
    kv_layout: Layout = "padded" if spec.kv.kind == "contiguous" else spec.kv.kind
    kv_dtype = spec.kv.dtype or spec.dtype
    if op == "backward" and kv_layout == "paged":
        raise UnsupportedError(
            "backward does not read a paged cache",
            where="spec.kv",
            why="gradients of k and v would need pages of their own",
            fix="train with kv=ag.Contiguous() or ag.Ragged()",
        )
    if kv_dtype != spec.dtype:
        raise UnsupportedError(
            f"q is {spec.dtype} but the KV cache is {kv_dtype}",
            where="spec.kv.dtype",
            why="mixed element types are not supported",
            fix=f"declare kv dtype {spec.dtype} or leave it out",
        )
    score: Expr = SCORE
    for mod in spec.score_mods:
        score = mod.expr(score, heads.num_qo_heads)
    return Variant(
        num_qo_heads=heads.num_qo_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim_qk=heads.head_dim_qk,
        head_dim_vo=heads.value_dim,
        q_layout="padded" if op == "decode" or kv_layout == "padded" else "ragged",
        kv_layout=kv_layout,
        page_size=spec.kv.page_size if spec.kv.kind == "paged" else 0,
        dtype=spec.dtype,
        kv_dtype=kv_dtype,
        out_dtype=spec.out_dtype or spec.dtype,
        mask=spec.mask.expr(),
        score=score,
        params=_merged_params(spec),
        normalizer=spec.normalizer.kind,
        sm_scale=heads.head_dim_qk**-0.5 if spec.sm_scale is None else spec.sm_scale,
    )


def _merged_params(spec: AttentionSpec) -> tuple[Param, ...]:
    merged: dict[str, Param] = {}
    for source in (spec.mask, *spec.score_mods):
        for param in source.params():
            if merged.setdefault(param.name, param) != param:
                raise SpecError(
                    f"parameter {param.name!r} is declared twice, differently",
                    where="spec.mask / spec.score_mods",
                    why=f"{merged[param.name].dims} {merged[param.name].dtype} and {param.dims} {param.dtype}",
                    fix="rename one of them",
                )
    return tuple(merged.values())
