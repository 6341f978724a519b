"""Kernel entry names, so that a profiler trace explains itself."""

from __future__ import annotations

import re

from attngen.ir.expr import SCORE, TRUE, Binary, Compare, Const, Coord, Expr, Unary, operands, params
from attngen.variant import Variant


def entry_name(variant: Variant, op: str, schedule: str) -> str:
    """``prefill_causal_window4095_gqa2_bf16_d256``; kernels of an op beyond its main one add their schedule's name.

    Stored keys and values are named where they are not as q: ``decode_causal_gqa8_page16_kv_int4_bf16_d128``.
    """
    if op == "append":
        parts = [op, *storage_labels(variant)]
    else:
        name = op if schedule == "forward" else schedule if schedule.startswith(op) else f"{op}_{schedule}"
        parts = [name, *mask_labels(variant.mask), *score_labels(variant.score)]
    if variant.group_size > 1:
        parts.append(f"gqa{variant.group_size}" if variant.num_kv_heads > 1 else f"mqa{variant.group_size}")
    if variant.kv_layout == "paged":
        parts.append(f"page{variant.page_size}")
    elif variant.kv_layout == "ragged":
        parts.append("ragged")
    labels = storage_labels(variant)
    if op != "append" and labels != [variant.dtype]:
        parts += ["kv", *labels] if len(labels) == 1 else labels
    dims = f"d{variant.head_dim_qk}"
    parts += [variant.dtype, dims if variant.head_dim_qk == variant.head_dim_vo else f"{dims}x{variant.head_dim_vo}"]
    return re.sub(r"[^A-Za-z0-9_]", "_", "_".join(parts))


def storage_labels(variant: Variant) -> list[str]:
    """Element types of keys and values, once where they are the same."""
    names = (variant.k_storage.dtype, variant.v_storage.dtype)
    return [names[0]] if names[0] == names[1] else [f"k_{names[0]}", f"v_{names[1]}"]


def mask_labels(mask: Expr) -> list[str]:
    """What each conjunct keeps: ``causal``, ``window<left>``, ``chunk<size>``, names of the parameters that it reads, ...

    Alternatives are joined by ``or``; ``mask`` is whatever has no short name.
    """
    labels = dict.fromkeys(_alternatives(term) for term in operands(mask, "and") if term != TRUE)
    return sorted(labels) or ["full"]


def score_labels(score: Expr) -> list[str]:
    """What each mod does: ``softcap<cap>``, names of the parameters that it reads, ``bias``, ``scale``, or ``score``."""
    match score:
        case Coord("score"):
            return []
        case Binary("mul", Const(cap), Unary("tanh", Binary("mul", inner, Const()))):
            label = f"softcap{cap:g}".replace(".", "p").replace("+", "").replace("-", "m")
            return [*score_labels(inner), label]
        case Binary("add" | "sub", inner, term) if SCORE in inner.walk() and SCORE not in term.walk():
            return [*score_labels(inner), _read(term) or "bias"]
        case Binary("mul", inner, factor) if SCORE in inner.walk() and SCORE not in factor.walk():
            return [*score_labels(inner), _read(factor) or "scale"]
    return ["score"]


def _alternatives(term: Expr) -> str:
    return "_or_".join(dict.fromkeys("_".join(_conjuncts(part)) for part in operands(term, "or")))


def _conjuncts(term: Expr) -> list[str]:
    return sorted({_label(part) for part in operands(term, "and")})


def _label(term: Expr) -> str:
    match term:
        case Compare("le", Coord("k"), Coord("q")):
            return "causal"
        case Compare("le", Binary("sub", Coord("q"), Const(left)), Coord("k")):
            return f"window{left}"
        case Compare("le", Binary("sub", Coord("k"), Const(right)), Coord("q")):
            return f"ahead{right}"
        case Compare("lt", Coord("k"), Const(n)):
            return f"first{n}"
        case Compare("lt", Coord("q"), Const(n)):
            return f"global{n}"
        case Compare("eq", Binary("floordiv", Coord("q"), Const(size)), Binary("floordiv", Coord("k"), Const(other))):
            return f"chunk{size}" if size == other else "mask"
        case Compare("eq", Binary("mod", Binary("sub", Coord("q"), Coord("k")), Const(step)), Const(0)):
            return f"every{step}"
    return _read(term) or "mask"


def _read(expr: Expr) -> str:
    """Names of the parameters that an expression reads, if they are few."""
    names = sorted(params(expr))
    return "_".join(names) if len(names) <= 2 else ""
