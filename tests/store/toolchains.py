"""Kernels and toolchains for tests of the store."""

from __future__ import annotations

import ctypes
import subprocess
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from attngen.codegen.render import RenderedKernel
from attngen.codegen.toolchain import BuildResult
from attngen.errors import BuildError
from attngen.store import Artifact
from attngen.target import Target

KERNEL = RenderedKernel(
    entry="decode_causal_gqa4_fp16_d64",
    source="// Decode: one query row a request.\nint answer() { return 41; }\n",
    suffix=".cpp",
    flags=("-O3", "-fopenmp"),
    target=Target("cpu", "x86-64-v3"),
)


def other_kernel(number: int) -> RenderedKernel:
    return replace(KERNEL, source=f'extern "C" int {KERNEL.entry}() {{ return {number}; }}\n')


@dataclass
class FakeToolchain:
    """Writes a file after a delay; half of it before."""

    name: str | None = "fake 1.0"
    delay: float = 0.0
    failure: Exception | None = None
    marker: Path | None = None
    built: list[str] = field(default_factory=list)

    def fingerprint(self, target: Target) -> str | None:
        return self.name

    def build(self, kernel: RenderedKernel, folder: Path) -> BuildResult:
        self.built.append(kernel.entry)
        binary = folder / f"{kernel.entry}.so"
        binary.write_bytes(b"half")
        if self.marker is not None:
            self.marker.touch()
        time.sleep(self.delay)
        if self.failure is not None:
            raise self.failure
        (folder / "stages").mkdir()
        (folder / "stages" / "kernel.ptx").write_text(".version 9.0\n")
        binary.write_bytes(b"whole " + kernel.source.encode())
        return BuildResult(binary.name, {"num_warps": 4, "shape": [64, 128]}, log="fake: all went well\n")


@dataclass
class CompilerToolchain:
    """The system's C++ compiler, in a process of its own, after a pause that makes it slow."""

    pause: float = 0.0
    marker: Path | None = None

    def fingerprint(self, target: Target) -> str | None:
        return "c++"

    def build(self, kernel: RenderedKernel, folder: Path) -> BuildResult:
        if self.marker is not None:
            self.marker.touch()
        script = 'sleep "$1" && exec c++ -shared -fPIC -o kernel.so "$2"'
        command = ["sh", "-c", script, "sh", str(self.pause), f"{kernel.entry}{kernel.suffix}"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            error = BuildError("the C++ compiler failed", why=done.stderr)
            error.log = done.stderr
            raise error
        return BuildResult("kernel.so", log=done.stderr)


def call(artifact: Artifact) -> int:
    """Load what :class:`CompilerToolchain` built from :func:`other_kernel`, and call it."""
    library = ctypes.CDLL(str(artifact.binary))
    return int(getattr(library, artifact.manifest.entry)())
