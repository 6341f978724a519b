"""Cold compile and warm load of one variant with all ops: ``python -m benchmarks.compile_time [target]``."""

from __future__ import annotations

import os
import sys
import tempfile
import time

import attngen as ag


def main() -> None:
    """Print seconds of a cold compile into an empty cache, and of a warm load of each op by a fresh object."""
    target = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    spec = ag.AttentionSpec(
        heads=ag.GQA(num_qo_heads=32, num_kv_heads=8, head_dim=128),
        mask=ag.Causal() & ag.SlidingWindow(left=1023),
        score_mods=(ag.SoftCap(cap=50.0),),
        dtype="fp32" if target == "cpu" else "bf16",
    )
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ATTNGEN_CACHE_DIR"] = folder
        began = time.perf_counter()
        ag.compile(spec, target=target)
        print(f"{target}: cold, all ops {time.perf_counter() - began:.2f} s")
        for op in ("prefill", "decode", "backward"):
            began = time.perf_counter()
            ops = ag.compile(spec, target=target, ops=(op,))
            if target == "cpu":
                ops.warmup(op)
            print(f"{target}: warm {op} {(time.perf_counter() - began) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
