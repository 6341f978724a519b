"""Calls of an op on random tensors of a given shape: what a tuning measures."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from attngen.dtypes import Storage, quantize
from attngen.errors import ArgumentError
from attngen.ir.params import OR_ONE, Param
from attngen.ops import append, calls
from attngen.ops.checks import torch_dtype
from attngen.ops.kernels import KernelOp
from attngen.ops.ops import captured, declaration
from attngen.ops.storage import Extras, unpack
from attngen.spec import AttentionSpec, Paged
from attngen.variant import OpName, Variant

_PERIOD = 1021  # tokens of a cache that differ; a prime, so that no tile lies like the one before it
_ALWAYS_ONE = frozenset({"decode", "append"})

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Shape:
    """Sizes of a call.

    Attributes:
        batch: requests.
        kv_len: keys of each.
        qo_len: queries, or new tokens, of each; 0: one in decode and append, as many as keys elsewhere.
    """

    batch: int
    kv_len: int
    qo_len: int = 0

    @staticmethod
    def parse(text: str) -> Shape:
        """Read ``batch=64,kv_len=8192`` or ``batch=64,kv_len=8192,qo_len=1``.

        Raises:
            ArgumentError: it is not written so.
        """
        pairs = [part.partition("=") for part in text.replace(" ", "").split(",")]
        given = {name: int(value) for name, _, value in pairs if value.isdecimal()}
        names = {field.name for field in fields(Shape)}
        if len(given) < len(pairs) or not {"batch", "kv_len"} <= given.keys() <= names or min(given.values()) < 1:
            raise ArgumentError(
                f"{text!r} is no shape",
                where="shapes",
                why=f"it gives positive numbers for {', '.join(sorted(names))}; qo_len may be left out",
                fix="write batch=64,kv_len=8192",
            )
        return Shape(**given)

    def queries(self, op: OpName) -> int:
        """Queries, or new tokens, of a request in a call of ``op``."""
        return self.qo_len or (1 if op in _ALWAYS_ONE else self.kv_len)

    def __str__(self) -> str:
        return f"batch={self.batch},kv_len={self.kv_len}" + (f",qo_len={self.qo_len}" if self.qo_len else "")


@dataclass(frozen=True)
class Call:
    """A call that any build of an op can make.

    Attributes:
        run: makes it, and gives back tensors that it wrote.
        results: makes it, with memory that holds nothing from before, and gives back every tensor that it wrote.
    """

    run: Callable[[KernelOp], Tensors]
    results: Callable[[KernelOp], Tensors]


def random_call(
    spec: AttentionSpec,
    variant: Variant,
    op: OpName,
    shape: Shape,
    device: torch.device,
    forward: KernelOp | None = None,
    params: Mapping[str, torch.Tensor] | None = None,
) -> Call:
    """A call of ``op`` on random numbers.

    Args:
        spec, variant: what it computes.
        shape: its sizes; all requests have the same.
        forward: for backward, the prefill that it follows.
        params: parameters whose values matter to the time it takes, like document ids; others are drawn: what a mask's primitives
            give as examples, and numbers between 0 and 1.
    """
    made = _Maker(spec, variant, op, shape, device, params or {})
    if op == "append":
        return made.append()
    q, k, v, extras = made.inputs()
    if op != "backward":

        def run(kernels: KernelOp) -> Tensors:
            return calls.forward(kernels, q, k, v, extras, made.params, None, want_max=False, partial=False)[:2]

        return Call(run, run)
    assert forward is not None
    out, lse, _ = calls.forward(forward, q, k, v, extras, made.params, None, want_max=False, partial=False)
    dout = made.normal(*out.shape).to(out.dtype)

    def backward(kernels: KernelOp) -> Tensors:
        stats = lse if variant.is_softmax else None
        dq, dk, dv, dparams = calls.backward(kernels, dout, q, k, v, out, stats, None, extras, made.params)
        return (dq, dk, dv, *dparams.values())

    return Call(backward, backward)


class _Maker:
    """Tensors of one call, drawn from a generator of their own."""

    def __init__(
        self,
        spec: AttentionSpec,
        variant: Variant,
        op: OpName,
        shape: Shape,
        device: torch.device,
        given: Mapping[str, torch.Tensor],
    ) -> None:
        self.spec, self.variant, self.device = spec, variant, device
        self.batch, self.qo_len, self.kv_len = shape.batch, shape.queries(op), shape.kv_len
        self._generator = torch.Generator(device).manual_seed(0)
        self.params = self._parameters(given)

    def normal(self, *sizes: int) -> torch.Tensor:
        """fp32, standard normal."""
        return torch.randn(sizes, generator=self._generator, device=self.device)

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Extras]:
        """q, k, v and everything else, as :func:`attngen.ops.calls.forward` takes them."""
        variant = self.variant
        padded = variant.q_layout == "padded"
        lead = (self.batch, self.qo_len) if padded else (self.batch * self.qo_len,)
        q = self.normal(*lead, variant.num_qo_heads, variant.head_dim_qk).to(torch_dtype(variant.dtype))
        given: dict[str, torch.Tensor] = {}
        if not padded:
            given["qo_indptr"] = self._starts(self.qo_len)
        if variant.kv_layout == "ragged":
            given["kv_indptr"] = self._starts(self.kv_len)
        if variant.kv_layout == "paged":
            given |= {
                "page_table": self._page_table(),
                "kv_lens": self._integers(torch.full((self.batch,), self.kv_len)),
            }
        if variant.dropout:
            given["seed"] = torch.ones(1, dtype=torch.int64, device=self.device)
        cache, scales = self.cache()
        apart = variant.value_source == "values" and variant.kv_layout != "paged"
        k, v = cache if apart else (cache, None)
        return unpack(variant.signature, declaration(self.spec), q, k, v, Extras(**given, **scales))

    def append(self) -> Call:
        """New tokens for the last slots of every request."""
        if self.qo_len > self.kv_len:
            raise ArgumentError(
                f"{self.qo_len} new tokens have no room",
                where="shapes",
                why=f"a request has {self.kv_len} slots",
                fix="give kv_len at least as large as qo_len",
            )
        variant, signature = self.variant, self.variant.signature
        count, heads = self.batch * self.qo_len, variant.num_kv_heads
        absorbed = variant.value_source == "keys"
        shape = (count, variant.head_dim_qk) if absorbed else (count, heads, variant.head_dim_qk)
        dtype = torch_dtype(variant.dtype)
        values = None if absorbed else self.normal(count, heads, variant.head_dim_vo).to(dtype)
        new = append.unpack_new(signature, self.normal(*shape).to(dtype), values)
        cache, scales = self.cache()
        slots = append.unpack_slots(
            signature, declaration(self.spec), new, cache, scales.get("k_scale"), scales.get("v_scale")
        )
        last = torch.arange(self.kv_len - self.qo_len, self.kv_len, device=self.device)
        if variant.kv_layout == "paged":
            page = self._page_table().long()[:, last // variant.page_size]
            slot = page * variant.page_size + last % variant.page_size
        else:
            slot = torch.arange(self.batch, device=self.device)[:, None] * self.kv_len + last
        positions = self._integers(last.repeat(self.batch)) if variant.rotates else None
        places = append.Places(slot_mapping=slot.flatten(), positions=positions)
        written = append.written(signature, slots)

        def run(kernels: KernelOp) -> Tensors:
            append.run(kernels, new, slots, places, self.params)
            return tuple(written.values())

        def results(kernels: KernelOp) -> Tensors:
            for tensor in written.values():
                tensor.zero_()
            return tuple(tensor.clone() for tensor in run(kernels))

        return Call(run, results)

    def cache(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """Keys and values as users pass them, and their factors by name."""
        variant, scales = self.variant, {}
        if variant.value_source == "keys":
            joined, scale = self._stored(1, variant.head_dim_qk, variant.k_storage)
            if scale is not None:
                scales["k_scale"] = scale.squeeze(-1) if variant.k_storage.scale == "token" else scale
            bare = tuple(tensor.squeeze(len(self._tokens())) for tensor in joined)
            return (bare if variant.k_storage.block else bare[0]), scales
        parts = []
        sides = ("k", variant.head_dim_qk, variant.k_storage), ("v", variant.head_dim_vo, variant.v_storage)
        for name, width, storage in sides:
            part, scale = self._stored(variant.num_kv_heads, width, storage)
            parts.append(part if storage.block else part[0])
            if scale is not None:
                scales[f"{name}_scale"] = scale
        return tuple(parts), scales

    def _stored(self, heads: int, width: int, storage: Storage) -> tuple[Tensors, torch.Tensor | None]:
        """Data, block scales if there are any, and factors, in the layout of the cache."""
        tokens = self._tokens()
        number = tokens[0] * tokens[-1] if len(tokens) > 1 else tokens[0]
        numbers = self.normal(min(number, _PERIOD), heads, width)
        if not storage.is_quantized:
            return (self._laid_out(numbers.to(torch_dtype(storage.dtype)), number),), None
        scale = None
        if storage.scale in ("tensor", "head"):
            top = numbers.abs().amax() if storage.scale == "tensor" else numbers.abs().amax((0, 2))
            scale = torch.ones_like(top) if storage.block else top / storage.row.largest
        data, blocks, factors = quantize(numbers, storage, scale)
        parts = tuple(self._laid_out(part, number) for part in (data, blocks) if part is not None)
        return parts, scale if factors is None else self._laid_out(factors, number)

    def _laid_out(self, rows: torch.Tensor, number: int) -> torch.Tensor:
        """``[tokens, heads, ...]``, repeated to ``number`` tokens, in the shape of the cache."""
        index = torch.arange(number, device=self.device) % len(rows)
        as_bytes = rows.view(torch.uint8) if rows.element_size() == 1 else rows
        tensor = as_bytes[index].view(rows.dtype).reshape(*self._tokens(), *rows.shape[1:])
        kv = self.spec.kv
        heads_first = self.variant.kv_layout == "paged" and isinstance(kv, Paged) and kv.layout == "HND"
        if heads_first and self.variant.value_source == "values":
            return tensor.transpose(1, 2).contiguous()
        return tensor

    def _tokens(self) -> tuple[int, ...]:
        """Dims of the cache before the heads."""
        if self.variant.kv_layout == "padded":
            return self.batch, self.kv_len
        if self.variant.kv_layout == "ragged":
            return (self.batch * self.kv_len,)
        return self.batch * self._pages, self.variant.page_size

    @property
    def _pages(self) -> int:
        """Pages of a request."""
        return -(-self.kv_len // self.variant.page_size)

    def _page_table(self) -> torch.Tensor:
        order = torch.randperm(self.batch * self._pages, generator=torch.Generator().manual_seed(0))
        return self._integers(order.view(self.batch, self._pages))

    def _starts(self, length: int) -> torch.Tensor:
        return self._integers(torch.arange(self.batch + 1) * length)

    def _integers(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.device, torch.int32)

    def _parameters(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        variant = self.variant
        names = {param.name for param in variant.params}
        known = {name: tensor for name, tensor in {**captured(self.spec), **given}.items() if name in names}
        if names - known.keys():
            examples = sample_parameters(self.spec, self.qo_len, self.kv_len, self.batch)
            known = {name: tensor for name, tensor in examples.items() if name in names} | known
        made = {param.name: known.get(param.name, self._drawn(param)) for param in variant.params}
        if variant.gate and variant.gate in given:
            made[variant.gate] = given[variant.gate]
        elif variant.gate:
            lead = (self.batch, self.qo_len) if variant.q_layout == "padded" else (self.batch * self.qo_len,)
            gate = self.normal(*lead, variant.num_qo_heads, variant.head_dim_vo)
            made[variant.gate] = gate.to(torch_dtype(variant.compute_dtype))
        return {name: tensor.to(self.device) for name, tensor in made.items()}

    def _drawn(self, param: Param) -> torch.Tensor:
        """Numbers between 0 and 1, zeros of integers and truth values; free axes are as long as the keys."""
        sizes = _sizes(self.spec, self.batch, self.qo_len, self.kv_len)
        shape = [
            dim if isinstance(dim, int) else sizes.get(dim.removesuffix(OR_ONE), self.kv_len) for dim in param.dims
        ]
        numbers = torch.rand(shape, generator=self._generator, device=self.device)
        return (numbers if param.expr_type == "f32" else torch.zeros_like(numbers)).to(torch_dtype(param.dtype))


def _sizes(spec: AttentionSpec, batch: int, qo_len: int, kv_len: int) -> dict[str, int]:
    return {
        "batch": batch,
        "num_qo_heads": spec.heads.num_qo_heads,
        "num_kv_heads": spec.heads.num_kv_heads,
        "max_qo_len": qo_len,
        "max_kv_len": kv_len,
    }


def sample_parameters(spec: AttentionSpec, qo_len: int, kv_len: int, requests: int = 2) -> dict[str, torch.Tensor]:
    """What the primitives of the spec's mask give as examples, by name; parameters of custom masks have none.

    Args:
        spec: the declaration.
        qo_len, kv_len: lengths of every request.
        requests: how many there are.
    """
    samples = spec.mask.sample(_sizes(spec, requests, qo_len, kv_len))
    dtypes = {param.name: param.dtype for param in spec.mask.params()}
    return {name: torch.tensor(values).to(torch_dtype(dtypes[name])) for name, values in samples.items()}


def read_parameter(text: str) -> tuple[str, torch.Tensor]:
    """Name and tensor of ``NAME=FILE.pt``; the file is read as data, never executed."""
    name, _, file = text.partition("=")
    try:
        tensor = torch.load(file, weights_only=True, map_location="cpu")
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        why = str(error).partition("\n")[0]
        raise ArgumentError(f"cannot read {text!r}", where="param", why=why, fix="pass NAME=FILE.pt") from None
    if not isinstance(tensor, torch.Tensor):
        why = f"it holds a {type(tensor).__name__}"
        raise ArgumentError(f"{file} holds no tensor", where="param", why=why, fix="torch.save(tensor, file)")
    return name, tensor
