"""The cache of built kernels: the only part of attngen that touches the disk."""

from attngen.store.artifact import Artifact
from attngen.store.difference import differences
from attngen.store.disk import Store
from attngen.store.key import entry_path, source_digest
from attngen.store.manifest import Manifest
from attngen.store.tuning import Tuning, TuningKey, Tunings

__all__ = [
    "Artifact",
    "Manifest",
    "Store",
    "Tuning",
    "TuningKey",
    "Tunings",
    "differences",
    "entry_path",
    "source_digest",
]
