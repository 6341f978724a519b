"""Where cases run, what they feed in, and an oracle of their own.

Probe data make faults exact: with ``q = 0`` every visible key has the same weight, so that with ``v[j] = j`` the output
is the mean visible position and ``exp(lse)`` the number of visible keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

import attngen as ag
from attngen.ops.checks import torch_dtype
from attngen.variant import OpName

NAN = float("nan")
STORAGES = (ag.Contiguous(), ag.Ragged(), ag.Paged(page_size=16))


@dataclass(frozen=True)
class Place:
    """A backend and the device of its tensors."""

    backend: str
    device: str

    def __str__(self) -> str:
        return self.backend

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def compile(self, spec: ag.AttentionSpec) -> ag.Ops:
        """The ops of ``spec``, kept for the whole run."""
        return _compile(spec, self.backend)


REFERENCE, CPP, TRITON = Place("reference", "cpu"), Place("cpp", "cpu"), Place("triton", "cuda")


def name_place(value: object) -> str | None:
    """Ids of test parameters that hold a place."""
    return str(value) if isinstance(value, Place) else None


def on_gpu(*values: Any) -> Any:
    """A set of test parameters that needs a GPU."""
    return pytest.param(*values, marks=pytest.mark.gpu)


@cache
def _compile(spec: ag.AttentionSpec, backend: str) -> ag.Ops:
    return ag.compile(spec, backend=backend)


def declare(qo_heads: int = 1, kv_heads: int = 1, head_dim: int = 64, **fields: Any) -> ag.AttentionSpec:
    """A spec of grouped heads, fp16 unless ``fields`` say otherwise."""
    heads = ag.GQA(num_qo_heads=qo_heads, num_kv_heads=kv_heads, head_dim=head_dim)
    return ag.AttentionSpec(**{"heads": heads, "dtype": "fp16", **fields})


@dataclass(frozen=True)
class Request:
    """``q [qo_len, num_qo_heads, dim]``, ``k, v [kv_len, num_kv_heads, dim]`` on the CPU, in the spec's dtype."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def part(self, rows: slice, keys: slice) -> Request:
        """Some of the queries over some of the keys."""
        return Request(self.q[rows], self.k[keys], self.v[keys])


def noise(spec: ag.AttentionSpec, qo_len: int, kv_len: int, seed: int = 0) -> Request:
    """Normal numbers."""
    heads, dtype = spec.heads, torch_dtype(spec.dtype)
    generator = torch.Generator().manual_seed(1000 * seed + 17 * qo_len + kv_len)
    return Request(
        torch.randn(qo_len, heads.num_qo_heads, heads.head_dim_qk, generator=generator).to(dtype),
        torch.randn(kv_len, heads.num_kv_heads, heads.head_dim_qk, generator=generator).to(dtype),
        torch.randn(kv_len, heads.num_kv_heads, heads.value_dim, generator=generator).to(dtype),
    )


def probe(
    spec: ag.AttentionSpec, qo_len: int, kv_len: int, values: Sequence[float] | torch.Tensor | None = None
) -> Request:
    """``q = 0``, random keys, and ``v[j] = values[j]`` in every element; ``values[j]`` is ``j`` by default."""
    request = noise(spec, qo_len, kv_len)
    column = torch.arange(kv_len) if values is None else torch.as_tensor(values)
    rows = column.to(request.v.dtype).view(kv_len, *[1] * 2)
    return Request(torch.zeros_like(request.q), request.k, rows.expand(request.v.shape).contiguous())


