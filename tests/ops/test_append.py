"""Writing the cache: quantized bit by bit, into the right slots and nowhere else, and read back by decode."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import attngen as ag
from attngen.compiler import plan_op, render_kernel
from attngen.dtypes import dequantize, quantize
from attngen.ops import append
from attngen.target import Target
from tests.acceptance.probes import Place
from tests.ops.append_cases import Case, cases, check

ROOT = Path(__file__).resolve().parents[2]
CASES = [case for number, dtype in enumerate(("bf16", "fp16", "fp32")) for case in cases(dtype)[number::3]]
HEADS = ag.GQA(num_qo_heads=4, num_kv_heads=2, head_dim=64)
LENS = (13, 22)
SLOTS = {"slot_mapping": torch.arange(3)}


def declare(**fields: Any) -> ag.AttentionSpec:
    return ag.AttentionSpec(**{"heads": HEADS, "dtype": "fp32", "kv": ag.Paged(8), "mask": ag.Causal(), **fields})


def pages(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(6, 8, 2, 64, dtype=dtype), torch.zeros(6, 8, 2, 64, dtype=dtype)


def tokens(count: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 2, 64), torch.randn(count, 2, 64)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_storage_is_written_bit_by_bit(place: Place, case: Case) -> None:
    check(case, place.compile(case.spec), place.device)


def test_blocks_with_infinity_are_written_as_they_are_defined(kernels: Place) -> None:
    spec = ag.AttentionSpec(heads=ag.MHA(1, 64), kv=ag.Paged(4, dtype="mxfp4"), dtype="fp32")
    x = torch.ones(2, 1, 64)
    x[0, 0, 3], x[1, 0, 40] = float("inf"), -float("inf")
    data, blocks, _ = quantize(x, spec.kv.storages("fp32")[0])
    assert blocks is not None
    caches = [(torch.zeros(2, 4, 1, 32, dtype=torch.uint8), torch.zeros(2, 4, 1, 2, dtype=torch.uint8)) for _ in "kv"]
    moved = tuple(tuple(part.to(kernels.device) for part in cache) for cache in caches)
    new = x.to(kernels.device)
    kernels.compile(spec).append(new, new, moved, slot_mapping=torch.tensor([1, 5], device=kernels.device))
    for cache in moved:
        assert torch.equal(cache[0].cpu().view(8, 1, 32)[[1, 5]], data)
        assert torch.equal(cache[1].cpu().view(8, 1, 2)[[1, 5]], blocks)


def test_triton_writes_the_same_under_its_interpreter() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "tests.ops.append_cases"]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert result.stdout.splitlines()[-1:] == [f"{len(cases('fp16'))} cases"], (
        result.stdout[-4000:] + result.stderr[-2000:]
    )
    assert len(result.stdout.splitlines()) == 1, result.stdout[-4000:]


@pytest.mark.parametrize("target", ["cuda:sm90a", "cuda:sm80", "hip:gfx942"])
@pytest.mark.parametrize("stored", [{"dtype": "fp8_e4m3"}, {"dtype": "nvfp4"}, {"dtype": "int4", "zero_point": True}])
def test_kernels_build_for_other_devices(target: str, stored: dict[str, Any]) -> None:
    spec = declare(dtype="bf16", kv=ag.Paged(16, **stored), rope=ag.Rope(keys="append"))
    (kernel,) = ag.compile(spec, target=target, ops=("append",)).op("append").kernels
    assert kernel.binary.read_bytes()[:4] == b"\x7fELF"


def requests() -> dict[str, torch.Tensor]:
    positions = torch.cat([torch.arange(n) for n in LENS]).int()
    return {"positions": positions, "batch_indices": torch.arange(2).repeat_interleave(torch.tensor(LENS)).int()}


@pytest.mark.parametrize(
    "rope", [ag.Rope(), ag.Rope(dim=32, interleaved=True), ag.Rope(dim=32, table="cs")], ids=["whole", "part", "table"]
)
@pytest.mark.parametrize(
    "kv", [ag.Paged(8), ag.Contiguous(), ag.Paged(8, dtype="int8", scale="token")], ids=["paged", "contiguous", "int8"]
)
def test_keys_turn_when_they_are_written_or_when_they_are_read(place: Place, rope: ag.Rope, kv: Any) -> None:
    """Both give the same attention; int8 keys are rounded before or after they turn."""
    torch.manual_seed(0)
    k, v = tokens(sum(LENS))
    q, params = torch.randn(2, 4, 64), {"cs": torch.randn(40, 32)} if rope.table else {}
    table = torch.tensor([[4, 2, 0], [1, 5, 3]]).int()
    lead = (6, 8, 2) if kv.kind == "paged" else (2, 24, 2)
    found = []
    for keys in ("append", "load"):
        spec = declare(kv=kv, rope=rope.model_copy(update={"keys": keys}))
        ops = place.compile(spec)
        paged = {"page_table": table} if kv.kind == "paged" else {}
        cache = tuple(torch.zeros(*lead, 64, dtype=torch.int8 if kv.dtype else torch.float32) for _ in range(2))
        scales = {f"{side}_scale": torch.full(lead, float("nan")) for side in "kv"} if kv.scale else {}
        moved = {name: x.to(place.device) for name, x in (paged | scales).items()}
        cache = tuple(x.to(place.device) for x in cache)
        own = {name: x.to(place.device) for name, x in params.items()}
        where = {name: x.to(place.device) for name, x in requests().items()}
        ops.append(
            k.to(place.device), v.to(place.device), cache, **where, **moved, params=own if keys == "append" else {}
        )
        kv_lens = torch.tensor(LENS).int().to(place.device)
        given = (cache,) if kv.kind == "paged" else cache
        found.append(ops.decode(q.to(place.device), *given, kv_lens=kv_lens, **moved, params=own).cpu())
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0.03 if kv.dtype else 2e-6)


def test_fresh_keys_turn_on_load_whatever_the_cache_holds() -> None:
    q, k, v = torch.randn(1, 5, 4, 64), *(torch.randn(1, 5, 2, 64) for _ in range(2))
    found = [
        ag.compile(declare(kv=ag.Contiguous(), rope=ag.Rope(keys=keys)), backend="cpp").prefill(q, k, v)
        for keys in ("append", "load")
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [None, "fp8_e4m3", "int8", "int4", "nvfp4", "mxfp4"])
@pytest.mark.parametrize(
    "heads", [HEADS, ag.MLA(num_qo_heads=3, head_dim_ckv=64, head_dim_kpe=32)], ids=["heads", "latents"]
)
def test_decode_reads_what_was_written(place: Place, dtype: str | None, heads: Any) -> None:
    torch.manual_seed(0)
    spec = declare(heads=heads, dtype="fp16", kv=ag.Paged(8, dtype=dtype))
    storage = spec.kv.storages("fp16")[0]
    latent = heads.kind == "mla"
    lead, dims = ((6, 8), (64, 32)) if latent else ((6, 8, 2), (64, 64))
    x = [torch.randn(sum(LENS), *lead[2:], dim, dtype=torch.float16) for dim in dims]
    cache: list[Any] = []
    for dim in dims:
        data, blocks, _ = quantize(torch.zeros(*lead, dim), storage)
        cache.append(data.to(place.device) if blocks is None else (data.to(place.device), blocks.to(place.device)))
    head_scale = torch.full((1 if latent else 2,), 0.03, device=place.device)
    scales = (
        {}
        if storage.scale != "head"
        else {"k_scale": head_scale}
        if latent
        else {"k_scale": head_scale, "v_scale": head_scale}
    )
    table = torch.tensor([[4, 2, 0], [1, 5, 3]]).int().to(place.device)
    where = {name: t.to(place.device) for name, t in requests().items()} | {"page_table": table}
    given = [t.to(place.device) for t in x]
    ops = place.compile(spec)
    ops.append(tuple(given) if latent else given[0], None if latent else given[1], tuple(cache), **where, **scales)
    q = torch.randn(2, heads.num_qo_heads, sum(dims) if latent else 64, dtype=torch.float16)
    kv_lens = torch.tensor(LENS).int().to(place.device)
    got = ops.decode(q.to(place.device), tuple(cache), page_table=table, kv_lens=kv_lens, **scales).cpu()
    numbers = numbers_of(x, storage, latent)
    for b, (n, first) in enumerate(zip(LENS, (0, LENS[0]), strict=True)):
        k, v = (t[first : first + n].double() for t in numbers)
        logits = torch.einsum("hd,khd->hk", q[b].double(), k) * (heads.head_dim_qk**-0.5)
        want = torch.einsum("hk,khd->hd", logits.softmax(-1), v)
        torch.testing.assert_close(got[b].double(), want, rtol=1e-2, atol=4e-3)


def numbers_of(x: list[torch.Tensor], storage: Any, latent: bool) -> list[torch.Tensor]:
    """What the cache stands for, a head of queries each: keys and values."""
    rows = [torch.cat(x, -1).unsqueeze(1)] if latent else x
    scale = torch.full((rows[0].shape[1],), 0.03) if storage.scale == "head" else None
    found = []
    for t in rows:
        data, blocks, _ = quantize(t, storage, scale)
        found.append(dequantize(data, storage, blocks, scale) if storage.is_quantized else t)
    if latent:
        return [found[0].expand(-1, 3, -1), found[0][..., :64].expand(-1, 3, -1)]
    return [t.repeat_interleave(2, 1) for t in found]


def test_latents_turn_their_last_columns(place: Place) -> None:
    heads = ag.MLA(num_qo_heads=2, head_dim_ckv=64, head_dim_kpe=32)
    spec = declare(heads=heads, rope=ag.Rope(keys="append", interleaved=True))
    ckv, kpe = torch.randn(5, 64), torch.randn(5, 32)
    cache = torch.zeros(6, 8, 96, device=place.device)
    slot, positions = torch.tensor([9, 3, 4, -1, 40]), torch.tensor([0, 7, 1000, 3, 9]).int()
    place.compile(spec).append(
        (ckv.to(place.device), kpe.to(place.device)),
        None,
        cache,
        slot_mapping=slot.to(place.device),
        positions=positions.to(place.device),
    )
    angle = positions[:, None].double() * 10000.0 ** (-torch.arange(16).double() / 16)
    turned = torch.view_as_real(
        torch.view_as_complex(kpe.double().view(5, 16, 2)) * torch.polar(torch.ones_like(angle), angle)
    )
    want = torch.zeros(48, 96, dtype=torch.float64)
    kept = slot >= 0
    want[slot[kept]] = torch.cat([ckv.double(), turned.flatten(1)], -1)[kept]
    torch.testing.assert_close(cache.cpu().flatten(0, 1).double(), want, rtol=0, atol=2e-6)
    with pytest.raises(ag.UnsupportedError, match="neither rotates nor norms"):
        place.compile(spec).decode(torch.zeros(1, 2, 96, device=place.device), cache)


@pytest.mark.parametrize(
    "kv",
    [ag.Paged(8), ag.Paged(8, dtype="int8", scale="token"), ag.Paged(8, dtype="int4")],
    ids=["plain", "int8", "int4"],
)
def test_dynamo_traces_it(place: Place, kv: ag.Paged) -> None:
    torch.compiler.reset()
    spec = declare(kv=kv)
    ops, storage = place.compile(spec), kv.storages("fp32")[0]
    k, v = (x.to(place.device) for x in tokens())
    shape = (6, 2, 8, 2, 32) if storage.packed == 2 else (6, 2, 8, 2, 64)
    caches, scales = [], []
    for run in (
        ops.append,
        torch.compile(ops.append, fullgraph=True, backend="aot_eager"),
    ):
        data = torch.zeros(shape, dtype={"int8": torch.int8, "int4": torch.uint8}.get(storage.dtype, torch.float32)).to(
            place.device
        )
        cache: Any = (
            (data, torch.zeros(6, 2, 8, 2, 2, dtype=torch.float16, device=place.device)) if storage.block else data
        )
        own = {f"{side}_scale": torch.zeros(6, 8, 2, device=place.device) for side in "kv"} if storage.scale else {}
        run(k, v, cache, slot_mapping=torch.tensor([3, -1, 20], device=place.device), **own)
        caches.append(data)
        scales.append(own)
    assert caches[0].count_nonzero()
    assert torch.equal(caches[0], caches[1])
    assert all(torch.equal(scales[0][name], scales[1][name]) for name in scales[0])


@pytest.mark.gpu
def test_a_graph_replays_with_other_slots() -> None:
    ops = ag.compile(declare(kv=ag.Paged(8, dtype="fp8_e4m3")), backend="triton")
    k, v = (x.cuda() for x in tokens())
    cache = tuple(x.cuda() for x in pages(torch.float8_e4m3fn))
    slot = torch.tensor([3, -1, 20], device="cuda")
    ops.append(k, v, cache, slot_mapping=slot)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.append(k, v, cache, slot_mapping=slot)
    slot.copy_(torch.tensor([7, 47, 10**6]))
    graph.replay()
    written = cache[0].view(torch.uint8).flatten(0, 1).any(-1).any(-1).nonzero().flatten()
    assert written.tolist() == [3, 7, 20, 47]


def test_nothing_is_written_outside_of_the_cache(kernels: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels check by themselves: on a GPU nothing else does."""
    monkeypatch.setattr(append, "_check_places", lambda *_: None)
    k, v = (x.to(kernels.device) for x in tokens(4))
    table = torch.tensor([[0, 6], [-1, 2]]).int()
    for where in (
        {"slot_mapping": torch.tensor([48, -5, 2**40, -(2**40)])},
        {
            "positions": torch.tensor([9, 1, 16, 3]).int(),
            "batch_indices": torch.tensor([0, 1, 1, 2]).int(),
            "page_table": table,
        },
    ):
        cache = tuple(x.to(kernels.device) for x in pages())
        kernels.compile(declare()).append(k, v, cache, **{name: x.to(kernels.device) for name, x in where.items()})
        assert not any(x.any() for x in cache)


