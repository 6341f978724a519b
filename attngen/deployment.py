"""What a deployment compiles: specs, directories of specs, and manifests called ``attngen.toml``.

A manifest names groups of specs, with targets and ops for each or for all::

    targets = ["cuda:sm90a", "cpu:x86-64-v3"]

    [[compile]]
    specs = ["llama3-8b", "mine/window.toml"]  # shipped names, or files beside the manifest

    [[compile]]
    specs = ["bert-base-training"]
    targets = ["cuda:sm90a"]
    ops = ["prefill", "backward"]
    backend = "triton"
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from attngen.errors import SpecError
from attngen.model import SpecModel
from attngen.signature import CallName
from attngen.spec import AttentionSpec, load_spec
from attngen.spec.loading import read_toml

MANIFEST = "attngen.toml"


class Group(SpecModel):
    """Specs that are compiled alike.

    Attributes:
        specs: shipped names, or files relative to the manifest.
        targets, ops, backend: instead of the manifest's.
    """

    specs: tuple[str, ...] = Field(min_length=1)
    targets: tuple[str, ...] = ()
    ops: tuple[CallName, ...] = ()
    backend: str | None = None


class Manifest(SpecModel):
    """A deployment.

    Attributes:
        targets: this machine's by default.
        ops: every op that a spec has, by default; also ``prefix`` and ``listed``, as for :func:`attngen.compile`.
        backend: the fastest by default.
        compile: what to compile.
    """

    targets: tuple[str, ...] = ()
    ops: tuple[CallName, ...] = ()
    backend: str | None = None
    compile: tuple[Group, ...] = Field(min_length=1)


@dataclass(frozen=True)
class Wanted:
    """One spec, and how it is to be compiled; what is empty is left to the caller."""

    name: str
    spec: AttentionSpec
    targets: tuple[str, ...] = ()
    ops: tuple[CallName, ...] = ()
    backend: str = ""


def wanted(sources: Iterable[str]) -> list[Wanted]:
    """All specs that ``sources`` name: shipped specs, files, directories and manifests.

    Raises:
        SpecError: something is not there or not valid.
    """
    return [found for source in dict.fromkeys(sources) for found in _from_source(source)]


def _from_source(source: str) -> list[Wanted]:
    path = Path(source)
    if path.is_dir():
        if (path / MANIFEST).is_file():
            return _from_manifest(path / MANIFEST)
        files = sorted(file for file in path.iterdir() if file.suffix in (".toml", ".json") and file.is_file())
        if not files:
            raise SpecError(
                f"no specs in {path}",
                where=str(path),
                why=f"it holds neither {MANIFEST} nor .toml or .json files",
                fix="name a directory with specs",
            )
        return [_one(str(file)) for file in files]
    return _from_manifest(path) if path.name == MANIFEST and path.is_file() else [_one(source)]


def _from_manifest(path: Path) -> list[Wanted]:
    manifest = Manifest.model_validate(read_toml(path))
    found = []
    for group in manifest.compile:
        for source in group.specs:
            beside = path.parent / source
            one = _one(str(beside) if beside.is_file() else source)
            found.append(
                Wanted(
                    one.name,
                    one.spec,
                    group.targets or manifest.targets,
                    group.ops or manifest.ops,
                    group.backend or manifest.backend or "",
                )
            )
    return found


def _one(source: str) -> Wanted:
    spec = load_spec(source)
    return Wanted(spec.name or Path(source).stem, spec)
