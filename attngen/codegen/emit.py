"""What templates see under the name ``emit``: the variant's expressions, spelled in the kernel's language."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from attngen.codegen.printer import Dialect, Printer, float32_literal
from attngen.codegen.samples import Samples, samples, tiles_at_once
from attngen.ir.differentiate import param_gradients
from attngen.ir.expr import TRUE, Binary, Const, Expr, Extent, Load, Local, Type, coords
from attngen.ir.hoist import Hoisted, hoist
from attngen.ir.intervals import position_axes
from attngen.ir.simplify import add_signed, of_product, signed_terms
from attngen.schedule.hopper import launch_shape
from attngen.schedule.plan import KernelPlan


@dataclass(frozen=True)
class ParamGradient:
    """One contribution ``d_<param>[offset] += dlogit * value``, where ``valid`` holds.

    Attributes:
        param: name of the parameter in the kernel.
        offset, valid, value: texts; ``valid`` is empty where the index is known to be inside.
        per_query, per_key: whether the offset depends on the query's position, on the key's.
    """

    param: str
    offset: str
    valid: str
    value: str
    per_query: bool
    per_key: bool


@dataclass(frozen=True)
class TileLoad:
    """A load whose least and greatest value in a tile tell tiles apart.

    Attributes:
        name: of its extents in the kernel, ``doc_ids_at_q``.
        load: an expression.
        per_query, per_key: whether it depends on the query's position, on the key's.
    """

    name: str
    load: Load
    per_query: bool
    per_key: bool


Definitions = tuple[tuple[str, str], ...]
_FEW = 8  # uniform values that are worth registers
_Parts = tuple[Definitions, Definitions, Definitions, Definitions, Mapping[str, Type]]


@dataclass(frozen=True)
class HoistedLogit:
    """The logit as a function of the raw dot product ``score``, in parts. Definitions are pairs of a name and a text.

    Attributes:
        uniform: once a program; where the rows of a tile have different heads, once a row.
        rows: once a row, before the loop over keys; may use ``uniform``.
        columns: once a column, in each tile of keys; may use ``uniform``.
        shared: in each pair, in this order, before ``text`` and ``slope``.
        text: the logit, in base 2 if asked for.
        slope: derivative of the logit (in base e) by the scaled dot product; empty unless asked for.
        mask: whether the pair is visible; empty unless asked for.
        factor: the logit is ``factor * text - shift``, if that is asked for.
        shift: what is the same for a whole row, once a row: weights do not need it; may use ``uniform`` and ``rows``.
        types: of what is defined, by name.
    """

    uniform: Definitions
    rows: Definitions
    columns: Definitions
    shared: Definitions
    types: Mapping[str, Type]
    text: str
    slope: str = ""
    mask: str = ""
    factor: float = 1.0
    shift: str = ""

    @property
    def before_loop(self) -> Definitions:
        """What is computed once, before the loop over tiles."""
        return (*self.uniform, *self.rows) if self.kept else ()

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of what is computed before the loop and used in it: rows, and uniform values if they are few."""
        uniform = self._tile_uniform
        few = uniform if len(uniform) <= _FEW else ()
        return tuple(name for name, _ in (*few, *self.rows))

    @property
    def in_tile(self) -> Definitions:
        """What each tile computes before its pairs."""
        uniform = self._tile_uniform
        return (*(uniform if len(uniform) > _FEW else ()), *self.columns, *self.shared)

    @property
    def _tile_uniform(self) -> Definitions:
        needed = " ".join((*(text for _, text in (*self.columns, *self.shared)), self.text, self.slope, self.mask))
        found: list[tuple[str, str]] = []
        for name, text in reversed(self.uniform):
            if re.search(rf"\b{name}\b", needed):
                found.insert(0, (name, text))
                needed += f" {text}"
        return tuple(found)


