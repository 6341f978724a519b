"""C11: scales of fp8 keys and values are dropped where q is fp8 too.

Stored ``q = 8`` at 0.25, or 2 in bf16, ``k1 = 1`` at 0.5 and ``v = 0, 1`` at 3: logits 0 and 1, out = 3 sigmoid(1).
"""

from __future__ import annotations

import pytest
import torch

import attngen as ag
from tests.acceptance.probes import Place

EXPECTED = 2.193176


@pytest.mark.parametrize("op", ["decode", "prefill"])
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3"])
def test_c11_scales_count_once(place: Place, dtype: str, paged: bool, op: str) -> None:
    kv = ag.Paged(page_size=16, dtype="fp8_e4m3") if paged else ag.Contiguous(dtype="fp8_e4m3")
    spec = ag.AttentionSpec(heads=ag.MHA(num_heads=1, head_dim=64), sm_scale=1.0, dtype=dtype, kv=kv)
    ops, device = place.compile(spec), place.device
    q = torch.zeros(1, 1, 1, 64)
    q[..., 0] = 2.0 if dtype == "bf16" else 8.0
    k, v = torch.zeros(2, 1, 16 if paged else 2, 1, 64)
    k[0, 1, 0, 0], v[0, 1] = 1.0, 1.0
    query = q.to(torch.bfloat16 if dtype == "bf16" else torch.float8_e4m3fn).to(device)
    keys, values = (x.to(torch.float8_e4m3fn).to(device) for x in (k, v))
    options = {"k_scale": torch.tensor(0.5, device=device), "v_scale": torch.tensor(3.0, device=device)}
    if dtype != "bf16":
        options["q_scale"] = torch.tensor(0.25, device=device)
    one = torch.tensor([2], dtype=torch.int32, device=device)
    if paged:
        options |= {"page_table": torch.zeros(1, 1, dtype=torch.int32, device=device), "kv_lens": one}
    if op == "decode":
        query = query[:, 0]
    elif paged:
        query = query[0]
        options["qo_indptr"] = torch.tensor([0, 1], dtype=torch.int32, device=device)
    cache = ((keys, values),) if paged else (keys, values)
    out, lse = getattr(ops, op)(query, *cache, return_lse=True, **options)
    assert out.dtype == torch.bfloat16
    assert float((out.float() - EXPECTED).abs().max()) <= 2e-2
    assert float((lse - 1.313262).abs().max()) <= 1e-3
