"""The vocabulary of kernel arguments: every name a kernel may take, with its type. Ops supply values by these names.

========================  =================================================================================================
``q k v out dout dq dk dv``  tensors, unit last stride; ``<t>_stride_b``, ``_t``, ``_h`` are i64 element strides of request
                          (page, for a paged k or v; 0 for ragged), token and head; those of packed elements count bytes
``q_pe k_pe``             likewise: the last ``head_dim_pe`` columns of q and k where they lie apart; q and k hold those before
``k_blocks v_blocks``     block scales, in the dtype of the storage's row, with strides likewise; ``k_pe_blocks`` of ``k_pe``
``q_scale``               fp32 ``[1]``, the factor of fp8 queries
``k_scale v_scale``       fp32 ``[1]``, of heads ``[num_kv_heads]``, or of tokens, with ``_stride_b``, ``_t``, ``_h``; where values
                          are columns of the keys, both are the same tensor
``lse delta dlse``        fp32, contiguous ``[tokens, num_qo_heads]``; Triton keeps its delta ``[num_qo_heads, tokens]``
``partial_out``           fp32 ``[num_splits, tokens, num_qo_heads, head_dim_vo]``; ``partial_lse`` likewise without the last dim
                          (element-wise: 0 marks a part that has been written, -inf one that saw no key)
``max_logit``             fp32 ``[tokens, num_qo_heads]``, largest logit of a row, -inf without keys: written where
                          ``has_max_logit`` is 1; ``partial_max`` likewise ``[num_splits, tokens, num_qo_heads]``
``has_sink``              whether the sink counts in out (0: partial results, that are merged later)
``gate dgate``            like ``out``: out is multiplied by sigmoid(gate)
``gated_dout``            ``dout * sigmoid(gate)``: written by ``delta``, the ``dout`` of the kernels after it
``total_lse``             ``lse`` with the sink's term in it: written by ``delta``, the ``lse`` of the kernels after it
``dsink``                 fp32 ``[num_qo_heads, tokens]``: each row's share of the gradient of its head's sink
``seed offset``           i64 ``[1]``: the random stream of dropout
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
``k_tiles v_tiles``       tensor maps of k and v, ``[request or page, head, token, dim]`` (one request where ragged);
                          ``k_pe_tiles`` of ``k_pe``
``q_tiles dout_tiles``    likewise of q and dout, for kernels that copy queries too
``next_item``             i32 ``[1]``, 0 at first: how many programs blocks have taken beyond the first one of each
``dq_sums``               fp32 ``[num_qo_heads, num_q_tiles, tile]``, zeroed: dq without its factor, tiles of queries in order of
                          the registers that held them; ``num_q_tiles`` is the number of tiles of queries over all requests
``has_dlse``              whether ``dlse`` is read
``param_<name>``          each run-time parameter, then ``param_<name>_dim<i>`` (i32) for each axis; ``d_param_<name>`` its gradient
``partial_dq_norm``       fp32 ``[programs, head_dim_qk]``, zeroed: each program's share of the gradient of the query norm's
                          weight; ``partial_dk_norm`` of the keys'
``tile_list``             i32 ``[lists, list_capacity]``: indices of the tiles of the other side that a tile meets, those that need
                          the mask from the front, those visible as a whole from the back; ``tile_counts`` i32 ``[lists, 2]``, how
                          many of each. The list of tile ``t`` (counted over all requests) for head ``h`` is number
                          ``t * list_heads + h``; with one ``list_heads`` the mask is the same for all heads
``new_k new_v new_k_pe``  (append) new tokens ``[tokens, heads, dim]``, with ``_stride_t``, ``_stride_h``; ``k``, ``v``, ``k_pe``,
                          their ``_blocks`` and the scales of tokens are written; fp8 as bytes
``num_slots``             tokens that the cache has room for
``slot_mapping``          i64 ``[tokens]``, the slot of each new token, counted over all pages or requests; negative: nowhere. Read
                          where ``has_slot_mapping`` is 1, else ``positions`` and ``batch_indices``, i32 ``[tokens]``
``pass_idx``              0: find ``top_param_<name>``, fp32 ``[1]``, the largest size of a contribution to a gradient; 1: add up
                          contributions times ``scale_param_<name>``, fp32 ``[1]``, in ``sum_param_<name>``, i64
========================  =================================================================================================
"""

from __future__ import annotations

from collections.abc import Collection

from attngen.dtypes import DTYPES, Storage
from attngen.ir.params import Param
from attngen.schedule.launch import maps_fit
from attngen.schedule.plan import Arg
from attngen.variant import Variant


