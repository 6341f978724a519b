"""Spec -> Variant: one meaning, whatever words the user chose."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

from attngen.dtypes import DTYPES, Storage, widened
from attngen.errors import SpecError, UnsupportedError
from attngen.ir.differentiate import differentiate
from attngen.ir.expr import SCORE, TRUE, Const, Expr, K, Load, Q, coords
from attngen.ir.loads import position_step
from attngen.ir.params import Param
from attngen.ir.simplify import simplify
from attngen.signature import OPS, Layout, OpName, Signature, Sizes
from attngen.spec import MLA, AttentionSpec, Heads, Paged, QKNorm, Rope, Softmax

_BLOCK = 16  # queries or keys, from which on masks are told to be of blocks
_LARGEST_FP16 = 65504.0


@dataclass(frozen=True)
class Variant(Sizes):
    """What one op of a spec computes.

    Attributes:
        num_qo_heads, num_kv_heads: query head ``h`` reads key head ``h // group_size``.
        head_dim_qk, head_dim_vo: widths of q/k and of v/out.
        q_layout: ``padded`` ``[batch, qo_len, heads, dim]`` or ``ragged`` ``[nnz, heads, dim]`` with ``qo_indptr``.
        kv_layout: the same for k and v, or ``paged``.
        page_size: tokens a page; 0 where the cache is not paged.
        dtype, out_dtype: elements of q and of out.
        k_storage, v_storage: how numbers of keys and values are stored.
        mask: bool expression over ``b h q k qo_len kv_len``, simplified.
        score: f32 expression of the logit over ``score`` (the scaled dot product) and the same coordinates.
            With an element-wise normalizer it is the weight itself: the normalizer is then one more function of the logit.
        params: run-time tensors that kernels read element by element: of the expressions, rotation tables, norm weights.
        normalizer: ``softmax``, or ``elementwise``, whose weights are the score and are only added up.
        sm_scale: factor on the dot product.
        sink: f32 expression over ``h`` of one more logit in the sum of a softmax: a constant or a load; ``None`` without one.
        gate: name of the tensor that gates out; ``None`` without one.
        dropout: probability that a weight becomes 0.
        rope: rotation of queries and keys, its ``dim`` known; ``None`` without one. ``keys`` says "append" where the keys of the op
            are in a cache that holds them rotated.
        qk_norm: norm of queries and keys; ``None`` without one.
        head_dim_pe: the last columns of q and k that lie in tensors of their own, ``q_pe`` and ``k_pe``; 0 where there are none.
        value_source: ``keys`` where values are the first ``head_dim_vo`` columns of the keys.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    q_layout: Layout
    kv_layout: Layout
    page_size: int
    dtype: str
    out_dtype: str
    k_storage: Storage
    v_storage: Storage
    mask: Expr
    score: Expr
    params: tuple[Param, ...]
    normalizer: Literal["softmax", "elementwise"]
    sm_scale: float
    sink: Expr | None = None
    gate: str | None = None
    dropout: float = 0.0
    rope: Rope | None = None
    qk_norm: QKNorm | None = None
    head_dim_pe: int = 0
    value_source: Literal["values", "keys"] = "values"

    @property
    def has_score_mod(self) -> bool:
        """Whether the logit is anything but the scaled dot product."""
        return self.score != SCORE

    @cached_property
    def dscore(self) -> Expr:
        """Derivative of the logit with respect to the scaled dot product."""
        return differentiate(self.score, SCORE)

    @property
    def score_slope_is_one(self) -> bool:
        """Whether that is identically 1, as with additive biases."""
        return self.dscore == Const(1.0)

    @property
    def score_loads(self) -> tuple[Load, ...]:
        """Distinct parameter loads of the score."""
        return tuple(dict.fromkeys(node for node in self.score.walk() if isinstance(node, Load)))

    @property
    def mask_loads(self) -> tuple[Load, ...]:
        """Distinct parameter loads of the mask."""
        return tuple(dict.fromkeys(node for node in self.mask.walk() if isinstance(node, Load)))

    @property
    def mask_reads_data(self) -> bool:
        """Whether the mask loads data by position."""
        return any(isinstance(node, Load) and coords(node) & {"q", "k"} for node in self.mask.walk())

    @property
    def _mask_pair_loads(self) -> list[Load]:
        """Loads of the mask that depend on the query's and the key's position."""
        return [node for node in self.mask.walk() if isinstance(node, Load) and coords(node) >= {"q", "k"}]

    @property
    def mask_reads_pairs(self) -> bool:
        """Whether the mask loads data by both positions."""
        return bool(self._mask_pair_loads)

    @property
    def mask_reads_each_pair(self) -> bool:
        """Whether pairs have data of their own, and not blocks of them."""
        return any(position_step(node, axis) < _BLOCK for node in self._mask_pair_loads for axis in (Q, K))

    @property
    def is_transformed(self) -> bool:
        """Whether queries and keys are normed or rotated before their product."""
        return self.rope is not None or self.qk_norm is not None

    @property
    def score_reads_pairs(self) -> bool:
        """Whether the score loads elements that depend on the query's and the key's position."""
        return any({"q", "k"} <= coords(load) for load in self.score_loads)

    @property
    def is_softmax(self) -> bool:
        """Whether weights share a sum, so that rows have an lse."""
        return self.normalizer == "softmax"

    @property
    def gradient_params(self) -> tuple[Param, ...]:
        """Floating parameters of the score: those whose gradients are summed over pairs."""
        loaded = {load.param for load in self.score_loads}
        return tuple(p for p in self.params if p.name in loaded and p.expr_type == "f32")

    @property
    def stored_bits(self) -> int:
        """Most bits of a stored number of keys and of values."""
        return max(self.k_storage.row.bits, self.v_storage.row.bits)

    @property
    def widens(self) -> bool:
        """Whether stored keys and values have fewer bits than queries."""
        return self.stored_bits < DTYPES[self.dtype].bits

    @property
    def has_sink(self) -> bool:
        """Whether a softmax has one more logit in its sum."""
        return self.sink is not None

    @property
    def rotates(self) -> bool:
        """Whether queries or keys turn by their positions."""
        return self.rope is not None

    @property
    def dropout_threshold(self) -> int:
        """The smallest random word of 32 bits whose weight stays."""
        return min(round(self.dropout * 2**32), 2**32 - 1)

    @property
    def sink_param(self) -> Param | None:
        """The sinks' parameter."""
        return next((p for p in self.params if isinstance(self.sink, Load) and p.name == self.sink.param), None)

    @property
    def norm_weights(self) -> tuple[str | None, str | None]:
        """Names of the norm weights of queries and of keys."""
        return (None, None) if self.qk_norm is None else (self.qk_norm.q_weight, self.qk_norm.k_weight)

    @property
    def differentiable(self) -> tuple[str, ...]:
        """Names of all run-time tensors that have gradients."""
        sink = () if self.sink_param is None else (self.sink_param.name,)
        norm = tuple(name for name in self.norm_weights if name)
        gate = () if self.gate is None else (self.gate,)
        return tuple(dict.fromkeys((*(p.name for p in self.gradient_params), *sink, *norm, *gate)))

    @property
    def signature(self) -> Signature:
        """What calls must know of it."""
        return Signature(**{field.name: getattr(self, field.name) for field in fields(Signature)})


