"""Every score primitive against its formula as published, written with numpy or plain torch, and gradients against autograd."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import attngen as ag
from attngen.ir.differentiate import differentiate, param_gradients
from attngen.ir.evaluate import evaluate
from attngen.ir.expr import SCORE

BATCH, HEADS, QO, KV = 2, 3, 19, 45
SHAPE = (BATCH, HEADS, QO, KV)


def env(score: torch.Tensor, first: int = KV - QO) -> dict[str, torch.Tensor | int]:
    return {
        "score": score,
        "b": torch.arange(BATCH).view(-1, 1, 1, 1),
        "h": torch.arange(HEADS).view(-1, 1, 1),
        "q": first + torch.arange(QO).view(-1, 1),
        "k": torch.arange(KV),
        "qo_len": QO,
        "kv_len": KV,
    }


def scores(seed: int = 0) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def values(mod: ag.ScoreMod, seed: int = 1) -> dict[str, torch.Tensor]:
    """Positive parameters: some mods need that."""
    sizes = {"batch": BATCH, "num_qo_heads": HEADS, "max_qo_len": QO, "max_kv_len": KV}
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for param in mod.params():
        shape = [dim if isinstance(dim, int) else sizes[dim.removesuffix(" or 1")] for dim in param.dims]
        found[param.name] = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.2
    return found


def changed(mod: ag.ScoreMod, params: dict[str, torch.Tensor], first: int = KV - QO) -> torch.Tensor:
    return evaluate(mod.expr(SCORE, HEADS), env(scores(), first), params).expand(SHAPE)


def positions(first: int = KV - QO) -> tuple[torch.Tensor, torch.Tensor]:
    return first + torch.arange(QO)[:, None], torch.arange(KV)[None]


def t5_bucket(relative: np.ndarray, bidirectional: bool, num_buckets: int, max_distance: int) -> np.ndarray:
    """The bucket of ``key - query`` as T5's own code computes it, in float32."""
    bucket = np.zeros_like(relative)
    if bidirectional:
        num_buckets //= 2
        bucket += np.where(relative > 0, num_buckets, 0)
        distance = np.abs(relative)
    else:
        distance = np.maximum(-relative, 0)
    exact = num_buckets // 2
    safe = np.maximum(distance, 1).astype(np.float32)
    scaled = (
        np.log(safe / np.float32(exact)) / np.float32(math.log(max_distance / exact)) * np.float32(num_buckets - exact)
    )
    far = np.minimum(exact + scaled.astype(np.int64), num_buckets - 1)
    return bucket + np.where(distance < exact, distance, far)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (32, 64), (64, 1000), (12, 40), (320, 800)])
def test_t5_buckets(bidirectional: bool, num_buckets: int, max_distance: int) -> None:
    """Read from a table that holds bucket numbers, at every distance up to far beyond the last bucket."""
    mod = ag.RelativeBias("table", num_buckets, max_distance, bidirectional=bidirectional)
    table = torch.arange(num_buckets, dtype=torch.float64)[:, None].expand(-1, HEADS).contiguous()
    reach = 2 * max_distance
    place = {
        "score": torch.zeros(()),
        "h": 0,
        "q": torch.full((2 * reach + 1,), reach),
        "k": torch.arange(2 * reach + 1),
    }
    got = evaluate(mod.expr(SCORE, HEADS), place, {"table": table}).numpy()
    want = t5_bucket(np.arange(-reach, reach + 1), bidirectional, num_buckets, max_distance)
    np.testing.assert_array_equal(got, want)
    assert set(want.tolist()) >= {0, 1, num_buckets - 1}


def test_t5_heads_read_their_own_column() -> None:
    mod = ag.RelativeBias(bidirectional=True)
    params = values(mod)
    q, k = positions()
    bucket = torch.tensor(t5_bucket((k - q).numpy(), True, 32, 128))
    torch.testing.assert_close(changed(mod, params), scores() + params["rel_bias"][bucket].permute(2, 0, 1))


def test_dense_bias_counts_rows_of_the_call() -> None:
    mod = ag.DenseBias("bias")
    params = values(mod)
    torch.testing.assert_close(changed(mod, params), scores() + params["bias"])
    one = {"bias": params["bias"][:1, :1]}
    torch.testing.assert_close(changed(mod, one), scores() + params["bias"][0, 0])


