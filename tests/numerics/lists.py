"""Judges lists of tiles against the mask itself, pair by pair: ``python -m tests.numerics.lists TARGET BACKEND`` prints faults."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

import torch

import attngen as ag
from attngen.backends.base import Inputs
from attngen.backends.reference import Request, requests
from attngen.ir.evaluate import evaluate
from attngen.ops.op import Op
from attngen.variant import Variant
from tests.numerics.harness import Case, build_call, oracle_inputs

HEADS = ag.GQA(num_qo_heads=4, num_kv_heads=2, head_dim=16)
MASKS: dict[str, ag.Mask] = {
    "documents": ag.Causal() & ag.Document("doc_ids"),
    "images": ag.Causal() | ag.ImageSpans("span_ids"),
    "blocks": ag.BlockSparse("blocks", 96, 48),
    "dense": ag.Dense("mask"),
    "dense-packed": ag.Dense("mask", packed=True),
    "tree": ag.Tree("ancestors"),
}


def cases() -> list[Case]:
    """Each mask, for padded and for ragged requests of several tiles, of one row and of none."""
    return [
        Case(
            name, ag.AttentionSpec(heads=HEADS, mask=mask, kv=kv, dtype="fp32"), "backward", (330, 0, 1), (410, 7, 200)
        )
        for name, mask in MASKS.items()
        for kv in (ag.Contiguous(), ag.Ragged())
    ]


def faults(case: Case, target: str | None, backend: str) -> Iterator[str]:
    """Tiles that are missed, listed twice, or taken as whole though they are not, in the lists that backward makes."""
    op = ag.compile(case.spec, target=target, ops=(), backend=backend).op("backward")
    variant, inputs = oracle_inputs(case, build_call(case))
    for schedule, consumer in (("key_lists", "dq"), ("query_lists", "dkdv")):
        own_is_q = schedule == "key_lists"
        plan = op.plan.kernel(consumer)
        sizes = (plan.tiles.q, plan.tiles.kv)[:: 1 if own_is_q else -1]
        lists = op.tile_lists(schedule, plan, inputs)
        first = 0
        for request in requests(variant, inputs.batch):
            pairs = visible(variant, inputs, request, plan.list_heads)
            pairs = pairs if own_is_q else pairs.transpose(1, 2)
            padded = inputs.batch.qo_len if own_is_q else inputs.batch.kv_len
            count = -(-padded // sizes[0]) if padded else pairs.shape[1] // sizes[0] + 1
            for own in range(-(-pairs.shape[1] // sizes[0])):
                for head in range(heads_listed(op, plan.list_heads, inputs)):
                    index = (first + own) * plan.list_heads + head
                    row, (masked, full) = lists["tile_list"][index].tolist(), lists["tile_counts"][index].tolist()
                    rows = pairs[head, own * sizes[0] : (own + 1) * sizes[0]]
                    for fault in judged(rows, sizes[1], row[:masked], row[len(row) - full :]):
                        yield f"{case.name} {case.spec.kv.kind} {schedule} {request.index} {own} {head}: {fault}"
            first += count


def heads_listed(op: Op, list_heads: int, inputs: Inputs) -> int:
    """Heads whose lists are read: one where every parameter that heads index has one head."""
    shared = all(
        inputs.params[param.name].shape[axis] == 1
        for param in op.variant.params
        for axis, dim in enumerate(param.dims)
        if str(dim).startswith("num_qo_heads")
    )
    return 1 if shared else list_heads


def visible(variant: Variant, inputs: Inputs, request: Request, heads: int) -> torch.Tensor:
    """bool ``[heads, qo_len, kv_len]`` of one request."""
    q_pos = request.q_offset + torch.arange(request.qo_len)[:, None]
    kv_pos = request.kv_offset + torch.arange(len(request.keys))
    env = {"b": request.index, "h": torch.arange(heads)[:, None, None], "q": q_pos, "k": kv_pos}
    env |= {"qo_len": request.qo_len, "kv_len": len(kv_pos)}
    return evaluate(variant.mask, env, inputs.params, torch.float64).expand(heads, request.qo_len, len(kv_pos))


def judged(rows: torch.Tensor, size: int, masked: list[int], full: list[int]) -> Iterator[str]:
    """Faults of the list of one tile, whose pairs are ``rows``."""
    if len({*masked, *full}) != len(masked) + len(full):
        yield "a tile is listed twice"
    for other in range(-(-rows.shape[1] // size)):
        tile = rows[:, other * size : (other + 1) * size]
        if tile.any() and other not in (*masked, *full):
            yield f"tile {other} is missing"
        if other in full and not (tile.all() and tile.shape[1] == size):
            yield f"tile {other} is not visible as a whole"


def main() -> None:
    """Child's entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("backend")
    options = parser.parse_args()
    print(json.dumps([fault for case in cases() for fault in faults(case, options.target, options.backend)]))


if __name__ == "__main__":
    main()
