"""Names of cache entries: what a binary is made from, and by which toolchain.

The digest covers the text that is compiled, never the options it was rendered from: a forgotten option cannot then
return a wrong kernel.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from attngen.codegen.render import RenderedKernel

# Layout of an entry and meaning of its manifest; a new number makes every older entry unreachable.
SCHEMA = 1


def source_digest(kernel: RenderedKernel) -> str:
    """SHA-256, in hex, of everything that decides what ``kernel`` is built into, save the toolchain."""
    parts = {
        "schema": SCHEMA,
        "target": str(kernel.target),
        "entry": kernel.entry,
        "suffix": kernel.suffix,
        "flags": kernel.flags,
        "source": kernel.source,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode("ascii")).hexdigest()


def entry_path(root: Path, kernel: RenderedKernel, fingerprint: str) -> Path:
    """The folder of ``kernel`` built by the toolchain that calls itself ``fingerprint``."""
    return root / source_digest(kernel) / slug(fingerprint)


def slug(fingerprint: str) -> str:
    """A file name a person recognizes, different for every fingerprint."""
    readable = re.sub(r"[^A-Za-z0-9._+-]+", "-", fingerprint).strip(".-")[:48]
    return f"{readable}-{hashlib.sha256(fingerprint.encode()).hexdigest()[:12]}"
