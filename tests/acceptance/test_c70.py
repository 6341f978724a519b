"""C70: the op is opaque to Dynamo, so that ``fullgraph=True`` fails.

Extras are tensors everywhere, so that no ``max_seqlen`` exists.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import attngen as ag
from tests.acceptance.probes import TRITON, Place, declare, noise, pack

DENSE = declare(4, 2, dtype="fp32", mask=ag.Causal())
RAGGED = declare(4, 2, dtype="fp32", mask=ag.Causal(), kv=ag.Ragged())
PAGED = declare(4, 2, dtype="fp32", mask=ag.Causal(), kv=ag.Paged(page_size=16))
EACH_SPEC = pytest.mark.parametrize("spec", [DENSE, RAGGED], ids=["contiguous", "ragged"])


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch.compiler.reset()


def inputs(
    place: Place, spec: ag.AttentionSpec, op: str = "prefill"
) -> tuple[tuple[Any, ...], dict[str, torch.Tensor]]:
    shapes = [(128, 128)] if spec is DENSE else [(100, 100), (28, 40)]
    call = pack(spec, op, [noise(spec, 1 if op == "decode" else n, m) for n, m in shapes], place.device, filler=0.0)
    return (call.q, *call.kv), call.lengths


def compiled(fn: Callable[..., Any], backend: str = "aot_eager") -> Callable[..., Any]:
    return torch.compile(fn, fullgraph=True, backend=backend)


def assert_equal(got: Any, want: Any) -> None:
    assert len(got) == len(want)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("spec", "op"), [(DENSE, "prefill"), (RAGGED, "prefill"), (PAGED, "decode"), (DENSE, "decode")]
)
def test_c70_inference(kernels: Place, spec: ag.AttentionSpec, op: str) -> None:
    ops = kernels.compile(spec)
    tensors, lengths = inputs(kernels, spec, op)

    def run(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return getattr(ops, op)(*args, **lengths, return_lse=True)

    with torch.inference_mode():
        assert_equal(compiled(run)(*tensors), run(*tensors))


@EACH_SPEC
def test_c70_training(kernels: Place, spec: ag.AttentionSpec) -> None:
    ops = kernels.compile(spec)
    tensors, lengths = inputs(kernels, spec)

    def loss(*args: torch.Tensor) -> torch.Tensor:
        out, lse = ops.attention(*args, **lengths, return_lse=True)
        return out.square().sum() + lse.sum()

    found = []
    for fn in (loss, compiled(loss)):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        value = fn(*leaves)
        value.backward()
        found.append([value.detach(), *(leaf.grad for leaf in leaves)])
    assert_equal(found[1], found[0])


@EACH_SPEC
def test_c70_explicit_backward(kernels: Place, spec: ag.AttentionSpec) -> None:
    ops = kernels.compile(spec)
    tensors, lengths = inputs(kernels, spec)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, lse = ops.prefill(q, k, v, **lengths, return_lse=True)
        return ops.backward(2 * out, q, k, v, out, lse, **lengths)[:3]

    with torch.no_grad():
        assert_equal(compiled(run)(*tensors), run(*tensors))


def test_c70_tracing_reads_no_addresses() -> None:
    """Meta tensors have none, like a GPU's while a graph is traced."""

    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    table, lens = meta(2, 3, dtype=torch.int32), meta(2, dtype=torch.int32)
    stored = declare(4, 2, dtype="fp32", kv=ag.Paged(page_size=16, dtype="int8", scale="tensor"))
    prefill, ops = ag.compile(DENSE, backend="cpp").prefill, ag.compile(stored, backend="cpp")
    cache = (meta(6, 16, 2, 64, dtype=torch.int8), meta(6, 16, 2, 64, dtype=torch.int8))
    out, lse = compiled(lambda *args: prefill(*args, return_lse=True), "eager")(*(meta(1, 8, n, 64) for n in (4, 2, 2)))
    assert (out.shape, lse.shape) == ((1, 8, 4, 64), (1, 8, 4))
    decoded = compiled(lambda q, c: ops.decode(q, c, page_table=table, kv_lens=lens), "eager")(meta(2, 4, 64), cache)
    assert decoded.shape == (2, 4, 64)
    slots = meta(2, dtype=torch.int64)
    compiled(lambda k, v, c: ops.append(k, v, c, slot_mapping=slots), "eager")(meta(2, 2, 64), meta(2, 2, 64), cache)


@pytest.mark.gpu
def test_c70_addresses_are_checked_when_a_graph_runs() -> None:
    ops = TRITON.compile(DENSE)
    run = compiled(ops.prefill)
    (q, k, v), _ = inputs(TRITON, DENSE)
    run(q, k, v)
    memory = torch.zeros(q.numel() + 1, device="cuda")
    with pytest.raises(ag.ArgumentError, match="not aligned to 16 bytes"):
        run(memory[1:].view(q.shape), k, v)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores .* not enabled:UserWarning")
def test_c70_default_compiler(kernels: Place) -> None:
    ops = kernels.compile(DENSE)
    tensors, _ = inputs(kernels, DENSE)

    def run(*args: torch.Tensor) -> tuple[torch.Tensor]:
        return (ops.prefill(*args),)

    with torch.inference_mode():
        assert_equal(compiled(run, "inductor")(*tensors), run(*tensors))


class Recorder(TorchDispatchMode):
    """Keeps the calls of attngen's registered ops."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, tuple[Any, ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "attngen":
            self.calls[func] = args
        return func(*args, **(kwargs or {}))


@EACH_SPEC
def test_c70_opcheck(kernels: Place, spec: ag.AttentionSpec) -> None:
    ops = kernels.compile(spec)
    tensors, lengths = inputs(kernels, spec)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    with Recorder() as recorder:
        out, lse = ops.attention(*leaves, **lengths, return_lse=True)
        (out.sum() + lse.sum()).backward()
    assert set(recorder.calls) == {torch.ops.attngen.forward.default, torch.ops.attngen.backward.default}
    torch.library.opcheck(torch.ops.attngen.forward.default, recorder.calls[torch.ops.attngen.forward.default])
    once = tree_map_only(torch.Tensor, torch.Tensor.detach, recorder.calls[torch.ops.attngen.backward.default])
    torch.library.opcheck(torch.ops.attngen.backward.default, once)  # it has no derivative of its own


def test_c70_ops_of_one_spec_live_on_their_own(kernels: Place) -> None:
    kept, other = (ag.compile(DENSE, backend=kernels.backend) for _ in range(2))
    tensors, _ = inputs(kernels, DENSE)
    run = compiled(kept.attention)
    want = run(*tensors)
    del other
    gc.collect()
    assert torch.equal(kept.attention(*tensors), want)
    assert torch.equal(run(*tensors), want)
