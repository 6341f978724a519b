"""New tokens beside a paged prefix: one call over both equals one over all keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attngen as ag
from attngen.backends import reference
from attngen.dtypes import quantize
from attngen.ops.batching import collect_inputs
from attngen.ops.storage import Extras, unpack
from attngen.variant import normalize
from tests.acceptance.probes import Place
from tests.backends.triton_kernels import run_python

PREFIX, NEW = (37, 0, 16), (5, 9, 1)
HEADS = ag.GQA(num_qo_heads=4, num_kv_heads=2, head_dim=64)


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


PAGES = {
    "table": {"page_table": i32(6, 2, 5, -1, -1, -1, 1, -1, -1).view(3, 3), "kv_lens": i32(*PREFIX)},
    "csr": {
        "page_indptr": i32(0, 3, 3, 4),
        "kv_indices": i32(6, 2, 5, 1),
        "kv_last_page_len": i32(37 - 32, 0, 16),
    },
}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"mask": ag.Causal() & ag.SlidingWindow(left=11), "score_mods": (ag.ALiBi(),)},
        {"normalizer": ag.Softmax(sink=True), "output_gate": "gate"},
        {"normalizer": ag.Softmax(off_by_one=True)},
        {"normalizer": ag.Sigmoid(bias=-1.0)},
        {"rope": ag.Rope()},
    ],
    ids=["causal", "window-alibi", "sink-gate", "off-by-one", "sigmoid", "rope"],
)
@pytest.mark.parametrize("dtype", [None, "fp8_e4m3"])
@pytest.mark.parametrize("form", PAGES)
def test_a_prefix_and_new_tokens_are_seen_in_one_call(
    place: Place, form: str, fields: dict[str, Any], dtype: str | None
) -> None:
    compare(place.compile, place.device, form, fields, dtype)


@pytest.mark.parametrize("form", PAGES)
def test_the_interpreter_sees_both_in_one_call(form: str) -> None:
    script = (
        "import sys, attngen as ag; from tests.ops.test_mixed import compare; make = lambda spec: ag.compile(spec, "
        "target='interpret', backend='triton', ops=()); compare(make, 'cpu', sys.argv[1], {}, 'fp8_e4m3')"
    )
    run_python(script, form, TRITON_INTERPRET="1")


def compare(
    compile_spec: Callable[[ag.AttentionSpec], ag.Ops],
    device: str,
    form: str,
    fields: dict[str, Any],
    dtype: str | None,
) -> None:
    """The call over both against the oracle over all keys in one tensor."""
    torch.manual_seed(0)
    spec = ag.AttentionSpec(
        **{"heads": HEADS, "mask": ag.Causal(), "dtype": "fp32", "kv": ag.Paged(page_size=16, dtype=dtype), **fields}
    )
    storage = spec.kv.storages("fp32")[0]
    pool = [torch.randn(8, 16, 2, 64) for _ in range(2)]
    cache = tuple(quantize(x, storage)[0] for x in pool)
    table = PAGES["table"]["page_table"]
    q, k, v = (torch.randn(sum(NEW), n, 64) for n in (4, 2, 2))
    params = {"sink": torch.randn(4)} if "normalizer" in fields and spec.normalizer == ag.Softmax(sink=True) else {}
    if spec.output_gate:
        params["gate"] = torch.randn(sum(NEW), 4, 64)
    indptr = i32(0, 5, 14, 15)
    dense = ag.AttentionSpec.model_validate({**spec.model_dump(), "kv": ag.Ragged().model_dump()})
    whole = []
    for stored, fresh in zip(cache, (k, v), strict=True):
        old = [stored[table[b].clamp(min=0).long()].flatten(0, 1)[:n].float() for b, n in enumerate(PREFIX)]
        whole.append(torch.cat([x for pair in zip(old, fresh.split(NEW), strict=True) for x in pair]))
    variant = normalize(dense, "prefill")
    total = torch.tensor([0, *PREFIX]).cumsum(0).int() + indptr
    exact = reference.rows(
        variant,
        collect_inputs(
            variant, *unpack(variant, dense.kv, q, *whole, Extras(qo_indptr=indptr, kv_indptr=total)), params
        ),
    )
    got = compile_spec(spec).prefill(
        q.to(device),
        k.to(device),
        v.to(device),
        kv_cache=tuple(x.to(device) for x in cache),
        qo_indptr=indptr.to(device),
        kv_indptr=indptr.to(device),
        **{name: x.to(device) for name, x in PAGES[form].items()},
        params={name: x.to(device) for name, x in params.items()},
        **({"return_lse": True, "return_max": True} if variant.is_softmax else {}),
    )
    for found, want in zip(got if isinstance(got, tuple) else (got,), exact, strict=False):
        torch.testing.assert_close(found.cpu().double(), want, rtol=2e-5, atol=2e-6)


def test_what_cannot_be_merged_is_refused() -> None:
    tree = ag.AttentionSpec(heads=HEADS, mask=ag.Causal() & ag.Tree("ancestors"), dtype="fp32", kv=ag.Paged(16))
    dense = ag.AttentionSpec(heads=HEADS, mask=ag.Causal(), dtype="fp32")
    q = torch.randn(2, 4, 64)
    for spec, why in ((tree, "have a length each"), (dense, "declare kv=ag.Paged")):
        with pytest.raises(ag.UnsupportedError, match=why):
            ag.compile(spec, backend="reference").prefill(q, q[:, :2], q[:, :2], kv_cache=(q, q))


def test_what_a_prefix_gives_no_meaning_is_refused() -> None:
    spec = ag.AttentionSpec(heads=HEADS, mask=ag.Causal(), dtype="fp32", kv=ag.Paged(page_size=16))
    cache, q, k = torch.randn(3, 2, 16, 2, 64), torch.randn(2, 4, 64), torch.randn(2, 2, 64)
    given = {"kv_cache": cache, "qo_indptr": i32(0, 2), "kv_indptr": i32(0, 2), "page_table": i32(1).view(1, 1)}
    prefill = ag.compile(spec, backend="reference").prefill
    prefill(q, k, k, kv_lens=i32(5), **given)
    pages = {"page_indptr": i32(0, 1), "kv_indices": i32(1), "kv_last_page_len": i32(5)}
    listed = {name: x for name, x in given.items() if name != "page_table"} | pages
    prefill(q, k, k, **listed)
    for change, what in (
        ({"page_table": i32(1).view(1, 1)}, "kv_indices has no meaning here"),
        ({"kv_lens": i32(5)}, "kv_lens has no meaning here"),
        ({"page_indptr": None}, "page_indptr is missing"),
        ({"page_indptr": i32(0, 2)}, "page_indptr ends at 2"),
        ({"page_indptr": i32(0, 0, 1)}, "page_indptr describes 2 requests"),
        ({"kv_indices": None}, "kv_indices is missing"),
        ({"kv_indices": i32(3)}, "kv_indices names page 3"),
        ({"kv_last_page_len": None}, "kv_last_page_len is missing"),
        ({"kv_last_page_len": i32(17)}, "kv_last_page_len holds 17"),
    ):
        with pytest.raises(ag.ArgumentError, match=what):
            prefill(q, k, k, **(listed | change))
    with pytest.raises(ag.ArgumentError, match="page_indptr has no meaning here"):
        prefill(q, cache, qo_indptr=i32(0, 2), page_table=i32(1).view(1, 1), kv_lens=i32(5), page_indptr=i32(0, 1))
    for extra, what in (
        ({"kv_offset": i32(0)}, "kv_offset has no meaning here"),
        ({"seed": torch.zeros(1, dtype=torch.int64)}, "seed has no meaning here"),
        ({"out": torch.empty(1, 4, 64)}, "out has shape"),
    ):
        with pytest.raises(ag.ArgumentError, match=what):
            prefill(q, k, k, kv_lens=i32(5), **given, **extra)


class _Case:
    """A call of two new tokens behind five in a cache, of a spec with these fields."""

    def __init__(self, **fields: Any) -> None:
        torch.manual_seed(0)
        kv = ag.Paged(page_size=16)
        self.spec = ag.AttentionSpec(**{"heads": HEADS, "mask": ag.Causal(), "dtype": "fp32", "kv": kv, **fields})
        self.ops = ag.compile(self.spec, backend="reference")
        self.q, self.k, self.v = (torch.randn(2, n, 64) for n in (4, 2, 2))
        self.given: dict[str, Any] = {
            "kv_cache": tuple(torch.randn(3, 16, 2, 64) for _ in range(2)),
            "qo_indptr": i32(0, 2),
            "kv_indptr": i32(0, 2),
            "page_table": i32(1).view(1, 1),
            "kv_lens": i32(5),
        }

    def __call__(self, **change: Any) -> Any:
        q, k, v = (change.pop(name, getattr(self, name)) for name in "qkv")
        return self.ops.prefill(q, k, v, **(self.given | change))


@pytest.mark.parametrize("name", ["q", "k", "v", "kv_cache"])
def test_backward_says_that_it_reads_no_prefix(name: str) -> None:
    """As for a paged cache alone: the call works, and to ask for gradients is refused."""
    case = _Case()
    given = case.given["kv_cache"][1] if name == "kv_cache" else getattr(case, name)
    given.requires_grad_()
    out, lse = case(return_lse=True)
    with torch.no_grad():
        exact = case()
    assert torch.equal(out, exact)
    assert not exact.requires_grad
    assert out.requires_grad
    assert lse.requires_grad
    for result in (out, lse):
        with pytest.raises(ag.UnsupportedError, match="backward does not read a paged cache"):
            result.sum().backward(retain_graph=True)


def test_backward_says_that_it_reads_no_latents() -> None:
    heads = ag.MLA(num_qo_heads=4, head_dim_ckv=64, head_dim_kpe=32, head_dim_nope=32, head_dim_vo=32, absorbed=False)
    case = _Case(heads=heads)
    case.q, case.k, case.v = (torch.randn(2, 4, n) for n in (64, 64, 32))
    weights = {name: torch.randn(4, 64, 32).requires_grad_() for name in ("w_uk", "w_uv")}
    out = case(kv_cache=(torch.randn(3, 16, 64), torch.randn(3, 16, 32)), **weights)
    with pytest.raises(ag.UnsupportedError, match="backward does not read a paged cache"):
        out.sum().backward()


def test_a_gate_is_checked() -> None:
    case = _Case(output_gate="gate")
    gate = torch.randn(2, 4, 64)
    case(params={"gate": gate})
    for params, what in (
        ({}, "is missing"),
        ({"gate": torch.randn(1, 4, 1)}, r"has shape \[1, 4, 1\]"),
        ({"gate": gate.half()}, "has dtype torch.float16"),
        ({"gate": gate[..., :32].repeat_interleave(2, -1)[..., ::2]}, "has shape"),
    ):
        with pytest.raises(ag.ArgumentError, match=what) as error:
            case(params=params)
        assert error.value.where == "params['gate']"


def test_new_tokens_are_checked() -> None:
    case = _Case()
    for change, what in (
        ({"kv_indptr": i32(0, 1, 2)}, "kv_indptr describes 2 requests"),
        ({"q": torch.tensor(1.0)}, r"q has shape \[\]"),
        ({"k": torch.tensor(1.0)}, r"k has shape \[\]"),
        ({"v": case.v[:1]}, "v has shape"),
        ({"q": case.q.half()}, "q has dtype"),
    ):
        with pytest.raises(ag.ArgumentError, match=what):
            case(**change)


def test_a_prefix_traces() -> None:
    case = _Case()
    case.ops.warmup("prefix")
    assert torch.equal(torch.compile(case, fullgraph=True, backend="eager")(), case())
