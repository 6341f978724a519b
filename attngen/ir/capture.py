"""Tensors that a function closes over become parameters.

The function is rebuilt, never changed: same code, new closure cells, globals and defaults in which symbols stand for
the torch tensors. Plain Python functions that it reaches are rebuilt the same way.
"""

from __future__ import annotations

import dis
import functools
import re
import types
from collections.abc import Iterator
from typing import Any

from attngen.errors import SpecError
from attngen.ir.param_symbol import load
from attngen.ir.params import Param
from attngen.ir.symbol import Symbol
from attngen.ir.text import RESERVED

_DTYPES = {
    **dict.fromkeys(("float32", "float64"), "fp32"),
    "bfloat16": "bf16",
    "float16": "fp16",
    **dict.fromkeys(("int64", "int32", "int16", "int8"), "i32"),
    "uint8": "u8",
    "bool": "bool",
}


class Captured:
    """Parameters found so far.

    Attributes:
        params: by name, in the order found.
        tensors: the captured tensor of each name.
    """

    def __init__(self, declared: dict[str, Param]) -> None:
        self.params = dict(declared)
        self.tensors: dict[str, Any] = {}
        self._symbols: dict[int, Symbol] = {}
        self._rebuilt: dict[int, Any] = {}
        self._open: set[int] = set()

    def replace(self, name: str, value: Any) -> Any:
        """What stands for ``value``, called ``name`` by the user, while tracing."""
        if _is_tensor(value):
            return self._tensor(name, value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, functools.partial) or type(value) in (tuple, list, dict):
            return self._container(name, value)
        return value

    def _container(self, name: str, value: Any) -> Any:
        if id(value) in self._open:  # contains itself
            return value
        self._open.add(id(value))
        if isinstance(value, functools.partial):
            args = [self.replace(f"{name}_{n}", v) for n, v in enumerate(value.args)]
            options = {key: self.replace(key, v) for key, v in value.keywords.items()}
            result: Any = functools.partial(self.replace(name, value.func), *args, **options)
        elif isinstance(value, dict):
            result = {key: self.replace(f"{name}_{key}", v) for key, v in value.items()}
        else:
            result = type(value)(self.replace(f"{name}_{n}", v) for n, v in enumerate(value))
        self._open.remove(id(value))
        return result

    def _function(self, fn: types.FunctionType) -> types.FunctionType:
        if id(fn) in self._rebuilt or fn.__module__.startswith("attngen."):
            rebuilt: types.FunctionType = self._rebuilt.get(id(fn), fn)
            return rebuilt
        cells = tuple(types.CellType() for _ in fn.__closure__ or ())
        scope = dict(fn.__globals__)
        copy = types.FunctionType(fn.__code__, scope, fn.__name__, None, cells)
        self._rebuilt[id(fn)] = copy
        parameters = fn.__code__.co_varnames[: fn.__code__.co_argcount]
        defaults = fn.__defaults__ or ()
        with_default = parameters[len(parameters) - len(defaults) :]
        copy.__defaults__ = tuple(self.replace(n, v) for n, v in zip(with_default, defaults, strict=True)) or None
        copy.__kwdefaults__ = {n: self.replace(n, v) for n, v in (fn.__kwdefaults__ or {}).items()}
        for name, old, new in zip(fn.__code__.co_freevars, fn.__closure__ or (), cells, strict=True):
            if _is_filled(old):
                new.cell_contents = self.replace(name, old.cell_contents)
        for name in _global_names(fn.__code__):
            if name in scope:
                scope[name] = self.replace(name, scope[name])
        return copy

    def _tensor(self, name: str, tensor: Any) -> Symbol:
        if id(tensor) not in self._symbols:
            param = Param(self._free_name(name), tuple(int(n) for n in tensor.shape), _param_dtype(name, tensor))
            self.params[param.name] = param
            self.tensors[param.name] = tensor
            self._symbols[id(tensor)] = load(param)
        return self._symbols[id(tensor)]

    def _free_name(self, name: str) -> str:
        plain = re.sub(r"[^A-Za-z0-9_]", "", name).lstrip("_0123456789")[:60] or "tensor"
        plain = plain.replace("attngen", "captured", 1) if plain.startswith("attngen") else plain
        candidates = (plain if n == 1 else f"{plain}_{n}" for n in range(1, 10**6))
        return next(c for c in candidates if c not in self.params and c not in RESERVED)


def _is_tensor(value: Any) -> bool:
    return any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in type(value).__mro__)


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _global_names(code: types.CodeType) -> Iterator[str]:
    """Globals that ``code`` and the functions defined inside it read."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _param_dtype(name: str, tensor: Any) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise SpecError(
            f"captured tensor {name!r} has dtype {dtype}",
            where=f"tensor {name}",
            why=f"parameters hold {', '.join(_DTYPES)}",
            fix="convert it first",
        )
    return _DTYPES[dtype]
