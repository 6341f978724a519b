"""What a call of a compiled op must know of its variant: sizes, layouts and tensors, as data, without an expression.

Everything here goes to JSON and back, so that a package with kernels needs no spec, and no means to read one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from attngen.dtypes import Storage, widened
from attngen.ir.params import Param

OpName = Literal["prefill", "decode", "backward", "append"]
OPS: tuple[OpName, ...] = ("prefill", "decode", "backward", "append")
# What can be built: ops, and calls that take ops of further specs: prefill with kv_cache=, and prefill or decode with key_indices=.
CallName = Literal["prefill", "decode", "backward", "append", "prefix", "listed"]
CALLS: tuple[CallName, ...] = (*OPS, "prefix", "listed")
Layout = Literal["padded", "ragged", "paged"]


class Sizes:
    """What follows from the sizes of an op, wherever they stand."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_pe: int
    dtype: str

    @property
    def compute_dtype(self) -> str:
        """What q is computed in, and the gate; stored numbers, too, where the hardware does not multiply them as they are."""
        return widened(self.dtype)

    @property
    def head_dim_main(self) -> int:
        """Width of the tensors q and k: all columns but those of q_pe and k_pe."""
        return self.head_dim_qk - self.head_dim_pe

    @property
    def group_size(self) -> int:
        """Query heads that share one key head."""
        return self.num_qo_heads // self.num_kv_heads


@dataclass(frozen=True)
class Signature(Sizes):
    """What one op takes and gives; attributes as of :class:`attngen.variant.Variant`, which makes it.

    Attributes:
        has_sink: a softmax has one more logit in its sum.
        rotates: queries or keys turn by their positions.
        sink_param: the parameter that holds the sinks.
        norm_weights: names of the norm weights of queries and of keys.
        gradient_params: parameters whose gradients are summed over pairs.
        differentiable: names of all run-time tensors that have gradients.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    head_dim_pe: int
    q_layout: Layout
    kv_layout: Layout
    page_size: int
    dtype: str
    out_dtype: str
    k_storage: Storage
    v_storage: Storage
    value_source: Literal["values", "keys"]
    params: tuple[Param, ...]
    is_softmax: bool
    has_sink: bool
    rotates: bool
    gate: str | None
    dropout: float
    sink_param: Param | None
    norm_weights: tuple[str | None, str | None]
    gradient_params: tuple[Param, ...]
    differentiable: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Signature:
        """What :meth:`to_json` was called on."""
        sink = data["sink_param"]
        storages = {name: Storage(**data[name]) for name in ("k_storage", "v_storage")}
        params = {name: tuple(map(_param, data[name])) for name in ("params", "gradient_params")}
        names = {name: tuple(data[name]) for name in ("norm_weights", "differentiable")}
        return Signature(
            **{**data, **storages, **params, **names, "sink_param": None if sink is None else _param(sink)}
        )


def _param(data: Mapping[str, Any]) -> Param:
    return Param(data["name"], tuple(data["dims"]), data["dtype"])


@dataclass(frozen=True)
class Declaration:
    """What the ops of a spec have in common beside their signatures.

    Attributes:
        normalizer: its kind; ``softmax``, or one of weights that depend on their own logit.
        depends_on_length: a weight depends on how many keys there are, so that partial results do not add.
        layout, stack_dim: of a paged cache, as :class:`attngen.Paged` has them.
        page_size: the same; 0 for other caches.
    """

    normalizer: str
    depends_on_length: bool
    page_size: int = 0
    layout: Literal["NHD", "HND"] = "NHD"
    stack_dim: int = 1
