"""Every mask primitive against a definition written for one pair of positions, on lengths that are no multiples of anything."""

from __future__ import annotations

import math

import pytest
import torch

import attngen as ag
from attngen.ir.evaluate import evaluate
from attngen.ops.checks import torch_dtype
from attngen.variant import normalize

BATCH, HEADS = 2, 3


def tensors(mask: ag.MaskMod, qo_len: int, kv_len: int) -> dict[str, torch.Tensor]:
    """The sample parameters of a mask."""
    dims = {
        "batch": BATCH,
        "num_qo_heads": HEADS,
        "num_kv_heads": HEADS,
        "max_qo_len": qo_len,
        "max_kv_len": kv_len,
    }
    values = mask.sample(dims)
    return {param.name: torch.tensor(values[param.name]).to(torch_dtype(param.dtype)) for param in mask.params()}


def visible(mask: ag.MaskMod, qo_len: int, kv_len: int, params: dict[str, torch.Tensor]) -> torch.Tensor:
    """The expression, bool ``[batch, heads, qo_len, kv_len]``."""
    env = {
        "b": torch.arange(BATCH).view(-1, 1, 1, 1),
        "h": torch.arange(HEADS).view(-1, 1, 1),
        "q": torch.arange(kv_len - qo_len, kv_len).view(-1, 1),
        "k": torch.arange(kv_len),
        "qo_len": qo_len,
        "kv_len": kv_len,
    }
    return evaluate(mask.expr(), env, params).expand(BATCH, HEADS, qo_len, kv_len)


def pairs(rule, qo_len: int, kv_len: int) -> torch.Tensor:
    """A rule over ``(b, h, q, k)`` asked pair by pair."""
    q = range(kv_len - qo_len, kv_len)
    rows = [[[[bool(rule(b, h, i, k)) for k in range(kv_len)] for i in q] for h in range(HEADS)] for b in range(BATCH)]
    return torch.tensor(rows).reshape(BATCH, HEADS, qo_len, kv_len)


def counted(mask: ag.MaskMod, qo_len: int, kv_len: int, params: dict[str, torch.Tensor], backend: str) -> torch.Tensor:
    """Visible keys of each row as a backend sees them: with q = 0, lse is the logarithm of their number."""
    spec = ag.AttentionSpec(heads=ag.MHA(HEADS, 16), mask=mask, dtype="fp32")
    q, k = torch.zeros(BATCH, qo_len, HEADS, 16), torch.randn(BATCH, kv_len, HEADS, 16)
    _, lse = ag.compile(spec, backend=backend).prefill(q, k, k, params=params, return_lse=True)
    return lse.double().exp().permute(0, 2, 1)


