"""docs/variants.md and its pictures are what docs/make_variants.py writes."""

from __future__ import annotations

import io

import pytest
from PIL import Image

import attngen as ag
from docs.make_variants import FOLDER, MASKS, OTHERS, SCORES, page, pictures

ENTRIES = (*MASKS, *SCORES, *OTHERS)


def test_the_page_is_up_to_date() -> None:
    assert (FOLDER / "variants.md").read_text() == page(), "run python -m docs.make_variants"


def test_the_pictures_are_up_to_date() -> None:
    """Pixel by pixel: compressors differ."""
    drawn = pictures()
    assert {path.relative_to(FOLDER).as_posix() for path in (FOLDER / "pictures").glob("*.png")} == set(drawn)
    for name, content in drawn.items():
        path = FOLDER / name
        assert path.stat().st_size < 15 * 1024
        with Image.open(path) as there, Image.open(io.BytesIO(content)) as here:
            assert there.convert("RGB").tobytes() == here.convert("RGB").tobytes(), (
                f"{name}: python -m docs.make_variants"
            )


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_entries_are_shipped(entry) -> None:
    """Specs named by an entry use the same primitives, with the sizes of their model."""

    def kinds(spec: ag.AttentionSpec) -> set[str]:
        found, stack = {spec.normalizer.kind}, [spec.mask, *spec.score_mods]
        while stack:
            mod = stack.pop()
            found.add(mod.kind)
            stack += getattr(mod, "operands", ())
        extra = {"rope": spec.rope, "qk_norm": spec.qk_norm, "dropout": spec.dropout, "gate": spec.output_gate}
        return found | {name for name, value in extra.items() if value} - {"full", "softmax", "and", "or"}

    assert entry.specs
    for name in entry.specs:
        missing = kinds(entry.spec()) - kinds(ag.load_spec(name)) - {"full", "softmax", "and", "or", "causal"}
        assert not missing, (name, missing)


def test_every_primitive_has_an_entry() -> None:
    declared = " ".join(entry.declare for entry in ENTRIES)
    composed = ("CustomMask", "MaskMod", "And", "Or", "Not")
    for module in (ag.masks, ag.score_mods):
        for name in module.__all__:
            if name[0].isupper() and name not in (*composed, "Mask", "CustomScoreMod", "ScoreMod", "AnyScoreMod"):
                assert f"ag.{name}(" in declared, name
