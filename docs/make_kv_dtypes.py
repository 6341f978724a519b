"""Measures what each storage of keys and values costs in accuracy: ``python -m docs.make_kv_dtypes`` writes ``docs/kv-dtypes.md``.

Activations are those of two models: the encoder of the demo on its sentences, and a small causal decoder (bytes, RoPE, grouped
heads) that is trained here on the source of Python's standard library, in under two minutes on two cores.
"""

from __future__ import annotations

import inspect
import math
import pkgutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import attngen as ag
from attngen.demo import MiniLM
from attngen.dtypes import Storage, quantize

PAGE = Path(__file__).with_name("kv-dtypes.md")
PEAK_RATE = 2e-3
WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 128, 3, 4, 2, 64, 128
STORAGES: tuple[dict[str, Any], ...] = (
    {"dtype": "bf16"},
    {"dtype": "fp8_e4m3", "scale": "tensor"},
    {"dtype": "fp8_e4m3", "scale": "head"},
    {"dtype": "fp8_e4m3", "scale": "token"},
    {"dtype": "fp8_e5m2", "scale": "tensor"},
    {"dtype": "int8", "scale": "head"},
    {"dtype": "int8", "scale": "token"},
    {"dtype": "int4", "group_size": 32},
    {"dtype": "int4", "group_size": 32, "zero_point": True},
    {"dtype": "int4", "group_size": 64},
    {"dtype": "nvfp4", "scale": "tensor"},
    {"dtype": "mxfp4"},
    {"k_dtype": "fp8_e4m3", "v_dtype": "int4", "scale": "tensor", "zero_point": True},
)


@dataclass
class Layer:
    """What one layer's attention was given: ``q [batch, len, heads, dim]``, k and v likewise, and lengths where padded."""

    q: Tensor
    k: Tensor
    v: Tensor
    lens: Tensor | None = None


@dataclass
class Measured:
    """One storage on one model."""

    errors: list[float] = field(default_factory=list)
    loss: float = float("nan")

    @property
    def error(self) -> float:
        """Root mean square over layers of the relative error of attention's output."""
        return float(torch.tensor(self.errors).square().mean().sqrt())


def factors(x: Tensor, storage: Storage) -> Tensor | None:
    """Calibrated factors of a tensor or of heads: the largest magnitude becomes the largest number of the dtype."""
    if storage.scale not in ("tensor", "head"):
        return None
    largest = storage.row.largest * (448.0 if storage.dtype == "nvfp4" else 1.0)
    top = x.abs().amax() if storage.scale == "tensor" else x.abs().flatten(0, -3).amax((0, -1))
    return top / largest if storage.dtype not in ("int4", "mxfp4") else torch.ones(())


class StoredAttention:
    """Attention over keys and values that go through one storage; compiled for this machine's CPU."""

    def __init__(self, fields: dict[str, Any], heads: int, kv_heads: int, dim: int, mask: ag.MaskMod) -> None:
        layout = ag.GQA(num_qo_heads=heads, num_kv_heads=kv_heads, head_dim=dim)
        self.spec = ag.AttentionSpec(heads=layout, mask=mask, dtype="fp32", kv=ag.Contiguous(**fields))
        self.exact = ag.compile(ag.AttentionSpec(heads=layout, mask=mask, dtype="fp32"))
        self.ops = ag.compile(self.spec)

    def __call__(self, layer: Layer) -> Tensor:
        parts, scales = [], {}
        for name, x, storage in zip("kv", (layer.k, layer.v), self.spec.kv.storages("fp32"), strict=True):
            data, blocks, tokens = quantize(x, storage, scale := factors(x, storage))
            parts.append(data if blocks is None else (data, blocks))
            if storage.scale:
                scales[f"{name}_scale"] = tokens if tokens is not None else scale
        return self._run(self.ops, layer, parts, scales)

    def error(self, layer: Layer) -> float:
        """Relative error (Frobenius) against keys and values in fp32."""
        exact = self._run(self.exact, layer, [layer.k, layer.v], {})
        return float((self(layer) - exact).norm() / exact.norm())

    @staticmethod
    def _run(ops: ag.Ops, layer: Layer, parts: list[Any], scales: dict[str, Any]) -> Tensor:
        lens = {} if layer.lens is None else {"qo_lens": layer.lens, "kv_lens": layer.lens}
        return ops.prefill(layer.q, *parts, **lens, **scales)  # type: ignore[return-value]


