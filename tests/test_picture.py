"""Tile classes against the predicate, counts against sums done by hand, and pixels of the pictures."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from rich.console import Console

import attngen as ag
from attngen.errors import ArgumentError, AttngenError
from attngen.ir.expr import TRUE, Const
from attngen.ir.text import to_text
from attngen.masks import MaskMod
from attngen.picture import TileMap, save_png, telling_length, terminal_picture
from attngen.picture.png import PAIRS, UNDECIDED, Canvas, draw
from attngen.picture.terminal import VISIBLE, WHOLE, counts, pixel_edges
from attngen.picture.tiles import assume
from attngen.schedule import choose_schedule
from attngen.target import Target
from attngen.variant import normalize
from attngen.workload import read_parameter, sample_parameters


def tile_map(mask: MaskMod, qo_len: int, kv_len: int, tile_q: int, tile_kv: int, **options: object) -> TileMap:
    spec = ag.AttentionSpec(heads=ag.GQA(num_qo_heads=4, num_kv_heads=2, head_dim=16), mask=mask)
    plan = choose_schedule(normalize(spec, "prefill"), "prefill", Target.parse("cpu"), "cpp")
    return TileMap(plan.kernel("forward"), qo_len, kv_len, tile_q, tile_kv, **options)


def numbers(tiles: TileMap) -> tuple[int, int, int]:
    return tiles.number("none"), tiles.number("some"), tiles.number("all")


@ag.mask_mod
def per_head(b, h, q, k):
    return q - k < 40 * (h + 1)


@ag.mask_mod
def same_document(b, h, q, k, doc_ids: ag.Tensor("batch", "max_kv_len", dtype="i32")):
    return doc_ids[b, q] == doc_ids[b, k]


@ag.mask_mod
def prefix(b, h, q, k, prefix_len: ag.Tensor("batch", dtype="i32")):
    return k < prefix_len[b]


@ag.mask_mod
def chunked(b, h, q, k):
    return q // 48 == k // 48


@ag.mask_mod
def even_distance(b, h, q, k):
    return (q - k) % 2 == 0


def test_causal_tiles_by_hand():
    tiles = tile_map(ag.Causal(), 512, 512, 128, 128)
    assert tiles.classes == (
        ("some", "none", "none", "none"),
        ("all", "some", "none", "none"),
        ("all", "all", "some", "none"),
        ("all", "all", "all", "some"),
    )
    assert numbers(tiles) == (6, 4, 6)
    assert int(tiles.pairs.visible) == 512 * 513 // 2
    assert tiles.visited_pairs == 10 * 128 * 128
    assert counts(tiles) == [
        "16 tiles: 10 visited (62.5%), 6 skipped, 4 partial",
        "262144 pairs: 131328 visible (50.1%; 80.2% of the pairs in visited tiles)",
    ]


def test_window_tiles_by_hand():
    """Rows 128 i .. 128 i + 127 see keys from 128 i - 127 on: their own tile and the one before, neither whole."""
    tiles = tile_map(ag.Causal() & ag.SlidingWindow(left=127), 512, 512, 128, 128)
    assert numbers(tiles) == (16 - 7, 7, 0)
    assert tiles.classes[2] == ("none", "some", "some", "none")
    assert int(tiles.pairs.visible) == sum(range(1, 128)) + (512 - 127) * 128


def test_fewer_queries_than_keys_are_aligned_to_the_end():
    tiles = tile_map(ag.Causal(), 128, 512, 128, 128)
    assert tiles.first_q_pos == 384
    assert tiles.classes == (("all", "all", "all", "some"),)


def test_more_queries_than_keys_leave_rows_without_any():
    tiles = tile_map(ag.Causal(), 256, 128, 128, 128)
    assert tiles.classes == (("none",), ("some",))
    assert int(tiles.pairs.visible) == 128 * 129 // 2


def test_short_last_tiles():
    tiles = tile_map(ag.Causal(), 200, 200, 128, 128)
    assert tiles.classes == (("some", "none"), ("all", "some"))
    assert tiles.visited_pairs == 128 * 128 + 72 * 128 + 72 * 72


def test_full_mask_takes_every_tile_whole():
    tiles = tile_map(ag.Full(), 100, 300, 64, 64)
    assert numbers(tiles) == (0, 0, 10)
    assert int(tiles.pairs.visible) == 30000


MASKS: dict[str, MaskMod] = {
    "causal": ag.Causal(),
    "window": ag.Causal() & ag.SlidingWindow(left=100),
    "both ways": ag.SlidingWindow(left=40, right=30),
    "not causal": ~ag.Causal(),
    "per head": ag.Causal() & per_head,
    "chunked": chunked & ag.Causal(),
    "either": chunked | ag.SlidingWindow(left=5, right=5),
    "parity": even_distance,
    "prefix": ag.Causal() | prefix,
    "documents": ag.Causal() & same_document,
}
PARAMS = {
    "prefix": {"prefix_len": torch.tensor([10, 150], dtype=torch.int32)},
    "documents": {"doc_ids": (torch.arange(400) // 70).to(torch.int32).expand(2, 400).contiguous()},
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("qo_len", "kv_len"), [(300, 300), (77, 301), (210, 130)])
@pytest.mark.parametrize("head", [0, 3])
def test_no_class_contradicts_the_predicate(name, qo_len, kv_len, head):
    tiles = tile_map(MASKS[name], qo_len, kv_len, 32, 48, head=head, request=1, params=PARAMS.get(name, {}))
    row_edges, column_edges = [*range(0, qo_len, 32), qo_len], [*range(0, kv_len, 48), kv_len]
    found = tiles.count(row_edges, column_edges)
    assert not found.undecided.any()
    for row, names in enumerate(tiles.classes):
        for column, drawn in enumerate(names):
            visible, total = int(found.visible[row, column]), int(found.total[row, column])
            assert visible == {"none": 0, "all": total}.get(drawn, visible), (row, column, drawn)


def test_heads_differ():
    near, far = (tile_map(ag.Causal() & per_head, 256, 256, 32, 32, head=head) for head in (0, 3))
    assert int(near.pairs.visible) == sum(min(q + 1, 40) for q in range(256))
    assert int(far.pairs.visible) == sum(min(q + 1, 160) for q in range(256))
    assert near.number("none") > far.number("none")


def test_a_missing_parameter_leaves_what_causal_keeps_undecided():
    tiles = tile_map(ag.Causal() & same_document, 256, 256, 64, 64)
    assert tiles.missing == ("doc_ids",)
    assert numbers(tiles) == (6, 10, 0)
    assert int(tiles.pairs.visible) == 0
    assert int(tiles.pairs.undecided) == 256 * 257 // 2
    assert counts(tiles)[-1] == "32896 pairs depend on doc_ids (not given): their tiles are drawn as some"


def test_a_given_parameter_decides():
    doc_ids = torch.tensor([[0] * 100 + [1] * 156], dtype=torch.int32)
    tiles = tile_map(ag.Causal() & same_document, 256, 256, 64, 64, params={"doc_ids": doc_ids})
    assert tiles.missing == ()
    assert int(tiles.pairs.visible) == 100 * 101 // 2 + 156 * 157 // 2


def test_request_selects_the_parameter():
    lengths = torch.tensor([0, 64], dtype=torch.int32)
    none, some = (
        tile_map(ag.Causal() | prefix, 128, 128, 64, 64, request=request, params={"prefix_len": lengths})
        for request in (0, 1)
    )
    assert int(none.pairs.visible) == 128 * 129 // 2
    assert int(some.pairs.visible) == 128 * 129 // 2 + 64 * 63 // 2


@pytest.mark.parametrize("outcome", [True, False])
def test_assume_bounds_from_one_side(outcome):
    causal, unknown = ag.Causal().expr(), same_document.expr()
    assert assume((ag.Causal() & same_document).expr(), (), outcome) == (causal if outcome else Const(False))
    assert assume((ag.Causal() | same_document).expr(), (), outcome) == (TRUE if outcome else causal)
    assert assume((~same_document).expr(), (), outcome) == Const(outcome)
    assert assume(unknown, ("doc_ids",), outcome) == unknown


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"head": 4}, "there is no head 4\n  where: head\n  why: the spec has 4\n  fix: pass 0 to 3"),
        (
            {"params": {"x": torch.zeros(1)}},
            "no parameter 'x'\n  where: params\n  why: the spec has none\n  fix: remove it",
        ),
    ],
)
def test_wrong_options(options, text):
    with pytest.raises(ArgumentError) as caught:
        tile_map(ag.Causal(), 64, 64, 32, 32, **options)
    assert str(caught.value) == text


def test_lengths_have_limits():
    with pytest.raises(ArgumentError, match="kv_len is 16385"):
        tile_map(ag.Causal(), 64, 16385, 32, 32)
    with pytest.raises(ArgumentError, match="tile_q is 0"):
        tile_map(ag.Causal(), 64, 64, 0, 32)


def test_telling_length_grows_with_the_mask():
    assert telling_length(ag.Causal().expr()) == 512
    assert telling_length(ag.SlidingWindow(left=500).expr()) == 1024
    assert telling_length(ag.SlidingWindow(left=4095).expr()) == 8192
    assert telling_length(ag.SlidingWindow(left=10**6).expr()) == 8192


def printed(tiles: TileMap, width: int, *, colour: bool = False) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=200, force_terminal=colour, color_system="truecolor" if colour else None)
    console.print(terminal_picture(tiles, width, colour=colour))
    return stream.getvalue()


def test_terminal_without_colours():
    """One character is one key wide and two queries high."""
    lines = printed(tile_map(ag.Causal(), 8, 8, 4, 4), 8 + 3).splitlines()
    assert lines == [
        "k <= q",
        "prefill for " + str(Target.parse("cpu")) + " by cpp: 8 queries x 8 keys in tiles of 4 x 4, head 0",
        "",
        "   0   4",
        " 0 ▓▒░░····",
        "   ▓▓▓▒····",
        "   ████▓▒░░",
        "   ████▓▓▓▒",
        "",
        "██ all       1  taken whole, the mask is not evaluated",
        "░▓ some      2  evaluated pair by pair",
        "·· none      1  skipped",
        "4 tiles: 3 visited (75.0%), 1 skipped, 2 partial",
        "64 pairs: 36 visible (56.2%; 75.0% of the pairs in visited tiles)",
    ]


def test_terminal_draws_undecided_pairs():
    assert "????????" in printed(tile_map(same_document, 8, 8, 4, 4), 11).splitlines()[4]
    assert "?? undecided    depends on doc_ids" in printed(tile_map(same_document, 8, 8, 4, 4), 11)


def test_terminal_with_colours():
    text = printed(tile_map(ag.Causal(), 8, 8, 4, 4), 11, colour=True)
    blue, amber = ("{};{};{}".format(*colour) for colour in (WHOLE, VISIBLE))
    first, *_, last = [line for line in text.splitlines() if "▀" in line]
    assert first.count("▀") == last.count("▀") == 8
    assert blue not in first
    assert f"38;2;{blue};48;2;{blue}m▀▀▀▀" in last
    assert f"48;2;{amber}m" in last


@pytest.mark.parametrize("width", [20, 60, 200])
def test_terminal_fits(width):
    tiles = tile_map(ag.Causal(), 1000, 1000, 64, 64)
    picture = [line for line in printed(tiles, width).splitlines() if "█" in line and "all" not in line]
    assert max(map(len, picture)) <= width
    assert len(picture) > 3


def test_pixel_edges_keep_to_tiles():
    assert pixel_edges(100, 64, 16.0) == [0, 16, 32, 48, 64, 82, 100]
    assert pixel_edges(100, 64, 100.0) == [0, 100]
    assert pixel_edges(300, 64, 65.0) == [0, 128, 256, 300]
    assert pixel_edges(4, 2, 0.1) == [0, 1, 2, 3, 4]


def pixel_of(tiles: TileMap) -> Callable[[int, int], tuple[int, ...]]:
    image, canvas = draw(tiles, "title"), Canvas.of(tiles)
    return lambda row, column: image.getpixel(canvas.centre(row, column))


def test_png_pixels():
    """Every colour at places that are known: off the grid, on both sides of the diagonal."""
    pixel = pixel_of(tile_map(ag.Causal(), 512, 512, 128, 128))
    assert pixel(10, 300) == PAIRS["none"][0]
    assert pixel(300, 10) == pixel(511, 383) == PAIRS["all"][1]
    assert pixel(200, 200) == pixel(200, 199) == PAIRS["some"][1]
    assert pixel(200, 201) == PAIRS["some"][0]


def test_png_has_a_tile_grid():
    tiles = tile_map(ag.Causal(), 512, 512, 128, 128)
    image, canvas = draw(tiles, "title"), Canvas.of(tiles)
    x, y = canvas.centre(300, 128)
    inside, line = image.getpixel((x, y)), image.getpixel((x - 1, y))
    assert inside == PAIRS["all"][1]
    assert sum(line) < sum(inside)


def test_png_of_long_masks_blends_pairs():
    """2048 positions on 1024 pixels: a pixel on the diagonal stands for 2 x 2 pairs, of which 3 are visible."""
    tiles = tile_map(ag.Causal(), 2048, 2048, 512, 512)
    pixel = pixel_of(tiles)
    hidden, visible = PAIRS["some"]
    assert pixel(100, 100) == tuple(round(a + (b - a) * 0.75) for a, b in zip(hidden, visible, strict=True))
    assert pixel(600, 100) == PAIRS["all"][1]
    assert Canvas.of(tiles).columns.pixels == 1024


def test_png_of_undecided_pairs():
    pixel = pixel_of(tile_map(ag.Causal() & same_document, 256, 256, 64, 64))
    assert pixel(200, 20) == UNDECIDED
    assert pixel(20, 30) == PAIRS["some"][0]
    assert pixel(20, 200) == PAIRS["none"][0]


def test_png_of_one_query_is_no_thin_strip():
    tiles = tile_map(ag.Causal(), 1, 4096, 64, 64)
    canvas = Canvas.of(tiles)
    assert (canvas.rows.pixels, canvas.columns.pixels) == (96, 1024)
    assert pixel_of(tiles)(0, 2000) == PAIRS["all"][1]


def test_png_is_written(tmp_path: Path):
    path = tmp_path / "mask.png"
    save_png(tile_map(ag.Causal(), 64, 64, 32, 32), path, "a title")
    with Image.open(path) as image:
        assert (image.format, image.mode) == ("PNG", "RGB")
        assert image.width > 1024


def test_png_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tiles = tile_map(ag.Causal(), 64, 64, 32, 32)
    with pytest.raises(ArgumentError, match=r"mask\.jpg is no PNG file"):
        save_png(tiles, tmp_path / "mask.jpg", "")
    with pytest.raises(ArgumentError, match="No such file"):
        save_png(tiles, tmp_path / "missing" / "mask.png", "")
    monkeypatch.setattr("attngen.picture.png.find_spec", lambda name: None)
    with pytest.raises(AttngenError, match="attngen\\[picture\\]"):
        save_png(tiles, tmp_path / "mask.png", "")


def test_read_parameter(tmp_path: Path):
    torch.save(torch.arange(3), tmp_path / "x.pt")
    name, tensor = read_parameter(f"x={tmp_path}/x.pt")
    assert (name, tensor.tolist()) == ("x", [0, 1, 2])
    torch.save({"x": 1}, tmp_path / "y.pt")
    with pytest.raises(ArgumentError, match="it holds a dict"):
        read_parameter(f"x={tmp_path}/y.pt")
    with pytest.raises(ArgumentError, match="cannot read 'x'"):
        read_parameter("x")


def test_the_title_shows_the_mask():
    tiles = tile_map(ag.Causal() & ag.SlidingWindow(left=7), 32, 32, 16, 16)
    assert printed(tiles, 80).splitlines()[0] == to_text(tiles.variant.mask)


@pytest.mark.parametrize("name", sorted(ag.shipped_specs()))
def test_shipped_masks_are_drawn(name):
    """With sample values of their parameters nothing is undecided, and no class contradicts the predicate."""
    mask = ag.load_spec(name).mask
    samples = sample_parameters(ag.AttentionSpec(heads=ag.MHA(4, 64), mask=mask), 96, 96)
    tiles = tile_map(mask, 96, 96, 16, 24, params=samples)
    found = tiles.count([*range(0, 97, 16)], [*range(0, 97, 24)])
    assert not found.undecided.any()
    for row, names in enumerate(tiles.classes):
        for column, drawn in enumerate(names):
            visible, total = int(found.visible[row, column]), int(found.total[row, column])
            assert visible == {"none": 0, "all": total}.get(drawn, visible), (row, column, drawn)


def test_tiles_of_data_are_classified_by_their_extents():
    """Four documents of 256 tokens, causal, in tiles of 64: 4 * 4 diagonal tiles are partial, 4 * 6 below them whole."""
    doc_ids = (torch.arange(1024) // 256).int()[None]
    mask = ag.Causal() & ag.Document("doc_ids")
    tiles = tile_map(mask, 1024, 1024, 64, 64, params={"doc_ids": doc_ids})
    assert numbers(tiles) == (216, 16, 24)
    assert (tiles.visited_pairs, int(tiles.pairs.visible)) == (40 * 64 * 64, 4 * 256 * 257 // 2)
    assert numbers(tile_map(mask, 1024, 1024, 64, 64)) == (120, 136, 0)  # without values: what causal alone tells


def test_packed_bits_are_classified_by_their_bytes():
    bits = torch.zeros(1, 64, 8, dtype=torch.uint8)
    bits[:, :32, :4] = 255
    bits[:, 40, 7] = 16
    tiles = tile_map(ag.Dense("mask", packed=True), 64, 64, 16, 16, params={"mask": bits[:, None]})
    assert numbers(tiles) == (11, 1, 4)
