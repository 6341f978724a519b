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


Heads = Annotated[MHA | MQA | GQA, Field(discriminator="kind")]
