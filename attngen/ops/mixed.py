"""Prefill of new tokens beside a prefix that is in a paged cache already: one call, two sets of keys.

Both parts are attended to on their own, in fp32, and merged by their lse (:func:`attngen.merge_states`), so that each is read as it
lies: the prefix in the cache's dtype and layout, the new tokens as the projection wrote them.

A prefix of latents is attended to with absorbed queries (DeepSeek-V2, arXiv 2405.04434): ``q . (w_uk^T c) = (w_uk q) . c``, and
what comes out is projected once a query. To project the prefix instead takes ``head_dim_ckv * (head_dim_nope + head_dim_vo)``
products a key and head, and saves ``2 * head_dim_ckv - head_dim_nope - head_dim_vo`` a key, head and query: it pays from some
170 new tokens a request on, but takes memory for every key and head of the prefix. Then project it, and prefill over both as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from attngen.errors import ArgumentError, UnsupportedError
from attngen.ir.expr import Coord
from attngen.ops.batching import cached_lengths, check_gate, check_page_lists, reads, same_batch
from attngen.ops.calls import Prefix, Rows
from attngen.ops.checks import check_indptr, check_tensor, torch_dtype
from attngen.ops.merge import merge_states
from attngen.ops.storage import Cache, Extras, Query, unpack
from attngen.signature import Signature
from attngen.spec import MLA, AttentionSpec, Paged, Ragged
from attngen.variant import Variant

if TYPE_CHECKING:
    from attngen.ops.ops import Ops


def prefix_specs(spec: AttentionSpec, variant: Variant) -> tuple[AttentionSpec, AttentionSpec]:
    """The specs whose prefill attends to the prefix and to the new tokens.

    Raises:
        UnsupportedError: the two cannot be merged.
    """
    _check(spec, variant)
    part = spec.model_copy(update={"out_dtype": "fp32", "output_gate": None})
    prefix = part
    if isinstance(spec.heads, MLA):
        heads = spec.heads.model_copy(update={"absorbed": True})
        prefix = part.model_copy(update={"heads": heads, "out_dtype": spec.dtype})
    return prefix, part.model_copy(update={"kv": Ragged.model_validate({"dtype": variant.compute_dtype})})


class PrefixPrefill:
    """Prefill of one spec over a prefix, by the ops of :func:`prefix_specs`."""

    def __init__(self, spec: AttentionSpec, variant: Variant, signature: Signature, prefix: Ops, fresh: Ops) -> None:
        self.spec, self.variant, self.signature = spec, variant, signature
        self._prefix, self._fresh = prefix, fresh

    def __call__(
        self,
        q: Query,
        k: Cache,
        v: Cache | None,
        prefix: Prefix,
        given: Extras,
        params: Mapping[str, torch.Tensor],
        *,
        partial: bool,
        want_max: bool,
    ) -> Rows:
        """out, lse and largest logits.

        Args:
            q, k, v: ragged; ``given.kv_indptr`` delimits the new keys.
            prefix, given: the keys before them, through ``page_table`` and ``kv_lens``, or ``page_indptr``, ``kv_indices`` and
                ``kv_last_page_len``; queries stand at the end of the new tokens.
        """
        if not isinstance(q, torch.Tensor) or not isinstance(k, torch.Tensor) or not isinstance(v, torch.Tensor):
            raise ArgumentError(
                "new keys are no tensors",
                where="k, v",
                why="beside a prefix they are passed as the projection wrote them",
                fix="pass k and v [nnz_kv, num_kv_heads, head_dim], and the cache as kv_cache=",
            )
        unpacked = unpack(
            self._fresh.signature("prefill"), self._fresh.declared, q, k, v, Extras(q_scale=given.q_scale)
        )
        gate = check_gate(self.signature, q, params)
        qo_indptr = check_indptr("qo_indptr", given.qo_indptr, q.shape[0], q.device, read=False)
        kv_indptr = check_indptr("kv_indptr", given.kv_indptr, k.shape[0], q.device, read=False)
        same_batch("kv_indptr", len(kv_indptr) - 1, len(qo_indptr) - 1)
        pages = _pages(given, len(qo_indptr) - 1, q.device)
        lens = cached_lengths(self._prefix.declared.page_size, pages, len(qo_indptr) - 1, q.device)
        first = given.q_offset
        if first is None:
            first = lens + (kv_indptr.diff() - qo_indptr.diff())
        own = {name: tensor for name, tensor in params.items() if name != self.variant.gate}
        positions: dict[str, Any] = {"qo_indptr": qo_indptr, "q_offset": first}
        scales = {"q_scale": given.q_scale, "k_scale": given.k_scale, "v_scale": given.v_scale}
        after = replace(unpacked[3], kv_indptr=kv_indptr, kv_offset=lens, **positions)
        new = _attend(self._fresh, *unpacked[:3], after, own, want_max=want_max)
        old = self._before(q, prefix, replace(pages, **scales, **positions), own, want_max=want_max)
        if not self.variant.is_softmax:
            return self._finished(old[0] + new[0], gate), q.new_empty(0), q.new_empty(0)
        sink = None
        if self.variant.sink is not None and not partial:
            param = self.variant.sink_param
            sink = torch.zeros(self.variant.num_qo_heads, device=q.device) if param is None else params[param.name]
        out, lse = merge_states((old[0], new[0]), (old[1], new[1]), sink)
        return self._finished(out, gate), lse, torch.maximum(old[2], new[2]) if want_max else q.new_empty(0)

    def _before(
        self, q: torch.Tensor, prefix: Prefix, given: Extras, params: Mapping[str, torch.Tensor], *, want_max: bool
    ) -> Rows:
        """Attention to the keys of the prefix, fp32 in the space of values."""
        heads, weights = self.spec.heads, {"w_uk": prefix.w_uk, "w_uv": prefix.w_uv}
        if not isinstance(heads, MLA):
            for name, tensor in weights.items():
                if tensor is not None:
                    raise ArgumentError(
                        f"{name} has no meaning here",
                        where=name,
                        why="it projects latents, and this cache holds keys and values",
                        fix="leave it out",
                    )
            return self._over_cache(q, prefix.cache, given, params, want_max=want_max)
        w_uk, w_uv = (
            check_tensor(
                name,
                tensor,
                dtype=self.spec.dtype,
                shape=(heads.num_qo_heads, heads.head_dim_ckv, width),
                axes=f"[num_qo_heads, head_dim_ckv, {axis}]",
                device=q.device,
            )
            for (name, tensor), axis, width in zip(
                weights.items(), ("head_dim_nope", "head_dim_vo"), (heads.head_dim_nope, heads.head_dim_vo), strict=True
            )
        )
        nope, rope = q[..., : heads.head_dim_nope], q[..., heads.head_dim_nope :]
        absorbed = (torch.einsum("thd,hcd->thc", nope, w_uk), rope)
        out, lse, largest = self._over_cache(absorbed, prefix.cache, given, params, want_max=want_max)
        return torch.einsum("thc,hcd->thd", out, w_uv).float(), lse, largest

    def _over_cache(
        self, q: Query, cache: Cache, given: Extras, params: Mapping[str, torch.Tensor], *, want_max: bool
    ) -> Rows:
        """Attention to the cache as it lies, without sink and gate."""
        unpacked = unpack(self._prefix.signature("prefill"), self._prefix.declared, q, cache, None, given)
        return _attend(self._prefix, *unpacked, params, want_max=want_max)

    def _finished(self, out: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        if gate is not None:
            out = out * torch.sigmoid(gate.float())
        return out.to(torch_dtype(self.variant.out_dtype))


def _attend(
    ops: Ops,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    given: Extras,
    params: Mapping[str, torch.Tensor],
    *,
    want_max: bool,
) -> Rows:
    """Attention to the keys of one part, without sink and gate."""
    return ops.attend("prefill", q, k, v, given, params, want_max=want_max, partial=True)


def _pages(given: Extras, batch: int, device: torch.device) -> Extras:
    """Where the prefix lies, in the names of a call over a paged cache alone."""
    csr = given.page_table is None and (given.page_indptr is not None or given.kv_indices is not None)
    own = {"page_indptr", "kv_indices", "kv_last_page_len"} if csr else {"page_table", "kv_lens"}
    given.reject_other_than(
        {"qo_indptr", "kv_indptr", "q_offset"} | own, "ragged keys beside a paged prefix", frozenset()
    )
    if not csr:
        return Extras(page_table=given.page_table, kv_lens=given.kv_lens)
    pages = check_page_lists(given.page_indptr, given.kv_indices, device, read=reads(device), name="page_indptr")
    same_batch("page_indptr", len(pages["page_indptr"]) - 1, batch)
    return Extras(kv_indptr=given.page_indptr, kv_indices=given.kv_indices, kv_last_page_len=given.kv_last_page_len)


def _check(spec: AttentionSpec, variant: Variant) -> None:
    def refuse(what: str, where: str, why: str, fix: str) -> None:
        raise UnsupportedError(what, where=where, why=why, fix=fix)

    if not isinstance(spec.kv, Paged):
        refuse(
            "kv_cache has no meaning here",
            "kv_cache",
            f"the spec's storage is {spec.kv.kind}, passed as k and v",
            "declare kv=ag.Paged(...)",
        )
    if isinstance(spec.heads, MLA) and spec.heads.absorbed:
        refuse(
            "kv_cache has no meaning beside absorbed queries",
            "spec.heads.absorbed",
            "they attend to latents alone, and new tokens have been projected up",
            "declare absorbed=False; or append the new tokens to the cache, and leave kv_cache out",
        )
    if isinstance(spec.heads, MLA) and spec.dtype == "fp8_e4m3":
        refuse("fp8 queries are not absorbed", "spec.dtype", "their products need more bits", "use dtype bf16 or fp16")
    if spec.dropout:
        refuse("dropout has no meaning beside a cache", "spec.dropout", "it serves training", "declare dropout=0")
    lengths = {Coord("kv_len"), Coord("qo_len")}
    if any(node in lengths for expr in (variant.mask, variant.score) for node in expr.walk()):
        refuse(
            "the mask or score reads kv_len",
            "kv_cache",
            "prefix and new tokens are attended to one after the other, and have a length each",
            "append the new tokens to the cache first, then call prefill over the cache alone",
        )
