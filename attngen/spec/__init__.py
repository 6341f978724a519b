"""The declaration layer."""

from attngen.spec.attention import AttentionSpec
from attngen.spec.heads import GQA, MHA, MQA, Heads
from attngen.spec.kv import KV, Contiguous, Paged, Ragged
from attngen.spec.loading import load_spec, shipped_specs
from attngen.spec.normalizer import Normalizer, Softmax

__all__ = [
    "GQA",
    "KV",
    "MHA",
    "MQA",
    "AttentionSpec",
    "Contiguous",
    "Heads",
    "Normalizer",
    "Paged",
    "Ragged",
    "Softmax",
    "load_spec",
    "shipped_specs",
]