@dataclass(frozen=True)
class State:
    """``out [qo_len, num_qo_heads, head_dim_vo]`` and ``lse [qo_len, num_qo_heads]`` of one request, on the CPU."""

    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class Call:
    """A batch of requests as the arguments of one call, in the storage of a spec."""

    q: torch.Tensor
    kv: tuple[Any, ...]
    lengths: dict[str, torch.Tensor]
    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]

    def rows(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """What belongs to each request in a tensor shaped like q (or without its last dim)."""
        ragged = "qo_indptr" in self.lengths
        one_token = self.q.dim() == 3 and not ragged
        return _split(packed.unsqueeze(1) if one_token else packed, self.qo_lens, ragged=ragged)

    def keys(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """The same for a tensor shaped like k."""
        return _split(packed, self.kv_lens, ragged="kv_indptr" in self.lengths)


def _split(packed: torch.Tensor, lens: tuple[int, ...], *, ragged: bool) -> list[torch.Tensor]:
    packed = packed.cpu()
    if ragged:
        return list(packed.split(lens))
    return [packed[b, :n] for b, n in enumerate(lens)]


def pack(
    spec: ag.AttentionSpec, op: OpName, requests: Sequence[Request], device: str = "cpu", *, filler: float = NAN
) -> Call:
    """``requests`` in one batch; every slot that belongs to no request holds ``filler``, pages are in random order."""
    qo_lens, kv_lens = (tuple(len(getattr(r, name)) for r in requests) for name in "qk")
    lengths: dict[str, torch.Tensor] = {}
    queries = [r.q for r in requests]
    if op == "decode" or spec.kv.kind == "contiguous":
        q = _padded(queries, filler)
        if len(set(qo_lens)) > 1:
            lengths["qo_lens"] = int32(qo_lens)
        elif op == "decode" and qo_lens[0] == 1:
            q = q.squeeze(1)
    else:
        q = torch.cat(queries)
        lengths["qo_indptr"] = indptr(qo_lens)
    keys, values = [r.k for r in requests], [r.v for r in requests]
    kv: tuple[Any, ...]
    if spec.kv.kind == "contiguous":
        kv = (_padded(keys, filler), _padded(values, filler))
        if len(set(kv_lens)) > 1:
            lengths["kv_lens"] = int32(kv_lens)
    elif spec.kv.kind == "ragged":
        kv = (torch.cat(keys), torch.cat(values))
        lengths["kv_indptr"] = indptr(kv_lens)
    else:
        table = page_table(kv_lens, spec.kv.page_size)
        kv = (tuple(_paged(rows, table, spec.kv.page_size, filler) for rows in (keys, values)),)
        lengths |= {"page_table": table, "kv_lens": int32(kv_lens)}
    place = tuple(tuple(x.to(device) for x in t) if isinstance(t, tuple) else t.to(device) for t in kv)
    return Call(q.to(device), place, {name: t.to(device) for name, t in lengths.items()}, qo_lens, kv_lens)


def page_table(kv_lens: Sequence[int], page_size: int, seed: int = 0) -> torch.Tensor:
    """Random distinct pages of a pool with two spare ones; entries beyond a request's own are -1."""
    counts = [-(-n // page_size) for n in kv_lens]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    table = torch.full((len(counts), max(counts, default=0)), -1, dtype=torch.int32)
    for b, count in enumerate(counts):
        table[b, :count] = order[sum(counts[:b]) : sum(counts[: b + 1])]
    return table


def _paged(rows: Sequence[torch.Tensor], table: torch.Tensor, page_size: int, filler: float) -> torch.Tensor:
    pages = int((table >= 0).sum()) + 2
    pool = torch.full((pages, page_size, *rows[0].shape[1:]), filler, dtype=rows[0].dtype)
    for own, entries in zip(rows, table, strict=True):
        for start, page in zip(range(0, len(own), page_size), entries.tolist(), strict=False):
            chunk = own[start : start + page_size]
            pool[page, : len(chunk)] = chunk
    return pool


def _padded(rows: Sequence[torch.Tensor], filler: float) -> torch.Tensor:
    longest = max(map(len, rows))
    packed = torch.full((len(rows), longest, *rows[0].shape[1:]), filler, dtype=rows[0].dtype)
    for b, own in enumerate(rows):
        packed[b, : len(own)] = own
    return packed


def indptr(lens: Sequence[int]) -> torch.Tensor:
    """Running totals with a leading 0."""
    return int32([sum(lens[:b]) for b in range(len(lens) + 1)])


def int32(values: Sequence[int]) -> torch.Tensor:
    """Extras or indices as calls take them."""
    return torch.tensor(values, dtype=torch.int32)


def attend(
    place: Place,
    spec: ag.AttentionSpec,
    op: OpName,
    requests: Sequence[Request],
    params: dict[str, torch.Tensor] | None = None,
    *,
    filler: float = NAN,
) -> list[State]:
    """Run prefill or decode on one batch, into an output buffer of NaN."""
    call = pack(spec, op, requests, place.device, filler=filler)
    given = {name: tensor.to(place.device) for name, tensor in (params or {}).items()}
    ops = place.compile(spec)
    run = ops.decode if op == "decode" else ops.prefill
    buffer = call.q.new_full((*call.q.shape[:-1], spec.heads.value_dim), NAN)
    out, lse = run(call.q, *call.kv, **call.lengths, params=given, out=buffer, return_lse=True)
    return [State(o, s) for o, s in zip(call.rows(out), call.rows(lse), strict=True)]


@dataclass(frozen=True)
class Gradients:
    """Gradients of one request in the shapes of its q, k, v, on the CPU."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def gradients(
    place: Place,
    spec: ag.AttentionSpec,
    requests: Sequence[Request],
    douts: Sequence[torch.Tensor],
    params: dict[str, torch.Tensor] | None = None,
) -> list[Gradients]:
    """Run prefill, then backward with ``douts``, one a request."""
    call = pack(spec, "prefill", requests, place.device)
    given = {name: tensor.to(place.device) for name, tensor in (params or {}).items()}
    ops = place.compile(spec)
    out, lse = ops.prefill(call.q, *call.kv, **call.lengths, params=given, return_lse=True)
    packed = torch.cat(list(douts)) if "qo_indptr" in call.lengths else _padded(douts, NAN)
    dout = packed.to(out.dtype).to(place.device)
    dq, dk, dv, _ = ops.backward(dout, call.q, *call.kv, out, lse, **call.lengths, params=given)
    return [Gradients(*grads) for grads in zip(call.rows(dq), call.keys(dk), call.keys(dv), strict=True)]


def exact(
    request: Request,
    visible: torch.Tensor | None = None,
    *,
    sm_scale: float | None = None,
    modify: Callable[[torch.Tensor], torch.Tensor] = lambda score: score,
) -> State:
    """The same attention, dense and in float64.

    Args:
        request: tensors of any dtype, with gradients or without.
        visible: bool ``[qo_len, kv_len]``.
        sm_scale: ``head_dim_qk ** -0.5`` when omitted.
        modify: maps scaled scores ``[num_qo_heads, qo_len, kv_len]`` to logits.
    """
    group = request.q.shape[1] // request.k.shape[1]
    q, k, v = request.q.double(), *(t.double().repeat_interleave(group, 1) for t in (request.k, request.v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if sm_scale is None else sm_scale)
    seen = torch.ones(scores.shape[1:], dtype=torch.bool) if visible is None else visible
    logits = modify(scores).masked_fill(~seen, -torch.inf)
    lse = logits.logsumexp(-1)
    weights = torch.exp(logits - torch.where(lse.isinf(), 0.0, lse)[..., None])
    return State(torch.einsum("hqk,khd->qhd", weights, v), lse.T)


def exact_gradients(
    request: Request, dout: torch.Tensor, visible: torch.Tensor | None = None, **meaning: Any
) -> Gradients:
    """Gradients of ``sum(out * dout)`` by torch's autograd through :func:`exact`."""
    leaves = [t.double().requires_grad_() for t in (request.q, request.k, request.v)]
    out = exact(Request(*leaves), visible, **meaning).out
    return Gradients(*torch.autograd.grad((out * dout.double()).sum(), leaves))


def band(qo_len: int, kv_len: int, left: int | None = None) -> torch.Tensor:
    """Bool ``[qo_len, kv_len]``: causal, bottom-right aligned, at most ``left`` keys before the own one."""
    distance = (torch.arange(qo_len) + kv_len - qo_len)[:, None] - torch.arange(kv_len)
    return (distance >= 0) & (distance <= (kv_len if left is None else left))


def assert_near(got: torch.Tensor, want: torch.Tensor | float, *, atol: float = 2e-2) -> None:
    """No NaN, and within ``atol``; large values may also be off by their own rounding to ``got``'s dtype."""
    wanted = torch.as_tensor(want, dtype=torch.float64).expand(got.shape)
    torch.testing.assert_close(got.double(), wanted, atol=atol, rtol=torch.finfo(got.dtype).eps / 2)


def assert_state(state: State, out: torch.Tensor | float, lse: torch.Tensor | float) -> None:
    """Both results of a request; ``out`` and ``lse`` are given a row, for all heads and elements, or in full."""
    assert_near(state.out, _by_row(out, state.out))
    assert_near(state.lse, _by_row(lse, state.lse), atol=1e-3)


def _by_row(want: torch.Tensor | float, like: torch.Tensor) -> torch.Tensor:
    wanted = torch.as_tensor(want, dtype=torch.float64)
    return wanted.view(-1, *[1] * (like.dim() - 1)) if wanted.dim() == 1 else wanted