class Decoder(nn.Module):
    """Bytes in, logits of the next byte out; ``attend`` is exchangeable."""

    def __init__(self) -> None:
        super().__init__()
        self.attend: Callable[[Layer], Tensor] = causal
        self.embed = nn.Embedding(256, WIDTH)
        nn.init.normal_(self.embed.weight, std=WIDTH**-0.5)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2 * LAYERS + 1))
        wide = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        self.project = nn.ModuleList(nn.Linear(WIDTH, wide, bias=False) for _ in range(LAYERS))
        self.merge = nn.ModuleList(nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False) for _ in range(LAYERS))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for i in range(LAYERS):
            heads = self.project[i](self.norms[2 * i](x)).unflatten(-1, (-1, HEAD_DIM))
            q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), -2)
            x = x + self.merge[i](self.attend(Layer(rotated(q), rotated(k), v)).flatten(-2))
            x = x + self.down[i](functional.gelu(self.up[i](self.norms[2 * i + 1](x))))
        return functional.linear(self.norms[-1](x), self.embed.weight)


def rotated(x: Tensor) -> Tensor:
    """RoPE with pairs half a head apart."""
    frequency = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angle = torch.arange(x.shape[1])[:, None] * frequency
    first, second = x.chunk(2, -1)
    cosine, sine = angle.cos()[:, None], angle.sin()[:, None]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


