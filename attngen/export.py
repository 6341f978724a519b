"""Writes compiled ops as a Python package that needs torch, and neither attngen nor a compiler.

A package is data and a copy of attngen's own modules: binaries, a JSON description of how each is launched
(:class:`attngen.schedule.launch.KernelLaunch`, :class:`attngen.signature.Signature`), and every module that
:mod:`attngen.ops.packaged` imports, under the package's name. Nothing is written a second time for packages.
"""

from __future__ import annotations

import ast
import ctypes
import hashlib
import json
import keyword
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from attngen.backends import registry
from attngen.backends.registry import default_backend
from attngen.codegen.environment import environment
from attngen.compiler import compile as compile_spec
from attngen.dtypes import DTYPES
from attngen.errors import ArgumentError, UnsupportedError
from attngen.ops import Op, Ops
from attngen.ops.checks import torch_dtype
from attngen.ops.ops import captured, declaration
from attngen.package_text import op_facts, plain
from attngen.signature import OPS, OpName
from attngen.spec import AttentionSpec
from attngen.target import Target
from attngen.variant import Variant

REQUIREMENTS = ("torch>=2.11",)
CUDA_REQUIREMENT = "cuda-bindings>=13.0,<14; platform_system == 'Linux'"
METHODS = ("prefill", "decode", "attention", "backward", "append", "warmup")
_ROOTS = ("attngen.ops.packaged", "attngen.ops.merge")
_SOURCES = Path(__file__).resolve().parent
_IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_TAKEN = {*METHODS, "ops", "load", "Path", "merge_states", "ArgumentError", "BuildError", "UnsupportedError"}


@dataclass(frozen=True)
class Exported:
    """What lies in a package.

    Attributes:
        folder: the project, to be installed.
        modules: names of the specs in it.
        kernels: number of binaries.
        size: their bytes.
        absent: what it does not serve, in words.
    """

    folder: Path
    modules: tuple[str, ...]
    kernels: int
    size: int
    absent: tuple[str, ...]


