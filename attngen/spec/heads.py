"""Head layouts."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from attngen.model import SpecModel

HeadDim = Annotated[int, Field(ge=16, le=256, multiple_of=8)]
Count = Annotated[int, Field(ge=1, le=4096)]


class _Heads(SpecModel):
    head_dim: HeadDim
    head_dim_vo: HeadDim | None = None

    @property
    def head_dim_qk(self) -> int:
        """Width of queries and keys."""
        return self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of values and outputs."""
        return self.head_dim_vo or self.head_dim


class MHA(_Heads):
    """Multi-head attention: every query head has its own keys and values."""

    positional: ClassVar[tuple[str, ...]] = ("num_heads", "head_dim", "head_dim_vo")
    kind: Literal["mha"] = "mha"
    num_heads: Count

    @property
    def num_qo_heads(self) -> int:
        return self.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads


class MQA(_Heads):
    """Multi-query attention (Shazeer, arXiv 1911.02150): all query heads share one key and value head."""

    positional: ClassVar[tuple[str, ...]] = ("num_qo_heads", "head_dim", "head_dim_vo")
    kind: Literal["mqa"] = "mqa"
    num_qo_heads: Count

    @property
    def num_kv_heads(self) -> int:
        return 1


class GQA(_Heads):
    """Grouped-query attention (Ainslie et al., arXiv 2305.13245): query head ``h`` reads key head ``h // group_size``."""

    positional: ClassVar[tuple[str, ...]] = ("num_qo_heads", "num_kv_heads", "head_dim", "head_dim_vo")
    kind: Literal["gqa"] = "gqa"
    num_qo_heads: Count
    num_kv_heads: Count

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(f"num_qo_heads={self.num_qo_heads} is no multiple of num_kv_heads={self.num_kv_heads}")
        return self


class MLA(SpecModel):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    A token leaves one latent ``ckv`` and one rotated key part ``kpe`` in the cache. Decode is absorbed: every head attends, with
    queries ``(q_nope, q_pe)`` of ``head_dim_ckv + head_dim_kpe``, to the latents, and gives a latent. Prefill and backward take
    keys and values that have been projected up: as MHA with ``head_dim_qk = head_dim_nope + head_dim_kpe``. Both scale by
    ``head_dim_qk ** -0.5``.

    Attributes:
        absorbed: prefill attends to the latents too, as decode does, with ragged queries where the cache is paged or ragged (padded
            ones of Contiguous): for a few new tokens a request that are in the cache already. There is no backward then.
    """

    positional: ClassVar[tuple[str, ...]] = ("num_qo_heads",)
    kind: Literal["mla"] = "mla"
    num_qo_heads: Count
    head_dim_ckv: int = Field(default=512, ge=16, le=512, multiple_of=16)
    head_dim_kpe: int = Field(default=64, ge=16, le=64, multiple_of=16)
    head_dim_nope: HeadDim = 128
    head_dim_vo: HeadDim = 128
    absorbed: bool = False

    @property
    def num_kv_heads(self) -> int:
        """Of keys that have been projected up; the cache has one."""
        return self.num_qo_heads

    @property
    def head_dim_qk(self) -> int:
        """Width of queries and keys before absorption."""
        return self.head_dim_nope + self.head_dim_kpe

    @property
    def value_dim(self) -> int:
        """Width of values and outputs of prefill."""
        return self.head_dim_vo


Heads = Annotated[MHA | MQA | GQA | MLA, Field(discriminator="kind")]
