"""Random expressions for property tests, and the parameters they load."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from attngen.ir.expr import (
    FLOAT_UNARY,
    SCORE,
    B,
    Const,
    Coord,
    H,
    K,
    Load,
    Q,
    and_,
    binary,
    cast,
    compare,
    not_,
    or_,
    select,
    unary,
)
from attngen.ir.params import Param

PARAMS = (
    Param("bias", ("num_qo_heads",)),
    Param("scale", ()),
    Param("lengths", ("batch",), "i32"),
    Param("doc_ids", ("batch", "max_kv_len"), "i32"),
    Param("flags", ("num_qo_heads",), "bool"),
    Param("pattern", ("rows", "columns"), "bool"),
    Param("bits", ("rows", "bytes"), "u8"),
)
TENSORS = {
    "bias": torch.tensor([0.5, -1.25, 2.0], dtype=torch.float64),
    "scale": torch.tensor(0.75, dtype=torch.float64),
    "lengths": torch.tensor([3, 7], dtype=torch.int32),
    "doc_ids": torch.tensor([[0, 0, 1, 1, 1, 2, 2, 5], [0, 1, 1, 1, 1, 1, 4, 4]], dtype=torch.int32),
    "flags": torch.tensor([True, False, True]),
    "pattern": torch.tensor([[True, True, False, False], [False, False, True, True], [False, True, False, True]]),
    "bits": torch.tensor(
        [[255, 0], [255, 255], [129, 7], [0, 255], [0, 0], [254, 1], [85, 170], [255, 255]], dtype=torch.uint8
    ),
}


def stable(max_examples):
    """Settings that give every run the same examples."""
    return settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=max_examples,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def element(name, indices, tensors=TENSORS):
    """``loads`` of the scalar evaluator; an index out of range reads 0."""
    tensor = tensors[name]
    inside = all(0 <= i < n for i, n in zip(indices, tensor.shape, strict=True))
    return tensor[indices].item() if inside else torch.zeros((), dtype=tensor.dtype).item()


COMPARISONS = ["lt", "le", "gt", "ge", "eq", "ne"]


@dataclass(frozen=True)
class Trees:
    """Random trees.

    Attributes:
        coords: integer coordinates.
        constants: strategy of integer constants.
        floats: strategy of float constants.
        truncation: include casts from f32, float comparisons, and float powers, ``//`` and ``%``.
    """

    coords: tuple[Coord, ...]
    constants: st.SearchStrategy[int]
    floats: st.SearchStrategy[float]
    truncation: bool = True

    def i32(self, depth):
        return _tree(self, "i32", depth)

    def f32(self, depth):
        return _tree(self, "f32", depth)

    def boolean(self, depth):
        return _tree(self, "bool", depth)


@st.composite
def _tree(draw, trees, kind, depth):
    return _Grower(draw, trees).grow(kind, depth)


class _Grower:
    def __init__(self, draw, trees):
        self.draw, self.trees = draw, trees

    def pick(self, *options):
        return self.draw(st.sampled_from(options))

    def grow(self, kind, depth):
        return {"i32": self.i32, "f32": self.f32, "bool": self.boolean}[kind](depth - 1)

    def i32(self, depth):
        rule = self.pick(
            "coord",
            "const",
            "load",
            *(["sum", "sum", "neg", "quotient", "bits", "shift", "where", "bool", "doc", "bit"] if depth >= 0 else []),
            *(["trunc"] if depth >= 0 and self.trees.truncation else []),
        )
        match rule:
            case "coord":
                return self.pick(*self.trees.coords)
            case "const":
                return Const(self.draw(self.trees.constants))
            case "load":
                return Load("lengths", (B,), "i32")
            case "sum":
                return binary(self.pick("add", "sub", "mul", "min", "max"), self.i32(depth - 1), self.i32(depth - 1))
            case "neg":
                return unary(self.pick("neg", "abs"), self.i32(depth - 1))
            case "quotient":
                return binary(self.pick("floordiv", "mod"), self.i32(depth - 1), self.draw(self.trees.constants))
            case "shift":
                return binary("shr", self.i32(depth - 1), self.pick(Const(1), Const(3), Const(40), self.i32(depth - 1)))
            case "bits":
                mask = self.pick(Const(5), Const(-4), self.i32(depth - 1))
                return binary(self.pick("bitand", "bitor", "bitxor"), self.i32(depth - 1), mask)
            case "where":
                return select(self.boolean(depth - 1), self.i32(depth - 1), self.i32(depth - 1))
            case "bool":
                return cast(self.boolean(depth - 1), "i32")
            case "doc":
                return Load(self.pick("doc_ids", "bits"), (self.i32(depth - 1), self.i32(depth - 1)), "i32")
            case "bit":
                word, count = Load("bits", (self.i32(depth - 1), self.i32(depth - 1)), "i32"), self.i32(depth - 1)
                return binary("mod", binary("shr", word, binary("mod", count, 8)), self.pick(2, 4))
        value = self.f32(depth - 1)
        return cast(SCORE if isinstance(value, Const) else value, "i32")

    def boolean(self, depth):
        rule = self.pick(
            "const",
            "load",
            *(["compare"] * 4 + ["same", "logic", "fold", "not", "where", "cast", "table"] if depth >= 0 else []),
            *(["float", "trunc"] if depth >= 0 and self.trees.truncation else []),
        )
        match rule:
            case "const":
                return Const(self.draw(st.booleans()))
            case "load":
                return Load("flags", (H,), "bool")
            case "table":
                return Load("pattern", (self.i32(depth - 1), self.i32(depth - 1)), "bool")
            case "compare":
                return compare(self.pick(*COMPARISONS), self.i32(depth - 1), self.i32(depth - 1))
            case "same":
                return compare(self.pick(*COMPARISONS), self.boolean(depth - 1), self.boolean(depth - 1))
            case "logic":
                return binary(self.pick("and", "or"), self.boolean(depth - 1), self.boolean(depth - 1))
            case "fold":
                return self.pick(and_, or_)(self.boolean(depth - 1), not_(self.boolean(depth - 1)))
            case "not":
                return unary("not", self.boolean(depth - 1))
            case "where":
                return select(self.boolean(depth - 1), self.boolean(depth - 1), self.boolean(depth - 1))
            case "cast":
                return cast(self.i32(depth - 1), "bool")
            case "float":
                return compare(self.pick(*COMPARISONS), self.f32(depth - 1), self.i32(depth - 1))
        return cast(self.f32(depth - 1), "bool")

    def f32(self, depth):
        rule = self.pick(
            "score",
            "const",
            "load",
            "scale",
            *(["unary", "binary", "binary", "mixed", "where", "order", "int", "table"] if depth >= 0 else []),
            *(["steps"] if depth >= 0 and self.trees.truncation else []),
        )
        match rule:
            case "score":
                return SCORE
            case "const":
                return Const(self.draw(self.trees.floats))
            case "load":
                return Load("bias", (H,), "f32")
            case "scale":
                return Load("scale", (), "f32")
            case "unary":
                return unary(self.pick("neg", "abs", *FLOAT_UNARY), self.f32(depth - 1))
            case "binary":
                return binary(
                    self.pick("add", "sub", "mul", "div", "min", "max"), self.f32(depth - 1), self.f32(depth - 1)
                )
            case "mixed":
                return binary(self.pick("add", "mul"), self.f32(depth - 1), self.i32(depth - 1))
            case "where":
                return select(self.boolean(depth - 1), self.f32(depth - 1), self.f32(depth - 1))
            case "order":
                x, y = self.f32(depth - 1), self.f32(depth - 1)
                return select(compare(self.pick("lt", "ge"), x, y), x, y)
            case "int":
                return cast(self.i32(depth - 1), "f32")
            case "table":
                return Load("bias", (self.i32(depth - 1),), "f32")
        return binary(self.pick("floordiv", "mod", "pow"), self.f32(depth - 1), self.f32(depth - 1))


POSITIONS = (Q, K, B, H, Coord("qo_len"), Coord("kv_len"))
SMALL = Trees(POSITIONS, st.integers(-6, 6), st.sampled_from([-2.5, -1.0, 0.0, 0.5, 1.0, 3.0]), truncation=False)
ANYTHING = Trees(
    (*POSITIONS, Coord("q0"), Coord("k1")),
    st.one_of(st.integers(-9, 9), st.sampled_from([-(2**31), 2**31 - 1])),
    st.one_of(st.floats(allow_nan=False), st.sampled_from([-0.5, 1.0])),
)