def causal(layer: Layer) -> Tensor:
    """Plain causal attention by torch."""
    q, k, v = (x.transpose(1, 2) for x in (layer.q, layer.k, layer.v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def library_source() -> tuple[Tensor, Tensor]:
    """Bytes of the standard library's modules, in name order: what is trained on, and the last tenth, which is not."""
    names = sorted(
        m.name for m in pkgutil.iter_modules() if m.name in sys.stdlib_module_names and not m.name.startswith("_")
    )
    text = b""
    for name in names:
        spec = pkgutil.resolve_name("importlib.util:find_spec")(name)
        if spec is not None and spec.origin and spec.origin.endswith(".py"):
            text += Path(spec.origin).read_bytes()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:]


def batch(data: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows and the bytes that follow."""
    starts = torch.randint(len(data) - CONTEXT - 1, (size,), generator=generator)
    rows = data[starts[:, None] + torch.arange(CONTEXT + 1)]
    return rows[:, :-1], rows[:, 1:]


def train(data: Tensor, seconds: float) -> Decoder:
    """AdamW, warmed up, with a cosine schedule over the time given."""
    torch.manual_seed(0)
    model, generator = Decoder(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, weight_decay=0.01)
    began = time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        done = spent / seconds
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * min(done / 0.05, 0.5 * (1.0 + math.cos(math.pi * done)))
        tokens, wanted = batch(data, 16, generator)
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


@torch.no_grad()
def measure_decoder(model: Decoder, data: Tensor) -> tuple[float, list[Measured]]:
    """Loss (bits a byte) in fp32 and, of each storage, errors in each layer, and loss when every layer uses it."""
    tokens, wanted = batch(data, 16, torch.Generator().manual_seed(2))
    layers: list[Layer] = []

    def bits(attend: Callable[[Layer], Tensor]) -> float:
        model.attend = attend
        return float(
            functional.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten()) / torch.log(torch.tensor(2.0))
        )

    exact = bits(lambda layer: layers.append(layer) or causal(layer))  # type: ignore[func-returns-value]
    found = []
    for fields in STORAGES:
        stored = StoredAttention(fields, HEADS, KV_HEADS, HEAD_DIM, ag.Causal())
        found.append(Measured([stored.error(layer) for layer in layers], bits(stored)))
    return exact, found


@torch.no_grad()
def measure_encoder() -> list[Measured]:
    """Errors in the layers of the demo's encoder."""
    encoder, layers = MiniLM(), []
    plain = ag.compile(ag.load_spec("minilm"))

    class Recorded:
        def prefill(self, q: Tensor, k: Tensor, v: Tensor, *, qo_lens: Tensor, kv_lens: Tensor) -> Tensor:
            layers.append(Layer(*(x.contiguous() for x in (q, k, v)), kv_lens))
            return plain.prefill(q, k, v, qo_lens=qo_lens, kv_lens=kv_lens)  # type: ignore[return-value]

    encoder.use(Recorded())  # type: ignore[arg-type]
    encoder.encode()
    layers = layers[: encoder.model.config.num_hidden_layers]
    heads, dim = layers[0].q.shape[-2:]
    found = []
    for fields in STORAGES:
        if fields.get("group_size", 32) > dim:
            found.append(Measured([float("nan")]))
            continue
        stored = StoredAttention(fields, heads, heads, dim, ag.Full())
        found.append(Measured([stored.error(layer) for layer in layers]))
    return found


def name_of(fields: dict[str, Any]) -> str:
    """The declaration's fields as words."""
    return ", ".join(str(value) if key == "dtype" else f"{key}={value}" for key, value in fields.items())


def page(exact: float, decoder: list[Measured], encoder: list[Measured], seconds: float) -> str:
    """The document."""
    method = inspect.cleandoc(_METHOD.format(exact=exact, seconds=seconds))
    lines = [inspect.cleandoc(_INTRODUCTION), "", "## Accuracy", "", method, "", _HEAD, "|---|---|---|---|---|"]
    for fields, own, other in zip(STORAGES, decoder, encoder, strict=True):
        size = sum(storage.bytes_per_token(HEAD_DIM) for storage in ag.Contiguous(**fields).storages("bf16"))
        first = "-" if other.error != other.error else f"{100 * other.error:.2f} %"
        cells = (name_of(fields), f"{size:g}", first, f"{100 * own.error:.2f} %", f"{own.loss - exact:+.4f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


_HEAD = "| storage of K and V | bytes a token and head, d 64 | encoder: error | decoder: error | decoder: bits a byte |"

_INTRODUCTION = """
# Storage of keys and values

Generated by `python -m docs.make_kv_dtypes`.

A stored number stands for `data * block scale * scale`. Factors of a tensor, head or token never multiply elements: kernels fold
those of keys into the logits and those of values into weights or results, once. Block scales multiply elements while these are
widened.

| dtype | data | block scales | factors (`k_scale`, `v_scale`) |
|---|---|---|---|
| `fp8_e4m3`, `fp8_e5m2` | one byte | none | `tensor` (default), `head`, `token` |
| `int8` | one byte, -127 .. 127 | none | `head` (default), `token`, `tensor` |
| `int4` | two a byte, low nibble first, -8 .. 7 (`zero_point`: 0 .. 15) | fp16 of 32 (default), 64 or 128 | none, `tensor` |
| `nvfp4` | e2m1, two a byte | e4m3 of 16 | `tensor` |
| `mxfp4` | e2m1, two a byte | e8m0 of 32 | none, `tensor` |

`attngen.dtypes.quantize` and `dequantize` define every bit; `ops.append` writes what they say.

Queries of fp8_e4m3 meet keys of fp8_e4m3 as they are. In decode, and in prefill by Triton's and C++ kernels, weights and values are
multiplied in bf16. In prefill on Hopper weights are rounded to e4m3 too, as in FlashAttention-3, for the tensor cores then work
twice as fast: on random numbers, 16,384 tokens of 16 heads of 128, that makes out differ by 2.2 % (causal) and 2.6 % (full) from
exact attention to the same numbers; FlashAttention-3's differs by as much. `backend="triton"` keeps weights in bf16.
"""
_METHOD = """
Error: relative difference (Frobenius norm) of attention's output from that over fp32 keys and values, root mean square over the
layers; queries and everything else are fp32. Encoder: all-MiniLM-L6-v2 (12 heads of 32, 6 layers) on the demo's sentences. Decoder:
3 layers, 4 query and 2 key heads of 64, RoPE (keys are stored rotated), trained {seconds:.0f} s on the bytes of Python's standard
library; {exact:.3f} bits a byte on modules it has not seen, and what each storage adds to that. Factors of tensors and heads are
calibrated on the same activations.
"""

if __name__ == "__main__":
    budget = float(sys.argv[1]) if len(sys.argv) > 1 else 110.0
    known, unseen = library_source()
    bits_exact, of_decoder = measure_decoder(train(known, budget), unseen)
    PAGE.write_text(page(bits_exact, of_decoder, measure_encoder(), budget), encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))
