"""Text of users never becomes code: names are identifiers, and what is free text stays out of kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import attngen as ag
from attngen.compiler import plan_op, render_kernel
from attngen.target import Target

HOSTILE = (
    "*/ int main() { return 1; } /*",
    '"""; import os; os.system("true"); """',
    "// \\\n#include </etc/passwd>",
    "{{ 7 * 7 }}{% include '/etc/passwd' %}",
    "a\nb",
    "a b",
    "a;b",
    "a\0b",
    "a\u2028b",
    "ａ",
    "é",
    "x" * 65,
    "1a",
    "",
    "_a",
    "a.b",
    "a-b",
    "$(true)",
    "../../a",
    "__class__",
    "attngen_x",
)
PLACES = (("cpu:x86-64-v3", "cpp"), ("cuda:sm90a", "triton"), ("cuda:sm90a", "cuda"))


def sources(spec: ag.AttentionSpec) -> list[str]:
    """Every kernel of prefill and decode, by every backend."""
    return [
        render_kernel(kernel).source
        for target, backend in PLACES
        for op in ("prefill", "decode")
        for kernel in plan_op(spec, op, Target.parse(target), backend).kernels  # type: ignore[arg-type]
    ]


def declare(**fields: Any) -> ag.AttentionSpec:
    return ag.AttentionSpec(**{"heads": ag.MHA(2, 64), "mask": ag.Causal(), "dtype": "bf16"} | fields)


@pytest.mark.parametrize("name", HOSTILE)
def test_names_of_parameters_are_identifiers(name: str) -> None:
    for make in (
        lambda: ag.ALiBi(slopes=name),
        lambda: ag.Document(name),
        lambda: declare(output_gate=name),
        lambda: ag.CustomMask(name="m", expression="True", parameters=[{"name": name, "dims": []}]),
    ):
        with pytest.raises(ag.SpecError):
            make()


@pytest.mark.parametrize("name", [name for name in HOSTILE if name not in ("_a", "__class__", "attngen_x")])
def test_names_of_mods_are_identifiers(name: str) -> None:
    with pytest.raises(ag.SpecError):
        ag.CustomMask(name=name, expression="k <= q")
    with pytest.raises(ag.SpecError):
        ag.CustomScoreMod(name=name, expression="score")


def test_names_of_specs_stay_out_of_kernels() -> None:
    plain = sources(declare())
    for name in HOSTILE[:10]:
        assert sources(declare(name=name)) == plain


def test_names_of_free_dims_stay_out_of_kernels() -> None:
    def with_dim(dim: str) -> ag.AttentionSpec:
        parameter = {"name": "table", "dims": ["num_qo_heads", dim]}
        mod = ag.CustomScoreMod(name="mod", expression="score + table[h, k]", parameters=[parameter])
        return declare(score_mods=(mod,))

    plain = sources(with_dim("n"))
    for dim in HOSTILE[:4]:
        assert sources(with_dim(dim)) == plain


def test_docstrings_and_captured_text_stay_out_of_kernels() -> None:
    def spy(b, h, q, k):
        """*/ #include </etc/passwd> {{ 7 * 7 }}"""
        return k <= q

    def plain(b, h, q, k):
        return k <= q

    spy.__name__ = spy.__qualname__ = plain.__name__
    assert sources(declare(mask=ag.mask_mod(spy))) == sources(declare(mask=ag.mask_mod(plain)))
    spy.__name__ = "*/ evil /*"
    try:
        mask = ag.mask_mod(spy)
    except ag.SpecError:
        return
    assert mask.name.isidentifier()
    assert "evil */" not in "".join(sources(declare(mask=mask)))


def test_manifests_of_hostile_names_are_data(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spec's name is kept in manifests and shown in commands, as text."""
    from attngen.settings import Settings
    from attngen.store import Store
    from tests.store.toolchains import KERNEL, FakeToolchain

    store = Store.from_settings(Settings(cache_dir=str(tmp_path / "cache")))
    for number, name in enumerate(HOSTILE):
        kernel = replace(KERNEL, source=str(number))
        artifact = store.get_or_build(kernel, FakeToolchain(), {"spec": name, "op": "decode"})
        assert artifact.manifest.about["spec"] == name
        assert store.find(kernel, "fake 1.0") == artifact
    strict = Store.from_settings(Settings(cache_dir=str(tmp_path / "none"), require_cached=True))
    with pytest.raises(ag.CacheMissError, match=r"attngen compile '\$\(true\)' --target"):
        strict.get_or_build(KERNEL, FakeToolchain(), {"spec": "$(true)", "op": "decode"})
