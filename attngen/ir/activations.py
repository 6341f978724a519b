"""Activation functions of ``torch.nn.functional``, put together from the functions that expressions have."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from attngen.ir.expr import Expr, binary, compare, select, unary
from attngen.ir.symbol import Symbol, fail, wrap

# Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: |error| <= 1.5e-7.
_ERF_RATE = 0.3275911
_ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def _erf(x: Expr) -> Expr:
    size = unary("abs", x)
    t = binary("div", 1.0, binary("add", 1.0, binary("mul", size, _ERF_RATE)))
    series: Expr | float = 0.0
    for n, factor in enumerate(reversed(_ERF)):
        series = binary("mul", binary("add", factor, series), t) if n else binary("mul", factor, t)
    value = binary("sub", 1.0, binary("mul", series, unary("exp", unary("neg", binary("mul", x, x)))))
    return select(compare("lt", x, 0.0), unary("neg", value), value)


def _gelu(x: Expr) -> Expr:
    half = binary("mul", x, 0.5)
    return binary("mul", half, binary("add", 1.0, _erf(binary("mul", x, math.sqrt(0.5)))))


def _gelu_tanh(x: Expr) -> Expr:
    cube = binary("mul", binary("mul", binary("mul", x, x), x), 0.044715)
    inner = binary("mul", binary("add", x, cube), math.sqrt(2 / math.pi))
    return binary("mul", binary("mul", x, 0.5), binary("add", 1.0, unary("tanh", inner)))


def _softplus(x: Expr) -> Expr:
    """log(1 + exp(x)) without overflow."""
    tail = unary("log", binary("add", 1.0, unary("exp", unary("neg", unary("abs", x)))))
    return binary("add", binary("max", x, 0.0), tail)


def gelu(x: Any, approximate: str = "none") -> Symbol:
    """Exact with an error function good to 1.5e-7, or the tanh form."""
    if approximate not in ("none", "tanh"):
        raise fail(f"approximate={approximate!r} cannot be traced", "gelu is exact or tanh", "use one of them")
    return wrap(_gelu_tanh if approximate == "tanh" else _gelu)(x)


def _plain(build: Callable[[Expr], Expr]) -> Callable[..., Symbol]:
    """Of one value, whatever ``inplace`` says."""
    function = wrap(build)
    return lambda x, **_: function(x)


ACTIVATIONS: dict[str, Callable[..., Symbol]] = {
    "erf": wrap(_erf),
    "gelu": gelu,
    "log_sigmoid": wrap(lambda x: unary("neg", _softplus(unary("neg", x)))),
    "relu": _plain(lambda x: binary("max", x, 0)),
    "silu": _plain(lambda x: binary("mul", x, unary("sigmoid", x))),
    "softplus": wrap(_softplus),
}
