"""Writes docs/variants.md and its pictures from the declarations below: ``python -m docs.make_variants``."""

from __future__ import annotations

import ctypes
import io
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image

import attngen as ag
from attngen.compiler import plan_op
from attngen.ir.evaluate import evaluate
from attngen.ir.expr import SCORE
from attngen.picture import TileMap
from attngen.picture.png import Axis, Canvas, mask_bytes
from attngen.target import Target
from attngen.workload import sample_parameters

FOLDER = Path(__file__).parent
LENGTH, TILE, ZOOM, HEADS = 96, 8, 3, 4
WARM, COLD, PAPER = ((234, 88, 12), (37, 99, 235), (255, 255, 255))


@dataclass(frozen=True)
class Entry:
    """One variant.

    Attributes:
        name: heading, and the picture's file name.
        declare: fields of the spec besides its heads, as Python.
        formula: what it computes.
        users: models and papers.
        specs: shipped specs that declare it.
        pictured: whether it depends on the positions, so that a picture says something.
    """

    name: str
    declare: str
    formula: str
    users: str
    specs: tuple[str, ...] = ()
    pictured: bool = True

    @property
    def file(self) -> str:
        """The picture, relative to this folder."""
        return f"pictures/{self.name.lower().replace(' ', '-').replace(',', '')}.png"

    def spec(self) -> ag.AttentionSpec:
        """The declaration with a few small heads."""
        fields = eval(f"dict({self.declare})", {"ag": ag})  # the text above, which the page shows
        return ag.AttentionSpec(heads=ag.MHA(HEADS, 64), dtype="fp32", **fields)


