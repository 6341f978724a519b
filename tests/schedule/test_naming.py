"""Labels of masks and score mods in the names of kernels."""

from __future__ import annotations

import pytest

import attngen as ag
from attngen.ir.expr import SCORE
from attngen.schedule.naming import entry_name, mask_labels, score_labels
from attngen.variant import normalize


@pytest.mark.parametrize(
    ("mask", "label"),
    [
        (ag.Full(), "full"),
        (ag.Causal() & ag.SlidingWindow(left=7), "causal_window7"),
        (ag.SlidingWindow(left=7, right=2), "ahead2_window7"),
        (ag.Causal() & ag.Chunked(16), "causal_chunk16"),
        (ag.Causal() | ag.Chunked(16), "causal_or_chunk16"),
        (ag.Causal() & (ag.SlidingWindow(left=7) | ag.Dilated(8)), "causal_causal_window7_or_every8"),
        (ag.GlobalTokens(4, both=True), "first4_or_global4"),
        (ag.PrefixLM("prefix_len"), "prefix_len_or_causal"),
        (ag.Causal() & ag.Document("doc_ids"), "causal_doc_ids"),
        (ag.Causal() | ag.ImageSpans("span_ids"), "causal_or_span_ids"),
        (ag.Causal() & ag.Tree("ancestors"), "ancestors_causal"),
        (ag.BlockSparse("blocks", 64, 64), "blocks"),
        (ag.Neighborhood((8, 8), 3), "mask"),
    ],
)
def test_masks(mask: ag.MaskMod, label: str) -> None:
    assert "_".join(mask_labels(mask.expr())) == label


@pytest.mark.parametrize(
    ("mods", "label"),
    [
        ((), ""),
        ((ag.SoftCap(30),), "softcap30"),
        ((ag.ALiBi(),), "bias"),
        ((ag.RelativeBias(), ag.SoftCap(5.5)), "rel_bias_softcap5p5"),
        ((ag.Temperature("gain"), ag.DenseBias("pair")), "gain_pair"),
        ((ag.Temperature(floor_scale=64), ag.Kerple()), "scale_kerple_r1_kerple_r2"),
        ((ag.CustomScoreMod(name="root", expression="sqrt(score)"),), "score"),
        ((ag.CustomScoreMod(name="square", expression="score * score"),), "score"),
    ],
)
def test_scores(mods: tuple[ag.ScoreMod, ...], label: str) -> None:
    score = SCORE
    for mod in mods:
        score = mod.expr(score, 4)
    assert "_".join(score_labels(score)) == label


def test_entries() -> None:
    variant = normalize(ag.load_spec("olmo2-7b-packed"), "prefill")
    assert entry_name(variant, "prefill", "forward") == "prefill_causal_doc_ids_bf16_d128"
    variant = normalize(ag.load_spec("t5-small-decoder"), "decode")
    assert entry_name(variant, "decode", "merge") == "decode_merge_causal_rel_bias_fp32_d64"