def clamped_start(x: int, length: int, window: int) -> int:
    return min(max(x - window // 2, 0), length - window)


def near(q: tuple[int, ...], k: tuple[int, ...], shape, window, dilation, causal) -> bool:
    """One neighborhood, by listing the tokens that a query sees in each dimension."""
    for x, y, length, size, step, last in zip(q, k, shape, window, dilation, causal, strict=True):
        line = list(range(x % step, length, step))  # the tokens that share the query's remainder
        place = line.index(x)
        start = max(0, place - size + 1) if last else clamped_start(place, len(line), size)
        seen = line[start : place + 1] if last else line[start : start + size]
        if y not in seen:
            return False
    return True


def unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    place = []
    for length in reversed(shape):
        place.append(index % length)
        index //= length
    return tuple(reversed(place))


def neighborhood(shape, window, dilation=1, causal=False):
    """A mask, its rule and its number of tokens."""

    def each(value):
        return value if isinstance(value, tuple) else (value,) * len(shape)

    def rule(params):
        return lambda b, h, q, k: near(
            unravel(q, shape), unravel(k, shape), shape, each(window), each(dilation), each(causal)
        )

    return ag.Neighborhood(shape, window, dilation, causal=causal), rule, math.prod(shape)


def documents(p):
    return lambda b, h, q, k: p["doc_ids"][b, q] == p["doc_ids"][b, k]


def images(p):
    ids = p["span_ids"]
    return lambda b, h, q, k: ids[b, q] >= 0 and ids[b, q] == ids[b, k]


def tree(p, kv_len):
    n = p["ancestors"].shape[1]

    def rule(b, h, q, k):
        if k < kv_len - n:
            return True
        return q >= kv_len - n and p["ancestors"][b, q - (kv_len - n), k - (kv_len - n)]

    return rule


def block_diffusion(size, half):
    def rule(b, h, q, k):
        q_block, k_block = q % half // size, k % half // size
        if q < half and k < half:
            return q_block == k_block
        if q < half:
            return k_block < q_block
        return k >= half and k_block <= q_block

    return rule


# Mask, its rule made from the parameters and lengths, and lengths.
RULES = {
    "prefix": (ag.PrefixLM("prefix_len"), lambda p, n: lambda b, h, q, k: k < p["prefix_len"][b] or k <= q),
    "documents": (ag.Document("doc_ids"), lambda p, n: documents(p)),
    "chunked": (ag.Chunked(7), lambda p, n: lambda b, h, q, k: math.floor(q / 7) == math.floor(k / 7)),
    "dilated": (ag.Dilated(3), lambda p, n: lambda b, h, q, k: abs(q - k) in range(0, 1000, 3)),
    "sinks": (ag.GlobalTokens(4), lambda p, n: lambda b, h, q, k: k in (0, 1, 2, 3)),
    "global": (ag.GlobalTokens(2, both=True), lambda p, n: lambda b, h, q, k: k in (0, 1) or q in (0, 1)),
    "tree": (ag.Tree("ancestors"), tree),
    "images": (ag.ImageSpans("span_ids"), lambda p, n: images(p)),
    "dense": (ag.Dense("mask"), lambda p, n: lambda b, h, q, k: p["mask"][0, 0, q - n, k]),
    "block sparse": (
        ag.BlockSparse("blocks", 5, 9),
        lambda p, n: lambda b, h, q, k: p["blocks"][h, math.floor(q / 5), math.floor(k / 9)],
    ),
    "block sparse, a request": (
        ag.BlockSparse("blocks", 16, 8, per_request=True),
        lambda p, n: lambda b, h, q, k: p["blocks"][b, h, math.floor(q / 16), math.floor(k / 8)],
    ),
}
LENGTHS = [(37, 37), (11, 50), (1, 29)]
NEIGHBORHOODS = {
    "1d": neighborhood((23,), 5),
    "1d even": neighborhood((19,), 4),
    "1d dilated": neighborhood((23,), 4, 3),
    "1d causal": neighborhood((17,), 5, 2, True),
    "2d": neighborhood((5, 7), (3, 5)),
    "2d dilated": neighborhood((7, 8), (3, 2), (2, 3)),
    "2d, the first causal": neighborhood((6, 5), 3, 1, (True, False)),
    "3d": neighborhood((3, 4, 5), (3, 3, 2)),
    "3d dilated": neighborhood((4, 3, 5), 2, (2, 1, 2), (True, False, True)),
}


@pytest.mark.parametrize(("qo_len", "kv_len"), LENGTHS)
@pytest.mark.parametrize("name", RULES)
def test_rule(name: str, qo_len: int, kv_len: int) -> None:
    mask, make = RULES[name]
    params = tensors(mask, qo_len, kv_len)
    first = {"tree": kv_len, "dense": kv_len - qo_len}.get(name, 0)
    want = pairs(make(params, first), qo_len, kv_len)
    assert torch.equal(visible(mask, qo_len, kv_len, params), want)
    assert want.any() or (name, qo_len) == ("images", 1)  # the last token is text
    for backend in ("reference", "cpp"):
        torch.testing.assert_close(
            counted(mask, qo_len, kv_len, params, backend), want.sum(-1).double(), rtol=1e-6, atol=0
        )


@pytest.mark.parametrize("name", NEIGHBORHOODS)
def test_neighborhoods(name: str) -> None:
    mask, make, tokens = NEIGHBORHOODS[name]
    want = pairs(make({}), tokens, tokens)
    assert torch.equal(visible(mask, tokens, tokens, {}), want)
    torch.testing.assert_close(counted(mask, tokens, tokens, {}, "cpp"), want.sum(-1).double(), rtol=1e-6, atol=0)


def test_neighborhoods_are_whole_without_causality() -> None:
    """At edges the window moves, so every query has window ** dims keys."""
    mask, _, tokens = neighborhood((6, 7), (3, 5))
    assert set(visible(mask, tokens, tokens, {}).sum(-1).flatten().tolist()) == {15}


@pytest.mark.parametrize("half", [24, 21])
def test_block_diffusion(half: int) -> None:
    mask = ag.BlockDiffusion(4)
    want = pairs(block_diffusion(4, half), 2 * half, 2 * half)
    assert torch.equal(visible(mask, 2 * half, 2 * half, {}), want)
    torch.testing.assert_close(counted(mask, 2 * half, 2 * half, {}, "cpp"), want.sum(-1).double(), rtol=1e-6, atol=0)
    last = pairs(block_diffusion(4, half), 1, 2 * half)
    assert torch.equal(visible(mask, 1, 2 * half, {}), last)
    assert last[0, 0, 0].tolist() == [False] * half + [True] * half


def test_block_diffusion_generates_block_causally() -> None:
    """What a clean query sees of the clean half is what generation sees: its block and those before."""
    half = 20
    training = visible(ag.BlockDiffusion(4), 2 * half, 2 * half, {})[..., half:, half:]
    assert torch.equal(training, visible(ag.Causal() | ag.Chunked(4), half, half, {}))


def test_packed_is_the_same_as_bytes_a_pair() -> None:
    for plain, packed in ((ag.Tree("t"), ag.Tree("t", packed=True)), (ag.Dense("t"), ag.Dense("t", packed=True))):
        for qo_len, kv_len in ((37, 37), (9, 50), (1, 64)):
            want = visible(plain, qo_len, kv_len, tensors(plain, qo_len, kv_len))
            params = tensors(packed, qo_len, kv_len)
            assert params["t"].dtype == torch.uint8
            assert torch.equal(visible(packed, qo_len, kv_len, params), want)
            got = counted(packed, qo_len, kv_len, params, "cpp")
            torch.testing.assert_close(got, want.sum(-1).double(), rtol=1e-6, atol=0)


def test_bits_of_a_byte_count_from_the_lowest() -> None:
    mask = ag.Dense("m", packed=True)
    row = torch.tensor([0b00000101, 0b1000_0000], dtype=torch.uint8).view(1, 1, 1, 2)
    assert visible(mask, 1, 16, {"m": row})[0, 0, 0].nonzero().flatten().tolist() == [0, 2, 15]


@pytest.mark.parametrize("shape", [(1, 1), (BATCH, 1), (1, HEADS), (BATCH, HEADS)])
@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_one_request_or_head_serves_all(shape: tuple[int, int], backend: str) -> None:
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(*shape, 13, 29, generator=generator) < 0.4
    mask[..., 0] = True
    got = counted(ag.Dense("mask"), 13, 29, {"mask": mask}, backend)
    torch.testing.assert_close(got, mask.expand(BATCH, HEADS, 13, 29).sum(-1).double(), rtol=1e-6, atol=0)


def test_other_sizes_are_refused() -> None:
    with pytest.raises(ag.ArgumentError) as caught:
        counted(ag.Dense("mask"), 5, 6, {"mask": torch.ones(1, 2, 5, 6, dtype=torch.bool)}, "reference")
    assert str(caught.value) == (
        "params['mask'] has shape [1, 2, 5, 6]\n  where: params['mask']\n"
        "  why: expected [batch or 1, num_qo_heads or 1, max_qo_len, max_kv_len] = [1, 3, 5, 6]\n  fix: reshape it"
    )
    with pytest.raises(ag.ArgumentError, match=r"= \[2, 3, 5, 6\]"):
        counted(ag.Dense("mask"), 5, 6, {"mask": torch.ones(5, 6, dtype=torch.bool)}, "reference")


def test_trees_of_fewer_tokens() -> None:
    """A request with two draft tokens of the four: the columns before them are true."""
    ancestors = torch.zeros(BATCH, 4, 4, dtype=torch.bool)
    ancestors[0] = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]])
    ancestors[1] = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]])
    got = visible(ag.Causal() & ag.Tree("t"), 4, 10, {"t": ancestors})
    assert got[0, 0].sum(-1).tolist() == [7, 8, 8, 9]
    assert got[1, 0].sum(-1).tolist() == [7, 8, 9, 9]


