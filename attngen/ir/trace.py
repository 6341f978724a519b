"""Python function -> Expr: the function runs once with symbols for its arguments."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import attngen.ir.torch_functions  # noqa: F401 (what torch's functions mean on symbols)
from attngen.errors import AttngenError, SpecError
from attngen.ir.capture import Captured
from attngen.ir.expr import Coord, Expr, cast, params
from attngen.ir.limits import check_size
from attngen.ir.param_symbol import load
from attngen.ir.params import Param
from attngen.ir.symbol import Symbol, expr_of, row_of
from attngen.ir.text import check_param_name

__all__ = ["Symbol", "Tensor", "Traced", "trace"]


# Arguments that need no annotation: a mod may ask for its request's lengths by these names.
LENGTHS = ("qo_len", "kv_len")


class Tensor:
    """Annotation of a run-time parameter: ``slopes: ag.Tensor("num_qo_heads")``.

    Args:
        dims: one entry an axis: a size, a name that calls check (``batch``, ``num_qo_heads``, ``num_kv_heads``,
            ``max_qo_len``, ``max_kv_len``), one of these followed by `` or 1`` (a tensor with one element there serves every
            index), or any other name. None: a scalar. ``slopes.shape[0]`` is a size that only a call decides.
        dtype: ``fp32``, ``bf16``, ``fp16``, ``i32``, ``u8`` or ``bool``; floating ones have gradients.
    """

    def __init__(self, *dims: str | int, dtype: str = "fp32") -> None:
        self.dims, self.dtype = dims, dtype

    def __repr__(self) -> str:
        return f"Tensor({', '.join(map(repr, self.dims))}, dtype={self.dtype!r})"


@dataclass(frozen=True)
class Traced:
    """What a function means.

    Attributes:
        expr: its result.
        params: the tensors that the result reads: declared ones in the order of the signature, then captured ones.
        defaults: name -> captured torch tensor.
        name: the function's name as an identifier.
    """

    expr: Expr
    params: tuple[Param, ...]
    defaults: dict[str, object] = field(hash=False, compare=False)
    name: str


def trace(fn: Callable[..., Any], args: tuple[str, ...], result: Literal["bool", "f32"]) -> Traced:
    """Run ``fn`` once with symbols.

    Args:
        fn: a function, lambda or ``functools.partial`` of one.
        args: coordinates passed by position: ``("b", "h", "q", "k")``, before them ``"score"`` for a score mod.
            Further arguments must be annotated with :class:`Tensor` or have a default.
        result: ``bool`` for a mask, which must give a bool; ``f32`` for a score, which is converted.

    Raises:
        SpecError: the function branches on a symbol, uses what expressions cannot say, or gives the wrong type.
    """
    declared = _declared(fn, args)
    captured = Captured(declared)
    runnable = captured.replace("fn", fn)
    symbols = [Symbol(Coord(name)) for name in args]
    by_name: dict[str, Any] = {argument: load(param) for argument, param in declared.items()}
    by_name |= {name: Symbol(Coord(name)) for name in LENGTHS if name in inspect.signature(fn).parameters}
    try:
        value = runnable(*symbols, **by_name)
    except AttngenError:
        raise
    except Exception as error:
        raise SpecError(
            f"{_name(fn)} failed while it was traced",
            where=_location(fn),
            why=f"{type(error).__name__}: {error}",
            fix="the function must run on symbols: arithmetic, comparisons, indexing of parameters, torch.where, ...",
        ) from error
    expr = _result(fn, value, result)
    used = params(expr)
    kept = tuple(p for p in captured.params.values() if p.name in used or p.name in declared)
    defaults = {name: tensor for name, tensor in captured.tensors.items() if name in used}
    return Traced(expr, kept, defaults, _name(fn))


def _result(fn: Callable[..., Any], value: Any, result: Literal["bool", "f32"]) -> Expr:
    if value is None:
        raise SpecError(f"{_name(fn)} returns None", where=_location(fn), why="a mod gives a value", fix="add a return")
    values = row_of(value)
    if values is not None:
        raise SpecError(
            f"{_name(fn)} returns {len(values)} values",
            where=_location(fn),
            why="a mod gives one",
            fix="index them, or reduce them with any, all or sum",
        )
    expr = expr_of(value)
    if result == "bool" and expr.type != "bool":
        raise SpecError(
            f"{_name(fn)} returns a value of type {expr.type}",
            where=_location(fn),
            why="a mask is a bool: true where query q sees key k",
            fix="return a comparison, or a score mod if a number is meant",
        )
    check_size(expr)
    return cast(expr, "f32") if result == "f32" else expr


def _declared(fn: Callable[..., Any], args: tuple[str, ...]) -> dict[str, Param]:
    """Parameters annotated with :class:`Tensor`, by argument name."""
    signature = inspect.signature(fn)
    try:
        signature.bind_partial(*args)
    except TypeError as error:
        raise _signature_error(fn, args, str(error)) from None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    rest = list(signature.parameters.values())
    taken = [p for p in rest if p.kind in positional][: len(args)]
    variadic = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in rest)
    if len(taken) < len(args) and not variadic:
        raise _signature_error(fn, args, f"it takes {len(taken)}")
    found: dict[str, Param] = {}
    for parameter in rest:
        if parameter in taken or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        annotation = _annotation(fn, parameter)
        if isinstance(annotation, Tensor) and parameter.default is parameter.empty:
            check_param_name(parameter.name)
            found[parameter.name] = Param(parameter.name, annotation.dims, annotation.dtype)
        elif parameter.default is parameter.empty and parameter.name not in LENGTHS:
            raise _signature_error(
                fn,
                args,
                f"nothing says what {parameter.name!r} is: annotate it with ag.Tensor(...), or call it qo_len or kv_len",
            )
    return found


def _signature_error(fn: Callable[..., Any], args: tuple[str, ...], why: str) -> SpecError:
    return SpecError(
        f"{_name(fn)} has the wrong arguments",
        where=_location(fn),
        why=f"a mod of this kind is called with ({', '.join(args)}): {why}",
        fix=f"declare it as def {_name(fn)}({', '.join(args)}) with ag.Tensor parameters after these",
    )


def _annotation(fn: Callable[..., Any], parameter: inspect.Parameter) -> object:
    """The annotation, evaluated if the user's module postpones annotations."""
    if not isinstance(parameter.annotation, str):
        return parameter.annotation
    plain = _plain(fn)
    scope = dict(inspect.getclosurevars(plain).nonlocals)
    try:
        return eval(parameter.annotation, getattr(plain, "__globals__", {}), scope)  # the user's own source, not data
    except Exception as error:
        raise SpecError(
            f"the annotation of {parameter.name!r} cannot be resolved",
            where=_location(fn),
            why=f"{type(error).__name__}: {error} in {parameter.annotation}",
            fix="import attngen at the top of the module, not inside a function",
        ) from None


def _plain(fn: Any) -> Any:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def _name(fn: Any) -> str:
    name = re.sub(r"\W", "", getattr(_plain(fn), "__name__", type(fn).__name__), flags=re.ASCII)[:64]
    return "lambda_" if name == "lambda" else name or "mod"


def _location(fn: Any) -> str:
    code = getattr(_plain(fn), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else _name(fn)