def export(
    specs: Mapping[str, AttentionSpec],
    folder: Path,
    name: str,
    targets: Sequence[Target],
    *,
    ops: Sequence[OpName] = (),
    backend: str = "",
    progress: Callable[[str], None] | None = None,
) -> Exported:
    """Write an installable package into ``folder``, which must be empty or absent.

    Args:
        specs: by name; the ops of a single one are functions of the package, those of several are in objects of these names.
        name: of the package, a plain identifier.
        targets: what to build for; the one that fits the device is chosen when an op is called.
        ops: what to export; every op of the spec by default.
        backend: as for :func:`attngen.compile`.
        progress: called with a line before each build.

    Raises:
        ArgumentError: the name is no identifier, or the folder is in use.
        UnsupportedError: there are no such kernels, or a package cannot run them.
        BuildError: a toolchain is missing or failed.
    """
    check_name(name, "--name")
    if name in sys.stdlib_module_names or name in ("attngen", "torch", "cuda"):
        raise ArgumentError(f"{name} is taken", where="--name", why="another package has it", fix="choose another")
    modules = _module_names(specs)
    _check_targets(targets, backend)
    folder = folder.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ArgumentError(
            f"{folder.name} is in use", where="--output", why="a package is written whole", fix="name an empty folder"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    private = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    try:
        package = private / name
        package.mkdir()
        described = [
            _write_spec(package, module, specs[source], targets, ops, backend, progress)
            for source, module in modules.items()
        ]
        _write_runtime(package / "_runtime", name)
        _write_texts(private, name, described, targets)
        private.chmod(0o755)
        if folder.exists():
            folder.rmdir()
        private.rename(folder)
    except BaseException:
        shutil.rmtree(private, ignore_errors=True)
        raise
    binaries = [path for path in (folder / name / "kernels").rglob("*") if path.is_file()]
    absent = tuple(dict.fromkeys(line for spec in described for line in spec["absent"]))
    return Exported(
        folder, tuple(modules.values()), len(binaries), sum(path.stat().st_size for path in binaries), absent
    )


def check_name(name: str, where: str) -> str:
    """A name that may stand in Python source.

    Raises:
        ArgumentError: it may not.
    """
    if not _IDENTIFIER.fullmatch(name) or keyword.iskeyword(name):
        raise ArgumentError(
            f"{name!r} is no plain identifier",
            where=where,
            why="it names a module: letters, digits and underscores, 64 at most, the first a letter, and no keyword",
            fix="choose another, like my_attention",
        )
    return name


def _module_names(specs: Mapping[str, AttentionSpec]) -> dict[str, str]:
    """An identifier for each spec."""
    if not specs:
        raise ArgumentError(
            "no spec is given", where="SPEC", why="a package has kernels of one at least", fix="name one"
        )
    found: dict[str, str] = {}
    for source in specs:
        module = re.sub(r"[^A-Za-z0-9]+", "_", source).strip("_").lower()
        module = check_name(module if module[:1].isalpha() else f"spec_{module}", f"spec {source!r}"[:80])
        if module in found.values() or module in _TAKEN:
            raise ArgumentError(
                f"two things would be called {module}",
                where="SPEC",
                why="each spec is found by its name",
                fix="rename one of the specs",
            )
        found[source] = module
    return found


def _check_targets(targets: Sequence[Target], backend: str) -> None:
    if not targets:
        raise ArgumentError("no target is given", where="--target", why="binaries are of one", fix="pass cpu:x86-64-v3")
    for target in targets:
        if target.kind not in ("cpu", "cuda"):
            raise UnsupportedError(
                f"a package cannot run kernels for {target}",
                where="--target",
                why="on AMD they go through Triton's own launcher; one on the HIP driver is missing"
                if target.kind == "hip"
                else "the interpreter is part of Triton",
                fix="export for cpu or cuda targets; for AMD, ship a cache (attngen compile --into) beside attngen and triton"
                if target.kind == "hip"
                else "export for cpu or cuda targets, and use ag.compile there",
            )
        if registry.backend(backend or default_backend(target)) is None:
            raise UnsupportedError(
                "the reference backend has no kernels",
                where="--backend",
                why="it evaluates the spec",
                fix="leave it out, or use cpp, triton or cuda",
            )


def _write_spec(
    package: Path,
    module: str,
    spec: AttentionSpec,
    targets: Sequence[Target],
    wanted: Sequence[OpName],
    backend: str,
    progress: Callable[[str], None] | None,
) -> dict[str, Any]:
    """Binaries and description of one spec. Returns what the README says of it."""
    described: dict[str, Any] = {}
    variants: dict[OpName, Variant] = {}
    absent: list[str] = []
    built: dict[str, dict[str, Any]] = {}
    for target in targets:
        compiled = compile_spec(spec, target=target, ops=(), backend=backend or None, progress=progress)
        here = built[str(target)] = {}
        for op in OPS:
            if wanted and op not in wanted:
                described[op] = _refusal(_left_out(op, wanted))
                continue
            try:
                variant = compiled.variant(op)
                here |= dict(_write_op(package, compiled, op, target))
                variants[op], described[op] = variant, {"signature": variant.signature.to_json()}
            except UnsupportedError as error:
                if wanted:
                    raise
                absent.append(f"{op} for {target}: {error.what}, since {error.why}")
                described.setdefault(op, _refusal(error))
                here[op] = _refusal(error)
        if all("refused" in about for about in here.values()):
            raise UnsupportedError(
                f"{module} has no op for {target}", where="--target", why="; ".join(absent), fix="leave the target out"
            )
    data = {
        "declared": asdict(declaration(spec)),
        "ops": described,
        "defaults": _write_defaults(package, module, spec),
        "targets": built,
    }
    (package / f"{module}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    absent += [f"{op}: not exported" for op in OPS if wanted and op not in wanted]
    absent.append("kv_cache= of prefill, and key_indices=: they take kernels of further specs")
    ops = [op_facts(op, spec, variant) for op, variant in variants.items()]
    example = next((op["name"] for op in ops if op["name"] != "append"), "append")
    return {"module": module, "ops": ops, "absent": [plain(line) for line in absent], "example": example}


def _write_op(package: Path, ops: Ops, name: OpName, target: Target) -> Iterator[tuple[str, dict[str, Any]]]:
    """Kernels of an op, and those that give repeatable gradients where they are others."""
    op = ops.op(name)
    yield name, {"kernels": _write_kernels(package, op, target)}
    if name == "backward" and (exact := ops.op(name, deterministic=True)) is not op:
        yield f"deterministic {name}", {"kernels": _write_kernels(package, exact, target)}


def _write_kernels(package: Path, op: Op, target: Target) -> list[dict[str, Any]]:
    place = Path("kernels") / str(target).replace(":", "-")
    (package / place).mkdir(parents=True, exist_ok=True)
    written = []
    for kernel in (kernel.present() for kernel in op.kernels):
        toolchain, data = registry.backend(kernel.plan.backend), kernel.binary.read_bytes()
        assert toolchain is not None  # kernels are made by one
        digest = hashlib.sha256(data).hexdigest()
        # Names of kernels are those of people: two that differ may share one.
        binary = place / f"{kernel.plan.entry}-{digest[:12]}{kernel.binary.suffix}"
        (package / binary).write_bytes(data)
        written.append(
            {
                "launch": kernel.plan.to_json(),
                "binary": binary.as_posix(),
                "sha256": digest,
                "options": toolchain.launch_options(kernel.metadata, kernel.plan),
            }
        )
    return written


def _write_defaults(package: Path, module: str, spec: AttentionSpec) -> dict[str, Any]:
    """Captured tensors, as bytes."""
    described = {}
    dtypes = {torch_dtype(name): name for name in DTYPES if DTYPES[name].packed == 1}
    for name, tensor in captured(spec).items():
        data = tensor.detach().cpu().contiguous()
        file = Path("defaults") / f"{module}-{name}.bin"
        (package / file).parent.mkdir(exist_ok=True)
        (package / file).write_bytes(ctypes.string_at(data.data_ptr(), data.nbytes) if data.nbytes else b"")
        described[name] = {"dtype": dtypes[data.dtype], "shape": list(data.shape), "file": file.as_posix()}
    return described


def _left_out(op: OpName, wanted: Sequence[OpName]) -> UnsupportedError:
    return UnsupportedError(
        f"{op} is not in this package",
        where=op,
        why=f"it was exported with --ops {','.join(wanted)}",
        fix=f"export it again with {op}",
    )


def _refusal(error: UnsupportedError) -> dict[str, Any]:
    return {"refused": [error.what, error.where, error.why, error.fix]}


def runtime_modules() -> dict[str, str]:
    """Sources, by name, of the modules that packages carry: all that :mod:`attngen.ops.packaged` imports."""
    found: dict[str, str] = {}
    queue = list(_ROOTS)
    while queue:
        name = queue.pop()
        if name not in found:
            found[name] = _source(name).read_text(encoding="utf-8")
            queue += imported_modules(found[name])
    return dict(sorted(found.items()))


def imported_modules(source: str) -> list[str]:
    """Modules of attngen that a module imports, wherever in it."""
    modules = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "attngen":
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            inside = [name for name in submodules if _source(name).is_file()]
            modules += inside if len(inside) == len(submodules) else [node.module or ""]
    return modules


def _source(module: str) -> Path:
    return (_SOURCES / "/".join(module.split(".")[1:])).with_suffix(".py")


def _write_runtime(folder: Path, name: str) -> None:
    modules = runtime_modules()
    tops = "|".join(sorted({module.split(".")[1] for module in modules}))
    for module, source in modules.items():
        path = folder.joinpath(*module.split(".")[1:]).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        (folder / "__init__.py").touch()
        path.write_text(re.sub(rf"\battngen\.(?=(?:{tops})\b)", f"{name}._runtime.", source), encoding="utf-8")


def _write_texts(project: Path, name: str, specs: Sequence[Mapping[str, Any]], targets: Sequence[Target]) -> None:
    on_gpu = any(target.kind == "cuda" for target in targets)
    packages = [path.parent.relative_to(project) for path in project.rglob("__init__.py")]
    facts = {
        "name": name,
        "version": _version(),
        "targets": list(map(str, targets)),
        "on_gpu": on_gpu,
        "specs": specs,
        "methods": METHODS,
        "public": ["ops", *METHODS] if len(specs) == 1 else [spec["module"] for spec in specs],
        "requirements": [*REQUIREMENTS, *([CUDA_REQUIREMENT] if on_gpu else [])],
        "packages": sorted({name, *(".".join(path.parts) for path in packages)}),
    }
    for file in ("__init__.py", "pyproject.toml", "README.md"):
        text = environment("package").get_template(f"{file}.jinja").render(facts)
        (project / (name if file == "__init__.py" else ".") / file).write_text(text, encoding="utf-8")
    (project / name / "py.typed").touch()


def _version() -> str:
    try:
        return version_of("attngen")
    except PackageNotFoundError:
        return "from a working copy"
