"""The vocabulary of kernel arguments: every name a kernel may take, with its type. Ops supply values by these names.

========================  =================================================================================================
``q k v out dout dq dk dv``  tensors, unit last stride; ``<t>_stride_b``, ``_t``, ``_h`` are i64 element strides of request
                          (page, for a paged k or v; 0 for ragged), token and head
``lse delta dlse``        fp32, contiguous ``[tokens, num_qo_heads]``; Triton keeps its delta ``[num_qo_heads, tokens]``
``partial_out``           fp32 ``[num_splits, tokens, num_qo_heads, head_dim_vo]``; ``partial_lse`` likewise without the last dim
``batch qo_len kv_len``   requests; padded lengths (``kv_len`` of a paged cache: keys its page table can hold)
``num_keys``              rows of ragged k and v
``num_tokens``            rows of lse: ``batch * qo_len`` or nnz
``num_tiles``             tiles of the axis that the grid walks, over all requests (an upper bound when ragged)
``num_splits``            parts that the grid provides for
``qo_indptr kv_indptr``   i32 ``[batch + 1]``, tokens
``qo_lens kv_lens``       i32 ``[batch]``, read where ``has_qo_lens`` / ``has_kv_lens`` is 1
``q_offset kv_offset``    i32 ``[batch]``, positions of the first row and key, read where ``has_q_offset`` / ``has_kv_offset`` is 1
``page_table``            i32 page numbers; request b starts at ``b * page_table_stride``, or, where that stride is 0 (CSR), at
                          ``page_indptr[b]``; then ``kv_lens`` holds the tokens of the last page
``k_tiles v_tiles``       tensor maps of k and v, ``[request, head, token, dim]`` (one request where ragged)
``has_dlse``              whether ``dlse`` is read
``param_<name>``          each run-time parameter, then ``param_<name>_dim<i>`` (i32) for each axis; ``d_param_<name>`` its gradient
========================  =================================================================================================
"""

from __future__ import annotations

from attngen.schedule.plan import Arg
from attngen.variant import Variant


def tensor(name: str, dtype: str) -> tuple[Arg, ...]:
    """A tensor with its three strides."""
    return (Arg(name, f"*{dtype}"), *(Arg(f"{name}_stride_{axis}", "i64") for axis in ("b", "t", "h")))


def sequences(variant: Variant) -> tuple[Arg, ...]:
    """Where each request's queries and keys lie and how many there are."""
    q_side = {
        "padded": (Arg("qo_len", "i32"), Arg("qo_lens", "*i32"), Arg("has_qo_lens", "i32")),
        "ragged": (Arg("qo_indptr", "*i32"),),
    }[variant.q_layout]
    kv_side = {
        "padded": (Arg("kv_len", "i32"), Arg("kv_lens", "*i32"), Arg("has_kv_lens", "i32")),
        "ragged": (Arg("kv_indptr", "*i32"), Arg("num_keys", "i32")),
        "paged": (
            Arg("kv_len", "i32"),
            Arg("kv_lens", "*i32"),
            Arg("page_table", "*i32"),
            Arg("page_table_stride", "i64"),
            Arg("page_indptr", "*i32"),
        ),
    }[variant.kv_layout]
    offsets = (
        Arg("q_offset", "*i32"),
        Arg("has_q_offset", "i32"),
        Arg("kv_offset", "*i32"),
        Arg("has_kv_offset", "i32"),
    )
    return (Arg("batch", "i32"), *q_side, *kv_side, *offsets)


def parameters(variant: Variant) -> tuple[Arg, ...]:
    """The run-time parameters of mask and score mods."""
    args: list[Arg] = []
    for param in variant.params:
        args.append(Arg(param.symbol, f"*{param.dtype}"))
        args.extend(Arg(f"{param.symbol}_dim{axis}", "i32") for axis in range(len(param.dims)))
    return tuple(args)


def tensor_maps(variant: Variant) -> tuple[Arg, ...]:
    """Keys and values as the hardware copies tiles of them."""
    return (Arg("k_tiles", f"tiles<{variant.kv_dtype}>"), Arg("v_tiles", f"tiles<{variant.kv_dtype}>"))


def param_gradients(variant: Variant) -> tuple[Arg, ...]:
    """fp32 accumulators ``d_param_<name>`` of the floating parameters that the score loads."""
    return tuple(Arg(f"d_{param.symbol}", "*fp32") for param in variant.gradient_params)
