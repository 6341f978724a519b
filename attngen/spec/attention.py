"""The declaration of an attention variant."""

from __future__ import annotations

from typing import Any

import tomli_w
from pydantic import Field, field_validator

from attngen.dtypes import DTypeName
from attngen.masks import Full, Mask
from attngen.model import SpecModel
from attngen.score_mods import AnyScoreMod
from attngen.spec.heads import Heads
from attngen.spec.kv import KV, Contiguous
from attngen.spec.normalizer import Normalizer, Softmax


class AttentionSpec(SpecModel):
    """What the user wrote. Logit = ``sm_scale * (q . k)``, then ``score_mods`` in order, then ``mask``, then ``normalizer``.

    Attributes:
        name: shown in manifests and logs, never in generated source.
        heads: :class:`MHA`, :class:`MQA` or :class:`GQA`.
        mask: which keys a query sees; combine with ``& | ~``.
        score_mods: changes of the logit, applied in order.
        normalizer: :class:`Softmax`.
        sm_scale: factor on the dot product; ``head_dim_qk ** -0.5`` when omitted.
        dtype: element type of q and out.
        kv: storage of keys and values.
        out_dtype: element type of out when it differs from ``dtype``.

    ``rope, qk_norm, dropout, output_gate`` are reserved: only their neutral values are accepted.

    Raises:
        SpecError: a field is unknown, ill-typed or out of range; the message names its path.
    """

    name: str | None = Field(default=None, max_length=128)
    heads: Heads
    mask: Mask = Full()
    score_mods: tuple[AnyScoreMod, ...] = ()
    normalizer: Normalizer = Softmax()
    sm_scale: float | None = None
    dtype: DTypeName = "bf16"
    kv: KV = Contiguous()
    out_dtype: DTypeName | None = None
    rope: None = None
    qk_norm: None = None
    dropout: float = 0.0
    output_gate: None = None

    @field_validator("dropout")
    @classmethod
    def _no_dropout(cls, value: float) -> float:
        if value != 0.0:
            raise ValueError("dropout on the weights is not supported; only 0.0 is accepted")
        return value

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