def tensor(name: str, dtype: str) -> tuple[Arg, ...]:
    """A tensor with its three strides."""
    return (Arg(name, f"*{dtype}"), *(Arg(f"{name}_stride_{axis}", "i64") for axis in ("b", "t", "h")))


def stored(name: str, storage: Storage) -> tuple[Arg, ...]:
    """A tensor of a cache and its block scales, each with three strides."""
    blocks = tensor(f"{name}_blocks", storage.row.block_scale) if storage.block else ()
    return (*tensor(name, storage.dtype), *blocks)


def factor(name: str, storage: Storage) -> tuple[Arg, ...]:
    """The factors of a cache's tensor: one, of heads, or of tokens with three strides."""
    if storage.scale == "token":
        return tensor(name, "fp32")
    return (Arg(name, "*fp32"),) if storage.scale else ()


def queries(variant: Variant) -> tuple[Arg, ...]:
    """q, its last columns where they lie apart, and its factor."""
    pe = tensor("q_pe", variant.dtype) if variant.head_dim_pe else ()
    return (*tensor("q", variant.dtype), *pe, *((Arg("q_scale", "*fp32"),) if DTYPES[variant.dtype].largest else ()))


def keys_and_values(variant: Variant) -> tuple[Arg, ...]:
    """Keys in all their parts, values where they are tensors of their own, and the factors of both."""
    k, v = variant.k_storage, variant.v_storage
    return (
        *stored("k", k),
        *(stored("k_pe", k) if variant.head_dim_pe else ()),
        *(stored("v", v) if variant.value_source == "values" else ()),
        *factor("k_scale", k),
        *factor("v_scale", v),
    )


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


def parameters(variant: Variant, only: Collection[Param] | None = None) -> tuple[Arg, ...]:
    """The run-time parameters, or those of them in ``only``."""
    args: list[Arg] = []
    for param in variant.params if only is None else only:
        args.append(Arg(param.symbol, f"*{param.dtype}"))
        args.extend(Arg(f"{param.symbol}_dim{axis}", "i32") for axis in range(len(param.dims)))
    return tuple(args)


def random_stream(variant: Variant) -> tuple[Arg, ...]:
    """Seed and offset of dropout."""
    return (Arg("seed", "*i64"), Arg("offset", "*i64")) if variant.dropout else ()


def sink(variant: Variant) -> tuple[Arg, ...]:
    """Whether the sink counts."""
    return () if variant.sink is None else (Arg("has_sink", "i32"),)


def tile_lists(*, lists: bool) -> tuple[Arg, ...]:
    """The tiles that a tile meets, where only the data of the mask tell."""
    return (Arg("tile_list", "*i32"), Arg("tile_counts", "*i32"), Arg("list_capacity", "i32")) if lists else ()


def tensor_maps(variant: Variant, *, queries: bool = False) -> tuple[Arg, ...]:
    """Keys and values, unless pages are too small, and if asked for queries, as the hardware copies tiles of them."""
    keys = (
        "k",
        *(("k_pe",) if variant.head_dim_pe else ()),
        *(("v",) if variant.value_source == "values" else ()),
    )
    names = (*(("q",) if queries else ()), *(keys if maps_fit(variant.page_size) else ()))
    stored = {"q": variant.dtype, "v": variant.v_storage.dtype}
    return tuple(Arg(f"{name}_tiles", f"tiles<{stored.get(name, variant.k_storage.dtype)}>") for name in names)


def turns() -> tuple[Arg, ...]:
    """What blocks need to take programs in turn."""
    return (Arg("next_item", "*i32"),)


def backward_maps(variant: Variant) -> tuple[Arg, ...]:
    """What one walk over queries and keys reads, as the hardware copies tiles of it."""
    return tuple(Arg(f"{name}_tiles", f"tiles<{variant.dtype}>") for name in ("q", "k", "v", "dout"))


def param_gradients(variant: Variant) -> tuple[Arg, ...]:
    """fp32 accumulators ``d_param_<name>`` of the floating parameters that the score loads."""
    return tuple(Arg(f"d_{param.symbol}", "*fp32") for param in variant.gradient_params)


def exact_param_gradients(variant: Variant) -> tuple[Arg, ...]:
    """Accumulators of the same gradients whose order of summation does not matter."""
    kinds = (("top", "*fp32"), ("scale", "*fp32"), ("sum", "*i64"))
    return tuple(Arg(f"{kind}_{param.symbol}", element) for param in variant.gradient_params for kind, element in kinds)
