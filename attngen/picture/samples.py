"""Example values for the parameters of a mask, so that it can be drawn without data."""

from __future__ import annotations

import torch

from attngen.ops.checks import torch_dtype
from attngen.spec import AttentionSpec


def sample_parameters(spec: AttentionSpec, qo_len: int, kv_len: int, requests: int = 2) -> dict[str, torch.Tensor]:
    """What the primitives of the spec's mask give as examples, by name; parameters of custom masks have none.

    Args:
        spec: the declaration.
        qo_len, kv_len: lengths of every request.
        requests: how many there are.
    """
    sizes = {
        "batch": requests,
        "num_qo_heads": spec.heads.num_qo_heads,
        "num_kv_heads": spec.heads.num_kv_heads,
        "max_qo_len": qo_len,
        "max_kv_len": kv_len,
    }
    samples, dtypes = spec.mask.sample(sizes), {param.name: param.dtype for param in spec.mask.params()}
    return {name: torch.tensor(values).to(torch_dtype(dtypes[name])) for name, values in samples.items()}