def test_page_lists_are_read_within_their_bounds(kernels: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Page numbers lie in memory before and behind ``kv_indices``; none of them is read."""
    unread = append.check_page_lists
    monkeypatch.setattr(append, "_check_places", lambda *_: None)
    monkeypatch.setattr(append, "check_page_lists", lambda *given, **_: unread(*given, read=False))
    k, v = (x.to(kernels.device) for x in tokens(3))
    around = torch.tensor([3, 4, 1, 2, 5, 0]).int().to(kernels.device)
    where = {"positions": torch.tensor([1, 8, 9]).int(), "batch_indices": torch.tensor([0, 1, 1]).int()}
    for indptr, pages_written in (([0, 0, 2], [2]), ([0, 1, 4], [1]), ([-2, 0, 4], [2]), ([2, 3, 4], [])):
        cache = tuple(x.to(kernels.device) for x in pages())
        call = where | {"kv_indptr": torch.tensor(indptr).int()}
        kernels.compile(declare()).append(
            *(k, v, cache), kv_indices=around[2:4], **{name: x.to(kernels.device) for name, x in call.items()}
        )
        assert cache[0].flatten(1).any(-1).nonzero().flatten().tolist() == pages_written


def test_nothing_new_writes_nothing(place: Place) -> None:
    k, v = (x.to(place.device) for x in tokens(0))
    cache = tuple(x.to(place.device) for x in pages())
    place.compile(declare()).append(k, v, cache, slot_mapping=torch.zeros(0, dtype=torch.long, device=place.device))
    empty = tuple(torch.zeros(0, 8, 2, 64, device=place.device) for _ in range(2))
    k, v = (x.to(place.device) for x in tokens(1))
    place.compile(declare()).append(k, v, empty, slot_mapping=torch.tensor([-1], device=place.device))


def wrong_calls() -> list[Any]:
    one, two = torch.zeros(3).int(), torch.zeros(3).int()
    table = torch.zeros(1, 2).int()
    places = {"positions": one, "batch_indices": two}
    call = pytest.param
    return [
        call(
            {}, "nothing tells where the tokens go", "pass slot_mapping, or positions and batch_indices", id="nowhere"
        ),
        call(SLOTS | {"batch_indices": one}, "batch_indices has no meaning here", "leave slot_mapping out", id="both"),
        call(SLOTS | {"positions": one}, "positions has no meaning here", "leave it out", id="positions beside slots"),
        call({"positions": one}, "batch_indices is missing", "pass one", id="no request"),
        call(places, "no pages are given", "or slot_mapping", id="no pages"),
        call(
            places | {"page_table": table, "kv_indptr": one}, "kv_indptr has no meaning here", "leave", id="two tables"
        ),
        call({"slot_mapping": torch.tensor([0, 1, 48])}, r"slot_mapping\[2\] is 48", "-1 to skip", id="slot"),
        call({"slot_mapping": torch.zeros(2).long()}, r"slot_mapping has shape \[2\]", "reshape", id="short"),
        call({"slot_mapping": torch.zeros(3)}, "slot_mapping has dtype torch.float32", "int64", id="floating"),
        call(places | {"page_table": table - 1}, "position 0 of request 0 has no slot", "-1 to skip", id="page"),
        call(
            {"positions": one + 16, "batch_indices": two, "page_table": table},
            "position 16 of request 0 has no slot",
            "more room",
            id="beyond the table",
        ),
        call(SLOTS | {"k_scale": torch.ones(1)}, "k_scale has no meaning here", "leave it out", id="scale"),
        call(SLOTS | {"params": {"cs": table}}, "params holds 'cs'", "remove", id="parameter"),
    ]


@pytest.mark.parametrize(("where", "message", "fix"), wrong_calls())
def test_places_that_are_refused(where: dict[str, Any], message: str, fix: str) -> None:
    cache = pages()
    with pytest.raises(ag.ArgumentError, match=message) as error:
        ag.compile(declare(), backend="cpp").append(*tokens(), cache, **where)
    assert fix in error.value.fix
    assert not any(x.any() for x in cache)


def test_tensors_that_are_refused() -> None:
    ops, (k, v), cache = ag.compile(declare(), backend="cpp"), tokens(), pages()
    for message, args in {
        r"v has shape \[2, 2, 64\]": (k, v[:2], cache),
        "k has dtype torch.float64": (k.double(), v, cache),
        "kv_cache has 3 members": (k, v, (*cache, cache[0])),
        "k_cache has shape": (k, v, (cache[0][:, :7], cache[1])),
        "has stride 0": (k, v, (cache[0][:1].expand(6, -1, -1, -1), cache[1])),
        "requires grad": (k, v, (cache[0].requires_grad_(), cache[1])),
    }.items():
        with pytest.raises(ag.ArgumentError, match=message):
            ops.append(*args, **SLOTS)
    turning = ag.compile(declare(rope=ag.Rope(keys="append")), backend="cpp")
    with pytest.raises(ag.ArgumentError, match="positions is missing"):
        turning.append(k, v, pages(), **SLOTS)
    with pytest.raises(ag.SpecError, match="turns keys before qk_norm"):
        declare(rope=ag.Rope(keys="append"), qk_norm=ag.QKNorm())


def test_kernels_are_named_after_what_they_write() -> None:
    named = {
        "append_fp8_e4m3_page16_bf16_d128": {"kv": ag.Paged(16, dtype="fp8_e4m3")},
        "append_k_int8_v_int4_page16_bf16_d128": {"kv": ag.Paged(16, k_dtype="int8", v_dtype="int4")},
        "append_bf16_ragged_bf16_d128": {
            "kv": ag.Ragged(),
            "mask": ag.SlidingWindow(left=7),
            "score_mods": (ag.ALiBi(),),
        },
    }
    for name, fields in named.items():
        spec = declare(heads=ag.GQA(4, 2, 128), dtype="bf16", **fields)
        for backend, target in (("cpp", "cpu"), ("triton", "cuda:sm90a")):
            (plan,) = plan_op(spec, "append", Target.parse(target), backend).kernels
            assert plan.entry == name
            assert all(line == line.rstrip() for line in render_kernel(plan).source.splitlines())
