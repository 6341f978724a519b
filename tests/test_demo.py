"""The main job on real input: a trained sentence encoder whose attention is compiled here."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

import attngen as ag
from attngen import demo
from attngen.errors import ArgumentError


@pytest.fixture(scope="module")
def stock() -> demo.Encoding:
    return demo.MiniLM().encode()


@pytest.fixture(scope="module")
def compiled() -> demo.MiniLM:
    encoder = demo.MiniLM()
    encoder.use(ag.compile(ag.load_spec("minilm")))
    return encoder


@pytest.fixture(scope="module")
def ours(compiled: demo.MiniLM) -> demo.Encoding:
    return compiled.encode()


def test_compiled_attention_gives_the_stock_models_embeddings(stock: demo.Encoding, ours: demo.Encoding) -> None:
    assert len(set(ours.num_tokens)) >= 5, "the sentences are meant to need padding"
    torch.testing.assert_close(ours.embeddings, stock.embeddings, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.similarities, stock.similarities, rtol=0, atol=1e-5)


def test_every_sentence_is_closest_to_the_one_of_its_topic(ours: demo.Encoding) -> None:
    others = ours.similarities.fill_diagonal_(-1)
    assert others.argmax(-1).tolist() == [1, 0, 3, 2, 5, 4, 7, 6]


def test_padding_reaches_the_kernel(stock: demo.Encoding, compiled: demo.MiniLM) -> None:
    """A sentence needs no padding alone, and reads the same among longer ones; unless its padding is dropped."""
    alone = compiled.encode(demo.SENTENCES[:1])
    torch.testing.assert_close(alone.embeddings[0], stock.embeddings[0], rtol=0, atol=1e-5)

    batch = compiled.tokenizer(list(demo.SENTENCES), padding=True, return_tensors="pt").to(demo.DEVICE)
    with torch.inference_mode():
        padded, dropped = (
            compiled.model(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state[0, 0]
            for mask in (batch["attention_mask"], None)
        )
    assert (padded - dropped).abs().max() > 0.1


def mask_hook(mask: torch.Tensor | None, mask_function: object = bidirectional_mask_function) -> torch.Tensor:
    return demo.lengths_of_right_padding(
        batch_size=2,
        kv_length=3,
        mask_function=mask_function,
        attention_mask=mask,
        device=torch.device("cpu"),
        q_length=3,
        dtype=torch.float32,
    )


def test_lengths_of_right_padding() -> None:
    assert mask_hook(None).tolist() == [3, 3]
    assert mask_hook(torch.tensor([[1, 1, 0], [1, 1, 1]])).tolist() == [2, 3]
    assert mask_hook(torch.tensor([[0, 0, 0], [1, 0, 0]])).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("mask", "mask_function"),
    [
        (torch.tensor([[0, 1, 1], [1, 1, 1]]), bidirectional_mask_function),
        (torch.tensor([[1, 0, 1], [1, 1, 1]]), bidirectional_mask_function),
        (torch.tensor([[1, 1, 0], [1, 1, 1]]), causal_mask_function),
        (None, causal_mask_function),
    ],
    ids=["left padding", "hole", "causal", "causal without padding"],
)
def test_a_mask_that_lengths_cannot_say_is_refused(mask: torch.Tensor | None, mask_function: object) -> None:
    with pytest.raises(ArgumentError, match="more than padding on the right") as caught:
        mask_hook(mask, mask_function)
    assert "fix: use a bidirectional encoder and tokenizer.padding_side = 'right'" in str(caught.value)


def test_largest_difference_sees_what_differs() -> None:
    ours, infinite = torch.tensor([1.0, 2.0]), torch.tensor([1.0, -torch.inf])
    assert demo.largest_difference(ours, ours + 1e-3) == pytest.approx(1e-3 / 2.001, rel=1e-3)
    assert demo.largest_difference(infinite, infinite) == 0
    assert not demo.largest_difference(ours, infinite) < 1
    assert not demo.largest_difference(torch.tensor([torch.nan, 2.0]), ours) < 1


@pytest.mark.slow
def test_the_whole_demo_runs(capsys: pytest.CaptureFixture[str]) -> None:
    demo.main()
    shown = capsys.readouterr().out
    for expected in (*demo.SENTENCES[:2], "stock model", "on attngen", "cold compile", "prefill", "decode", "backward"):
        assert expected in shown
    assert shown.count("largest difference in") == 5


def test_without_triton_the_demo_says_what_it_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    console = Console(record=True)
    demo.build_for_other_machines(console, demo.recency_variant())
    assert "Skipped: triton is not installed. Install it with pip install 'attngen[triton]'." in console.export_text()


def test_a_wrong_result_stops_the_demo() -> None:
    console = Console(record=True)
    with pytest.raises(ag.AttngenError, match="embeddings differ by nan"):
        demo.check(console, "embeddings", float("nan"))
    with pytest.raises(ag.AttngenError, match=r"embeddings differ by 2\.0e-04"):
        demo.check(console, "embeddings", 2e-4)
