"""Expressions printed in a kernel language, run over some points, one double an expression and point."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch

from attngen.codegen.dialects import CppDialect, TritonDialect
from attngen.codegen.environment import environment
from attngen.codegen.printer import Dialect, Printer
from attngen.ir.expr import Expr
from tests.ir.expressions import PARAMS, TENSORS

ROOT = Path(__file__).resolve().parents[2]
POINTS = 64
INTEGERS = ("b", "h", "q", "k", "qo_len", "kv_len")
_CTYPES = {"fp32": "float", "i32": "int32_t", "u8": "uint8_t", "bool": "bool"}
_PLAN = SimpleNamespace(target=SimpleNamespace(kind="interpret"), variant=SimpleNamespace(dtype="fp32"))


def points() -> dict[str, torch.Tensor]:
    """Coordinates of :data:`POINTS` pairs, in and out of the parameters."""
    n = torch.arange(POINTS)
    small = {"b": n % 2, "h": n % 3, "q": n % 11 - 3, "k": n % 7 - 1, "qo_len": n * 0 + 5, "kv_len": n * 0 + 7}
    return {**small, "score": (torch.sin(n * 1.7) * 3).float().double()}


def data() -> dict[str, torch.Tensor]:
    """The parameters in the dtypes that kernels read."""
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in TENSORS.items()}


def _printed(exprs: Sequence[Expr], dialect: Dialect, names: dict[str, str], partial: str) -> tuple[list[str], str]:
    printer = Printer(dialect, names, {param.name: param for param in PARAMS})
    texts = [printer.print(expr) for expr in exprs]
    importing = f'{{% from "{partial}" import math_for with context %}}{{{{ math_for(text) }}}}'
    backend = "cpp" if partial.endswith(".cpp.jinja") else "triton"
    return texts, environment(backend).from_string(importing).render(text="\n".join(texts), plan=_PLAN)


def run_cpp(exprs: Sequence[Expr], folder: Path) -> torch.Tensor:
    """``[expressions, POINTS]``, by one shared library."""
    names = {name: f"{name}[i]" for name in (*INTEGERS, "score")}
    texts, math = _printed(exprs, CppDialect(), names, "_math.cpp.jinja")
    lines = ["#include <cmath>", "#include <cstdint>", "#include <utility>", "namespace {", math]
    env, tensors = points(), data()
    for name in INTEGERS:
        lines.append(f"const int32_t {name}[] = {{{', '.join(map(str, env[name].tolist()))}}};")
    lines.append(f"const float score[] = {{{', '.join(f'float({x})' for x in env['score'].tolist())}}};")
    for param in PARAMS:
        values = tensors[param.name].flatten().tolist()
        cells = ", ".join(str(x).lower() if param.dtype == "bool" else f"{_CTYPES[param.dtype]}({x})" for x in values)
        lines.append(f"const {_CTYPES[param.dtype]} {param.symbol}[] = {{{cells}}};")
        sizes = enumerate(tensors[param.name].shape)
        lines += [f"const int32_t {param.symbol}_dim{axis} = {size};" for axis, size in sizes]
    lines += ["}", 'extern "C" void run(double* out) {']
    for row, text in enumerate(texts):
        lines.append(f"  for (int i = 0; i < {POINTS}; i++) out[{row * POINTS} + i] = double({text});")
    source, library = folder / "expressions.cpp", folder / "expressions.so"
    source.write_text("\n".join([*lines, "}", ""]))
    subprocess.run(
        ["c++", "-std=c++17", "-O0", "-fwrapv", "-ffp-contract=off", "-shared", "-fPIC", "-o", library, source],
        check=True,
    )
    out = torch.zeros(len(exprs), POINTS, dtype=torch.float64)
    ctypes.CDLL(str(library)).run(ctypes.c_void_p(out.data_ptr()))
    return out


def run_triton(exprs: Sequence[Expr], folder: Path) -> torch.Tensor:
    """``[expressions, POINTS]``, by Triton's interpreter in a process of its own."""
    names = {name: name for name in (*INTEGERS, "score")}
    texts, math = _printed(exprs, TritonDialect(), names, "_math.py.jinja")
    tensors = data()
    pointers = [param.symbol for param in PARAMS]
    sizes = {f"{p.symbol}_dim{axis}": n for p in PARAMS for axis, n in enumerate(tensors[p.name].shape)}
    lines = ["import triton", "import triton.language as tl", "", "", math, "", "@triton.jit"]
    lines.append(f"def evaluate(out, coordinates, scores, {', '.join([*pointers, *sizes])}):")
    lines.append(f"    i = tl.arange(0, {POINTS})")
    lines += [f"    {name} = tl.load(coordinates + {n * POINTS} + i)" for n, name in enumerate(INTEGERS)]
    lines += ["    score = tl.load(scores + i)", "    zero = score * 0.0"]
    for row, (expr, text) in enumerate(zip(exprs, texts, strict=True)):
        value = f"tl.where(({text}) & (i >= 0), 1.0, 0.0)" if expr.type == "bool" else f"zero + ({text})"
        lines.append(f"    tl.store(out + {row * POINTS} + i, {value})")
    (folder / "expressions_kernel.py").write_text("\n".join([*lines, ""]))
    torch.save({"tensors": [tensors[param.name] for param in PARAMS], "sizes": sizes}, folder / "data.pt")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "tests.codegen.languages", str(folder), str(len(exprs))]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.tensor(json.loads(done.stdout.splitlines()[-1]), dtype=torch.float64)


def main(folder: str, rows: str) -> None:
    """The child of :func:`run_triton`."""
    import expressions_kernel  # made by the parent

    given = torch.load(Path(folder) / "data.pt", weights_only=True)
    env = points()
    coordinates = torch.stack([env[name].int() for name in INTEGERS])
    out = torch.zeros(int(rows), POINTS)
    expressions_kernel.evaluate[(1,)](out, coordinates, env["score"].float(), *given["tensors"], **given["sizes"])
    print(json.dumps(out.double().tolist()))


if __name__ == "__main__":
    main(*sys.argv[1:])
