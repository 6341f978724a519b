"""What can be called: all ops of one spec, with the arguments of the public contract."""

from __future__ import annotations

from typing import Literal

import torch

from attngen.ops import append, torch_library
from attngen.ops.calls import Gradients, Params, prefix_of
from attngen.ops.dispatch import Dispatch, Result, chosen
from attngen.ops.storage import Cache, Extras, Query, unpack


class Methods(Dispatch):
    """Prefill, decode, backward, autograd attention and writing of the cache, of one spec.

    Serves every device of its target; kernels are compiled, or loaded from the cache, when an op is first needed. Shapes are
    those of the spec's storage: Contiguous ``q [batch, qo_len, num_qo_heads, head_dim_qk]`` and ``k, v [batch, kv_len,
    num_kv_heads, dim]``; Ragged ``[nnz, heads, dim]`` with ``qo_indptr, kv_indptr`` int32 ``[batch + 1]``; Paged: ragged q and
    a cache of ``[num_pages, page_size, num_kv_heads, dim]`` (NHD) or ``[num_pages, num_kv_heads, page_size, dim]`` (HND).

    Every method raises :class:`ArgumentError` for tensors that do not fit, before anything is launched,
    :class:`UnsupportedError` where the backend cannot run the op, and :class:`BuildError` where a toolchain fails.
    """

    def prefill(
        self,
        q: Query,
        k: Cache,
        v: Cache | None = None,
        *,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_last_page_len: torch.Tensor | None = None,
        qo_lens: torch.Tensor | None = None,
        kv_lens: torch.Tensor | None = None,
        q_offset: torch.Tensor | None = None,
        kv_offset: torch.Tensor | None = None,
        q_scale: torch.Tensor | float | None = None,
        k_scale: torch.Tensor | float | None = None,
        v_scale: torch.Tensor | float | None = None,
        params: Params | None = None,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: Literal["e", "log2"] = "e",
        partial: bool = False,
        return_max: bool = False,
        seed: torch.Tensor | None = None,
        offset: torch.Tensor | None = None,
        kv_cache: Cache | None = None,
        page_indptr: torch.Tensor | None = None,
        w_uk: torch.Tensor | None = None,
        w_uv: torch.Tensor | None = None,
        key_indices: torch.Tensor | None = None,
    ) -> Result:
        """Attention of many queries a request; like :meth:`attention`, gradients flow where an input requires them.

        Args:
            k: keys, or for Paged the cache: ``(k_cache, v_cache)`` or one tensor stacked along ``stack_dim``; where numbers have
                block scales each is a pair ``(data, scales)``.
            qo_indptr, kv_indptr: int32 ``[batch + 1]``; ``kv_indptr`` counts tokens (Ragged) or pages (Paged, CSR form).
            page_table: int32 ``[batch, max_pages]``, with ``kv_lens``; or CSR ``kv_indptr, kv_indices, kv_last_page_len``.
            qo_lens, kv_lens: int32 ``[batch]``, valid lengths of padded rows; padded queries give out 0 and lse -inf.
            q_offset, kv_offset: int32 ``[batch]``, positions of the first query (default ``kv_len - qo_len``) and key (0).
            params: run-time tensors of the spec by name, also the output gate's; captured ones default to what was captured.
            out: buffer for the result, ``[..., num_qo_heads, head_dim_vo]``.
            return_lse: also return the log-sum-exp of the logits over visible keys, fp32 ``[..., num_qo_heads]``. A sink is not in
                it; element-wise normalizers have none.
            lse_base: unit of lse: natural logarithm or base 2.
            partial: results over part of the keys, to be merged with :func:`merge_states`, which then counts the sink once.
                Element-wise ones simply add, if the normalizer has a length or bias of its own.
            return_max: also return the largest logit over visible keys, fp32 ``[..., num_qo_heads]``, without a gradient.
            seed, offset: int64 ``[1]`` of dropout, on the device of q, so that a graph replays with fresh masks; offset is 0 by
                default.
            q_scale, k_scale, v_scale: fp32 factors of quantized tensors, as the spec's ``kv`` says: a scalar (also a number; 1 by
                default), ``[num_kv_heads]``, or the cache's shape without head_dim.
            kv_cache: a paged cache of the keys before k and v, which are then ragged, ``kv_indptr`` counting new tokens. Those
                before come through ``page_table`` and ``kv_lens``, or in CSR form through ``page_indptr``, ``kv_indices`` and
                ``kv_last_page_len``.
            page_indptr: int32 ``[batch + 1]``, pages of the keys in ``kv_cache``: what is ``kv_indptr`` where there are no others.
            w_uk, w_uv: of MLA, where ``kv_cache`` holds latents: ``[num_qo_heads, head_dim_ckv, head_dim_nope]`` and
                ``[num_qo_heads, head_dim_ckv, head_dim_vo]`` in the spec's dtype. A latent times them is a head's key, without kpe,
                and its value. Queries are absorbed and results projected with them; q, k and v are those of MLA's prefill.
            key_indices: int32 ``[nnz_q, top_k]`` (decode: ``[batch, top_k]`` or ``[batch, qo_len, top_k]``): positions of the only
                keys that a query sees, each once, padded with -1; over a paged cache with a page table. Latents are attended
                to with absorbed queries.

        Returns:
            out in the spec's out dtype, or ``(out, lse)``, ``(out, max)``, ``(out, lse, max)``.
        """
        extras = Extras(
            qo_indptr,
            kv_indptr,
            qo_lens,
            kv_lens,
            page_table,
            kv_indices,
            kv_last_page_len,
            q_offset,
            kv_offset,
            seed,
            offset,
            page_indptr,
            q_scale,  # type: ignore[arg-type] # numbers become tensors when the call is unpacked
            k_scale,  # type: ignore[arg-type]
            v_scale,  # type: ignore[arg-type]
        )
        return self.forward(
            "prefill",
            q,
            k,
            v,
            extras,
            params,
            out,
            return_lse,
            lse_base,
            partial=partial,
            return_max=return_max,
            prefix=prefix_of(kv_cache, w_uk, w_uv),
            key_indices=key_indices,
        )

    def decode(
        self,
        q: Query,
        k: Cache,
        v: Cache | None = None,
        *,
        kv_indptr: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_last_page_len: torch.Tensor | None = None,
        qo_lens: torch.Tensor | None = None,
        kv_lens: torch.Tensor | None = None,
        q_offset: torch.Tensor | None = None,
        kv_offset: torch.Tensor | None = None,
        q_scale: torch.Tensor | float | None = None,
        k_scale: torch.Tensor | float | None = None,
        v_scale: torch.Tensor | float | None = None,
        params: Params | None = None,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: Literal["e", "log2"] = "e",
        partial: bool = False,
        return_max: bool = False,
        key_indices: torch.Tensor | None = None,
    ) -> Result:
        """Attention of one query token a request, ``q [batch, num_qo_heads, head_dim_qk]``, or a few, ``[batch, qo_len, ...]``.

        No gradients are recorded. The keys of a request are divided among programs by its own length alone, so that a result
        does not depend on its neighbours. Arguments and result as for :meth:`prefill`.
        """
        extras = Extras(
            None,
            kv_indptr,
            qo_lens,
            kv_lens,
            page_table,
            kv_indices,
            kv_last_page_len,
            q_offset,
            kv_offset,
            q_scale=q_scale,  # type: ignore[arg-type] # numbers become tensors when the call is unpacked
            k_scale=k_scale,  # type: ignore[arg-type]
            v_scale=v_scale,  # type: ignore[arg-type]
        )
        return self.forward(
            "decode",
            q,
            k,
            v,
            extras,
            params,
            out,
            return_lse,
            lse_base,
            partial=partial,
            return_max=return_max,
            key_indices=key_indices,
        )

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        qo_lens: torch.Tensor | None = None,
        kv_lens: torch.Tensor | None = None,
        q_offset: torch.Tensor | None = None,
        kv_offset: torch.Tensor | None = None,
        params: Params | None = None,
        return_lse: bool = False,
        return_max: bool = False,
        seed: torch.Tensor | None = None,
        offset: torch.Tensor | None = None,
    ) -> Result:
        """Prefill with autograd: gradients reach q, k, v, floating parameters and the gate, and flow through lse too.

        All are bitwise repeatable under ``torch.use_deterministic_algorithms(True)``; arguments as for :meth:`prefill`.
        """
        extras = Extras(
            qo_indptr, kv_indptr, qo_lens, kv_lens, q_offset=q_offset, kv_offset=kv_offset, seed=seed, offset=offset
        )
        self.check_rows(return_lse=return_lse, return_max=return_max)
        found = torch_library.attention(
            self._handle,
            "prefill",
            *unpack(self.signature("prefill"), self.declared, q, k, v, extras),
            self.with_defaults(params),
            want_max=return_max,
        )
        return chosen(found, "e", return_lse=return_lse, return_max=return_max)

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        *,
        dlse: torch.Tensor | None = None,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        qo_lens: torch.Tensor | None = None,
        kv_lens: torch.Tensor | None = None,
        q_offset: torch.Tensor | None = None,
        kv_offset: torch.Tensor | None = None,
        params: Params | None = None,
        seed: torch.Tensor | None = None,
        offset: torch.Tensor | None = None,
        deterministic: bool = False,
    ) -> Gradients:
        """Gradients of :meth:`prefill`, recomputing the weights from ``lse``; no memory that grows with the square of a length.

        Args:
            dout: gradient of out, same shape and dtype.
            out, lse: what prefill returned (lse in natural logarithm); without ``partial``. Element-wise normalizers have no lse.
            dlse: gradient of lse, fp32, same shape.
            seed, offset: those of the forward call, where the spec has dropout.
            deterministic: every gradient is bitwise repeatable. dk and dv always are. Where the cuda backend adds up dq in any
                order, other kernels then run; parameters of score mods are summed by another kernel, which runs twice.

        Returns:
            ``(dq, dk, dv, dparams)``: dense, in the shapes and dtypes of q, k, v; ``dparams`` by name, the gate's among them.
        """
        extras = Extras(
            qo_indptr, kv_indptr, qo_lens, kv_lens, q_offset=q_offset, kv_offset=kv_offset, seed=seed, offset=offset
        )
        given = self.with_defaults(params)
        if torch.compiler.is_compiling():
            dq, dk, dv, *rest = torch_library.backward(
                self._handle, dout, dlse, q, k, v, out, lse, extras, given, deterministic=deterministic
            )
            grads = dict(zip(given, rest, strict=True))
            return dq, dk, dv, {name: grads[name] for name in self.differentiable if name in grads}
        return self.run_backward(dout, q, k, v, out, lse, dlse, extras, given, deterministic=deterministic)

    def append(
        self,
        k: Query,
        v: torch.Tensor | None,
        kv_cache: Cache,
        *,
        slot_mapping: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        batch_indices: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        k_scale: torch.Tensor | float | None = None,
        v_scale: torch.Tensor | float | None = None,
        params: Params | None = None,
    ) -> None:
        """Write new keys and values into a cache, in place, stored as the spec's ``kv`` says: what decode then reads.

        Numbers are rounded as :func:`attngen.dtypes.quantize` defines, bit for bit. Keys are written as projected, unless the spec
        has ``Rope(keys="append")``, which turns them here; ``qk_norm`` norms them when they are read.

        Args:
            k, v: new tokens of all requests, one after another: ``[tokens, num_kv_heads, head_dim]`` in the spec's dtype (bf16
                where that is fp8), any strides. MLA: ``k`` is ``(ckv, kpe)`` or both joined, ``[tokens, dim]``, and v ``None``.
            kv_cache: as for :meth:`decode`; of Contiguous and Ragged keys and values the pair ``(k, v)``.
            slot_mapping: int64 or int32 ``[tokens]``: ``page * page_size + offset``, ``request * kv_len + position``
                (Contiguous) or the row (Ragged). A token with a negative slot is not written. Every other slot is given once.
            positions, batch_indices: instead, int32 ``[tokens]``: place in its request, and request, of each token; a negative
                position is not written. Slots come from ``page_table [batch, max_pages]`` or ``kv_indptr, kv_indices`` (Paged),
                ``kv_indptr`` (Ragged), or the shape of the cache. Keys that turn need ``positions`` beside ``slot_mapping`` too.
            k_scale, v_scale: factors of a tensor (1 by default) and of heads, which are read; scales of tokens, in the cache's
                shape without head_dim, which are written. So are block scales, which are part of the cache.
            params: the rotation's table.

        On a GPU nothing is read on the host, and a slot outside of the cache is skipped; on the CPU, and with
        ``ATTNGEN_VALIDATE=1``, it raises :class:`ArgumentError`.
        """
        variant = self.signature("append")
        new = append.unpack_new(variant, k, v)
        slots = append.unpack_slots(variant, self.declared, new, kv_cache, k_scale, v_scale)
        places = append.Places(slot_mapping, positions, batch_indices, page_table, kv_indptr, kv_indices)
        if torch.compiler.is_compiling():
            torch_library.append(self._handle, variant, new, slots, places, dict(params or {}))
        else:
            self.run_append(new, slots, places, dict(params or {}))
