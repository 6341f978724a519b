"""Which ptxas assembles Triton's PTX: the newest of CUDA 13 or before that is found.

Triton bundles older ones, which miscompile: 12.8 has given wrong results for attention, and any before 13.3 may reuse
the input registers of a Hopper matrix product too early (release notes of CUDA 13.3). ``ATTNGEN_PTXAS`` overrides the
choice. Nothing here starts a process.
"""

from __future__ import annotations

import hashlib
import mmap
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from attngen.errors import BuildError

_BANNER = b"Cuda compilation tools, release "
_VERSION = re.compile(_BANNER + rb"\d+\.\d+, V(\d+)\.(\d+)\.(\d+)")
_TOOLKIT = Path("/usr/local/cuda/bin/ptxas")
_NEWEST_MAJOR = 13


@dataclass(frozen=True)
class Ptxas:
    """An assembler.

    Attributes:
        path: the program.
        version: as it would print it; empty where the file does not tell, as with a script that starts the real one.
        identity: the version or, without one, a digest of path, size and time.
    """

    path: Path
    version: tuple[int, ...]
    identity: str


def choose_ptxas(explicit: str | None, triton: Path) -> Ptxas:
    """The assembler to use.

    Args:
        explicit: the user's choice, taken as it is.
        triton: Triton's package folder.

    Raises:
        BuildError: the user's choice is no file.
    """
    if explicit:
        if not Path(explicit).is_file():
            raise BuildError(
                "there is no ptxas where ATTNGEN_PTXAS says",
                where=f"ATTNGEN_PTXAS={explicit}",
                why="it is no file",
                fix="name the ptxas of a CUDA 13 toolkit, or unset ATTNGEN_PTXAS",
            )
        return identify(Path(explicit).absolute())
    found = [ptxas for ptxas in map(identify, _candidates(triton)) if ptxas.version[:1] <= (_NEWEST_MAJOR,)]
    if not found:
        raise BuildError("there is no ptxas", where=str(triton), why="Triton's own is missing", fix="reinstall triton")
    return max(found, key=lambda ptxas: ptxas.version)


def identify(path: Path) -> Ptxas:
    """What ``path`` is, read from the file itself."""
    status = path.stat()
    version = _read_version(path, status.st_size, status.st_mtime_ns)
    if version:
        return Ptxas(path, version, ".".join(map(str, version)))
    seen = f"{path}\0{status.st_size}\0{status.st_mtime_ns}"
    return Ptxas(path, (), hashlib.sha256(seen.encode()).hexdigest()[:16])


def _candidates(triton: Path) -> Iterator[Path]:
    """Existing ones: the wheel nvidia-cuda-nvcc, the system's toolkit, ``PATH``, and the two inside Triton."""
    wheels = find_spec("nvidia")
    folders = [Path(folder) for folder in (wheels and wheels.submodule_search_locations) or ()]
    paths = [path for folder in folders for path in sorted(folder.glob("*/bin/ptxas"))]
    if on_path := shutil.which("ptxas"):
        paths.append(Path(on_path))
    bundled = triton / "backends" / "nvidia" / "bin"
    for path in (*paths, _TOOLKIT, bundled / "ptxas", bundled / "ptxas-blackwell"):
        if path.is_file():
            yield path


@cache
def _read_version(path: Path, size: int, time: int) -> tuple[int, ...]:  # noqa: ARG001  # size and time: its identity
    """The version in the text that the program prints, which lies in the last third of tens of megabytes."""
    if size == 0:
        return ()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = content.rfind(_BANNER)
        while start >= 0:
            if match := _VERSION.match(content[start : start + 80]):
                return tuple(map(int, match.groups()))
            start = content.rfind(_BANNER, 0, start)
    return ()
