"""Compiles a rendered Triton kernel to machine code without a GPU, and checks that the result can be launched."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attngen.backends.ptxas import Ptxas
from attngen.backends.triton_worker import BINARY_SUFFIX, TEXT_SUFFIX
from attngen.backends.triton_workers import run_in_worker
from attngen.codegen.render import RenderedKernel
from attngen.codegen.toolchain import BuildResult
from attngen.errors import BuildError
from attngen.target import Target

# Bytes of shared memory a block may have, and columns of tensor memory.
SHARED_LIMITS = {
    "sm80": 163 << 10,
    "sm86": 99 << 10,
    "sm89": 99 << 10,
    "sm90a": 227 << 10,
    "sm100": 227 << 10,
    "gfx942": 64 << 10,
    "gfx950": 160 << 10,
}
_TENSOR_COLUMNS = 512
_DISTRIBUTIONS = ("triton", "pytorch-triton", "triton-rocm", "pytorch-triton-rocm")
_INHERITED = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME")
_CONTEXT_LINES = 3


def triton_folder() -> Path | None:
    """Triton's package folder, without importing it; ``None`` where it is absent."""
    try:
        spec = find_spec("triton")
    except (ImportError, ValueError):
        return None
    return (
        Path(spec.origin).parent if spec is not None and spec.origin else None
    )  # any folder called triton has no origin


def triton_version() -> str | None:
    """Version of the installed Triton, whatever its distribution is called; ``None`` where it is absent."""
    folder = triton_folder()
    return None if folder is None else _version_in(folder)


@cache
def _version_in(folder: Path) -> str | None:  # noqa: ARG001  # what the answer is about
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def parse_flags(flags: tuple[str, ...]) -> tuple[dict[str, str | int], list[tuple[str, str, int]]]:
    """Options of ``triton.compile``, and ``(name, type, divisor)`` of each argument."""
    options: dict[str, str | int] = {}
    arguments = []
    for flag in flags:
        name, _, value = flag.partition("=")
        if name.startswith("arg:"):
            kind, _, divisor = value.partition(":")
            arguments.append((name.removeprefix("arg:"), kind, int(divisor or 1)))
        else:
            options[name] = int(value) if value.isdigit() else value
    return options, arguments


