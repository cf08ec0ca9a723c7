"""flash-attention's functions of packed sequences, as calls of the bundled kernels.

Names, order and defaults of the arguments: github.com/Dao-AILab/flash-attention, release 2.8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashbench.kernels import _drop_in_checks as checks
from flashbench.kernels._drop_in import Options, Result, attend, parts
from flashbench.kernels._drop_in_probabilities import Packed
from flashbench.kernels._drop_in_rows import of_sequences
from flashbench.kernels._layout import unit_stride

_ROWS = "(rows of all sequences, heads, head_dim)"


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Attention of packed sequences: q (total_q, num_heads, head_dim), k and v (total_k, num_kv_heads, …).

    cu_seqlens_q and cu_seqlens_k: int32 (sequences + 1,), where each begins, and the end; max_seqlen_*: the
    longest, or more. block_table: int32 (sequences, max_pages), and k and v are (num_pages, page_size,
    num_kv_heads, …): their rows are copied, sequences times max_seqlen_k of them. The rest as of
    ``flash_attn_func``, alibi_slopes (sequences, num_heads), too; lse is (num_heads, total_q), and S_dmask
    (sequences, num_heads, max_seqlen_q, max_seqlen_k), 0 behind the ends of a sequence.
    """
    options = Options.of(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip
    checks.check_dimensions(3, _ROWS, q=q)
    checks.check_lengths(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    longest = checks.length("max_seqlen_q", max_seqlen_q), checks.length("max_seqlen_k", max_seqlen_k)
    packed, told = Packed(cu_seqlens_q, cu_seqlens_k, *longest), None
    slopes = checks.check_slopes(alibi_slopes, cu_seqlens_q.shape[0] - 1, q.shape[1])
    if block_table is None:
        checks.check_dimensions(3, _ROWS, k=k, v=v)
    else:
        told = packed
        k, v, packed = of_sequences(k, v, block_table, packed)
        if slopes is not None and slopes.ndim == 2:  # none of the sequence that has no queries
            slopes = torch.cat((slopes, slopes.new_zeros(1, q.shape[1])))
    tensors = tuple(unit_stride(x).transpose(0, 1)[None] for x in (q, k, v))
    o, lse, dropped = attend(tensors, options, slopes, packed, told)
    o = o[0].transpose(0, 1)
    return (o, lse[0], dropped) if options.return_attn_probs else o


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """As ``flash_attn_varlen_func``, of qkv (total, 3, num_heads, head_dim), which is not copied."""
    checks.check_dimensions(4, "(rows of all sequences, 3, heads, head_dim)", qkv=qkv)
    checks.check_lengths(cu_seqlens=cu_seqlens)
    q, k, v = parts("qkv", qkv, 3, 1)
    longest = checks.length("max_seqlen", max_seqlen)
    checks.check_starts("cu_seqlens", cu_seqlens, q.shape[0], longest, "max_seqlen")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, longest, longest, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """As ``flash_attn_varlen_func``, of kv (total_k, 2, num_kv_heads, head_dim), which is not copied."""
    checks.check_dimensions(4, "(rows of all sequences, 2, heads, head_dim)", kv=kv)
    k, v = parts("kv", kv, 2, 1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip
