"""Other systems' attention over tensors ``[batch, length, heads, head_dim]`` of one GPU, each where it is installed.

torch SDPA (cuDNN), compiled FlexAttention with default options and with its FlashAttention-4 backend, FlashAttention-3
(``fa3-fwd``, forward only) and FlashAttention-4 (``flash-attn-4``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from benchmarks.settings import Setting

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
flex = torch.compile(flex_attention, dynamic=False)


def peers(setting: Setting, batch: int, length: int, dtype: str = "bf16") -> dict[str, Attend]:
    """Every system that computes the setting with inputs of this dtype, by name."""
    found = dict(_peers(setting, batch, length))
    return found if dtype == "bf16" else {name: peer for name, peer in found.items() if name == "fa3"}


def _peers(setting: Setting, batch: int, length: int) -> Iterator[tuple[str, Attend]]:
    if setting.is_plain:
        yield "cudnn", partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION, causal=setting.mask is not None)
    options = {"score_mod": setting.score, "block_mask": setting.blocks(batch, length, "cuda")}
    yield "flex", partial(_flex, **options)
    fa4 = _module("flash_attn.cute.interface")
    if fa4 is not None:
        yield "flex (fa4)", partial(_flex, **options, kernel_options={"BACKEND": "FLASH"})
    for name, module in (("fa3", _module("fa3_fwd_interface")), ("fa4", fa4)):
        if module is not None and setting.flash is not None:
            yield name, partial(_flash, module.flash_attn_func, **setting.flash)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, backend: SDPBackend, causal: bool) -> torch.Tensor:
    """torch's attention by one of its backends."""
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal).transpose(1, 2)


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    return flex(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)


def _flash(
    function: Callable[..., Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> torch.Tensor:
    result = function(q, k, v, **options)
    return result[0] if isinstance(result, tuple) else result


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        return None