def normalize(spec: AttentionSpec, op: OpName) -> Variant:
    """The meaning of ``op`` of ``spec``.

    Raises:
        UnsupportedError: the op does not exist for this spec (backward over a paged or quantized cache).
        SpecError: two mods declare one parameter differently.
    """
    latent = isinstance(spec.heads, MLA)
    absorbed = isinstance(spec.heads, MLA) and (spec.heads.absorbed or op in ("decode", "append"))
    place = _absorbed(spec.heads) if isinstance(spec.heads, MLA) and absorbed else _plain(spec.heads)
    kv_layout: Layout = "padded" if spec.kv.kind == "contiguous" else spec.kv.kind
    k_storage, v_storage = spec.kv.storages(spec.dtype)
    if latent and not absorbed:  # projected keys and values are never in the cache
        kv_layout = "padded" if kv_layout == "padded" else "ragged"
        k_storage = v_storage = Storage(spec.dtype)
    if absorbed and op == "backward":
        raise UnsupportedError(
            "backward does not train on latents",
            where="spec.heads.absorbed",
            why="gradients of the projections need the keys and values that they make",
            fix="train with absorbed=False, on projected keys and values",
        )
    if absorbed and op != "append" and (spec.rope is not None or spec.qk_norm is not None):
        raise UnsupportedError(
            f"absorbed {op} neither rotates nor norms queries and keys",
            where="spec.rope" if spec.rope is not None else "spec.qk_norm",
            why="its queries have been projected into the space of latents, and the cache holds keys that are rotated",
            fix="leave rope and qk_norm out, and rotate q_pe and kpe before the call (append of a spec with "
            "ag.Rope(keys='append') rotates kpe)",
        )
    if absorbed and k_storage != v_storage:
        raise SpecError(
            f"keys are {k_storage.dtype} but values {v_storage.dtype}",
            where="spec.kv.v_dtype",
            why="the values of MLA are columns of its keys",
            fix="declare one dtype",
        )
    rope = _rotation(spec, op, kv_layout)
    if rope is not None and spec.qk_norm is None and op != "append":
        _check_turned(spec, rope, k_storage)
    if op == "append":
        return _append(spec, place, kv_layout, k_storage, v_storage, rope)
    if op == "backward":
        _check_trainable(spec, kv_layout, k_storage, v_storage)
    if spec.dropout and (op == "decode" or absorbed):
        raise UnsupportedError(
            f"{'absorbed ' if absorbed else ''}{op} has no dropout",
            where="spec.dropout",
            why="it serves inference",
            fix="declare a spec whose dropout is 0 for it",
        )
    score: Expr = SCORE
    for mod in spec.score_mods:
        score = mod.expr(score, spec.heads.num_qo_heads)
    softmax = spec.normalizer if isinstance(spec.normalizer, Softmax) else None
    return Variant(
        num_qo_heads=spec.heads.num_qo_heads,
        **place,
        q_layout="padded" if op == "decode" or kv_layout == "padded" else "ragged",
        kv_layout=kv_layout,
        page_size=_page_size(spec, kv_layout),
        dtype=spec.dtype,
        out_dtype=spec.out_dtype or widened(spec.dtype),
        k_storage=k_storage,
        v_storage=v_storage,
        mask=simplify(spec.mask.expr()),
        score=score if isinstance(spec.normalizer, Softmax) else spec.normalizer.weight(score),
        params=_merged_params(spec, rope),
        normalizer="elementwise" if softmax is None else "softmax",
        sm_scale=spec.heads.head_dim_qk**-0.5 if spec.sm_scale is None else spec.sm_scale,
        sink=None if softmax is None else softmax.sink_logit(),
        gate=spec.output_gate,
        dropout=spec.dropout,
        rope=rope,
        qk_norm=spec.qk_norm,
    )


