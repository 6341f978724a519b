"""Expr -> torch: the meaning of masks and score mods, as the oracle computes it.

Integers are int64 tensors (int32 in kernels), floats tensors of one chosen dtype. ``//`` and ``%``
floor; integer ``x // 0`` and ``x % 0`` give 0, so that an unselected branch cannot trap. ``minimum``, ``maximum``,
``abs`` and ``where`` are torch's, and so are their subgradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from attngen.errors import ArgumentError
from attngen.ir.expr import Binary, Cast, Compare, Const, Coord, Expr, Extent, Load, Local, Select, Size, Type, Unary

_TORCH_NAMES = {"not": "logical_not", "and": "logical_and", "or": "logical_or", "min": "minimum", "max": "maximum"}
_TORCH_NAMES |= {f"bit{name}": f"bitwise_{name}" for name in ("and", "or", "xor")}


def evaluate(
    expr: Expr,
    env: Mapping[str, torch.Tensor | int | float],
    params: Mapping[str, torch.Tensor],
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The value of ``expr``, broadcast over the coordinates.

    Args:
        expr: any expression.
        env: name of a coordinate or local -> numbers or tensors that broadcast together; gradients flow to ``score``.
        params: parameter name -> tensor; an index outside of it reads 0. Gradients flow to floating ones.
        dtype: type of f32 arithmetic.

    Returns:
        A bool, int64 or ``dtype`` tensor.

    Raises:
        ArgumentError: a coordinate or parameter is missing, or a parameter has the wrong number of dimensions.
    """
    tensors = [v for v in (*env.values(), *params.values()) if isinstance(v, torch.Tensor)]
    device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
    return _Evaluator(env, params, dtype, device).value(expr)


def extents(
    loads: Iterable[Load], env: Mapping[str, torch.Tensor | int | float], params: Mapping[str, torch.Tensor]
) -> dict[Extent, int]:
    """Least and greatest value of each i32 or bool load over the coordinates of ``env``, those of one tile."""
    found = {}
    for load in loads:
        values = evaluate(load, env, params)
        found[Extent(load, "lo")], found[Extent(load, "hi")] = int(values.min()), int(values.max())
    return found


class _Evaluator:
    def __init__(
        self,
        env: Mapping[str, torch.Tensor | int | float],
        params: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.env, self.params, self.device = env, params, device
        self.dtypes: dict[Type, torch.dtype] = {"bool": torch.bool, "i32": torch.int64, "f32": dtype}
        self.memo: dict[Expr, torch.Tensor] = {}

    def value(self, expr: Expr) -> torch.Tensor:
        """Equal subexpressions are computed once."""
        found = self.memo.get(expr)
        if found is None:
            found = self.memo[expr] = self.compute(expr)
        return found

    def compute(self, expr: Expr) -> torch.Tensor:
        match expr:
            case Const(value):
                return torch.tensor(value, dtype=self.dtypes[expr.type], device=self.device)
            case Coord(name) | Local(name):
                return self.coordinate(name, expr.type)
            case Load(param, indices):
                return self.load(param, [self.value(i) for i in indices]).to(self.dtypes[expr.type])
            case Size(param, axis):
                return torch.tensor(self.tensor(param).shape[axis], device=self.device)
            case Cast(x, to):
                return self.value(x).to(self.dtypes[to])
            case Select(condition, x, y):
                return torch.where(self.value(condition), self.value(x), self.value(y))
            case Binary("floordiv" | "mod" as op, x, y):
                return _floor_division(op, self.value(x), self.value(y))
            case Binary("shr", x, y):
                return torch.bitwise_right_shift(self.value(x), self.value(y).clamp(0, 31))
            case Unary(op, x):
                return self.call(op, x)
            case Binary(op, x, y) | Compare(op, x, y):
                return self.call(op, x, y)
        raise TypeError(f"no meaning for {type(expr).__name__}")

    def call(self, op: str, *operands: Expr) -> torch.Tensor:
        result: torch.Tensor = getattr(torch, _TORCH_NAMES.get(op, op))(*(self.value(x) for x in operands))
        return result

    def coordinate(self, name: str, to: Type) -> torch.Tensor:
        if name not in self.env:
            raise ArgumentError(
                f"{name!r} has no value", where="expression", fix=f"pass it; given are {sorted(self.env)}"
            )
        return torch.as_tensor(self.env[name], device=self.device).to(self.dtypes[to])

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self.params:
            raise ArgumentError(f"parameter {name!r} is missing", where=f"params[{name!r}]", fix="pass the tensor")
        return self.params[name]

    def load(self, name: str, indices: list[torch.Tensor]) -> torch.Tensor:
        tensor = self.tensor(name)
        if tensor.ndim != len(indices):
            why = f"the expression reads it with {len(indices)} indices, it has shape {tuple(tensor.shape)}"
            raise ArgumentError(f"parameter {name!r} has the wrong shape", where=f"params[{name!r}]", why=why)
        if not indices:
            return tensor
        inside = torch.ones((), dtype=torch.bool, device=self.device)
        for index, size in zip(indices, tensor.shape, strict=True):
            inside = inside & (index >= 0) & (index < size)
        if tensor.numel() == 0:
            return tensor.new_zeros(inside.shape)
        clamped = tuple(i.clamp(0, size - 1) for i, size in zip(indices, tensor.shape, strict=True))
        values = tensor[clamped]
        return torch.where(inside, values, torch.zeros((), dtype=tensor.dtype, device=self.device))


def _floor_division(op: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.is_floating_point():
        return torch.div(x, y, rounding_mode="floor") if op == "floordiv" else torch.remainder(x, y)
    zero = y == 0
    divisor = torch.where(zero, 1, y)
    result = torch.div(x, divisor, rounding_mode="floor") if op == "floordiv" else torch.remainder(x, divisor)
    return torch.where(zero, 0, result)
