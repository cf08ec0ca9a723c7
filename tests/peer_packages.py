"""Stand-ins for other packages: their real signatures, plain torch inside, on a CPU.

Signatures as the comments in flashbench/kernels/fa2.py, fa3.py, … say where they are from.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor


def install(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> ModuleType:
    """A module of that name, with its packages, for the length of a test."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        dotted = ".".join(parts[:depth])
        module = ModuleType(dotted)
        module.__path__ = []  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, dotted, module)
    vars(module).update(contents)
    return module


def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, seen: Tensor | None = None,
              softcap: float = 0.0, added: Tensor | None = None) -> Tensor:  # fmt: skip
    """Of (batch, rows, heads, columns); seen: boolean (rows, keys). Rows without keys are 0."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s if added is None else s + added
    if seen is not None:
        s = s.masked_fill(~seen, float("-inf"))
        s = s.masked_fill(~seen.any(1)[:, None], 0.0)
    p = s.softmax(-1)
    p = p if seen is None else p * seen
    return (p @ v).transpose(1, 2)


def band(rows: int, keys: int, causal: bool, left: int | None, right: int | None) -> Tensor:
    """What flash-attention says of window_size and causal; None or below 0: unlimited."""
    at = torch.arange(rows)[:, None] + keys - rows
    j = torch.arange(keys)[None]
    right = 0 if causal else right
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if left is not None and left >= 0:
        seen &= j >= at - left
    if right is not None and right >= 0:
        seen &= j <= at + right
    return seen


def by_sequence(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, one: Any) -> Tensor:
    """one(q, k, v) of each packed sequence."""
    outputs = [
        one(q[None, a:b], k[None, c:d], v[None, c:d])[0]
        for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True)
    ]
    return torch.cat(outputs)


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: Any, causal: bool, window: Any, softcap: float,
           slopes: Any = None) -> Tensor:  # fmt: skip
    assert q.stride(-1) == 1
    if q.dtype == torch.float64:
        raise RuntimeError(
            "FlashAttention only support fp16 and bf16 data type\nException raised from mha_fwd"
        )
    rows, keys = q.shape[1], k.shape[1]
    added = None
    if slopes is not None:
        distance = (torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)[None]).abs()
        added = -slopes[:, None, None] * distance
    seen = band(rows, keys, causal, *window)
    return attention(q, k, v, scale=scale, seen=seen, softcap=softcap, added=added)


def fa2(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
                        softcap=0.0, alibi_slopes=None, deterministic=False,
                        return_attn_probs=False):  # fmt: skip
        return _flash(q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes)

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                               softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                               alibi_slopes=None, deterministic=False, return_attn_probs=False,
                               block_table=None):  # fmt: skip
        assert max_seqlen_q == cu_seqlens_q.diff().max()
        one = lambda q, k, v: _flash(q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes)  # noqa: E731
        return by_sequence(q, k, v, cu_seqlens_q, cu_seqlens_k, one)

    functions = (flash_attn_func, flash_attn_varlen_func)
    return install(monkeypatch, "flash_attn", __version__="2.8.4", **{f.__name__: f for f in functions})


def fa3(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
                        v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
                        pack_gqa=None, deterministic=False, sm_margin=0,
                        return_attn_probs=False):  # fmt: skip
        return _flash(q, k, v, softmax_scale, causal, window_size, softcap)

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                               seqused_q=None, seqused_k=None, softmax_scale=None, causal=False, qv=None,
                               q_descale=None,
                               k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0,
                               softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
                               return_attn_probs=False):  # fmt: skip
        one = lambda q, k, v: _flash(q, k, v, softmax_scale, causal, window_size, softcap)  # noqa: E731
        return by_sequence(q, k, v, cu_seqlens_q, cu_seqlens_k, one)

    functions = (flash_attn_func, flash_attn_varlen_func)
    return install(
        monkeypatch, "flash_attn_interface", __version__="3.0.0b1", **{f.__name__: f for f in functions}
    )


def fa4(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    def flash_attn_func(q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False,
                        window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1,
                        pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None,
                        aux_tensors=None, aux_scalars=None, block_sparse_tensors=None,
                        block_sparse_tensors_bwd=None, return_lse=False):  # fmt: skip
        assert -1 not in window_size
        return _flash(q, k, v, softmax_scale, causal, window_size, softcap), None

    def flash_attn_varlen_func(q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
                               max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None,
                               gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False,
                               window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1,
                               pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None,
                               mask_mod=None, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None,
                               return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None,
                               disable_scheduler_metadata=False):  # fmt: skip
        one = lambda q, k, v: _flash(q, k, v, softmax_scale, causal, window_size, softcap)  # noqa: E731
        return by_sequence(q, k, v, cu_seqlens_q, cu_seqlens_k, one), None

    functions = (flash_attn_func, flash_attn_varlen_func)
    return install(monkeypatch, "flash_attn.cute", __version__="4.0.0", **{f.__name__: f for f in functions})


@dataclass
class _Mask:
    """A mask that knows which keys a row of a problem sees."""

    def seen(self, rows: int, keys: int) -> Tensor:
        raise NotImplementedError


class LowerTriangularMask(_Mask):
    def seen(self, rows, keys):
        return torch.ones(rows, keys, dtype=torch.bool).tril()


class LowerTriangularFromBottomRightMask(_Mask):
    def seen(self, rows, keys):
        return band(rows, keys, True, None, None)


@dataclass
class LocalAttentionFromBottomRightMask(_Mask):
    window_left: int
    window_right: int

    def __post_init__(self):
        if self.window_left < 0 or self.window_right < 0:
            raise ValueError("Invalid window value passed to `LocalAttentionFromBottomRightMask`")

    def seen(self, rows, keys):
        return band(rows, keys, False, self.window_left, self.window_right)


@dataclass
class BlockDiagonalMask(_Mask):
    lengths: Any
    causal: bool = False

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_seqlen=None, *, device=None):
        return cls(list(zip(q_seqlen, kv_seqlen or q_seqlen, strict=True)))

    def make_causal_from_bottomright(self):
        return BlockDiagonalMask(self.lengths, True)

    def seen(self, rows, keys):
        blocks = [band(q, k, self.causal, None, None) for q, k in self.lengths]
        return torch.block_diag(*[block.int() for block in blocks]).bool()


def xformers_ops(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None,
                                   output_dtype=None):  # fmt: skip
        if query.ndim == 5:
            if query.requires_grad:
                raise NotImplementedError("No operator found for `memory_efficient_attention_backward`")
            shape = query.shape[2:4]
            assert key.shape[2:4] == value.shape[2:4] == shape
            query, key, value = (x.flatten(2, 3) for x in (query, key, value))
            o = memory_efficient_attention(query, key, value, attn_bias, p, scale)
            return o.unflatten(2, shape)
        assert key.shape[2] == query.shape[2]
        added = attn_bias if isinstance(attn_bias, Tensor) else None
        seen = attn_bias.seen(query.shape[1], key.shape[1]) if isinstance(attn_bias, _Mask) else None
        return attention(query, key, value, scale=scale, seen=seen, added=added)

    masks = (LowerTriangularMask, LowerTriangularFromBottomRightMask, LocalAttentionFromBottomRightMask,
             BlockDiagonalMask)  # fmt: skip
    install(monkeypatch, "xformers.ops.fmha.attn_bias", **{mask.__name__: mask for mask in masks})
    module = sys.modules["xformers.ops"]
    module.memory_efficient_attention = memory_efficient_attention  # type: ignore[attr-defined]
    module.__version__ = "0.0.33"  # type: ignore[attr-defined]
    return module


def flashinfer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    class BatchPrefillWithRaggedKVCacheWrapper:
        def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
                     kv_indptr_buf=None, custom_mask_buf=None, mask_indptr_buf=None, backend="auto",
                     jit_args=None, jit_kwargs=None):  # fmt: skip
            assert (float_workspace_buffer.dtype, kv_layout) == (torch.uint8, "NHD")

        def plan(self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None,
                 custom_mask=None, packed_custom_mask=None, causal=False, pos_encoding_mode="NONE",
                 use_fp16_qk_reduction=False, window_left=-1, logits_soft_cap=None, sm_scale=None,
                 rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None, o_data_type=None,
                 non_blocking=True):  # fmt: skip
            self.planned = SimpleNamespace(**locals())

        def run(self, q, k, v, *args, q_scale=None, k_scale=None, v_scale=None, o_scale=None, out=None,
                lse=None, return_lse=False, enable_pdl=None, kv_cache_sf=None):  # fmt: skip
            p = self.planned
            assert q.shape[1:] == (p.num_qo_heads, p.head_dim_qk)
            assert v.shape[1:] == (p.num_kv_heads, p.head_dim_vo)
            assert q.is_contiguous()

            def one(q, k, v):
                seen = band(q.shape[1], k.shape[1], p.causal, p.window_left, -1)
                return attention(q, k, v, scale=p.sm_scale, seen=seen, softcap=p.logits_soft_cap or 0.0)

            return by_sequence(q, k, v, p.qo_indptr, p.kv_indptr, one)

    wrapper = BatchPrefillWithRaggedKVCacheWrapper
    return install(
        monkeypatch, "flashinfer", __version__="0.6.0", BatchPrefillWithRaggedKVCacheWrapper=wrapper
    )


FAKES = {"fa2": fa2, "fa3": fa3, "fa4": fa4, "xformers": xformers_ops, "flashinfer": flashinfer}
"""Implementation → what puts its package in place."""
