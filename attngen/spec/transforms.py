"""What happens to queries and keys before their product: a norm over the head dim, then a rotation by position."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from attngen.ir.names import ParamName
from attngen.ir.params import Param
from attngen.model import SpecModel

RotaryDim = Annotated[int, Field(ge=2, le=256, multiple_of=2)]


class Rope(SpecModel):
    """Rotary position embedding (Su et al., arXiv 2104.09864): pair ``i`` of a head turns by ``position * theta ** (-2 i / dim)``.

    Queries turn by ``q``, keys by ``k``, their positions in the request.

    Attributes:
        dim: how many of the head's first elements turn; all when omitted (partial: GPT-NeoX, Phi).
        theta: base of the frequencies.
        interleaved: pairs are neighbours ``(2 i, 2 i + 1)`` (GPT-J, the paper) instead of halves ``(i, i + dim / 2)`` (GPT-NeoX,
            Llama in Hugging Face's layout).
        table: name of a run-time fp32 parameter ``[positions, dim]`` with the cosines of all pairs, then their sines, for scaled
            frequencies (Llama 3, YaRN), instead of ``theta``. Positions outside of it read 0. It has no gradient.
        keys: when the keys of a cache turn. ``load``: the cache holds them as projected, and kernels turn them when they read
            them. ``append``: ``ops.append`` turns them by their positions on the way into the cache, and ops over the cache
            (decode; prefill of a paged cache) turn queries alone. Keys that prefill, backward and attention take outside
            of a paged cache come from the projection, and are turned on load either way. With MLA, ``kpe`` turns, in append only.
    """

    positional: ClassVar[tuple[str, ...]] = ("dim", "theta", "interleaved", "table")
    dim: RotaryDim | None = None
    theta: float = Field(default=10000.0, gt=1)
    interleaved: bool = False
    table: ParamName | None = None
    keys: Literal["load", "append"] = "load"

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.table is not None and self.theta != type(self).model_fields["theta"].default:
            raise ValueError("theta and table both tell the angles; declare one")
        return self

    def params(self) -> tuple[Param, ...]:
        """Run-time tensors it reads."""
        return () if self.table is None else (Param(self.table, ("positions", self.dim or 0)),)


class QKNorm(SpecModel):
    """Root-mean-square norm of every query and key head, before the rotation (Henry et al., arXiv 2010.04245; Qwen 3, Gemma 3).

    ``x / sqrt(mean of x ** 2 + eps) * weight`` over the head dim.

    Attributes:
        eps: added to the mean square.
        q_weight, k_weight: names of learnable run-time parameters, fp32 ``[head_dim_qk]``; ``None``: no weight. Gemma's
            ``1 + weight`` is passed as it is multiplied.
    """

    positional: ClassVar[tuple[str, ...]] = ("eps", "q_weight", "k_weight")
    eps: float = Field(default=1e-6, gt=0)
    q_weight: ParamName | None = None
    k_weight: ParamName | None = None

    def params(self, head_dim: int) -> tuple[Param, ...]:
        """Run-time tensors it reads."""
        return tuple(dict.fromkeys(Param(name, (head_dim,)) for name in (self.q_weight, self.k_weight) if name))