def _append(
    spec: AttentionSpec,
    place: dict[str, Any],
    kv_layout: Layout,
    k_storage: Storage,
    v_storage: Storage,
    rope: Rope | None,
) -> Variant:
    """New tokens, ragged, on their way into the cache; mask, score and normalizer have no part in it."""
    dtype = widened(spec.dtype)
    return Variant(
        num_qo_heads=place["num_kv_heads"],
        **place,
        q_layout="ragged",
        kv_layout=kv_layout,
        page_size=_page_size(spec, kv_layout),
        dtype=dtype,
        out_dtype=dtype,
        k_storage=k_storage,
        v_storage=v_storage,
        mask=TRUE,
        score=SCORE,
        params=() if rope is None else rope.params(),
        normalizer="elementwise",
        sm_scale=1.0,
        rope=rope,
    )


def _rotation(spec: AttentionSpec, op: OpName, kv_layout: Layout) -> Rope | None:
    """The rotation in the kernels of ``op``, and whether its keys turn on load or have turned on their way into the cache."""
    rope = spec.rope
    if rope is None or (op == "append" and rope.keys == "load"):
        return None
    if isinstance(spec.heads, MLA) and op != "append":
        raise UnsupportedError(
            f"{op} of MLA does not rotate",
            where="spec.rope",
            why="its last head_dim_kpe columns turn, and kernels turn the first ones",
            fix="leave rope out, and rotate q_pe and k_pe before the call",
        )
    width = spec.heads.head_dim_kpe if isinstance(spec.heads, MLA) else spec.heads.head_dim_qk
    cached = op in ("decode", "append") or kv_layout == "paged"
    keys = "append" if cached and rope.keys == "append" else "load"
    return rope.model_copy(update={"dim": rope.dim or width, "keys": keys})