MASKS = (
    Entry("Causal", "mask=ag.Causal()", "k <= q", "decoders", ("llama3-8b", "gpt2")),
    Entry(
        "Sliding window",
        "mask=ag.Causal() & ag.SlidingWindow(left=15)",
        "q - left <= k <= q",
        "Mistral 7B, Gemma 2 and 3, gpt-oss; Longformer (2004.05150)",
        ("mistral-7b", "gemma2-9b-local", "gpt-oss-20b-local"),
    ),
    Entry(
        "Two-sided window",
        "mask=ag.SlidingWindow(left=10, right=10)",
        "q - left <= k <= q + right",
        "ModernBERT (2412.13663)",
        ("modernbert-base-local",),
    ),
    Entry(
        "Prefix LM",
        'mask=ag.PrefixLM("prefix_len")',
        "k < prefix_len[b] or k <= q",
        "PaliGemma (2407.07726), UL2 (2205.05131), T5's prefix LM (1910.10683)",
        ("paligemma-3b",),
    ),
    Entry(
        "Packed documents",
        'mask=ag.Causal() & ag.Document("doc_ids")',
        "doc_ids[b, q] == doc_ids[b, k] and k <= q",
        "training on packed samples: OLMo 2 (2501.00656), Llama 3 (2407.21783)",
        ("olmo2-7b-packed",),
    ),
    Entry(
        "Chunks",
        "mask=ag.Causal() & ag.Chunked(32)",
        "q // size == k // size and k <= q",
        "local layers of Llama 4",
        ("llama4-scout-local",),
    ),
    Entry(
        "Block-causal",
        "mask=ag.Causal() | ag.Chunked(16)",
        "q // size >= k // size",
        "block-wise decoding of diffusion language models: SDAR (2510.06303), Fast-dLLM (2505.22618)",
        ("sdar-8b",),
    ),
    Entry(
        "Strided",
        "mask=ag.Causal() & (ag.SlidingWindow(left=7) | ag.Dilated(8))",
        "k <= q and (q - k <= left or (q - k) % step == 0)",
        "Sparse Transformer (1904.10509); dilated windows of Longformer",
        ("sparse-transformer-strided",),
    ),
    Entry(
        "Sinks and window",
        "mask=ag.Causal() & (ag.SlidingWindow(left=15) | ag.GlobalTokens(4))",
        "k <= q and (q - k <= left or k < n)",
        "StreamingLLM (2309.17453)",
        ("llama2-7b-streaming",),
    ),
    Entry(
        "Global tokens",
        "mask=ag.SlidingWindow(left=10, right=10) | ag.GlobalTokens(4, both=True)",
        "|q - k| <= w or q < n or k < n",
        "Longformer (2004.05150), with its global tokens first",
        ("longformer-base",),
    ),
    Entry(
        "Images in text",
        'mask=ag.Causal() | ag.ImageSpans("span_ids")',
        "k <= q or span_ids[b, q] == span_ids[b, k] >= 0",
        "Gemma 3 (2503.19786), Transfusion (2408.11039)",
        ("gemma3-12b-image",),
    ),
    Entry(
        "Trees of drafts",
        'mask=ag.Causal() & ag.Tree("ancestors")',
        "k < kv_len - n or ancestors[b, q - (kv_len - n), k - (kv_len - n)]",
        "verification in SpecInfer (2305.09781), Medusa (2401.10774), EAGLE-2 (2406.16858); `packed=True` reads bits",
        ("llama3-8b-eagle2", "vicuna-7b-medusa"),
    ),
    Entry(
        "Block diffusion",
        "mask=ag.BlockDiffusion(8)",
        "own block in the own half, or clean keys of earlier blocks",
        "BD3-LM (2503.09573): noised tokens, then clean ones",
        ("bd3lm-owt",),
    ),
    Entry(
        "Neighborhood",
        "mask=ag.Neighborhood((8, 12), (3, 5))",
        "s <= y < s + window in each dimension, s = clamp(x - window // 2, 0, length - window)",
        "NAT (2204.07143), video models with generalized neighborhood attention (2504.16922)",
        ("nat-tiny", "hunyuanvideo-gna"),
    ),
    Entry(
        "Dilated neighborhood",
        "mask=ag.Neighborhood((8, 12), 3, 2)",
        "the same among tokens of equal x % dilation",
        "DiNAT (2209.15001)",
        ("dinat-tiny",),
    ),
    Entry(
        "Sparse blocks",
        'mask=ag.BlockSparse("blocks", 8, 8)',
        "blocks[h, q // block_q, k // block_kv]",
        "BigBird (2007.14062), MInference (2407.02490), MoBA (2502.13189), VSA (2505.13389); see `ag.block_matrix`",
        ("bigbird-base", "llama3-8b-minference"),
    ),
    Entry(
        "Dense mask",
        'mask=ag.Dense("mask")',
        "mask[b, h, row, k]",
        "Mask2Former (2112.01527), FlashInfer's custom masks; `packed=True` reads bits",
        ("mask2former", "flashinfer-custom-mask"),
    ),
    Entry(
        "Cross attention",
        "mask=ag.Full()",
        "every key of the request",
        "Whisper (2212.04356)",
        ("whisper-large-cross",),
    ),
)
SCORES = (
    Entry(
        "Soft cap",
        "score_mods=(ag.SoftCap(50.0),)",
        "cap * tanh(score / cap)",
        "Gemma 2, Grok-1",
        ("gemma2-9b-global",),
        pictured=False,
    ),
    Entry(
        "ALiBi",
        "mask=ag.Causal(), score_mods=(ag.ALiBi(),)",
        "score + slope[h] * (k - q)",
        "BLOOM, MPT (2108.12409)",
        ("bloom-7b",),
    ),
    Entry(
        "T5 buckets",
        "score_mods=(ag.RelativeBias(bidirectional=True),), sm_scale=1.0",
        "score + table[bucket(k - q), h]",
        "T5, Flan-T5 (1910.10683)",
        ("t5-small-encoder", "t5-small-decoder"),
    ),
    Entry(
        "Dense bias",
        'score_mods=(ag.DenseBias("bias"),)',
        "score + bias[b, h, row, k]",
        "pair bias of AlphaFold 2 and 3, Swin's position bias",
        ("alphafold2-row", "alphafold3-pair-bias"),
    ),
    Entry(
        "Forgetting",
        'mask=ag.Causal(), score_mods=(ag.Forgetting("c"),)',
        "score + c[b, h, q] - c[b, h, k], c the running sum of log forget gates",
        "Forgetting Transformer (2503.02130)",
        ("fox-760m",),
    ),
    Entry(
        "Temperature by position",
        "mask=ag.Causal(), score_mods=(ag.Temperature(floor_scale=16),)",
        "score * (1 + attn_scale * log(1 + floor((q + 1) / floor_scale)))",
        "Llama 4; `train_len=` is Qwen's log-n (2309.16609)",
        ("llama4-scout-global", "qwen-7b-logn"),
    ),
    Entry(
        "Learned temperature",
        'score_mods=(ag.Temperature("gain"),), sm_scale=1.0',
        "score * gain[h]",
        "Swin v2 (2111.09883)",
        ("swin-v2-tiny",),
        pictured=False,
    ),
    Entry(
        "KERPLE",
        'mask=ag.Causal(), score_mods=(ag.Kerple("log"),)',
        "score - r1[h] * log(1 + r2[h] * |q - k|)",
        'KERPLE (2205.09921); `Kerple("power")`: score - r1[h] * |q - k| ** r2[h]',
        ("kerple-162m-log", "kerple-162m-power"),
    ),
    Entry(
        "FIRE",
        "mask=ag.Causal(), score_mods=(ag.Fire(8),)",
        "score + MLP(log(1 + c |q - k|) / log(1 + c max(q, L)))[h]",
        "FIRE (2310.04418)",
        ("fire-125m",),
    ),
)
OTHERS = (
    Entry(
        "Attention sinks",
        "mask=ag.Causal(), normalizer=ag.Softmax(sink=True)",
        "exp(s) / (sum of exp(s) + exp(sink[h]))",
        "gpt-oss; `off_by_one=True` is a sink of 0",
        ("gpt-oss-20b-local", "gpt-oss-20b-global"),
    ),
    Entry("Sigmoid", "normalizer=ag.Sigmoid()", "sigmoid(s - log(kv_len))", "2409.04431", ("sigmoid-vit-b16",)),
    Entry("ReLU", "normalizer=ag.ReLU()", "max(s, 0) / kv_len", "2309.08586", ("relu-vit-b16",)),
    Entry(
        "SiLU",
        "mask=ag.Causal(), normalizer=ag.SiLU()",
        "s * sigmoid(s) / kv_len",
        "HSTU (2402.17152)",
        ("hstu-large",),
    ),
    Entry("Dropout", "dropout=0.1", "kept weights / (1 - p), the rest 0", "BERT", ("bert-base-training",)),
    Entry(
        "Output gate",
        'output_gate="gate"',
        "out * sigmoid(gate)",
        "Qwen3-Next, AlphaFold",
        ("qwen3-next-80b", "alphafold2-row"),
    ),
    Entry(
        "Rotation",
        "rope=ag.Rope()",
        "q and k turned by position * theta ** (-2 i / dim)",
        "most decoders (2104.09864)",
        ("qwen3-next-80b",),
    ),
    Entry(
        "Norm of q and k",
        'qk_norm=ag.QKNorm(q_weight="q_weight", k_weight="k_weight")',
        "x / sqrt(mean(x ** 2) + eps) * weight",
        "Qwen3, Gemma 3",
        ("qwen3-next-80b",),
    ),
)
HEADER = """# Variants

Each with its formula over query `q`, key `k`, head `h` and request `b`, and its declaration; `heads` and storage are yours. Masks
combine with `&`, `|` and `~`, score mods apply in order. A picture of a mask has a row a query and a column a key, over the
tiles of a kernel: blue tiles are taken whole, orange ones are evaluated pair by pair, grey ones are skipped. A picture of a score
mod shows what it adds to a score of 1 in head 1: orange more, blue less.

Written by `python -m docs.make_variants`.
"""


