"""Kernel entry names, so that a profiler trace explains itself."""

from __future__ import annotations

import re

from attngen.ir.expr import TRUE, Binary, Compare, Const, Coord, Expr, Unary, operands
from attngen.variant import Variant


def entry_name(variant: Variant, op: str, schedule: str) -> str:
    """``prefill_causal_window4095_gqa2_bf16_d256``; kernels of an op beyond its main one add their schedule's name."""
    parts = [
        op if schedule == "forward" else f"{op}_{schedule}",
        *mask_labels(variant.mask),
        *score_labels(variant.score),
    ]
    if variant.group_size > 1:
        parts.append(f"gqa{variant.group_size}" if variant.num_kv_heads > 1 else f"mqa{variant.group_size}")
    if variant.kv_layout == "paged":
        parts.append(f"page{variant.page_size}")
    elif variant.kv_layout == "ragged":
        parts.append("ragged")
    dims = f"d{variant.head_dim_qk}"
    parts += [variant.dtype, dims if variant.head_dim_qk == variant.head_dim_vo else f"{dims}x{variant.head_dim_vo}"]
    return re.sub(r"[^A-Za-z0-9_]", "_", "_".join(parts))


def mask_labels(mask: Expr) -> list[str]:
    """``causal``, ``window<left>``, ... for the conjuncts that are bands; ``mask`` for the rest."""
    labels: dict[str, None] = {}
    for term in operands(mask, "and"):
        if term != TRUE:
            labels[_band_label(term)] = None
    return sorted(labels) or ["full"]


def score_labels(score: Expr) -> list[str]:
    """``softcap<cap>``, ``bias`` for an added term, ``score`` for other changes of the logit."""
    match score:
        case Coord("score"):
            return []
        case Binary("mul", Const(cap), Unary("tanh", _)):
            return [f"softcap{cap:g}".replace(".", "p").replace("+", "").replace("-", "m")]
        case Binary("add", Coord("score"), _):
            return ["bias"]
    return ["score"]


def _band_label(term: Expr) -> str:
    match term:
        case Compare("le", Coord("k"), Coord("q")):
            return "causal"
        case Compare("le", Binary("sub", Coord("q"), Const(left)), Coord("k")):
            return f"window{left}"
        case Compare("le", Binary("sub", Coord("k"), Const(right)), Coord("q")):
            return f"ahead{right}"
    return "mask"