def test_block_lists() -> None:
    counts = torch.tensor([[1, 0, 3]], dtype=torch.int32)
    indices = torch.tensor([[[2, 0, 0], [7, 7, 7], [0, 3, 1]]], dtype=torch.int32)
    want = [[[0, 0, 1, 0], [0, 0, 0, 0], [1, 1, 0, 1]]]
    assert ag.block_matrix(counts, indices, 4).int().tolist() == want
    with pytest.raises(ag.ArgumentError, match=r"counts has shape \[1, 2\], indices \[1, 3, 3\]"):
        ag.block_matrix(counts[:, :2], indices, 4)


def test_a_block_mask_of_flex_attention() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    def ragged(b, h, q, k):
        return (q >= k) & (q - k < 90 + 40 * h)

    block = create_block_mask(ragged, BATCH, HEADS, 200, 200, device="cpu", BLOCK_SIZE=(32, 64))
    fields = (block.kv_num_blocks, block.kv_indices), (block.full_kv_num_blocks, block.full_kv_indices)
    partial, full = (ag.block_matrix(*lists, 4) for lists in fields)
    sparse = [ag.BlockSparse(name, 32, 64, per_request=True) for name in ("partial", "full")]
    got = visible(sparse[0] & ag.mask_mod(ragged) | sparse[1], 200, 200, {"partial": partial, "full": full})
    assert torch.equal(got, pairs(lambda b, h, q, k: k <= q < k + 90 + 40 * h, 200, 200))
    assert full.any()


