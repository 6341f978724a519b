"""A learned bias for each bucket of distances (T5)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from attngen.errors import SpecError
from attngen.ir.expr import Expr, H, K, Q, binary, cast, compare, unary
from attngen.ir.loads import element
from attngen.ir.names import ParamName
from attngen.ir.params import Param
from attngen.score_mods.base import ScoreMod


class RelativeBias(ScoreMod):
    """``score + table[bucket(k - q), h]`` (Raffel et al., arXiv 1910.10683, section 2.1; T5 divides no score: ``sm_scale=1.0``).

    With ``n`` buckets for a direction, distances below ``n // 2`` have one each, larger ones share buckets that grow
    exponentially until ``max_distance``: bucket ``e + floor(log(d / e) / log(max_distance / e) * (n - e))``, ``e = n // 2``, at
    most ``n - 1``. Both directions have half of the buckets each, keys ahead the second half; in one direction, keys ahead
    count as distance 0. The bounds between buckets are worked out at declaration, in integers, so a kernel compares distances
    and no logarithm is rounded.

    Attributes:
        table: name of a run-time fp32 parameter ``[num_buckets, num_qo_heads]``; it has a gradient.
        num_buckets, max_distance: 32 and 128 in T5.
        bidirectional: true in encoders, false in decoders.
    """

    positional: ClassVar[tuple[str, ...]] = ("table", "num_buckets", "max_distance")
    kind: Literal["relative_bias"] = "relative_bias"
    table: ParamName = "rel_bias"
    num_buckets: int = Field(default=32, ge=2, le=512)
    max_distance: int = Field(default=128, ge=2, lt=2**20)
    bidirectional: bool = False

    @model_validator(mode="after")
    def _grows(self) -> RelativeBias:
        if self.bidirectional and (self.num_buckets % 2 or self.num_buckets < 4):
            raise SpecError(
                f"num_buckets is {self.num_buckets}",
                where="RelativeBias.num_buckets",
                why="two directions share them, at least two each",
                fix="pass an even number",
            )
        if self.max_distance <= self._each // 2:
            raise SpecError(
                f"max_distance is {self.max_distance}",
                where="RelativeBias.max_distance",
                why=f"the first {self._each // 2} distances have buckets of their own",
                fix="pass a larger distance",
            )
        return self

    @property
    def _each(self) -> int:
        """Buckets of one direction."""
        return self.num_buckets // 2 if self.bidirectional else self.num_buckets

    def params(self) -> tuple[Param, ...]:
        return (Param(self.table, (self.num_buckets, "num_qo_heads")),)

    def expr(self, score: Expr, num_qo_heads: int) -> Expr:
        (table,) = self.params()
        return binary("add", score, element(table, self._bucket(), H))

    def _bucket(self) -> Expr:
        behind = binary("sub", Q, K)
        distance = unary("abs", behind) if self.bidirectional else binary("max", behind, 0)
        bucket = binary("min", distance, self._each // 2)
        for bound in _bounds(self._each, self.max_distance):
            bucket = binary("add", bucket, cast(compare("ge", distance, bound), "i32"))
        if not self.bidirectional:
            return bucket
        return binary("add", bucket, binary("mul", cast(compare("gt", K, Q), "i32"), self._each))


def _bounds(buckets: int, max_distance: int) -> list[int]:
    """Least distance of each bucket that holds several, but the first: the smallest d with
    ``(d / e) ** (n - e) >= (max_distance / e) ** j``.
    """
    exact = buckets // 2
    shared = buckets - exact
    bounds, distance = [], exact
    for j in range(1, shared):
        target = max_distance**j * exact ** (shared - j)
        while distance**shared < target:
            distance += 1
        bounds.append(distance)
    return bounds
