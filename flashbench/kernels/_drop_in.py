"""flash-attention's functions of q, k and v, as calls of the bundled kernels.

Names, order and defaults of the arguments: github.com/Dao-AILab/flash-attention, release 2.8, its README and
docstrings. What no bundled kernel does is refused by the argument's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from flashbench.kernels._drop_in_checks import check_dimensions, check_options, refuse
from flashbench.kernels._layout import unit_stride
from flashbench.kernels._op import Options as Asked
from flashbench.kernels._op import attention
from flashbench.kernels._philox import keep_mask
from flashbench.kernels._portable_op import attention_portable, draw_seed

Result: TypeAlias = Tensor | tuple[Tensor, Tensor, Tensor | None]
"""o, or with return_attn_probs (o, lse, what dropout did or None)."""

PACKED = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
"""The arguments of packed sequences."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """The arguments that all functions share, as they name them."""

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    deterministic: bool = False
    return_attn_probs: bool = False

    def check(self) -> None:
        """Raise ValueError for an option of another kind."""
        check_options(
            self.causal, self.window_size, self.alibi_slopes, dropout_p=self.dropout_p,
            scale=self.softmax_scale, softcap=self.softcap,
        )  # fmt: skip


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of q (batch, seqlen_q, num_heads, head_dim) over k and v (batch, seqlen_k, num_kv_heads, …).

    fp16, bf16 or fp32; differentiable in q, k and v. causal and window_size (left, right; -1 unlimited) are
    aligned to the last query and key. alibi_slopes: (num_heads,) or (batch, num_heads) fp32, the latter at
    the cost of a copy of q, k and v. dropout_p: drawn from torch's default generator of the CPU, so that
    ``torch.manual_seed`` repeats it. deterministic: a backward without atomics.

    Returns o (batch, seqlen_q, num_heads, head_dim_v); with return_attn_probs (o, lse, S_dmask): lse
    (batch, num_heads, seqlen_q) fp32, natural log, -inf for a row without keys; S_dmask None, or with dropout
    the probabilities (batch, num_heads, seqlen_q, seqlen_k) in fp32, negative where they were dropped, which
    torch computes, for tests. Raises ValueError for a misfit.
    """
    options = Options(
        dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
        softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )  # fmt: skip
    check_dimensions(4, "(batch, seqlen, heads, head_dim)", q=q, k=k, v=v)
    options.check()
    q, k, v = (unit_stride(x).transpose(1, 2) for x in (q, k, v))
    sequences = q.shape[0]
    slopes = alibi_slopes
    if slopes is not None and slopes.ndim == 2:  # a slope per sequence: its heads are heads of one sequence
        _check_slopes(slopes, q)
        q, k, v = (x.flatten(0, 1)[None] for x in (q, k, v))
        slopes = slopes.flatten()
    o, lse, seed = attend((q, k, v), options, slopes)
    if not return_attn_probs:
        return _rows_first(o, sequences)
    dropped = None if seed is None else _dropped(q, k, lse, options, slopes, seed)
    return _rows_first(o, sequences), *(_apart(x, sequences) for x in (lse, dropped))


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """As ``flash_attn_func``, of qkv (batch, seqlen, 3, num_heads, head_dim), which is not copied."""
    check_dimensions(5, "(batch, seqlen, 3, heads, head_dim)", qkv=qkv)
    q, k, v = _parts("qkv", qkv, 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """As ``flash_attn_func``, of kv (batch, seqlen_k, 2, num_kv_heads, head_dim), which is not copied."""
    check_dimensions(5, "(batch, seqlen, 2, heads, head_dim)", kv=kv)
    k, v = _parts("kv", kv, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


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
    longest, or more. The rest as of ``flash_attn_func``; lse is (num_heads, total_q). Refused: block_table,
    slopes per sequence, and return_attn_probs with dropout.
    """
    refuse("flash_attn_varlen_func", block_table=block_table)
    check_dimensions(3, "(rows of all sequences, heads, head_dim)", q=q, k=k, v=v)
    check_dimensions(1, "(sequences + 1,)", cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    options = Options(
        dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
        softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic,
    )  # fmt: skip
    options.check()
    if alibi_slopes is not None and alibi_slopes.ndim != 1:
        raise ValueError("alibi_slopes of flash_attn_varlen_func must be (num_heads,), the same for all")
    if dropout_p and return_attn_probs:
        raise ValueError("return_attn_probs of flash_attn_varlen_func is not taken with dropout_p")
    packed = dict(zip(PACKED, (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), strict=True))
    o, lse, _ = attend(
        tuple(unit_stride(x).transpose(0, 1)[None] for x in (q, k, v)), options, alibi_slopes, packed
    )
    o = o[0].transpose(0, 1)
    return (o, lse[0], None) if return_attn_probs else o


def attend(
    tensors: tuple[Tensor, ...], options: Options, slopes: Tensor | None, packed: Any = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(o, lse, seed of dropout) of q, k and v, heads before rows; packed: the arguments of packed sequences.

    The best kernels for the card, or where they do not do it the portable ones: those have dropout, and a
    backward that always adds in one order.
    """
    scale = options.softmax_scale
    window = int(options.window_size[0]), int(options.window_size[1])
    if not options.dropout_p and not options.deterministic:
        o, lse = attention(
            *tensors, causal=options.causal, scale=scale, window=window, softcap=float(options.softcap),
            alibi_slopes=slopes, return_lse=True, **(packed or {}),
        )  # fmt: skip
        return o, lse, None
    seed = draw_seed() if options.dropout_p else None
    packed = dict.fromkeys(PACKED) if packed is None else packed
    longest = (-1 if packed[name] is None else packed[name] for name in PACKED[2:])
    asked = Asked(options.causal, *window, scale, float(options.softcap), *longest)
    cu_seqlens = (packed[name] for name in PACKED[:2])
    o, lse = attention_portable((*tensors, slopes, *cu_seqlens), asked, seed, float(options.dropout_p))
    return o, lse, seed


def _check_slopes(slopes: Tensor, q: Tensor) -> None:
    if slopes.shape != q.shape[:2]:
        raise ValueError(
            f"alibi_slopes must be ({q.shape[1]},) or {tuple(q.shape[:2])}; got {tuple(slopes.shape)}"
        )


def _parts(name: str, packed: Tensor, count: int) -> tuple[Tensor, ...]:
    if packed.shape[2] != count:
        raise ValueError(f"{name} has {count} in its third place; got {tuple(packed.shape)}")
    return tuple(packed.unbind(2))


def _apart(x: Tensor | None, sequences: int) -> Tensor | None:
    """(batch, heads, …) again, where the heads of all sequences were those of one."""
    if x is None or x.shape[0] == sequences:
        return x
    return x[0].unflatten(0, (sequences, -1))


def _rows_first(o: Tensor, sequences: int) -> Tensor:
    apart = _apart(o, sequences)
    assert apart is not None
    return apart.transpose(1, 2)


def _dropped(
    q: Tensor, k: Tensor, lse: Tensor, options: Options, slopes: Tensor | None, seed: Tensor
) -> Tensor:
    """The probabilities (batch, num_heads, seqlen_q, seqlen_k), negative where the seed drops them."""
    (batch, heads, rows, dim), keys = q.shape, k.shape[2]
    scale = dim**-0.5 if options.softmax_scale is None else options.softmax_scale
    s = q.detach().float() @ k.detach().float().repeat_interleave(heads // k.shape[1], 1).mT * scale
    if options.softcap:
        s = options.softcap * (s / options.softcap).tanh()
    behind = torch.arange(rows, device=q.device)[:, None] + keys - rows - torch.arange(keys, device=q.device)
    if slopes is not None:
        s = s - slopes[:, None, None] * behind.abs()
    left, right = options.window_size[0], 0 if options.causal else options.window_size[1]
    hidden = ((behind > left) & (left >= 0)) | ((-behind > right) & (right >= 0))
    p = (s - lse[..., None]).exp().masked_fill(hidden, 0.0)
    numbers = (torch.arange(n, device=q.device) for n in (batch * heads, rows, keys))
    kept = keep_mask(seed, options.dropout_p, *numbers).unflatten(0, (batch, heads))
    return torch.where(kept, p, -p)
