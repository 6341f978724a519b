"""Builds random calls of a spec, runs them, and compares every number with the float64 oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import attngen as ag
from attngen.backends import reference
from attngen.backends.base import Inputs
from attngen.ops.batching import collect_inputs
from attngen.ops.checks import torch_dtype
from attngen.ops.storage import Extras, unpack
from attngen.variant import OpName, Variant, normalize
from tests.numerics import caches

# A result may be off by this many times the error that eager torch makes in the working dtype on the same numbers, or what rounding
# the largest logit does to its exponential, if that is more. Gradients get twice as much: eager torch keeps the weights, while
# kernels recompute them from an lse that is rounded to fp32.
#
# A logit may also be off by as many times what summing its products one after another in fp32 does to it, as kernels do. Step j
# rounds a partial sum s_j by half an epsilon at most: errors of all steps have a standard deviation of eps / 2 * root(sum of
# s_j ** 2 / 3). Where products have random signs, s_j is about root(j) of them, and that is 0.64 * eps / 2 * (sum of the products'
# magnitudes), however many they are (N. Higham and T. Mary, "Sharper probabilistic backward error analysis for basic linear algebra
# kernels with random data", SIAM J. Sci. Comput. 42, 2020). Eager torch sums in blocks: of long sums it tells too little.
FACTOR = 4.0
GRADIENT_FACTOR = 8.0
# Parameters whose mod asks for more than any number: drawn evenly from these ranges.
RANGES = {"kerple_r1": (0.1, 1.0), "kerple_r2": (0.1, 1.0), "fire_len": (20.0, 40.0)}


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        name: unique, part of the test's id.
        spec, op: what is run.
        qo_lens, kv_lens: tokens of each request; decode takes the longest qo_len for all.
        pages: how a paged cache is passed: ``table``, ``csr`` or ``stacked``; latents are joined where ``stacked``.
        strided: pass views whose tokens and heads are not adjacent.
        exact: also ask for deterministic gradients, twice.
        probe: queries are zero and values the numbers of their tokens: out is the mean visible token, and exp(lse) how many are.
    """

    name: str
    spec: ag.AttentionSpec
    op: OpName
    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    pages: str = "table"
    strided: bool = False
    seed: int = 0
    exact: bool = False
    probe: bool = False


@dataclass
class Call:
    """Tensors of a case: positional arguments, keyword arguments, and the same for the oracle."""

    q: torch.Tensor
    kv: tuple[Any, ...]
    lengths: dict[str, torch.Tensor]
    params: dict[str, torch.Tensor]
    stream: dict[str, torch.Tensor]


def build_call(case: Case, device: str = "cpu") -> Call:
    """Random tensors; every slot that no request may read holds NaN."""
    variant = normalize(case.spec, case.op)
    generator = torch.Generator().manual_seed(case.seed + 1)
    lengths: dict[str, torch.Tensor] = {}
    q = _queries(case, variant, generator, lengths)
    if case.probe:
        q[~q.isnan()] = 0.0
    kv = _keys(case, variant, generator, lengths)
    if variant.dtype == "fp8_e4m3":
        lengths["q_scale"] = torch.tensor(0.7)
    params = {p.name: _param(p, case, variant, generator) for p in variant.params}
    if variant.gate:
        params[variant.gate] = _gate(case, variant, q, generator)
    stream = {}
    if variant.dropout:
        numbers = torch.randint(-(2**62), 2**62, (2,), generator=generator)
        stream = {"seed": numbers[:1].to(device), "offset": numbers[1:].to(device)}
    move = {name: t.to(device) for name, t in lengths.items()}
    return Call(_moved(q, device), _moved(kv, device), move, {name: t.to(device) for name, t in params.items()}, stream)


