"""The process that compiles with Triton: one JSON request a line on stdin, one JSON answer a line on stdout.

Run as a script by :mod:`attngen.backends.triton_workers`, so that Triton's process-wide settings, its cache, and a
crash of its compiler stay out of the user's process. It imports the standard library and Triton only: 0.1 s.
"""

from __future__ import annotations

import json
import os
import select
import sys
import tempfile
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from traceback import walk_tb
from types import CodeType
from typing import Any, TextIO

IDLE_SECONDS = 20.0
BINARY_SUFFIX = {"cuda": ".cubin", "hip": ".hsaco"}
TEXT_SUFFIX = {"cuda": ".ptx", "hip": ".amdgcn"}


class _SourceOnlyLoader(SourceFileLoader):
    """Reads and writes no ``__pycache__``."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def load_module(path: Path) -> Any:
    """The source file as a module that is in no table; Triton reads the text of its functions from the file."""
    loader = _SourceOnlyLoader(path.stem, str(path))
    spec = spec_from_loader(path.stem, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def main() -> None:
    """Answer requests until stdin ends, or nothing has come for a while."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    while select.select([0], [], [], IDLE_SECONDS)[0] and (line := _read_line()):
        _serve(json.loads(line), answers)


def _read_line() -> bytes:
    """The next line of stdin, unbuffered, so that ``select`` knows of all that is unread; empty at the end."""
    parts = []
    while part := os.read(0, 1 << 16):
        parts.append(part)
        if part.endswith(b"\n"):
            break
    return b"".join(parts)


def _serve(request: dict[str, Any], answers: TextIO) -> None:
    """Compile one kernel; whatever is printed meanwhile, by C++ or ptxas too, goes to ``log`` in the scratch folder."""
    scratch = Path(request["scratch"])
    os.environ["TRITON_CACHE_DIR"] = tempfile.tempdir = str(scratch)
    log = os.open(scratch / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    answer: dict[str, Any]
    try:
        answer = {"metadata": compile_kernel(request)}
    except OSError as error:
        answer = {"error": str(error), "errno": error.errno}
    except Exception as error:
        answer = {"error": describe(error), "line": find_line(error, Path(request["source"]))}
    sys.stdout.flush()
    sys.stderr.flush()
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def compile_kernel(request: dict[str, Any]) -> dict[str, Any]:
    """Compile ``entry`` of ``source``, leave the binary and the assembly text beside it, return Triton's metadata."""
    import triton  # noqa: PLC0415  # a failing import is reported like any other failure
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    source, arguments = Path(request["source"]), request["arguments"]
    kernel = triton.compile(
        ASTSource(
            getattr(load_module(source), request["entry"]),
            {name: kind for name, kind, _ in arguments},
            {},
            {(i,): [["tt.divisibility", divisor]] for i, (_, _, divisor) in enumerate(arguments) if divisor > 1},
        ),
        target=GPUTarget(*request["target"]),
        options=request["options"],
    )
    platform = request["target"][0]
    for suffix, write in ((BINARY_SUFFIX, Path.write_bytes), (TEXT_SUFFIX, Path.write_text)):
        write(source.with_suffix(suffix[platform]), kernel.asm[suffix[platform][1:]])
    metadata: dict[str, Any] = json.loads(json.dumps(kernel.metadata._asdict(), default=vars))
    # Of no use to a launcher: the cache key, paths of bitcode libraries, and (in capitals) environment variables.
    return {name: value for name, value in metadata.items() if name not in ("hash", "extern_libs") and name.islower()}


def describe(error: BaseException) -> str:
    """Triton's words, without the excerpts of source that it adds."""
    words = [text for e in _causes(error) if isinstance(text := getattr(e, "error_message", None), str) and text]
    return words[0] if words else f"{type(error).__name__}: {error}"


def find_line(error: BaseException, path: Path) -> int | None:
    """The line of the source file where compiling failed, in the innermost function that lies in that file."""
    text = path.read_text(encoding="utf-8")
    for e in _causes(error):
        if isinstance(e, SyntaxError):
            return e.lineno
        if line := _line_in_file(text, getattr(e, "src", None), getattr(e, "node", None)):
            return line
    line, source, node = None, None, None
    for frame, number in walk_tb(error.__traceback__):
        if frame.f_code.co_filename == str(path):
            line = number
        node = frame.f_locals.get("node", node)
        source = getattr(frame.f_locals.get("self"), "src", source)
    return line or _line_in_file(text, source, node)


def _line_in_file(text: str, function: object, node: object) -> int | None:
    """The line of a syntax tree's ``node``, which counts from the first line of ``function``, in ``text``."""
    start = text.find(function) if isinstance(function, str) and function else -1
    line = getattr(node, "lineno", None)
    return text.count("\n", 0, start) + line if start >= 0 and isinstance(line, int) else None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """``error`` and what led to it, the first cause first."""
    cause = error.__cause__ or error.__context__
    if cause is not None:
        yield from _causes(cause)
    yield error


if __name__ == "__main__":
    main()
