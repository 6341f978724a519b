"""The jinja2 environment of the kernel templates."""

from __future__ import annotations

import secrets
import sys
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from jinja2 import BytecodeCache, Environment, FileSystemLoader, StrictUndefined, __version__
from jinja2.bccache import Bucket

from attngen.resources import resource_folder

_OPTIONS: dict[str, Any] = {
    "trim_blocks": True,
    "lstrip_blocks": True,
    "keep_trailing_newline": True,
    "autoescape": False,
}
_SEAL = 32  # bytes of a checksum


@cache
def environment(backend: str) -> Environment:
    """Templates of one backend: undefined names are errors, block tags leave no blank lines."""
    return Environment(
        loader=FileSystemLoader(resource_folder("templates") / backend),
        undefined=StrictUndefined,
        bytecode_cache=_Compiled(),
        **_OPTIONS,
    )


class _Compiled(BytecodeCache):
    """Templates as bytecode, beside that of this module and under the rules of Python's own.

    Whoever can write there can change the package, too; where nobody can, templates are compiled in each process, which takes
    longer than all else that finds a kernel in a cache. Jinja checks the template's text.
    """

    def load_bytecode(self, bucket: Bucket) -> None:
        with suppress(OSError):
            data = _place(bucket).read_bytes()
            if data[:_SEAL] == sha256(data[_SEAL:]).digest():
                bucket.bytecode_from_string(data[_SEAL:])

    def dump_bytecode(self, bucket: Bucket) -> None:
        if sys.dont_write_bytecode:
            return
        place = _place(bucket)
        draft = place.with_suffix(f".{secrets.token_hex(8)}")
        with suppress(OSError):
            try:
                data = bucket.bytecode_to_string()
                draft.write_bytes(sha256(data).digest() + data)
                draft.replace(place)
            except OSError:
                draft.unlink(missing_ok=True)


def _place(bucket: Bucket) -> Path:
    makers = sha256(f"{__version__} {_OPTIONS}".encode()).hexdigest()[:16]
    return Path(__file__).parent / "__pycache__" / f"{bucket.key}.{makers}.{sys.implementation.cache_tag}.pyc"
