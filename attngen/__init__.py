"""attngen: a compiler for attention variants.

One declaration gives prefill, decode and backward ops, compiled for the CPU or a GPU and cached on disk.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
from attngen.masks import (
    And,
    BlockDiffusion,
    BlockSparse,
    Causal,
    Chunked,
    CustomMask,
    Dense,
    Dilated,
    Document,
    Full,
    GlobalTokens,
    ImageSpans,
    MaskMod,
    Neighborhood,
    Not,
    Or,
    PrefixLM,
    SlidingWindow,
    Tree,
    mask_mod,
)
from attngen.ops import Ops, block_matrix, merge_states
from attngen.score_mods import (
    ALiBi,
    CustomScoreMod,
    DenseBias,
    Fire,
    Forgetting,
    Kerple,
    RelativeBias,
    ScoreMod,
    SoftCap,
    Temperature,
    score_mod,
)
from attngen.spec import (
    GQA,
    MHA,
    MLA,
    MQA,
    AttentionSpec,
    Contiguous,
    Paged,
    QKNorm,
    Ragged,
    ReLU,
    Rope,
    Sigmoid,
    SiLU,
    Softmax,
    load_spec,
    shipped_specs,
)

if TYPE_CHECKING:
    from attngen.tuning import tune
    from attngen.workload import Shape

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """What is imported when it is first used."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_LATER[name]), name)
    return found


_LATER = {"Shape": "attngen.workload", "tune": "attngen.tuning"}

__all__ = [
    "GQA",
    "MHA",
    "MLA",
    "MQA",
    "ALiBi",
    "And",
    "ArgumentError",
    "AttentionSpec",
    "AttngenError",
    "BlockDiffusion",
    "BlockSparse",
    "BuildError",
    "CacheMissError",
    "Causal",
    "Chunked",
    "Contiguous",
    "CustomMask",
    "CustomScoreMod",
    "Dense",
    "DenseBias",
    "Dilated",
    "Document",
    "Fire",
    "Forgetting",
    "Full",
    "GlobalTokens",
    "ImageSpans",
    "Kerple",
    "MaskMod",
    "Neighborhood",
    "Not",
    "Ops",
    "Or",
    "Paged",
    "PrefixLM",
    "QKNorm",
    "Ragged",
    "ReLU",
    "RelativeBias",
    "Rope",
    "ScoreMod",
    "Shape",
    "SiLU",
    "Sigmoid",
    "SlidingWindow",
    "SoftCap",
    "Softmax",
    "SpecError",
    "Temperature",
    "Tensor",
    "Tree",
    "UnsupportedError",
    "abs",
    "block_matrix",
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
    "tune",
    "where",
]
