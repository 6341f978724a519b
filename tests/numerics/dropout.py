"""Dropout where keys start anywhere: ``python -m tests.numerics.dropout TARGET BACKEND`` prints the largest errors."""

from __future__ import annotations

import argparse
import json

import torch

import attngen as ag


def errors(target: str | None, backend: str) -> list[float]:
    """Largest differences of out, dq, dk and dv from the oracle's, whose weights are about 0.02: of one drawn otherwise 0.01."""
    torch.manual_seed(0)
    spec = ag.AttentionSpec(heads=ag.MHA(num_heads=2, head_dim=16), dtype="fp32", dropout=0.4)
    q, k, v, dout = (torch.randn(4, 70, 2, 16) for _ in range(4))
    options = {
        "kv_offset": torch.tensor([0, 1, 6, -5], dtype=torch.int32),
        "q_offset": torch.tensor([3, 0, -4, 7], dtype=torch.int32),
        "seed": torch.tensor([12345 - 2**61]),
        "offset": torch.tensor([2**61 + 999]),
    }
    results = []
    for name, built_for in (("reference", None), (backend, target)):
        ops = ag.compile(spec, target=built_for, ops=(), backend=name)
        out, lse = ops.prefill(q, k, v, return_lse=True, **options)
        results.append((out, *ops.backward(dout, q, k, v, out, lse, **options)[:3]))
    return [float((x - y).abs().max()) for x, y in zip(*results, strict=True)]


def main() -> None:
    """Child's entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("backend")
    options = parser.parse_args()
    print(json.dumps(errors(options.target, options.backend)))


if __name__ == "__main__":
    main()