def _check_turned(spec: AttentionSpec, rope: Rope, k_storage: Storage) -> None:
    """Stored numbers are turned before their factors, and rounded to the dtype of queries: they must fit it."""
    dtype = widened(spec.dtype)
    if rope.keys == "load" and dtype == "fp16" and k_storage.row.largest * 2**0.5 > _LARGEST_FP16:
        raise UnsupportedError(
            f"keys of {k_storage.dtype} do not turn in fp16",
            where="spec.kv.dtype",
            why=f"they are up to {k_storage.row.largest:.0f}, and turned ones beyond what fp16 holds",
            fix="declare dtype='bf16', keys of fp8_e4m3, or ag.Rope(keys='append'), which turns them before they are stored",
        )


def _page_size(spec: AttentionSpec, kv_layout: Layout) -> int:
    return spec.kv.page_size if isinstance(spec.kv, Paged) and kv_layout == "paged" else 0


def _plain(heads: Heads) -> dict[str, int]:
    return {"num_kv_heads": heads.num_kv_heads, "head_dim_qk": heads.head_dim_qk, "head_dim_vo": heads.value_dim}


def _absorbed(heads: MLA) -> dict[str, Any]:
    """One key head, whose latents are the values too."""
    return {
        "num_kv_heads": 1,
        "head_dim_qk": heads.head_dim_ckv + heads.head_dim_kpe,
        "head_dim_vo": heads.head_dim_ckv,
        "head_dim_pe": heads.head_dim_kpe,
        "value_source": "keys",
    }


def _check_trainable(spec: AttentionSpec, kv_layout: Layout, k_storage: Storage, v_storage: Storage) -> None:
    if kv_layout == "paged":
        raise UnsupportedError(
            "backward does not read a paged cache",
            where="spec.kv",
            why="gradients of k and v would need pages of their own",
            fix="train with kv=ag.Contiguous() or ag.Ragged()",
        )
    for storage in (k_storage, v_storage):
        if storage.dtype != spec.dtype or storage.is_quantized:
            raise UnsupportedError(
                f"backward does not train on {storage.dtype} keys and values with {spec.dtype} queries",
                where="spec.kv.dtype",
                why="gradients need q, k and v in one floating dtype of at least 16 bits",
                fix="train with dtype fp32, bf16 or fp16, and leave the kv dtype out",
            )


def _merged_params(spec: AttentionSpec, rope: Rope | None) -> tuple[Param, ...]:
    merged: dict[str, Param] = {}
    sources = [source.params() for source in (spec.mask, *spec.score_mods, spec.normalizer)]
    if rope is not None:
        sources.append(rope.params())
    if spec.qk_norm is not None:
        sources.append(spec.qk_norm.params(spec.heads.head_dim_qk))
    for params in sources:
        for param in params:
            if merged.setdefault(param.name, param) != param or param.name == spec.output_gate:
                other = merged[param.name] if merged[param.name] != param else "the output gate"
                raise SpecError(
                    f"parameter {param.name!r} is declared twice, differently",
                    where="spec",
                    why=f"{other} and {param}",
                    fix="rename one of them",
                )
    return tuple(merged.values())


__all__ = ["OPS", "Layout", "OpName", "Variant", "normalize"]
