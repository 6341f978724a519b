"""The declaration of an attention variant."""

from __future__ import annotations

from typing import Any, Self

import tomli_w
from pydantic import Field, model_validator

from attngen.dtypes import DTypeName, QueryDTypeName
from attngen.ir.names import ParamName
from attngen.masks import Full, Mask
from attngen.model import SpecModel
from attngen.score_mods import AnyScoreMod
from attngen.spec.heads import MLA, Heads
from attngen.spec.kv import KV, Contiguous
from attngen.spec.normalizer import Normalizer, Softmax
from attngen.spec.transforms import QKNorm, Rope


class AttentionSpec(SpecModel):
    """What the user wrote. Logit = ``sm_scale * (q . k)``, then ``score_mods`` in order, then ``mask``, then ``normalizer``.

    Before the product come ``qk_norm`` and ``rope``, after the normalizer ``dropout``, the values, and ``output_gate``.

    Attributes:
        name: shown in manifests and logs, never in generated source.
        heads: :class:`MHA`, :class:`MQA`, :class:`GQA` or :class:`MLA`.
        mask: which keys a query sees; combine with ``& | ~``.
        score_mods: changes of the logit, applied in order.
        normalizer: :class:`Softmax`, :class:`Sigmoid`, :class:`ReLU` or :class:`SiLU`.
        sm_scale: factor on the dot product; ``head_dim_qk ** -0.5`` when omitted.
        dtype: element type of q and, unless it is fp8, of out.
        kv: storage of keys and values.
        out_dtype: element type of out when it differs from ``dtype``; bf16 by default where that is fp8.
        rope: rotation of queries and keys by their positions, inside the kernels.
        qk_norm: norm of queries and keys over the head dim, before the rotation.
        dropout: probability with which a weight becomes 0 in prefill and training, the others growing by ``1 / (1 - dropout)``.
        output_gate: name of a run-time tensor in the shape of out and the spec's dtype: ``out * sigmoid(gate)`` (Qwen3-Next). It
            has a gradient.

    Raises:
        SpecError: a field is unknown, ill-typed or out of range; the message names its path.
    """

    name: str | None = Field(default=None, max_length=128)
    heads: Heads
    mask: Mask = Full()
    score_mods: tuple[AnyScoreMod, ...] = ()
    normalizer: Normalizer = Softmax()
    sm_scale: float | None = None
    dtype: QueryDTypeName = "bf16"
    kv: KV = Contiguous()
    out_dtype: DTypeName | None = None
    rope: Rope | None = None
    qk_norm: QKNorm | None = None
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    output_gate: ParamName | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        heads = self.heads
        turning = "head_dim_kpe" if isinstance(heads, MLA) else "head_dim_qk"
        if self.rope is not None and (self.rope.dim or 0) > getattr(heads, turning):
            raise ValueError(f"rope.dim={self.rope.dim} exceeds {turning}={getattr(heads, turning)}")
        if self.rope is not None and self.rope.keys == "append" and self.qk_norm is not None:
            raise ValueError(
                "rope.keys='append' turns keys before qk_norm norms them on load; declare rope.keys='load'"
            )
        stored = (
            (heads.head_dim_ckv, heads.head_dim_kpe) if isinstance(heads, MLA) else (heads.head_dim_qk, heads.value_dim)
        )
        storages = self.kv.storages(self.dtype)
        if self.kv.scale is not None and not any(storage.scale == self.kv.scale for storage in storages):
            raise ValueError(f"kv.scale={self.kv.scale!r} has no meaning for {' and '.join(x.dtype for x in storages)}")
        for storage in storages:
            if storage.block and any(width % storage.block for width in stored):
                raise ValueError(f"kv.group_size={storage.block} does not divide head dims {stored[0]} and {stored[1]}")
        return self

    def to_toml(self) -> str:
        """The spec as TOML text that :func:`attngen.load_spec` reads back to an equal spec."""
        fields = self.model_dump(mode="json", exclude_none=True)
        silent = ("score_mods", "normalizer", "dropout")
        return tomli_w.dumps(
            {
                n: v
                for n, v in fields.items()
                if n not in silent or getattr(self, n) != type(self).model_fields[n].default
            }
        )

    def defaults(self) -> dict[str, Any]:
        """Tensors that custom mods captured, by parameter name; not part of the spec's identity."""
        found = dict(self.mask.defaults())
        for mod in self.score_mods:
            found.update(mod.defaults())
        return found