def page() -> str:
    """The text of variants.md."""
    parts = [HEADER]
    for title, entries in (("Masks", MASKS), ("Scores", SCORES), ("Normalizers and the rest", OTHERS)):
        parts.append(f"\n## {title}\n")
        parts += map(_section, entries)
    return "".join(parts)


def _section(entry: Entry) -> str:
    spec = entry.spec()
    lines = [f"\n### {entry.name}\n"]
    if entry.pictured and entry not in OTHERS:
        lines.append(f"![{entry.name}]({entry.file})\n")
    lines.append(f"`{entry.formula}`\n")
    lines.append(f"Used by: {entry.users}. Shipped: {', '.join(f'`{name}`' for name in entry.specs)}.\n")
    fields = "\n".join(f"    {field}," for field in _fields(entry.declare))
    lines.append(f"```python\nspec = ag.AttentionSpec(\n    heads=heads,\n{fields}\n)\n```\n")
    declared = [*spec.mask.params(), *(param for mod in spec.score_mods for param in mod.params())]
    shapes = [f"`{param.name}` {param.dtype} `[{', '.join(map(str, param.dims))}]`" for param in declared]
    if shapes:
        lines.append(f"Reads {', '.join(shapes)}.\n")
    return "\n".join(lines)


def _fields(declare: str) -> list[str]:
    """The keyword arguments one by one."""
    depth, fields = 0, [""]
    for char in declare:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and not depth:
            fields.append("")
        else:
            fields[-1] += char
    return [field.strip() for field in fields]