def test_forgetting_is_a_product_of_gates() -> None:
    """exp(c_q - c_k) is the product of the gates after the key up to the query."""
    gates = torch.rand(BATCH, HEADS, KV, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 0.5 + 0.5
    decay = (changed(ag.Forgetting("c"), {"c": gates.log().cumsum(-1)}) - scores()).exp()
    for q, k in ((0, 26), (0, 3), (7, 33), (18, 0), (18, 44)):
        torch.testing.assert_close(decay[:, :, q, k], gates[..., k + 1 : KV - QO + q + 1].prod(-1))


def test_llama4_temperature() -> None:
    first = 8192 * 3 - 5
    q, _ = positions(first)
    want = torch.log1p(torch.floor((q.double() + 1.0) / 8192.0)) * 0.1 + 1.0
    torch.testing.assert_close(changed(ag.Temperature(floor_scale=8192), {}, first), scores() * want)
    assert changed(ag.Temperature(floor_scale=8192), {}).equal(scores())


def test_qwen_temperature() -> None:
    for first in (0, 2040):
        want = [math.log(i, 2048) if i > 2048 else 1.0 for i in range(first + 1, first + QO + 1)]
        got = changed(ag.Temperature(train_len=2048), {}, first)
        torch.testing.assert_close(got, scores() * torch.tensor(want).double()[:, None])


def test_learned_temperature() -> None:
    gain = torch.tensor([0.5, 2.0, 10.0], dtype=torch.float64)
    torch.testing.assert_close(changed(ag.Temperature("gain"), {"gain": gain}), scores() * gain[:, None, None])


@pytest.mark.parametrize("form", ["log", "power"])
def test_kerple(form: str) -> None:
    mod = ag.Kerple(form)
    params = values(mod)
    r1, r2 = (params[name][:, None, None] for name in ("kerple_r1", "kerple_r2"))
    q, k = positions()
    distance = (q - k).abs().double()
    bias = torch.log1p(r2 * distance) if form == "log" else distance**r2
    torch.testing.assert_close(changed(mod, params), scores() - r1 * bias)


def test_fire() -> None:
    """The network of the paper as torch modules."""
    mod = ag.Fire(5)
    params = values(mod) | {"fire_len": torch.tensor(30.0).double(), "fire_c": torch.tensor(-0.3).double()}
    params["fire_b1"] = params["fire_b1"] - 0.6
    first, last = torch.nn.Linear(1, 5).double(), torch.nn.Linear(5, HEADS).double()
    first.weight.data, first.bias.data = params["fire_w1"][:, None], params["fire_b1"]
    last.weight.data, last.bias.data = params["fire_w2"], params["fire_b2"]
    q, k = positions()
    x = torch.log1p(0.3 * (q - k).abs().double()) / torch.log1p(0.3 * q.clamp(min=30).double())
    with torch.no_grad():
        bias = last(torch.relu(first(x[..., None]))).permute(2, 0, 1)
    torch.testing.assert_close(changed(mod, params), scores() + bias)


MODS = {
    "relative": ag.RelativeBias(num_buckets=8, max_distance=20),
    "dense": ag.DenseBias("bias"),
    "forgetting": ag.Forgetting("c"),
    "gain": ag.Temperature("gain"),
    "llama4": ag.Temperature(floor_scale=10),
    "log-n": ag.Temperature(train_len=32),
    "kerple log": ag.Kerple(),
    "kerple power": ag.Kerple("power"),
    "fire": ag.Fire(3),
}


@pytest.mark.parametrize("name", MODS)
def test_gradients(name: str) -> None:
    """Derivatives of the expression, summed over the pairs that read an element, against autograd."""
    mod = MODS[name]
    expr = mod.expr(SCORE, HEADS)
    score = scores().requires_grad_()
    params = {key: tensor.requires_grad_() for key, tensor in values(mod).items()}
    upstream = scores(5)
    out = evaluate(expr, env(score), params).expand(SHAPE)
    want = torch.autograd.grad(out, (score, *params.values()), upstream)
    plain = {key: tensor.detach() for key, tensor in params.items()}
    with torch.no_grad():
        slope = evaluate(differentiate(expr, SCORE), env(scores()), plain)
        torch.testing.assert_close((slope * upstream).expand(SHAPE), want[0])
        got = {key: torch.zeros_like(tensor) for key, tensor in plain.items()}
        for load, derivative in param_gradients(expr):
            part = (evaluate(derivative, env(scores()), plain) * upstream).expand(SHAPE).reshape(-1)
            places = [evaluate(i, env(scores()), plain).expand(SHAPE).reshape(-1) for i in load.indices]
            if places:
                got[load.param].index_put_(tuple(places), part, accumulate=True)
            else:
                got[load.param] += part.sum()
    for key, grad in zip(params, want[1:], strict=True):
        torch.testing.assert_close(got[key], grad)
        assert grad.isfinite().all()
    assert set(got) == {param.name for param in mod.params()}


@pytest.mark.parametrize(
    ("make", "where", "why"),
    [
        (
            lambda: ag.RelativeBias(num_buckets=7, bidirectional=True),
            "RelativeBias.num_buckets",
            "two directions share",
        ),
        (lambda: ag.RelativeBias(max_distance=16), "RelativeBias.max_distance", "the first 16 distances"),
        (ag.Temperature, "Temperature", "exactly one of gain, floor_scale and train_len"),
        (lambda: ag.Temperature("g", train_len=4), "Temperature", "exactly one of"),
        (lambda: ag.DenseBias("score"), "DenseBias.bias", "a coordinate, a function or a keyword"),
        (lambda: ag.DenseBias("bias", dtype="i32"), "DenseBias.dtype", "'fp32', 'bf16' or 'fp16'"),
        (lambda: ag.Kerple("linear"), "Kerple.form", "'log' or 'power'"),
        (lambda: ag.Fire(65), "Fire.width", "less than or equal to 64"),
        (lambda: ag.Forgetting("not a name"), "Forgetting.c", "it is no plain identifier"),
    ],
)
def test_errors(make, where: str, why: str) -> None:
    with pytest.raises(ag.SpecError) as caught:
        make()
    assert caught.value.where == where
    assert why in str(caught.value)


@pytest.mark.parametrize("name", MODS)
def test_round_trip(name: str, tmp_path) -> None:
    spec = ag.AttentionSpec(heads=ag.MHA(2, 16), score_mods=(MODS[name], ag.SoftCap(30)))
    (tmp_path / "spec.toml").write_text(spec.to_toml())
    assert ag.load_spec(tmp_path / "spec.toml") == spec
