"""The oracle: eager torch, straight from the Variant, one request at a time, O(S^2) memory, any float dtype.

Gradients come from torch's autograd of this forward pass, so they do not share the compiler's own differentiation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from attngen.backends import philox
from attngen.backends.call import Batch, Inputs, NewTokens, append_slots
from attngen.dtypes import Storage, dequantize, quantize
from attngen.ir.evaluate import evaluate
from attngen.spec import Rope
from attngen.variant import Variant


@dataclass(frozen=True)
class Request:
    """One request's rows: query tokens ``rows`` of the flat batch, and its keys by flat index."""

    index: int
    rows: range
    qo_len: int
    keys: torch.Tensor
    q_offset: int
    kv_offset: int


def forward(variant: Variant, inputs: Inputs, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """``out`` and ``lse`` of :func:`rows`."""
    return rows(variant, inputs, dtype)[:2]


def rows(
    variant: Variant, inputs: Inputs, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of every request, in ``dtype`` throughout.

    Returns:
        ``out [num_tokens, num_qo_heads, head_dim_vo]``, ``lse [num_tokens, num_qo_heads]`` (natural logarithm, of the keys alone)
        and the largest logit likewise, all of ``dtype``; rows without a key, and padding, give 0 and -inf. Element-wise
        weights have no lse: there it means nothing.
    """
    q, k, v = (t.to(dtype) for t in operands(variant, inputs))
    params = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.params.items()}
    out = q.new_zeros(inputs.batch.num_tokens, variant.num_qo_heads, variant.head_dim_vo)
    lse = q.new_full((inputs.batch.num_tokens, variant.num_qo_heads), float("-inf"))
    gate = None if inputs.gate is None else flat(inputs.gate).to(dtype)
    parts, tokens = [], []
    for request in requests(variant, inputs.batch):
        if request.qo_len:
            own = slice(request.rows.start, request.rows.start + request.qo_len)
            tokens.append(torch.arange(own.start, own.stop, device=q.device))
            call = _Call(variant, request, params, inputs.seed, inputs.offset, dtype)
            attended, *stats = call.attend(q[own], k[request.keys], v[request.keys])
            parts.append((attended if gate is None else attended * torch.sigmoid(gate[own]), *stats))
    largest = lse
    if parts:
        index = torch.cat(tokens)
        filled = (torch.cat(part) for part in zip(*parts, strict=True))
        out, lse, largest = (
            whole.index_copy(0, index, part) for whole, part in zip((out, lse, largest), filled, strict=True)
        )
    return out, lse, largest


def backward(
    variant: Variant, inputs: Inputs, dout: torch.Tensor, dlse: torch.Tensor | None, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Gradients of ``sum(out * dout) + sum(lse * dlse)`` in ``dtype``: dq, dk, dv in the shapes of q, k, v, and by parameter."""
    # Inside a registered op or inference mode torch records nothing in this thread, and gradients would all be zero.
    with ThreadPoolExecutor(max_workers=1) as recording:
        return recording.submit(_differentiated, variant, inputs, dout, dlse, dtype).result()


def _differentiated(
    variant: Variant, inputs: Inputs, dout: torch.Tensor, dlse: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    leaves = {
        name: t.detach().to(dtype).requires_grad_() for name, t in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v))
    }
    given = {**inputs.params} if inputs.gate is None else {**inputs.params, variant.gate or "": inputs.gate}
    params = {
        name: value.detach().to(dtype).requires_grad_() if name in variant.differentiable else value
        for name, value in given.items()
    }
    own = {name: params[name] for name in inputs.params}
    gate = None if inputs.gate is None else params[variant.gate or ""]
    leaf = replace(inputs, q=leaves["q"], k=leaves["k"], v=leaves["v"], params=own, gate=gate)
    out, lse = forward(variant, leaf, dtype)
    total = (out * flat(dout).to(dtype)).sum()
    if dlse is not None and variant.is_softmax:
        total = total + torch.where(lse.isinf(), 0.0, lse * dlse.reshape(lse.shape).to(dtype)).sum()
    targets = [*leaves.values(), *(params[name] for name in variant.differentiable)]
    grads = torch.autograd.grad(total, targets, allow_unused=True) if total.requires_grad else [None] * len(targets)
    filled = [torch.zeros_like(t) if g is None else g for t, g in zip(targets, grads, strict=True)]
    return filled[0], filled[1], filled[2], dict(zip(variant.differentiable, filled[3:], strict=True))


def append(variant: Variant, tokens: NewTokens) -> None:
    """Write new tokens into a cache: :func:`attngen.dtypes.quantize` and an assignment to their slots."""
    slot = append_slots(variant.kv_layout, variant.page_size, tokens)
    kept = (slot >= 0) & (slot < tokens.num_slots)
    at = _indices(variant, tokens, slot[kept])
    k, v, pe = (None if x is None else x[kept].float() for x in (tokens.new_k, tokens.new_v, tokens.new_k_pe))
    assert k is not None
    if variant.rope is not None:
        assert tokens.positions is not None
        turning = k if pe is None else pe
        turned = _rotated(variant.rope, tokens.params, turning.double(), tokens.positions[kept].long()).float()
        k, pe = (turned, None) if pe is None else (k, turned)
    whole = k if pe is None else torch.cat([k, pe], -1)
    _write(variant.k_storage, whole, at, (tokens.k, tokens.k_pe), (tokens.k_blocks, tokens.k_pe_blocks), tokens.k_scale)
    if v is not None and tokens.v is not None:
        _write(variant.v_storage, v, at, (tokens.v,), (tokens.v_blocks,), tokens.v_scale)


def _indices(variant: Variant, tokens: NewTokens, slot: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What indexes the leading dims of the cache's tensors."""
    if variant.kv_layout == "ragged":
        return (slot,)
    outer = tokens.kv_len if variant.kv_layout == "padded" else variant.page_size
    return slot // outer, slot % outer


def _write(
    storage: Storage,
    x: torch.Tensor,
    at: tuple[torch.Tensor, ...],
    parts: tuple[torch.Tensor | None, ...],
    part_blocks: tuple[torch.Tensor | None, ...],
    scale: torch.Tensor | None,
) -> None:
    """Rows ``x``, quantized, to the tensors that hold their columns, one after another."""
    given = scale.squeeze(0) if scale is not None and storage.scale == "tensor" else scale
    data, blocks, tokens = quantize(x, storage, None if storage.scale == "token" else given)
    if tokens is not None and scale is not None:
        scale[at] = tokens
    if blocks is not None and storage.zero_point:
        blocks = blocks.flatten(-2)
    for stored, targets in ((data, parts), (blocks, part_blocks)):
        first = 0
        for target in targets:
            if stored is not None and target is not None:
                _as_bytes(target)[at] = _as_bytes(stored)[..., first : first + target.shape[-1]]
                first += target.shape[-1]


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.element_size() == 1 else x


def operands(variant: Variant, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v in full: scaled, dequantized to fp32, parts joined; rows of all requests (or slots of all pages) on one axis."""
    q, k, v = (flat(t) for t in (inputs.q, inputs.k, inputs.v))
    if inputs.q_pe is not None:
        q = torch.cat([q, flat(inputs.q_pe)], -1)
    if inputs.q_scale is not None:
        q = q.float() * inputs.q_scale
    k = _numbers(k, variant.k_storage, inputs.k_blocks, inputs.k_scale)
    if inputs.k_pe is not None:
        k = torch.cat([k, _numbers(flat(inputs.k_pe), variant.k_storage, inputs.k_pe_blocks, inputs.k_scale)], -1)
    return q, k, _numbers(v, variant.v_storage, inputs.v_blocks, inputs.v_scale)


def _numbers(
    data: torch.Tensor, storage: Storage, blocks: torch.Tensor | None, scale: torch.Tensor | None
) -> torch.Tensor:
    if not storage.is_quantized:
        return data
    if blocks is not None:
        blocks = flat(blocks)
        if storage.zero_point:
            blocks = blocks.reshape(*blocks.shape[:-1], blocks.shape[-1] // 2, 2)
    if scale is not None and storage.scale == "token":
        scale = flat(scale.unsqueeze(-1)).squeeze(-1)
    return dequantize(data, storage, blocks, scale)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Rows of all requests (or slots of all pages) on one axis: ``[rows, heads, dim]``."""
    return tensor.reshape(-1, *tensor.shape[-2:]) if tensor.dim() == 4 else tensor


def requests(variant: Variant, batch: Batch) -> Iterator[Request]:
    """Every request of a batch, with its lengths read to the host."""
    qo_indptr, kv_indptr, qo_lens, kv_lens, q_offset, kv_offset, page_indptr = (
        None if t is None else t.tolist()
        for t in (
            batch.qo_indptr,
            batch.kv_indptr,
            batch.qo_lens,
            batch.kv_lens,
            batch.q_offset,
            batch.kv_offset,
            batch.page_indptr,
        )
    )
    for b in range(batch.batch):
        if variant.q_layout == "ragged":
            assert qo_indptr is not None
            tokens = range(qo_indptr[b], qo_indptr[b + 1])
        else:
            tokens = range(b * batch.qo_len, (b + 1) * batch.qo_len)
        qo_len = qo_lens[b] if qo_lens else len(tokens)
        if variant.kv_layout == "ragged":
            assert kv_indptr is not None
            keys = torch.arange(kv_indptr[b], kv_indptr[b + 1])
        elif variant.kv_layout == "padded":
            keys = torch.arange(kv_lens[b] if kv_lens else batch.kv_len) + b * batch.kv_len
        else:
            assert kv_lens is not None
            keys = _page_slots(variant, batch, b, kv_lens[b], page_indptr)
        yield Request(
            index=b,
            rows=tokens,
            qo_len=qo_len,
            keys=keys,
            q_offset=q_offset[b] if q_offset else len(keys) - qo_len,
            kv_offset=kv_offset[b] if kv_offset else 0,
        )


def _page_slots(variant: Variant, batch: Batch, b: int, kv_len: int, page_indptr: list[int] | None) -> torch.Tensor:
    assert batch.page_table is not None
    start, table = 0, batch.page_table[b] if page_indptr is None else batch.page_table
    if page_indptr is not None:
        start, stop = page_indptr[b], page_indptr[b + 1]
        kv_len = (stop - start - 1) * variant.page_size + kv_len if stop > start else 0
    position = torch.arange(kv_len)
    pages = table.cpu()[start + position // variant.page_size]
    return pages.long() * variant.page_size + position % variant.page_size


@dataclass(frozen=True)
class _Call:
    """One request under evaluation; tensors are ``[tokens, heads, ...]``."""

    variant: Variant
    request: Request
    params: dict[str, torch.Tensor]
    seed: torch.Tensor | None
    offset: torch.Tensor | None
    dtype: torch.dtype

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """out, lse and largest logits of the request's queries."""
        variant, device = self.variant, q.device
        q_pos = self.request.q_offset + torch.arange(q.shape[0], device=device)
        kv_pos = self.request.kv_offset + torch.arange(k.shape[0], device=device)
        q_weight, k_weight = variant.norm_weights
        rope = variant.rope
        q = self.transformed(q, q_pos, q_weight, rope)
        k = self.transformed(k, kv_pos, k_weight, None if rope is None or rope.keys == "append" else rope)
        k, v = (t.repeat_interleave(variant.group_size, dim=1) for t in (k, v))
        heads = torch.arange(variant.num_qo_heads, device=device)[:, None, None]
        visible, logits = self.logits(torch.einsum("qhd,khd->hqk", q, k) * variant.sm_scale, heads, q_pos, kv_pos)
        seen = (logits != float("-inf")).any(-1)
        largest = (
            torch.where(seen, logits.amax(-1), float("-inf"))
            if k.shape[0]
            else logits.new_full(seen.shape, float("-inf"))
        )
        if variant.is_softmax:
            weights, lse = self.softmax(logits, seen)
        else:
            weights, lse = torch.where(visible, logits, 0.0), largest
        if variant.dropout:
            weights = weights * self.kept(heads, q_pos, kv_pos) / (1.0 - variant.dropout)
        return torch.einsum("hqk,khd->qhd", weights, v), lse.transpose(0, 1), largest.transpose(0, 1).detach()

    def logits(
        self, score: torch.Tensor, heads: torch.Tensor, q_pos: torch.Tensor, kv_pos: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Which pairs are visible, and the logit of each, -inf where hidden."""
        env: dict[str, torch.Tensor | int | float] = {
            "score": score,
            "b": self.request.index,
            "h": heads,
            "q": q_pos[:, None],
            "k": kv_pos,
            "qo_len": self.request.qo_len,
            "kv_len": len(kv_pos),
        }
        visible = evaluate(self.variant.mask, env, self.params, self.dtype).expand(score.shape)
        # The score mod is evaluated at visible pairs only: elsewhere it may be undefined, also in its gradient.
        pairs = visible.nonzero(as_tuple=True)
        at_pairs = {
            name: x.expand(visible.shape)[pairs] if isinstance(x, torch.Tensor) else x for name, x in env.items()
        }
        seen = evaluate(self.variant.score, at_pairs, self.params, self.dtype).expand(len(pairs[0]))
        return visible, torch.full_like(score, float("-inf")).index_put(pairs, seen)

    def softmax(self, logits: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights, and the lse of the keys alone."""
        logits = torch.where(seen[..., None], logits, 0.0)
        lse = torch.where(seen, torch.logsumexp(logits, -1), float("-inf"))
        # Not exp(logits - lse): next to logits of -1e30 the number of keys vanishes in lse.
        top = torch.where(seen, lse, 0.0).detach()[..., None]
        near = logits - top
        terms = near
        if self.variant.sink is not None:
            env = {"h": torch.arange(self.variant.num_qo_heads, device=logits.device)[:, None, None]}
            sink = evaluate(self.variant.sink, env, self.params, self.dtype).expand(*seen.shape, 1)
            terms = torch.cat([near, sink - top], -1)
        weights = torch.exp(near - torch.logsumexp(terms, -1, keepdim=True))
        return torch.where(seen[..., None], weights, 0.0), lse

    def kept(self, heads: torch.Tensor, q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
        """1 where dropout leaves a weight, else 0."""
        assert self.seed is not None
        assert self.offset is not None
        row = self.request.index * self.variant.num_qo_heads + heads
        stays = philox.kept(
            self.variant.dropout_threshold, int(self.seed), int(self.offset), row, q_pos[:, None], kv_pos
        )
        return stays.to(self.dtype)

    def transformed(
        self, x: torch.Tensor, position: torch.Tensor, weight: str | None, rope: Rope | None
    ) -> torch.Tensor:
        """Queries or keys as they are multiplied: normed, then rotated."""
        norm = self.variant.qk_norm
        if norm is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
            x = x if weight is None else x * self.params[weight]
        return x if rope is None else _rotated(rope, self.params, x, position)


def _rotated(rope: Rope, params: Mapping[str, torch.Tensor], x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Rows ``[tokens, heads, dim]`` turned by their positions."""
    assert rope.dim is not None
    cosine, sine = _rotation(rope, params, position, x.dtype)
    turning, rest = x[..., : rope.dim], x[..., rope.dim :]
    if rope.interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = turning.chunk(2, -1)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    paired = torch.stack(turned, -1).flatten(-2) if rope.interleaved else torch.cat(turned, -1)
    return torch.cat([paired, rest], -1)


def _rotation(
    rope: Rope, params: Mapping[str, torch.Tensor], position: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of every position and pair, ``[tokens, 1, dim / 2]``. Angles are never of fewer than 32 bits."""
    assert rope.dim is not None
    if rope.table is not None:
        table = params[rope.table]
        inside = ((position >= 0) & (position < table.shape[0]))[:, None]
        rows = table[position.clamp(0, max(table.shape[0] - 1, 0))] if table.shape[0] else table.new_zeros(1, rope.dim)
        cosine, sine = torch.where(inside, rows, 0.0).chunk(2, -1)
    else:
        pair = torch.arange(rope.dim // 2, device=position.device, dtype=torch.float64)
        angle = position[:, None] * rope.theta ** (-2.0 * pair / rope.dim)
        cosine, sine = angle.cos(), angle.sin()
    return cosine[:, None].to(dtype), sine[:, None].to(dtype)