def pictures() -> dict[str, bytes]:
    """PNG files by name."""
    images = {entry: _mask_image(entry) for entry in MASKS}
    images |= {entry: _score_image(entry) for entry in SCORES if entry.pictured}
    return {entry.file: _png(image) for entry, image in images.items()}


def _mask_image(entry: Entry) -> Image.Image:
    spec = entry.spec()
    kernel = plan_op(spec, "prefill", Target.parse("cpu"), "cpp").kernel("forward")
    samples = sample_parameters(spec, LENGTH, LENGTH)
    tiles = TileMap(kernel, LENGTH, LENGTH, TILE, TILE, params=samples)
    axis = Axis(LENGTH, LENGTH * ZOOM, TILE)
    return Image.frombytes("RGB", (LENGTH * ZOOM,) * 2, mask_bytes(tiles, Canvas(axis, axis)))


def _score_image(entry: Entry) -> Image.Image:
    """What the mods add to a score of 1; white where the mask hides the pair."""
    spec, places = entry.spec(), torch.arange(LENGTH)
    env = {"b": 0, "h": 1, "q": places[:, None], "k": places, "qo_len": LENGTH, "kv_len": LENGTH, "score": 1.0}
    score = SCORE
    params = {}
    for mod in spec.score_mods:
        score = mod.expr(score, HEADS)
        params |= {param.name: _example(param.name, param.dims) for param in mod.params()}
    added = (evaluate(score, env, params) - 1.0).expand(LENGTH, LENGTH)
    visible = evaluate(spec.mask.expr(), env, {}).expand(LENGTH, LENGTH)
    share = (added / added[visible].abs().max().clamp(min=1e-9)).where(visible, 0.0)[..., None].float()
    white, warm, cold = (torch.tensor(colour).float() for colour in (PAPER, WARM, COLD))
    colour = torch.lerp(white, torch.where(share > 0, warm, cold), share.abs().clamp(max=1.0))
    pixels = colour.repeat_interleave(ZOOM, 0).repeat_interleave(ZOOM, 1).round().to(torch.uint8).contiguous()
    return Image.frombytes("RGB", (LENGTH * ZOOM,) * 2, ctypes.string_at(pixels.data_ptr(), pixels.numel()))


def _example(name: str, dims: tuple[str | int, ...]) -> torch.Tensor:
    """Smooth values, so that a picture shows where they are read."""
    sizes = {"num_qo_heads": HEADS, "batch": 1, "max_qo_len": LENGTH, "max_kv_len": LENGTH}
    shape = [dim if isinstance(dim, int) else sizes[dim.removesuffix(" or 1")] for dim in dims]
    if name == "c":
        return (-0.03 * (1.2 + torch.sin(torch.arange(LENGTH) / 7.0))).cumsum(0).expand(shape).double()
    steps = sum(
        torch.arange(n).view(-1, *(1,) * (len(shape) - axis - 1)) * (axis + 1) / (n + 1) for axis, n in enumerate(shape)
    )
    return (torch.cos(3.0 * torch.as_tensor(steps)) + 0.3).abs().double().expand(shape)


def _png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.quantize(64).save(stream, format="PNG", optimize=True)
    return stream.getvalue()


def main() -> None:
    """Write the page and its pictures."""
    (FOLDER / "pictures").mkdir(exist_ok=True)
    for name, content in pictures().items():
        (FOLDER / name).write_bytes(content)
    (FOLDER / "variants.md").write_text(page())


if __name__ == "__main__":
    main()
