"""Bad calls: each is refused before anything runs, with a text that says what, where, why and what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import attngen as ag
from attngen.ops.checks import misalignment, readable

HEADS = ag.GQA(num_qo_heads=4, num_kv_heads=2, head_dim=32)
CONTIGUOUS = ag.AttentionSpec(heads=HEADS, mask=ag.Causal(), dtype="fp32")
RAGGED = ag.AttentionSpec(heads=HEADS, mask=ag.Causal(), dtype="fp32", kv=ag.Ragged())
PAGED = ag.AttentionSpec(heads=HEADS, mask=ag.Causal(), dtype="fp32", kv=ag.Paged(page_size=4))


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def dense(**changes: object) -> dict[str, object]:
    return {"q": torch.randn(2, 3, 4, 32), "k": torch.randn(2, 5, 2, 32), "v": torch.randn(2, 5, 2, 32)} | changes


def ragged(**changes: object) -> dict[str, object]:
    tensors = {"q": torch.randn(5, 4, 32), "k": torch.randn(7, 2, 32), "v": torch.randn(7, 2, 32)}
    return tensors | {"qo_indptr": i32(0, 2, 5), "kv_indptr": i32(0, 3, 7)} | changes


def paged(**changes: object) -> dict[str, object]:
    cache = (torch.randn(6, 4, 2, 32), torch.randn(6, 4, 2, 32))
    table = {"page_table": i32(0, 1, 2, 3).view(2, 2), "kv_lens": i32(8, 5)}
    return {"q": torch.randn(5, 4, 32), "k": cache, "qo_indptr": i32(0, 2, 5)} | table | changes


CASES: list[tuple[ag.AttentionSpec, Callable[[], dict[str, object]], str, str, str]] = [
    (CONTIGUOUS, lambda: dense(q=torch.randn(2, 3, 4, 32).half()), "q", "q has dtype torch.float16", "declares fp32"),
    (CONTIGUOUS, lambda: dense(q=torch.randn(2, 3, 5, 32)), "q", "q has shape [2, 3, 5, 32]", "= [*, *, 4, 32]"),
    (
        CONTIGUOUS,
        lambda: dense(q=torch.randn(3, 4, 32)),
        "q",
        "q has shape [3, 4, 32]",
        "[batch, qo_len, num_qo_heads, head_dim_qk]",
    ),
    (CONTIGUOUS, lambda: dense(k=torch.randn(3, 5, 2, 32)), "k", "k has shape [3, 5, 2, 32]", "= [2, *, 2, 32]"),
    (
        CONTIGUOUS,
        lambda: dense(v=torch.randn(2, 4, 2, 32)),
        "v",
        "v has shape [2, 4, 2, 32]",
        "the keys beside it have 2 x 5 slots",
    ),
    (CONTIGUOUS, lambda: dense(v=None), "v", "v is missing", "a tensor [batch, kv_len, num_kv_heads, head_dim]"),
    (CONTIGUOUS, lambda: dense(k=torch.randn(2, 5, 2, 32, device="meta")), "k", "k is on meta", "q is on cpu"),
    (
        CONTIGUOUS,
        lambda: dense(k=torch.randn(2, 5, 32, 2).transpose(2, 3)),
        "k",
        "k has stride 2 in its last dim",
        ".contiguous()",
    ),
    (CONTIGUOUS, lambda: dense(kv_lens=i32(5, 6)), "kv_lens", "kv_lens holds 6", "k is padded to 5 tokens"),
    (CONTIGUOUS, lambda: dense(qo_lens=i32(-1, 3)), "qo_lens", "qo_lens holds -1", "not negative"),
    (CONTIGUOUS, lambda: dense(kv_lens=torch.tensor([5, 5])), "kv_lens", "kv_lens has dtype torch.int64", "int32"),
    (
        CONTIGUOUS,
        lambda: dense(qo_indptr=i32(0, 3, 6)),
        "qo_indptr",
        "qo_indptr has no meaning here",
        "kv_lens, qo_lens",
    ),
    (
        CONTIGUOUS,
        lambda: dense(params={"x": torch.zeros(1)}),
        "params['x']",
        "params holds 'x'",
        "declares no parameter",
    ),
    (CONTIGUOUS, lambda: dense(lse_base="2"), "lse_base", "lse_base is '2'", "'log2'"),
    (CONTIGUOUS, lambda: dense(out=torch.empty(2, 3, 4, 16)), "out", "out has shape [2, 3, 4, 16]", "= [2, 3, 4, 32]"),
    (
        RAGGED,
        lambda: ragged(qo_indptr=i32(0, 4, 2)),
        "qo_indptr[2]",
        "qo_indptr decreases from 4 to 2 at request 1",
        "cumulative sum",
    ),
    (RAGGED, lambda: ragged(qo_indptr=i32(1, 2, 5)), "qo_indptr", "qo_indptr[0] is 1", "starts at 0"),
    (RAGGED, lambda: ragged(kv_indptr=i32(0, 3, 6)), "kv_indptr[2]", "kv_indptr ends at 6", "has 7 rows"),
    (
        RAGGED,
        lambda: ragged(kv_indptr=i32(0, 7)),
        "kv_indptr",
        "kv_indptr describes 1 requests",
        "the queries are of 2",
    ),
    (RAGGED, lambda: ragged(qo_indptr=None), "qo_indptr", "qo_indptr is missing", "[batch + 1]"),
    (
        PAGED,
        lambda: paged(kv_lens=i32(8, 9)),
        "kv_lens",
        "kv_lens holds 9",
        "page_table has 2 columns of 4 tokens, room for 8",
    ),
    (
        PAGED,
        lambda: paged(page_table=i32(0, 6, 2, 3).view(2, 2)),
        "page_table",
        "page_table names page 6",
        "pages 0 .. 5",
    ),
    (PAGED, lambda: paged(page_table=None, kv_lens=None), "page_table", "no pages are given", "kv_last_page_len"),
    (
        PAGED,
        lambda: paged(k=torch.randn(6, 3, 4, 2, 32)),
        "kv_cache",
        "kv_cache has shape [6, 3, 4, 2, 32]",
        "= [*, 2, 4, 2, 32]",
    ),
    (PAGED, lambda: paged(v=torch.randn(6, 4, 2, 32)), "v", "v is given beside a paged cache", "(k_cache, v_cache)"),
    (
        PAGED,
        lambda: paged(
            page_table=None, kv_lens=None, kv_indptr=i32(0, 2, 5), kv_indices=i32(0, 1), kv_last_page_len=i32(4, 4)
        ),
        "kv_indptr",
        "kv_indptr ends at 5",
        "kv_indices has 2 pages",
    ),
]


@pytest.mark.parametrize(("spec", "arguments", "where", "what", "hint"), CASES, ids=[case[3][:40] for case in CASES])
def test_bad_calls_are_explained(
    spec: ag.AttentionSpec, arguments: Callable[[], dict[str, object]], where: str, what: str, hint: str
) -> None:
    with pytest.raises(ag.ArgumentError) as error:
        ag.compile(spec, backend="reference").prefill(**arguments())
    assert error.value.where == where
    assert error.value.what == what
    assert hint in str(error.value)
    assert error.value.fix


def test_backward_checks_its_tensors() -> None:
    ops = ag.compile(CONTIGUOUS, backend="reference")
    call = dense()
    out, lse = ops.prefill(**call, return_lse=True)
    with pytest.raises(ag.ArgumentError, match=r"lse has shape \[2, 4, 3\]"):
        ops.backward(out, **call, out=out, lse=lse.transpose(1, 2))
    with pytest.raises(ag.ArgumentError, match=r"dout has dtype torch\.float16"):
        ops.backward(out.half(), **call, out=out, lse=lse)


def test_out_must_be_memory_of_its_own() -> None:
    ops = ag.compile(CONTIGUOUS, backend="reference")
    call = dense()
    with pytest.raises(ag.ArgumentError, match="out has stride 0"):
        ops.prefill(**call, out=torch.empty(1, 3, 4, 32).expand(2, 3, 4, 32))
    with pytest.raises(ag.ArgumentError, match="out requires grad"):
        ops.prefill(**call, out=torch.empty(2, 3, 4, 32, requires_grad=True))
    with torch.no_grad():
        ops.prefill(**call, out=torch.empty(2, 3, 4, 32, requires_grad=True))


def test_what_is_no_tensor_is_named() -> None:
    ops = ag.compile(CONTIGUOUS, backend="reference")
    call = dense()
    for attend in (ops.prefill, ops.attention):
        with pytest.raises(ag.ArgumentError, match="q is a list"):
            attend(**call | {"q": [1.0]})
        with pytest.raises(ag.ArgumentError, match="params is a list"):
            attend(**call, params=[call["q"]])
    with pytest.raises(ag.ArgumentError, match=r"params\['slopes'\] is a float"):
        ops.attention(**call, params={"slopes": 1.0})
    with pytest.raises(ag.ArgumentError, match="spec is a str") as error:
        ag.compile("gpt2")
    assert error.value.fix == "pass ag.load_spec('gpt2')"


def test_gradients_in_any_layout_can_be_read() -> None:
    narrow = torch.randn(2, 3, 4, 33).narrow(-1, 1, 32)
    assert misalignment(narrow) == "stride 33"
    assert misalignment(torch.randn(2, 33)[:, 1:].contiguous()) is None
    columns = torch.randn(2, 32, 4, 3).transpose(1, 3)
    for tensor in (narrow, columns, torch.ones(()).expand(2, 3, 4, 32)):
        assert torch.equal(readable(tensor), tensor)
        assert readable(tensor).stride(-1) == 1
    assert readable(narrow) is narrow, "CPU kernels read any row in place"


def test_names_of_ops_are_checked_everywhere() -> None:
    ops = ag.compile(CONTIGUOUS, backend="cpp")
    for call in (ops.warmup, ops.op):
        with pytest.raises(ag.UnsupportedError, match="no op 'attention'") as error:
            call("attention")
        assert error.value.fix == "use prefill, decode, backward, append"
    with pytest.raises(ag.UnsupportedError, match="no backend serves meta tensors"):
        ops.warmup(device="meta")


def test_unsupported_combinations_name_what_would_work() -> None:
    with pytest.raises(ag.UnsupportedError, match="unknown target 'cuda:sm70'") as error:
        ag.compile(CONTIGUOUS, target="cuda:sm70")
    assert "cuda:sm90a" in error.value.fix
    with pytest.raises(ag.UnsupportedError, match="no backend 'cutlass'"):
        ag.compile(CONTIGUOUS, backend="cutlass")
    with pytest.raises(ag.UnsupportedError, match="no op 'train'"):
        ag.compile(CONTIGUOUS, ops=("train",))
    with pytest.raises(ag.UnsupportedError, match="backward does not read a paged cache"):
        ag.compile(PAGED, ops=("backward",), backend="cpp")
    with pytest.raises(ag.UnsupportedError, match="cpp"):
        ag.compile(CONTIGUOUS, target="cuda:sm90a", backend="cpp")


def test_ops_of_one_target_refuse_other_devices() -> None:
    ops = ag.compile(CONTIGUOUS, target="cuda:sm90a", ops=(), backend="triton")
    with pytest.raises(ag.ArgumentError, match="q is on cpu") as error:
        ops.prefill(**dense())
    assert "compiled for cuda:sm90a" in error.value.why