@pytest.mark.parametrize(
    ("make", "where", "why"),
    [
        (lambda: ag.Chunked(0), "Chunked.size", "greater than or equal to 1"),
        (lambda: ag.Dilated(-1), "Dilated.step", "greater than or equal to 1"),
        (lambda: ag.GlobalTokens(-1), "GlobalTokens.n", "greater than or equal to 0"),
        (lambda: ag.Document("doc ids"), "Document.doc_ids", "it is no plain identifier"),
        (lambda: ag.PrefixLM("q"), "PrefixLM.prefix_len", "a coordinate, a function or a keyword"),
        (lambda: ag.BlockSparse("m", 0, 8), "BlockSparse.block_q", "greater than or equal to 1"),
        (lambda: ag.Neighborhood((4, 4), 5), "Neighborhood", "dimension 0 has 4 tokens, window 5"),
        (
            lambda: ag.Neighborhood((8, 6), 3, (1, 3)),
            "Neighborhood",
            "dimension 1 has 6 tokens, window 3 and dilation 3",
        ),
        (lambda: ag.Neighborhood((8, 8), (3, 3, 3)), "Neighborhood", "shape has 2 dimensions"),
        (lambda: ag.Neighborhood((0, 8), 1), "Neighborhood", "every length is at least 1"),
        (lambda: ag.Neighborhood((2, 2, 2, 2), 1), "Neighborhood.shape", "at most 3 items"),
    ],
)
def test_errors(make, where: str, why: str) -> None:
    with pytest.raises(ag.SpecError) as caught:
        make()
    assert caught.value.where == where
    assert why in str(caught.value)


@pytest.mark.parametrize(
    "mask", [*(mask for mask, _ in RULES.values()), ag.BlockDiffusion(3), ag.Neighborhood((4, 6), 3)]
)
def test_round_trip(mask: ag.MaskMod, tmp_path) -> None:
    spec = ag.AttentionSpec(heads=ag.MHA(2, 16), mask=ag.Causal() & mask)
    (tmp_path / "spec.toml").write_text(spec.to_toml())
    assert ag.load_spec(tmp_path / "spec.toml") == spec
    assert normalize(ag.AttentionSpec.model_validate_json(spec.model_dump_json()), "prefill") == normalize(
        spec, "prefill"
    )
