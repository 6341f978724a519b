"""The declaration layer."""

from attngen.spec.attention import AttentionSpec
from attngen.spec.heads import GQA, MHA, MLA, MQA, Heads
from attngen.spec.kv import KV, Contiguous, Paged, Ragged
from attngen.spec.loading import load_spec, shipped_specs
from attngen.spec.normalizer import Normalizer, ReLU, Sigmoid, SiLU, Softmax
from attngen.spec.transforms import QKNorm, Rope

__all__ = [
    "GQA",
    "KV",
    "MHA",
    "MLA",
    "MQA",
    "AttentionSpec",
    "Contiguous",
    "Heads",
    "Normalizer",
    "Paged",
    "QKNorm",
    "Ragged",
    "ReLU",
    "Rope",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "load_spec",
    "shipped_specs",
]
