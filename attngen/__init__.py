"""attngen: a compiler for attention variants.

One declaration gives prefill, decode and backward ops, compiled for the CPU or a GPU and cached on disk.
"""

from attngen.compiler import compile
from attngen.errors import (
    ArgumentError,
    AttngenError,
    BuildError,
    CacheMissError,
    SpecError,
    UnsupportedError,
)
from attngen.ir.functions import (
    abs,
    clamp,
    cos,
    exp,
    exp2,
    floor,
    log,
    log2,
    maximum,
    minimum,
    rsqrt,
    sigmoid,
    sin,
    sqrt,
    tanh,
    where,
)
from attngen.ir.trace import Tensor
from attngen.masks import And, Causal, CustomMask, Full, MaskMod, Not, Or, SlidingWindow, mask_mod
from attngen.ops import Ops, merge_states
from attngen.score_mods import ALiBi, CustomScoreMod, ScoreMod, SoftCap, score_mod
from attngen.spec import (
    GQA,
    MHA,
    MQA,
    AttentionSpec,
    Contiguous,
    Paged,
    Ragged,
    Softmax,
    load_spec,
    shipped_specs,
)

__version__ = "0.1.0"

__all__ = [
    "GQA",
    "MHA",
    "MQA",
    "ALiBi",
    "And",
    "ArgumentError",
    "AttentionSpec",
    "AttngenError",
    "BuildError",
    "CacheMissError",
    "Causal",
    "Contiguous",
    "CustomMask",
    "CustomScoreMod",
    "Full",
    "MaskMod",
    "Not",
    "Ops",
    "Or",
    "Paged",
    "Ragged",
    "ScoreMod",
    "SlidingWindow",
    "SoftCap",
    "Softmax",
    "SpecError",
    "Tensor",
    "UnsupportedError",
    "abs",
    "clamp",
    "compile",
    "cos",
    "exp",
    "exp2",
    "floor",
    "load_spec",
    "log",
    "log2",
    "mask_mod",
    "maximum",
    "merge_states",
    "minimum",
    "rsqrt",
    "score_mod",
    "shipped_specs",
    "sigmoid",
    "sin",
    "sqrt",
    "tanh",
    "where",
]
