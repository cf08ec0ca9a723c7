"""flash-attention's functions of q, k and v, as calls of the bundled kernels.

Names, order and defaults of the arguments: github.com/Dao-AILab/flash-attention, release 2.8, its README and
docstrings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from flashbench.kernels import _drop_in_checks as checks
from flashbench.kernels._drop_in_probabilities import Packed, Scores, probabilities
from flashbench.kernels._layout import unit_stride
from flashbench.kernels._op import Options as Asked
from flashbench.kernels._op import attention
from flashbench.kernels._portable_op import attention_portable, draw_seed

Result: TypeAlias = Tensor | tuple[Tensor, Tensor, Tensor | None]
"""o, or with return_attn_probs (o, lse, what dropout did or None)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """The arguments that all functions share, as they name them, and as the kernels have them."""

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    deterministic: bool = False
    return_attn_probs: bool = False

    @staticmethod
    def of(dropout_p: Any, softmax_scale: Any, causal: Any, *rest: Any) -> Options:
        """The same from what a caller gave, in their order. Raises ValueError for another kind."""
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs = rest
        return Options(
            dropout_p=checks.number("dropout_p", dropout_p, "a number from 0 to below 1"),
            softmax_scale=checks.scale_of(softmax_scale),
            causal=checks.flag("causal", causal),
            window_size=checks.sides(window_size),
            softcap=checks.cap_of(softcap),
            alibi_slopes=alibi_slopes,
            deterministic=checks.flag("deterministic", deterministic),
            return_attn_probs=checks.flag("return_attn_probs", return_attn_probs),
        )


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
    aligned to the last query and key. alibi_slopes: (num_heads,) or (batch, num_heads) fp32. dropout_p: drawn
    from torch's default generator of the CPU, so that ``torch.manual_seed`` repeats it. deterministic: a
    backward without atomics.

    Returns o (batch, seqlen_q, num_heads, head_dim_v); with return_attn_probs (o, lse, S_dmask): lse
    (batch, num_heads, seqlen_q) fp32, natural log, -inf for a row without keys; S_dmask None, or with dropout
    the probabilities (batch, num_heads, seqlen_q, seqlen_k) in fp32, negative where they were dropped, which
    torch computes, for tests. Raises ValueError for a misfit.
    """
    options = Options.of(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip
    checks.check_dimensions(4, "(batch, seqlen, heads, head_dim)", q=q, k=k, v=v)
    slopes = checks.check_slopes(alibi_slopes, q.shape[0], q.shape[2])
    q, k, v = (unit_stride(x).transpose(1, 2) for x in (q, k, v))
    o, lse, told = attend((q, k, v), options, slopes)
    o = o.transpose(1, 2)
    return (o, lse, told) if options.return_attn_probs else o


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
    checks.check_dimensions(5, "(batch, seqlen, 3, heads, head_dim)", qkv=qkv)
    q, k, v = parts("qkv", qkv, 3)
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
    checks.check_dimensions(5, "(batch, seqlen, 2, heads, head_dim)", kv=kv)
    k, v = parts("kv", kv, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def attend(
    tensors: tuple[Tensor, ...],
    options: Options,
    slopes: Tensor | None,
    packed: Packed | None = None,
    told: Packed | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(o, lse, what dropout did where that is asked for) of q, k and v, heads before rows.

    The best kernels for the card, or where they do not do it the portable ones: those have dropout, and a
    backward that always adds in one order. told: the first of the packed sequences, where the rest are none
    of the caller's.
    """
    scale, window, dropout_p = options.softmax_scale, options.window_size, options.dropout_p
    cu_q, cu_k, *longest = (None, None, None, None) if packed is None else packed
    if not dropout_p and not options.deterministic:
        o, lse = attention(
            *tensors, causal=options.causal, scale=scale, window=window, softcap=options.softcap,
            alibi_slopes=slopes, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=longest[0],
            max_seqlen_k=longest[1], return_lse=True,
        )  # fmt: skip
        return o, lse, None
    seed = draw_seed() if dropout_p else None
    known = (-1 if x is None else x for x in longest)
    asked = Asked(options.causal, *window, scale, options.softcap, *known)
    o, lse = attention_portable((*tensors, slopes, cu_q, cu_k), asked, seed, dropout_p)
    if seed is None or not options.return_attn_probs:
        return o, lse, None
    q, k = tensors[:2]
    band = window[0], 0 if options.causal else window[1]
    scores = Scores(asked.scale_of(q), band, options.softcap, slopes, dropout_p)
    return o, lse, probabilities(q, k, lse, scores, seed, told or packed)


def parts(name: str, packed: Tensor, count: int, place: int = 2) -> tuple[Tensor, ...]:
    """q, k and v, or k and v, of one tensor, not copied."""
    if packed.shape[place] != count:
        where = ("second", "third")[place - 1]
        raise ValueError(f"{name} has {count} in its {where} place; got {tuple(packed.shape)}")
    return tuple(packed.unbind(place))
