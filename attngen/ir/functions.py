"""Twins of torch's functions for mods that should not need torch. Given plain numbers they give numbers."""

from __future__ import annotations

from typing import Any

import attngen.ir.torch_functions  # noqa: F401 (fills the table)
from attngen.ir.scalar import evaluate_scalar
from attngen.ir.symbol import TORCH_FUNCTIONS, Symbol


def _call(name: str, *operands: Any) -> Any:
    """A symbol if an operand is one, else a number."""
    result = TORCH_FUNCTIONS[name](*operands)
    return result if any(isinstance(x, Symbol) for x in operands) else evaluate_scalar(result.expr, {})


def where(condition: Any, x: Any, y: Any) -> Any:
    """``x`` where ``condition`` (a bool) holds, else ``y``."""
    return _call("where", condition, x, y)


def minimum(x: Any, y: Any) -> Any:
    """The smaller of the two."""
    return _call("minimum", x, y)


def maximum(x: Any, y: Any) -> Any:
    """The larger of the two."""
    return _call("maximum", x, y)


def clamp(x: Any, min: Any, max: Any) -> Any:  # noqa: A002 (torch's names)
    """``x`` limited to ``[min, max]``."""
    return minimum(maximum(x, min), max)


def exp(x: Any) -> Any:
    """e to the power of ``x``."""
    return _call("exp", x)


def exp2(x: Any) -> Any:
    """2 to the power of ``x``."""
    return _call("exp2", x)


def log(x: Any) -> Any:
    """Natural logarithm."""
    return _call("log", x)


def log2(x: Any) -> Any:
    """Logarithm to base 2."""
    return _call("log2", x)


def sqrt(x: Any) -> Any:
    """Square root."""
    return _call("sqrt", x)


def rsqrt(x: Any) -> Any:
    """``1 / sqrt(x)``."""
    return _call("rsqrt", x)


def tanh(x: Any) -> Any:
    """Hyperbolic tangent."""
    return _call("tanh", x)


def sigmoid(x: Any) -> Any:
    """``1 / (1 + exp(-x))``."""
    return _call("sigmoid", x)


def sin(x: Any) -> Any:
    """Sine of radians."""
    return _call("sin", x)


def cos(x: Any) -> Any:
    """Cosine of radians."""
    return _call("cos", x)


def floor(x: Any) -> Any:
    """Largest whole number not above ``x``; integers pass."""
    return _call("floor", x)


def abs(x: Any) -> Any:  # noqa: A001 (torch's name)
    """``|x|``."""
    return _call("abs", x)