def _gate(case: Case, variant: Variant, q: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random, NaN where q has padding."""
    gate = _random((*q.shape[:-1], variant.head_dim_vo), variant.compute_dtype, generator, case.strided)
    if variant.q_layout == "padded":
        for b, n in enumerate(case.qo_lens):
            gate[b, n:] = float("nan")
    return gate


def _moved(tensor: Any, device: str) -> Any:
    """Copies on ``device`` with the same strides and gaps."""
    if isinstance(tensor, tuple):
        return tuple(_moved(x, device) for x in tensor)
    if device == "cpu":
        return tensor
    span = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = torch.as_strided(tensor, (span,), (1,), 0).to(device)
    return torch.as_strided(whole, tensor.shape, tensor.stride(), tensor.storage_offset())


def _random(shape: Sequence[int], dtype: str, generator: torch.Generator, strided: bool) -> torch.Tensor:
    """Normal numbers; ``strided`` interleaves three tensors and swaps tokens with heads, as packed projections do."""
    if not strided:
        return torch.randn(*shape, generator=generator).to(torch_dtype(dtype))
    *lead, tokens, heads, dim = shape
    packed = torch.randn(*lead, heads, 3, tokens, dim, generator=generator).to(torch_dtype(dtype))
    return packed.select(-3, 1).transpose(-2, -3)


def _queries(
    case: Case, variant: Variant, generator: torch.Generator, lengths: dict[str, torch.Tensor]
) -> torch.Tensor:
    shape: tuple[int, ...]
    if variant.q_layout == "ragged":
        lengths["qo_indptr"] = _indptr(case.qo_lens)
        shape = (sum(case.qo_lens), variant.num_qo_heads, variant.head_dim_qk)
        return _random(shape, variant.dtype, generator, case.strided)
    longest = max(case.qo_lens, default=0)
    q = _random(
        (len(case.qo_lens), longest, variant.num_qo_heads, variant.head_dim_qk), variant.dtype, generator, case.strided
    )
    if set(case.qo_lens) != {longest} and case.qo_lens:
        lengths["qo_lens"] = torch.tensor(case.qo_lens, dtype=torch.int32)
        for b, n in enumerate(case.qo_lens):
            q[b, n:] = float("nan")
    return q


def _keys(
    case: Case, variant: Variant, generator: torch.Generator, lengths: dict[str, torch.Tensor]
) -> tuple[Any, ...]:
    heads = variant.num_kv_heads
    dims = (variant.head_dim_qk, variant.head_dim_vo)[: 1 if variant.value_source == "keys" else 2]
    joined = case.pages == "stacked"
    if variant.kv_layout == "paged":
        return caches.pages(_pools(case, variant, dims, generator, lengths), variant, case.spec.kv, lengths, joined)
    if variant.kv_layout == "ragged":
        lengths["kv_indptr"] = _indptr(case.kv_lens)
        shapes = [(sum(case.kv_lens), heads, dim) for dim in dims]
    else:
        shapes = [(len(case.kv_lens), max(case.kv_lens, default=0), heads, dim) for dim in dims]
    kv = [_random(shape, "fp32", generator, case.strided) for shape in shapes]
    if case.probe and len(kv) == 2:
        kv[1].copy_(_token_numbers(kv[1].shape[-3]))
    if variant.kv_layout == "padded" and len(set(case.kv_lens)) > 1:
        lengths["kv_lens"] = torch.tensor(case.kv_lens, dtype=torch.int32)
        for b, n in enumerate(case.kv_lens):
            for tensor in kv:
                tensor[b, n:] = float("nan")
    return caches.dense(kv, variant, lengths, joined)


def _pools(
    case: Case, variant: Variant, dims: Sequence[int], generator: torch.Generator, lengths: dict[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Shuffled pools with spare pages; tails of last pages and spare pages are NaN, spare table entries are garbage."""
    size = variant.page_size
    counts = [-(-n // size) for n in case.kv_lens]
    total = sum(counts) + 3
    order = torch.randperm(total, generator=generator, dtype=torch.int64)
    pools = []
    for side, dim in enumerate(dims):
        pool = torch.full((total, size, variant.num_kv_heads, dim), float("nan"))
        start = 0
        for n, count in zip(case.kv_lens, counts, strict=True):
            rows = torch.full((count * size, variant.num_kv_heads, dim), float("nan"))
            rows[:n] = torch.randn(n, variant.num_kv_heads, dim, generator=generator)
            if case.probe and side == 1:
                rows[:n] = _token_numbers(n)
            pool[order[start : start + count]] = rows.view(count, size, variant.num_kv_heads, dim)
            start += count
        pools.append(pool)
    pages = order.to(torch.int32)
    if case.pages == "csr":
        lengths["kv_indptr"] = _indptr(counts)
        lengths["kv_indices"] = pages[: sum(counts)].contiguous()
        last = [(n - 1) % size + 1 if n else 0 for n in case.kv_lens]
        lengths["kv_last_page_len"] = torch.tensor(last, dtype=torch.int32)
    else:
        width = max(counts, default=0) + 1
        table = torch.full((len(counts), width), -1, dtype=torch.int32)
        start = 0
        for b, count in enumerate(counts):
            table[b, :count] = pages[start : start + count]
            start += count
        lengths["page_table"] = table
        lengths["kv_lens"] = torch.tensor(case.kv_lens, dtype=torch.int32)
    return pools


def _token_numbers(count: int) -> torch.Tensor:
    """Small whole numbers ``[count, 1, 1]`` that tell neighbours apart."""
    return torch.arange(count).remainder(7)[:, None, None].float()


def _param(param: Any, case: Case, variant: Variant, generator: torch.Generator) -> torch.Tensor:
    sizes = {
        "batch": len(case.kv_lens),
        "num_qo_heads": variant.num_qo_heads,
        "num_kv_heads": variant.num_kv_heads,
        "max_qo_len": max(case.qo_lens, default=0),
        "max_kv_len": max(case.kv_lens, default=0),
    }
    samples = case.spec.mask.sample(sizes)
    if param.name in samples:
        return torch.tensor(samples[param.name]).to(torch_dtype(param.dtype))
    sizes |= {f"{name} or 1": (size, 1)[case.seed % 2] for name, size in sizes.items()}
    shape = [dim if isinstance(dim, int) else sizes.get(dim, 64) for dim in param.dims]
    if param.dtype in ("i32", "bool"):
        return torch.randint(0, 2 if param.dtype == "bool" else 5, shape, generator=generator).to(
            torch_dtype(param.dtype)
        )
    if param.name in RANGES:
        low, high = RANGES[param.name]
        values = torch.rand(shape, generator=generator) * (high - low) + low
    else:
        values = torch.randn(shape, generator=generator) * 0.3
    return values.to(torch_dtype(param.dtype))


def _indptr(lens: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lens, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)


def _on_cpu(tensor: Any) -> Any:
    return tuple(_on_cpu(x) for x in tensor) if isinstance(tensor, tuple) else tensor.cpu()


def oracle_inputs(case: Case, call: Call) -> tuple[Variant, Inputs]:
    """The case as the oracle takes it, on the CPU."""
    variant = normalize(case.spec, case.op)
    kv = _on_cpu(call.kv)
    given = Extras(**{name: t.cpu() for name, t in (call.lengths | call.stream).items()})
    params = {name: t.cpu() for name, t in call.params.items()}
    keys, values = kv[0], (kv[1] if len(kv) > 1 else None)
    q, k, v, extras = unpack(variant, case.spec.kv, call.q.cpu(), keys, values, given)
    return variant, collect_inputs(variant, q, k, v, extras, params)


@dataclass(frozen=True)
class Verdict:
    """Largest error and its bound, by quantity; ``failures`` in words."""

    errors: dict[str, tuple[float, float]]
    failures: tuple[str, ...]


def run_case(case: Case, ops: ag.Ops, device: str = "cpu") -> Verdict:
    """Run a case and judge it."""
    call = build_call(case, device)
    variant, inputs = oracle_inputs(case, call)
    exact, eager = (
        reference.rows(variant, inputs, dtype) for dtype in (torch.float64, torch_dtype(variant.compute_dtype))
    )
    poison = torch.full(
        (*call.q.shape[:-1], variant.head_dim_vo), float("nan"), dtype=torch_dtype(variant.out_dtype), device=device
    )
    method = ops.decode if case.op == "decode" else ops.prefill
    options = call.lengths | call.stream
    asked = {"return_lse": True, "return_max": True} if variant.is_softmax else {}
    found = method(call.q, *call.kv, **options, params=call.params, out=poison, **asked)
    out, *rows = found if asked else (found,)
    if (
        variant.q_layout == "padded"
        and "qo_lens" not in call.lengths
        and call.q.shape[1:2] == (1,)
        and case.op == "decode"
    ):
        gate = {variant.gate: call.params[variant.gate][:, 0]} if variant.gate else {}
        squeezed = method(call.q[:, 0], *call.kv, **call.lengths, params=call.params | gate)
        assert torch.equal(squeezed, out[:, 0])
    seen = exact[2][exact[2].isfinite()].abs()
    largest_logit = max(1.0, float(seen.max())) if variant.is_softmax and seen.numel() else 1.0
    judge = _Judge(variant, largest_logit, _largest_magnitudes(variant, inputs))
    # Rounded once more where out has fewer bits.
    dtypes = (variant.out_dtype, variant.compute_dtype)
    coarsest = max(dtypes, key=lambda dtype: torch.finfo(torch_dtype(dtype)).eps)
    judge.compare("out", out, exact[0], eager[0], coarsest)
    for name, row, e, w in zip(("lse", "max"), rows, exact[1:], eager[1:], strict=False):
        judge.compare(name, row, e, w, dtype="fp32")
    if case.op == "backward":
        _judge_backward(judge, case, ops, call, variant, inputs, out, rows[0] if rows else None)
    return Verdict(judge.errors, tuple(judge.failures))


def _largest_magnitudes(variant: Variant, inputs: Inputs) -> float:
    """The largest sum of magnitudes of a logit's products; 0 where queries and keys are transformed before their product."""
    if variant.is_transformed:
        return 0.0
    q, k, _ = (x.double().abs() for x in reference.operands(variant, inputs))
    largest = 0.0
    for request in reference.requests(variant, inputs.batch):
        own, keys = q[request.rows.start :][: request.qo_len], k[request.keys].repeat_interleave(variant.group_size, 1)
        if len(own) and len(keys):
            largest = max(largest, float(torch.einsum("qhd,khd->hqk", own, keys).max()))
    return largest * abs(variant.sm_scale)


def _judge_backward(
    judge: _Judge,
    case: Case,
    ops: ag.Ops,
    call: Call,
    variant: Variant,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    generator = torch.Generator().manual_seed(case.seed + 2)
    dout = torch.randn(out.shape, generator=generator).to(out.dtype)
    dlse = None if lse is None or case.seed % 2 else torch.randn(lse.shape, generator=generator)
    exact = reference.backward(variant, inputs, dout, dlse)
    eager = reference.backward(variant, inputs, dout, dlse, torch_dtype(variant.dtype))
    moved = None if dlse is None else dlse.to(out.device)

    def run(deterministic: bool) -> tuple[Any, ...]:
        options = call.lengths | call.stream
        return ops.backward(
            dout.to(out.device),
            call.q,
            *call.kv,
            out,
            lse,
            dlse=moved,
            params=call.params,
            deterministic=deterministic,
            **options,
        )

    got = run(False)
    for name, g, e, w in zip(("dq", "dk", "dv"), got, exact, eager, strict=False):
        judge.compare(name, g, e, w)
    assert got[3].keys() == exact[3].keys()
    dtypes = {param.name: param.dtype for param in variant.params}
    for name, grad in got[3].items():
        judge.compare(f"d_{name}", grad, exact[3][name], eager[3][name], dtypes.get(name))
    if case.exact:
        first, second = run(True), run(True)
        for name, grad in first[3].items():
            judge.compare(f"d_{name} exact", grad, exact[3][name], eager[3][name], dtype=dtypes.get(name))
            if not torch.equal(grad, second[3][name]):
                judge.failures.append(f"d_{name}: deterministic runs differ")


class _Judge:
    def __init__(self, variant: Variant, largest_logit: float, magnitudes: float) -> None:
        self.variant, self.largest_logit, self.magnitudes = variant, largest_logit, magnitudes
        self.errors: dict[str, tuple[float, float]] = {}
        self.failures: list[str] = []

    def compare(
        self, name: str, got: torch.Tensor, exact: torch.Tensor, eager: torch.Tensor, dtype: str | None = None
    ) -> None:
        """Judge one tensor: infinities in the same places, no NaN, and errors within the bound."""
        got, exact = got.detach().double().cpu().reshape(exact.shape), exact.double()
        finite = exact.isfinite()
        if got.isnan().any() or not torch.equal(got[~finite], exact[~finite]):
            self.failures.append(
                f"{name}: {int(got.isnan().sum())} NaN, {int((got.isfinite() != finite).sum())} wrong infinities"
            )
            return
        if not finite.any():
            self.errors[name] = (0.0, 0.0)
            return
        error = float((got - exact)[finite].abs().max())
        eager_error = float((eager.double() - exact)[finite & eager.isfinite()].abs().max())
        epsilon = torch.finfo(torch_dtype(dtype or self.variant.compute_dtype)).eps
        factor = GRADIENT_FACTOR if name.startswith("d") else FACTOR
        is_logit = name in ("lse", "max")
        weighed = epsilon < 1e-6 and not is_logit
        rounding = epsilon * float(exact[finite].abs().max()) * (self.largest_logit if weighed else 1.0)
        summing = epsilon / 2 * self.magnitudes if is_logit else 0.0
        bound = factor * max(eager_error, rounding, summing, 1e-7 if epsilon < 1e-6 else 0.0)
        self.errors[name] = (error, bound)
        if not error <= bound:
            self.failures.append(f"{name}: error {error:.3g} above {bound:.3g}")