def compile_kernel(kernel: RenderedKernel, folder: Path, triton: Path, ptxas: Ptxas | None) -> BuildResult:
    """Compile ``<entry>.py`` in ``folder`` into a binary and the text of its assembly.

    Args:
        kernel: what to build.
        folder: where its source lies.
        triton: Triton's package folder.
        ptxas: assembler for NVIDIA targets.

    Raises:
        BuildError: the kernel does not compile, or needs more than its target has.
        OSError: the disk is full or cannot be written.
    """
    options, arguments = parse_flags(kernel.flags)
    source = folder.absolute() / f"{kernel.entry}{kernel.suffix}"
    with tempfile.TemporaryDirectory(prefix=".triton-", dir=source.parent) as scratch:
        request = {
            "source": str(source),
            "entry": kernel.entry,
            "scratch": scratch,
            "target": _gpu_target(kernel.target),
            "arguments": arguments,
            "options": options,
        }
        answer = run_in_worker(_environment(triton, ptxas), request)
        log = _read_log(Path(scratch) / "log", ptxas)
    if answer.get("errno"):
        raise OSError(answer["errno"], answer["error"])
    if "error" in answer:
        raise _failure(kernel, answer, log)
    text = source.with_suffix(TEXT_SUFFIX[kernel.target.kind]).read_text(encoding="utf-8")
    metadata = answer["metadata"]
    require_resources(kernel, metadata, log)
    require_parameters(kernel, [kind for _, kind, _ in arguments], text)
    if kernel.target.kind == "hip":
        source.with_suffix(".json").write_text(json.dumps(metadata, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return BuildResult(
        binary=source.with_suffix(BINARY_SUFFIX[kernel.target.kind]).name,
        metadata={name: metadata[name] for name in ("num_warps", "warp_size", "shared")}
        | {"tensor_maps": metadata.get("tensordesc_meta") or []}
        | _registers(log, text),
        log=log,
    )


def require_resources(kernel: RenderedKernel, metadata: Mapping[str, Any], log: str = "") -> None:
    """Fail if a launch of the kernel would.

    Raises:
        BuildError: it needs more shared or tensor memory than the target has, or scratch memory, which no launcher has.
    """
    limit = SHARED_LIMITS[kernel.target.arch]
    tensor_columns = metadata.get("tmem_size") or 0
    scratch = {name: size for name in ("global_scratch_size", "profile_scratch_size") if (size := metadata.get(name))}
    why = ""
    if metadata["shared"] > limit:
        why = f"it needs {metadata['shared']} bytes of shared memory, and a block on {kernel.target.arch} has {limit}"
    elif tensor_columns > _TENSOR_COLUMNS:
        why = f"it needs {tensor_columns} columns of tensor memory, and a multiprocessor has {_TENSOR_COLUMNS}"
    elif scratch:
        why = f"it needs scratch memory ({scratch}), which launches do not allocate"
    if why:
        error = BuildError(
            f"{kernel.entry} does not fit {kernel.target}",
            where=f"flags {' '.join(flag for flag in kernel.flags if not flag.startswith('arg:'))}",
            why=why,
            fix="give the kernel smaller tiles or fewer stages in attngen/schedule/tables.py",
        )
        error.log = log
        raise error


def require_parameters(kernel: RenderedKernel, kinds: list[str], text: str) -> None:
    """Check that the binary takes the kernel's arguments and, after them, Triton's two scratch pointers.

    Raises:
        BuildError: it takes others, so that a launch would pass garbage.
    """
    expected = [size for kind in kinds for size in _parameter_sizes(kind)] + [8, 8]
    if kernel.target.kind == "cuda":
        header = re.search(rf"\.entry\s+{kernel.entry}\((.*?)\)", text, re.DOTALL)
        pattern = r"\.param\s+(?:\.align\s+\d+\s+)?\.\w(\d+)[^,\[]*(?:\[(\d+)\])?"
        sizes = re.findall(pattern, header.group(1)) if header else []
        found = [int(bits) // 8 * int(count or 1) for bits, count in sizes]
    else:
        found = [int(size) for size in re.findall(r"\.size:\s+(\d+)\s+\.value_kind:\s+(?!hidden)", text)]
    if found != expected:
        raise BuildError(
            f"{kernel.entry} takes other parameters than its plan says",
            where=f"target {kernel.target}, triton {triton_version()}",
            why=f"the binary has parameters of {found} bytes, the launcher passes {expected}",
            fix="use a version of triton from 3.6 on that attngen is tested with",
        )


def _parameter_sizes(kind: str) -> list[int]:
    """Of one argument; a tensor map is followed by its tensor's sizes and strides."""
    if kind.startswith("tensordesc<"):
        rank = kind.count(",") + 1
        return [128] + [4] * rank + [8] * rank
    return [4 if kind == "i32" else 8]


def _gpu_target(target: Target) -> tuple[str, str | int, int]:
    return target.kind, target.capability if target.kind == "cuda" else target.arch, target.warp_size


def _environment(triton: Path, ptxas: Ptxas | None) -> dict[str, str]:
    """Everything a worker sees of the environment: no variable of the user's reaches Triton."""
    environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    environment |= {"PYTHONPATH": str(triton.parent), "PYTHONUTF8": "1", "PYTHONHASHSEED": "0"}
    environment |= {"TRITON_DISABLE_LINE_INFO": "1"}
    if ptxas is not None:
        environment |= {"TRITON_PTXAS_PATH": str(ptxas.path), "TRITON_PTXAS_BLACKWELL_PATH": str(ptxas.path)}
        environment |= {"TRITON_DUMP_PTXAS_LOG": "1"}
    return environment


def _read_log(path: Path, ptxas: Ptxas | None) -> str:
    """What was printed, below the names of the tools."""
    tools = f"triton {triton_version()}" + (f", ptxas {ptxas.identity} at {ptxas.path}" if ptxas else "")
    return f"{tools}\n{path.read_text(encoding='utf-8', errors='replace') if path.exists() else ''}"


def _registers(log: str, text: str) -> dict[str, Any]:
    """What a person wants to know of a binary: registers a thread, spills, and warnings of ptxas about speed."""
    facts: dict[str, Any] = {}
    patterns = {
        "registers": (r"Used (\d+) registers", r"\.vgpr_count:\s+(\d+)"),
        "spills": (r"(\d+) bytes spill stores", r"\.vgpr_spill_count:\s+(\d+)"),
    }
    for name, (in_log, in_text) in patterns.items():
        if match := re.search(in_log, log) or re.search(in_text, text):
            facts[name] = int(match.group(1))
    if version_line := re.search(r"^\.version (\S+)", text, re.MULTILINE):
        facts["ptx_version"] = version_line.group(1)
    if warnings := re.findall(r"(?:warning|info)\s*: (.*Potential Performance Loss.*)", log):
        facts["warnings"] = warnings
    return facts


def _failure(kernel: RenderedKernel, answer: Mapping[str, Any], log: str) -> BuildError:
    """Triton's message, with the lines of the generated file around the place it means."""
    message, line = answer["error"].split("Repro command:")[0].strip(), answer.get("line")
    file = f"{kernel.entry}{kernel.suffix}"
    if diagnostic := re.search(rf"{re.escape(file)}\"?:(\d+):\d+\)?:? error: (.*)", log):
        line, message = line or int(diagnostic.group(1)), f"{diagnostic.group(2)} ({message})"
    error = BuildError(
        f"{kernel.entry} does not compile for {kernel.target}",
        where=f"{file}, line {line}" if line else file,
        why="\n".join([message, *excerpt(kernel.source, line)]),
        fix="write the custom mod differently if one caused it; else report it with the source from `attngen explain`",
    )
    error.log = log + f"\n{answer['error']}\n"
    return error


def excerpt(source: str, line: int | None) -> list[str]:
    """Numbered lines around ``line``, which is marked."""
    if line is None:
        return []
    lines = source.splitlines()
    numbers = range(max(1, line - _CONTEXT_LINES), min(len(lines), line + _CONTEXT_LINES) + 1)
    return [f"  {'>' if number == line else ' '} {number:4} | {lines[number - 1]}" for number in numbers]
