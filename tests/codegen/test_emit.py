"""What templates get to print."""

from __future__ import annotations

import math

import attngen as ag
from attngen.backends.registry import backend
from attngen.codegen.emit import Emit, HoistedLogit
from attngen.compiler import plan_op
from attngen.ir.expr import Extent
from attngen.ir.intervals import classify
from attngen.target import Target

NAMES = {"q": "q_pos", "k": "kv_pos", "h": "head", "b": "batch", "score": "score"}


def emit_of(spec: ag.AttentionSpec, name: str = "cpp") -> Emit:
    target = Target.parse("cpu" if name == "cpp" else "cuda:sm90a")
    toolchain = backend(name)
    assert toolchain is not None
    return Emit(plan_op(spec, "prefill", target, name).kernels[-1], toolchain.dialect)


def test_a_logit_is_printed_in_parts() -> None:
    emit = emit_of(ag.AttentionSpec(heads=ag.MHA(2, 64), score_mods=(ag.ALiBi("slopes"),), dtype="bf16"), "triton")
    logit = emit.hoisted_logit(True, slope=True, **NAMES)
    assert logit.uniform == (("uniform_0", "tl.load(param_slopes + head) * 1.442695"),)
    assert logit.rows == (("row_0", "uniform_0 * tl.cast(q_pos, tl.float32)"),)
    assert logit.columns == (("column_0", "uniform_0 * tl.cast(kv_pos, tl.float32)"),)
    assert (logit.shared, logit.text, logit.slope) == ((), "score * 0.18033688 + (column_0 - row_0)", "1.0")


def test_fp32_keeps_differences_of_positions() -> None:
    emit = emit_of(ag.AttentionSpec(heads=ag.MHA(2, 64), score_mods=(ag.ALiBi("slopes"),), dtype="fp32"))
    logit = emit.hoisted_logit(False, **NAMES)
    assert logit.uniform == (("uniform_0", "param_slopes[head]"),)
    assert (logit.rows, logit.columns, logit.slope) == ((), (), "")
    assert logit.text == "score * 0.125f + float(kv_pos - q_pos) * uniform_0"


def test_a_soft_cap_and_its_slope_share_the_tanh() -> None:
    emit = emit_of(ag.AttentionSpec(heads=ag.MHA(2, 64), score_mods=(ag.SoftCap(cap=50.0),), dtype="bf16"))
    logit = emit.hoisted_logit(True, slope=True, **NAMES)
    assert logit.shared == (("shared_0", "tanh_f32(score * 0.0025f)"),)
    assert (logit.text, logit.slope) == ("shared_0 * 72.13475f", "1.0f - shared_0 * shared_0")


def test_bounds_of_data_are_spelled_with_extents() -> None:
    mask = ag.Document("doc_ids").expr()
    emit = emit_of(ag.AttentionSpec(heads=ag.MHA(2, 64), mask=ag.Document("doc_ids")))
    tile = classify(mask)
    names = {Extent(load, end): f"{end}_{i}" for i, load in enumerate(tile.loads) for end in ("lo", "hi")}
    assert emit.bound(tile.any, names, b="batch") == "(hi_0 >= lo_1) & (hi_1 >= lo_0)"


def test_what_exponentials_and_rows_take_is_left_out_of_a_weight() -> None:
    def weight(**fields: object) -> HoistedLogit:
        spec = ag.AttentionSpec(heads=ag.MHA(2, 64), dtype="bf16", **fields)
        return emit_of(spec).hoisted_weight(**NAMES)

    plain = weight()
    assert (plain.text, plain.factor, plain.shift, plain.mask) == ("score", 0.125 * math.log2(math.e), "", "")
    assert (weight(sm_scale=-0.5).text, weight(sm_scale=-0.5).factor) == ("score * (-0.7213475f)", 1.0)
    capped = weight(score_mods=(ag.SoftCap(cap=50.0),), mask=ag.Causal())
    assert (capped.text, capped.mask) == ("tanh_f32(score * 0.0025f)", "kv_pos <= q_pos")
    assert capped.factor == 50.0 * math.log2(math.e)
    biased = weight(score_mods=(ag.ALiBi("slopes"),))
    assert (biased.text, biased.factor, biased.shift) == ("score * 0.18033688f + column_0", 1.0, "row_0")
    assert biased.rows == (("row_0", "uniform_0 * float(q_pos)"),)