class Emit:
    """Expression printer of one kernel. Keyword arguments name coordinates and give their text in the kernel."""

    def __init__(self, plan: KernelPlan, dialect: Dialect) -> None:
        self._plan, self._dialect = plan, dialect
        self._params = {param.name: param for param in plan.variant.params}

    def expr(self, expr: Expr, **names: str) -> str:
        """Any expression; ``qo_len`` and ``kv_len`` spell themselves."""
        return self._printer(names).print(expr)

    def bound(self, expr: Expr, extents: Mapping[Extent, str], /, **names: str) -> str:
        """A bound of a tile that data decide: ``extents`` spells the extents of its loads, ``names`` the coordinates."""
        return self._printer({**names, **extents}).print(expr)

    @cached_property
    def tile_loads(self) -> tuple[TileLoad, ...]:
        """The loads behind the extents in ``plan.tile``."""
        found: dict[str, TileLoad] = {}
        for load in self._plan.tile.loads:
            axes = position_axes(load)
            stem = name = f"{load.param}_at_{'_and_'.join(sorted(axes, reverse=True))}"
            while name in found:
                name = f"{stem}_{len(found)}"
            found[name] = TileLoad(name, load, "q" in axes, "k" in axes)
        return tuple(found.values())

    def samples(self, data: TileLoad) -> dict[str, Samples]:
        """By axis, at which positions of a tile a load is read."""
        tiles = self._plan.tiles
        return {axis: samples(data.load, axis, size) for axis, size in (("q", tiles.q), ("k", tiles.kv))}

    @property
    def tiles_at_once(self) -> int:
        """Tiles whose extents a program finds together."""
        return tiles_at_once(self._plan.tile.loads, self._plan.tiles)

    @property
    def has_tile_test(self) -> bool:
        """Whether corners and data of a tile can prove that nothing in it is visible."""
        return self._plan.tile.any != TRUE

    def tile_bound(self, expr: Expr, spelling: str = "{name}.{end}", **names: str) -> str:
        """``plan.tile.any`` or ``.all``; ``spelling`` makes the name of an extent from its :attr:`TileLoad.name` and end."""
        ends: tuple[Literal["lo", "hi"], ...] = ("lo", "hi")
        extents = {
            Extent(data.load, end): spelling.format(name=data.name, end=end) for data in self.tile_loads for end in ends
        }
        return self.bound(expr, extents, **names)

    def _printer(self, names: Mapping[Any, str]) -> Printer:
        return Printer(self._dialect, {"qo_len": "qo_len", "kv_len": "kv_len", **names}, self._params)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block of the cuda backend."""
        return launch_shape(self._plan)[1]

    @property
    def has_score_mod(self) -> bool:
        """Whether the logit differs from the scaled dot product."""
        return self._plan.variant.has_score_mod

    def sink(self, **names: str) -> str:
        """The sink's logit; coordinate ``h``."""
        assert self._plan.variant.sink is not None
        return self.expr(self._plan.variant.sink, **names)

    @property
    def has_mask(self) -> bool:
        """Whether any key inside a request may be hidden."""
        return self._plan.variant.mask != TRUE

    def score(self, **names: str) -> str:
        """The logit; coordinates ``score b h q k``."""
        return self.expr(self._plan.variant.score, **names)

    def mask(self, **names: str) -> str:
        """The mask, a bool; coordinates ``b h q k``."""
        return self.expr(self._plan.variant.mask, **names)

    @property
    def score_slope_is_one(self) -> bool:
        """Whether d logit / d score is identically 1 (additive biases)."""
        return self._plan.variant.score_slope_is_one

    def dscore(self, **names: str) -> str:
        """Derivative of the logit with respect to the scaled score; coordinates ``score b h q k``."""
        return self.expr(self._plan.variant.dscore, **names)

    def hoisted_logit(self, base_2: bool, /, *, slope: bool = False, **names: str) -> HoistedLogit:
        """The logit of the raw dot product: scale and ``log2(e)`` folded in, taken apart by how often a part is computed.

        Args:
            base_2: in units for ``exp2``.
            slope: the derivative as well, from the same definitions.
            names: coordinates ``score b h q k``; ``score`` is the raw dot product.
        """
        variant = self._plan.variant
        exprs = [of_product(variant.score, variant.sm_scale, base_2=base_2)]
        if slope:
            exprs.append(of_product(variant.dscore, variant.sm_scale))
        definitions, (text, *rest) = self._hoisted(exprs, names)
        return HoistedLogit(*definitions, text, rest[0] if rest else "")

    def hoisted_pair(self, base_2: bool, /, **names: str) -> HoistedLogit:
        """Logit and mask from the same definitions; each empty where the variant leaves it out."""
        variant = self._plan.variant
        exprs = [of_product(variant.score, variant.sm_scale, base_2=base_2)] if self.has_score_mod else []
        definitions, texts = self._hoisted([*exprs, variant.mask], names)
        return HoistedLogit(*definitions, texts[0] if exprs else "", mask=texts[-1] if self.has_mask else "")

    def hoisted_weight(self, /, **names: str) -> HoistedLogit:
        """What a tile of prefill makes weights of, and mask.

        Of a softmax, logits in base 2, such that a factor and what a row shares are left to the exponential and to the row's end;
        else the weights.
        """
        variant = self._plan.variant
        if not variant.is_softmax:
            return self.hoisted_pair(False, **names)
        hoisted = self._hoist([of_product(variant.score, variant.sm_scale, base_2=True), variant.mask])
        logit, mask = hoisted.bodies
        own, shared = _by_row(logit)
        factor, text = _by_factor(own)
        parts, texts = self._printed(replace(hoisted, bodies=(text, shared, mask)), names)
        shift = texts[1] if shared != Const(0.0) else ""
        return HoistedLogit(*parts, texts[0], mask=texts[2] if self.has_mask else "", factor=factor, shift=shift)

    def _hoisted(self, exprs: list[Expr], names: dict[str, str]) -> tuple[_Parts, tuple[str, ...]]:
        return self._printed(self._hoist(exprs), names)

    def _hoist(self, exprs: list[Expr]) -> Hoisted:
        return hoist(exprs, split_positions=self._plan.variant.dtype != "fp32")

    def _printed(self, hoisted: Hoisted, names: dict[str, str]) -> tuple[_Parts, tuple[str, ...]]:
        parts = (hoisted.uniform, hoisted.rows, hoisted.columns, hoisted.shared)
        printer = self._printer({**names, **{local.name: local.name for part in parts for local, _ in part}})
        uniform, rows, columns, shared = (
            tuple((local.name, printer.print(value)) for local, value in part) for part in parts
        )
        types = {local.name: value.type for part in parts for local, value in part}
        return (uniform, rows, columns, shared, types), tuple(printer.print(body) for body in hoisted.bodies)

    def param_gradients(self, **names: str) -> list[ParamGradient]:
        """Contributions of one logit to the gradients of the floating parameters."""
        return [
            self._param_gradient(load, slope, names)
            for load, slope in param_gradients(self._plan.variant.score)
            if any(p.name == load.param for p in self._plan.variant.gradient_params)
        ]

    def _param_gradient(self, load: Load, slope: Expr, names: dict[str, str]) -> ParamGradient:
        printer = self._printer(names)
        param = self._params[load.param]
        return ParamGradient(
            param=param.symbol,
            offset=printer.offset(param, load.indices),
            valid=printer.valid(param, load.indices) or "",
            value=printer.print(slope),
            per_query="q" in coords(load),
            per_key="k" in coords(load),
        )

    def f32(self, value: float) -> str:
        """A float32 literal."""
        return self._dialect.constant(float(value))

    def digits(self, value: float) -> str:
        """The shortest decimal of a float32, without suffix."""
        return float32_literal(value)


def _by_row(logit: Expr) -> tuple[Expr, Expr]:
    """A hoisted logit as a difference: what each pair has, less what its row has."""
    own: list[tuple[int, Expr]] = []
    row: list[tuple[int, Expr]] = []
    for sign, term in signed_terms(logit):
        if isinstance(term, Local) and term.name.startswith(("row", "uniform")):
            row.append((-sign, term))
        else:
            own.append((sign, term))
    return (add_signed(own), add_signed(row)) if row and own else (logit, Const(0.0))


def _by_factor(logit: Expr) -> tuple[float, Expr]:
    """A product with a positive constant as that and the rest."""
    match logit:
        case Binary("mul", x, Const(c)) | Binary("mul", Const(c), x) if isinstance(c, float) and c > 0:
            return c, x
    return 1.0, logit
