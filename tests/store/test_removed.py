"""Entries that another process removes between being found and being loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import attngen as ag
from attngen.settings import Settings
from attngen.store import Store, artifact
from tests.store.toolchains import KERNEL, FakeToolchain

SPEC = ag.AttentionSpec(heads=ag.GQA(2, 1, 16), mask=ag.Causal(), dtype="fp32")
Q, K, V = torch.randn(1, 40, 2, 16), torch.randn(1, 40, 1, 16), torch.randn(1, 40, 1, 16)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "cache"))
    return Store.from_settings(Settings.from_env())


def builds(caplog: pytest.LogCaptureFixture) -> int:
    return sum(record.message.startswith("attngen build ") for record in caplog.records)


def test_kernels_found_and_then_collected_are_built_again(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="attngen")
    ag.compile(SPEC, target="cpu", ops=["prefill", "decode"])
    number = builds(caplog)
    ops = ag.compile(SPEC, target="cpu", ops=["prefill", "decode"])  # found, and not loaded yet
    assert len(store.trim(max_size=0, max_age=None)) == number == builds(caplog)
    out = ops.prefill(Q, K, V)
    torch.testing.assert_close(ops.decode(Q[:, -1], K, V), out[:, -1], rtol=0, atol=1e-6)
    assert builds(caplog) == 2 * number
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []
    store.clear()
    assert torch.equal(ops.prefill(Q, K, V), out)  # loaded, and not in need of its file
    assert builds(caplog) == 2 * number


def test_what_reads_an_entry_finds_it_again(store: Store) -> None:
    (kernel,) = ag.compile(SPEC, target="cpu", ops=["append"]).op("append").kernels
    assert kernel.present() is kernel
    store.clear()
    again = kernel.present()
    assert again.binary == kernel.binary
    assert again.binary.exists()


def test_where_nothing_may_be_built_it_is_missed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = ag.compile(SPEC, target="cpu", ops=["prefill"])
    store.clear()
    monkeypatch.setenv("ATTNGEN_REQUIRE_CACHED", "1")
    with pytest.raises(ag.CacheMissError, match="is not in any cache"):
        ops.prefill(Q, K, V)


def test_a_library_that_does_not_load_is_an_error(store: Store) -> None:
    """It is there, so that building it again would help nobody."""
    ops = ag.compile(SPEC, target="cpu", ops=["prefill"])
    for kernel in ops.op("prefill").kernels:
        kernel.binary.write_bytes(b"no library")
    with pytest.raises(ag.BuildError, match="cannot load prefill"):
        ops.prefill(Q, K, V)


def test_an_entry_that_goes_while_it_is_looked_at(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Between its folder's name and its manifest: the search goes on as if it had not been there."""
    toolchain = FakeToolchain()
    first = store.get_or_build(KERNEL, toolchain, {})
    read, looks = artifact.read, []

    def read_late(folder: Path) -> artifact.Artifact:
        looks.append(folder)
        if len(looks) == 1:
            Store.from_settings(Settings.from_env()).clear()
        return read(folder)

    monkeypatch.setattr(artifact, "read", read_late)
    assert store.get_or_build(KERNEL, toolchain, {}).folder == first.folder
    assert len(toolchain.built) == 2
    assert store.root is not None
    assert list(store.root.path.glob("damaged-*")) == []
    assert caplog.text == ""
