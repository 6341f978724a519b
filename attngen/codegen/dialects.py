"""How expressions are spelled in Triton, in C++ and in CUDA C++.

Helper functions named here are defined in the templates' math partials.
"""

from __future__ import annotations

from typing import ClassVar

from attngen.codegen.printer import Dialect, float32_literal
from attngen.ir.expr import Type
from attngen.ir.params import Param


class TritonDialect(Dialect):
    """Triton's Python: values are tensors or scalars of ``tl``."""

    _NATIVE: ClassVar = {
        "min": "tl.minimum",
        "max": "tl.maximum",
        "select": "tl.where",
        **{
            name: f"tl.{name}" for name in ("abs", "floor", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos")
        },
    }
    _HELPERS: ClassVar = {
        "floordiv": "floor_div",
        "mod": "floor_mod",
        "shr": "shift_right",
        "pow": "power",
        "tanh": "tanh",
        "sigmoid": "sigmoid",
    }
    _TYPES: ClassVar = {"i32": "tl.int32", "f32": "tl.float32", "bool": "tl.int1"}

    def constant(self, value: bool | int | float) -> str:
        if isinstance(value, float):
            text = float32_literal(value)
            return f'float("{text}")' if "inf" in text else text
        return str(value)

    def call(self, function: str, *operands: str) -> str:
        if function == "widen":
            return f"tl.cast({operands[0]}, tl.int64)"
        return f"{self._NATIVE.get(function) or self._HELPERS[function]}({', '.join(operands)})"

    def cast(self, text: str, to: Type) -> str:
        return f"({text} != 0)" if to == "bool" else f"tl.cast({text}, {self._TYPES[to]})"

    def invert(self, text: str) -> str:
        return f"~{text}"

    def load(self, param: Param, offset: str, valid: str | None) -> str:
        guard = f", mask={valid}, other=0" if valid else ""
        text = f"tl.load({param.symbol} + {offset}{guard})"
        if param.dtype in ("fp16", "bf16"):
            return f"{text}.to(tl.float32)"
        if param.dtype == "u8":
            return f"{text}.to(tl.int32)"
        return f"({text} != 0)" if param.dtype == "bool" else text


class CppDialect(Dialect):
    """C++17 scalars; helpers are inline and free of branches, so that loops over them vectorize."""

    _HELPERS: ClassVar = {
        "min": "minimum",
        "max": "maximum",
        "abs": "absolute",
        "floordiv": "floor_div",
        "mod": "floor_mod",
        "shr": "shift_right",
        "pow": "power",
        **{
            name: f"{name}_f32"
            for name in ("floor", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos")
        },
    }
    _TYPES: ClassVar = {"i32": "int32_t", "f32": "float", "bool": "bool"}
    _INFINITY: ClassVar = "__builtin_inff()"

    def constant(self, value: bool | int | float) -> str:
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, int):
            return str(value) if value != -(2**31) else "INT32_MIN"
        text = float32_literal(value)
        return text.replace("inf", self._INFINITY) if "inf" in text else f"{text}f"

    def call(self, function: str, *operands: str) -> str:
        if function == "select":
            return f"({operands[0]} ? {operands[1]} : {operands[2]})"
        if function == "widen":
            return f"int64_t({operands[0]})"
        return f"{self._HELPERS[function]}({', '.join(operands)})"

    def cast(self, text: str, to: Type) -> str:
        return f"{self._TYPES[to]}({text})"

    def invert(self, text: str) -> str:
        return f"!{text}"

    def load(self, param: Param, offset: str, valid: str | None) -> str:
        convert = {"fp16": "to_float", "bf16": "to_float", "u8": "int32_t", "bool": "bool"}.get(param.dtype, "")
        text = f"{convert}({param.symbol}[{offset}])" if convert else f"{param.symbol}[{offset}]"
        zero = {"i32": "0", "u8": "0", "bool": "false"}.get(param.dtype, "0.0f")
        return f"({valid} ? {text} : {zero})" if valid else text


class CudaDialect(CppDialect):
    """CUDA C++ of NVRTC: the same with other helpers behind the names."""

    _INFINITY: ClassVar = "INFINITY"
