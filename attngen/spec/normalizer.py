"""How logits become weights: softmax, whose weights share a sum, or a function of each logit alone."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from attngen.ir.expr import KV_LEN, SCORE, Const, Expr, ExprLike, H, Load, binary, cast, coords, unary
from attngen.ir.names import ParamName
from attngen.ir.params import Param
from attngen.model import SpecModel

Length = Annotated[float, Field(gt=0)]


class _Normalizer(SpecModel):
    @property
    def depends_on_length(self) -> bool:
        """Whether a weight depends on how many keys there are, beyond those it is normalized over."""
        return False

    def params(self) -> tuple[Param, ...]:
        """Run-time tensors it reads."""
        return ()


class Softmax(_Normalizer):
    """``exp(logit) / sum of exp(logit)`` over the visible keys; a row that sees none gives 0.

    Attributes:
        sink: a learnable logit a head that takes weight and gives no value (gpt-oss): the sum has ``exp(sink[h])`` as one more
            term. ``True`` reads the run-time parameter ``sink``, a string another name: fp32 ``[num_qo_heads]``.
        off_by_one: a sink of 0 in every head, ``exp(logit) / (1 + sum of exp(logit))`` (Miller, "Attention is off by one").
    """

    kind: Literal["softmax"] = "softmax"
    sink: bool | ParamName = False
    off_by_one: bool = False

    @model_validator(mode="after")
    def _one_sink(self) -> Self:
        if self.sink and self.off_by_one:
            raise ValueError("sink and off_by_one are both an extra term of the sum; declare one")
        self.params()
        return self

    @property
    def sink_name(self) -> str | None:
        """Name of the sinks' parameter."""
        return self.sink if isinstance(self.sink, str) else "sink" if self.sink else None

    def sink_logit(self) -> Expr | None:
        """The sink's logit, an f32 expression of ``h``; ``None`` without one."""
        if self.off_by_one:
            return Const(0.0)
        return None if self.sink_name is None else Load(self.sink_name, (H,), "f32")

    def params(self) -> tuple[Param, ...]:
        return () if self.sink_name is None else (Param(self.sink_name, ("num_qo_heads",)),)


class _Elementwise(_Normalizer):
    """A weight that depends on its own logit, and on nothing of other keys but, by default, their number.

    There is no lse, and results over parts of the keys add where the length or bias is given.
    """

    def weight(self, logit: Expr) -> Expr:
        """The weight, an f32 expression."""
        raise NotImplementedError(type(self).__name__)

    @property
    def depends_on_length(self) -> bool:
        return "kv_len" in coords(self.weight(SCORE))


class Sigmoid(_Elementwise):
    """``sigmoid(logit + bias)`` (Ramapuram et al., arXiv 2409.04431).

    Attributes:
        bias: a number, or the name of a learnable run-time parameter, fp32 ``[num_qo_heads]``; ``None`` takes the paper's
            ``-log(kv_len)``.
    """

    positional: ClassVar[tuple[str, ...]] = ("bias",)
    kind: Literal["sigmoid"] = "sigmoid"
    bias: Annotated[float, Field(strict=True)] | ParamName | None = None

    @model_validator(mode="after")
    def _names(self) -> Self:
        self.params()
        return self

    def weight(self, logit: Expr) -> Expr:
        if isinstance(self.bias, str):
            bias: ExprLike = Load(self.bias, (H,), "f32")
        else:
            bias = unary("neg", unary("log", KV_LEN)) if self.bias is None else self.bias
        return unary("sigmoid", binary("add", logit, bias))

    def params(self) -> tuple[Param, ...]:
        return (Param(self.bias, ("num_qo_heads",)),) if isinstance(self.bias, str) else ()


class ReLU(_Elementwise):
    """``relu(logit) ** power / length`` (Wortsman et al., arXiv 2309.08586; squared: So et al., arXiv 2109.08668).

    Attributes:
        power: 1 or 2.
        length: what weights are divided by; ``None`` takes the request's own ``kv_len``.
    """

    positional: ClassVar[tuple[str, ...]] = ("power", "length")
    kind: Literal["relu"] = "relu"
    power: Literal[1, 2] = 1
    length: Length | None = None

    def weight(self, logit: Expr) -> Expr:
        rectified = binary("max", logit, 0.0)
        return _over_length(rectified if self.power == 1 else binary("mul", rectified, rectified), self.length)


class SiLU(_Elementwise):
    """``logit * sigmoid(logit) / length``, of either sign (HSTU: Zhai et al., arXiv 2402.17152).

    Attributes:
        length: what weights are divided by; ``None`` takes the request's own ``kv_len``.
    """

    positional: ClassVar[tuple[str, ...]] = ("length",)
    kind: Literal["silu"] = "silu"
    length: Length | None = None

    def weight(self, logit: Expr) -> Expr:
        return _over_length(binary("mul", logit, unary("sigmoid", logit)), self.length)


def _over_length(weight: Expr, length: float | None) -> Expr:
    return binary("div", weight, cast(KV_LEN, "f32")) if length is None else binary("mul", weight, 1.0 / length)


Normalizer = Annotated[Softmax | Sigmoid | ReLU | SiLU, Field(discriminator="kind")]
