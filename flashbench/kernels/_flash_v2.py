"""FlashAttention-2 in portable Triton: the function and its gradients. Import through ``_triton.load``.

The same kernels run compiled on a GPU and through Triton's interpreter on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashbench.block_masks import SIZE
from flashbench.flash_configs import Config
from flashbench.kernels._block_mask import taken
from flashbench.kernels._call import (
    NOTHING,
    Call,
    Extra,
    check_devices,
    check_scale,
    check_shapes,
    check_strides,
    computable,
    on,
)
from flashbench.kernels._launches import Backward, Saved, backward_launches, forward_launch
from flashbench.kernels._layout import unit_stride
from flashbench.kernels._misfits import check_mask, check_tensors

__all__ = [
    "NOTHING",
    "Call",
    "Extra",
    "FlashAttention",
    "Saved",
    "backward_launches",
    "flash_attention",
    "forward_launch",
    "gradients",
]


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    top_left: bool = False,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    block_mask: Any = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    tf32: bool = False,
    configs: tuple[tuple[str, Config], ...] = (),
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q kᵀ · softmax_scale) v without the score matrix; differentiable in q, k, v, bias and sinks.

    q: (batch, num_heads, seqlen_q, head_dim); k: (batch, num_kv_heads, seqlen_k, head_dim);
    v: (batch, num_kv_heads, seqlen_k, head_dim_v), all of one dtype (fp16, bf16, fp32) and device,
    last stride 1, others any; head dims to 256. Query head h uses K/V head h // (num_heads // num_kv_heads).

    Masks. The diagonal is j = i + seqlen_k - seqlen_q, or j = i with top_left. causal: keys up to the
    diagonal. window: (left, right), keys from ``left`` before it to ``right`` after it, both included; -1 is
    unlimited; with causal, right is 0. block_mask, of 128 x 128, for all heads: a ``_block_mask.DeviceMask``,
    or FlexAttention's BlockMask, which every call converts (``_block_mask.from_flex`` once for several).
    Scores, in this order. softmax_scale (default head_dim**-0.5); softcap c > 0: c · tanh(s / c);
    alibi_slopes, fp32 (num_heads,) or (sequences, num_heads): less slope · |distance to the diagonal|; bias,
    (batch, num_heads, seqlen_q, seqlen_k) or 1 for any, in q's dtype: added. sinks (num_heads,) fp32: one
    more logit per head in the softmax, whose key has no value. dropout_p: share of the probabilities that are
    dropped, the others divided by 1 - dropout_p; drawn by Philox from seed (0 ≤ seed < 2**63) and position.
    Packed sequences: cu_seqlens_q, cu_seqlens_k, int32 (sequences + 1,), ascending from 0 to the rows; then
    batch is 1 and seqlens those of all; max_seqlen_*: the longest or more. On a GPU cu_seqlens are checked
    only where it is None, which asks the device: wrong ones reach past the tensors. No bias, no block_mask.
    fp32 products are IEEE, or TF32 with ``tf32``. configs: (kernel, configuration) in place of the table's.

    Returns o (batch, num_heads, seqlen_q, head_dim_v) in q's dtype, in memory ordered as q is; with
    return_lse also lse (batch, num_heads, seqlen_q): log of the sum of exponentials, fp32, differentiable.
    Rows without keys: o = 0, lse = -inf (or the sink), no gradient. Raises ValueError for a misfit.
    """
    check_shapes(q, k, v)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    call = Call(
        causal=causal, scale=scale, tf32=tf32, window=window, top_left=top_left, softcap=softcap,
        dropout_p=dropout_p, seed=seed, configs=configs, biased=bias is not None and 1 not in bias.shape[2:],
    )  # fmt: skip
    extra = Extra(slopes=alibi_slopes, bias=bias, sinks=sinks, cu_q=cu_seqlens_q, cu_k=cu_seqlens_k)
    check(q, k, v, call, extra)
    call, extra = _masked(q, k, call, extra, block_mask)
    extra = _measured(q, k, extra, max_seqlen_q, max_seqlen_k)
    found: tuple[Tensor, Tensor] = FlashAttention.apply(q, k, v, bias, sinks, call, extra)
    return found if return_lse else found[0]


def _masked(q: Tensor, k: Tensor, call: Call, extra: Extra, block_mask: Any) -> tuple[Call, Extra]:
    """The call with a block mask, which takes the band in, or None. Raises ValueError for a misfit."""
    if block_mask is None:
        return call, extra
    if extra.cu_q is not None:
        raise ValueError("packed sequences take no block_mask")
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    mask = taken(block_mask, seqlen_q, seqlen_k, q.device)
    for name, config in call.configs:
        if name != "delta" and (SIZE % config.block_q or SIZE % config.block_k):
            raise ValueError(
                f"{name} tile {config.block_q} x {config.block_k} does not divide a block of {SIZE}"
            )
    before, after = call.band
    if max(before, after) >= 0:
        diagonal = 0 if call.top_left else seqlen_k - seqlen_q
        mask = mask.within(
            -seqlen_q if before < 0 else max(-seqlen_q, diagonal - before),
            seqlen_k if after < 0 else min(seqlen_k, diagonal + after),
        )
        call = replace(call, causal=False, window=(-1, -1))
    call = replace(call, alone=before == after == 0 or seqlen_k <= 1)
    return call, replace(extra, block_mask=mask)


def _measured(q: Tensor, k: Tensor, extra: Extra, longest_q: int | None, longest_k: int | None) -> Extra:
    """The same, of packed sequences with the longest. Raises ValueError for lengths that cannot be."""
    if extra.cu_q is None or extra.cu_k is None:
        return extra
    return replace(
        extra,
        longest_q=_longest("q", extra.cu_q, longest_q, q.shape[2]),
        longest_k=_longest("k", extra.cu_k, longest_k, k.shape[2]),
    )


def _falls(starts: list[int]) -> str:
    """Where starts go down, in words, or nothing."""
    falls = [f" and falls from {a} to {b}" for a, b in pairwise(starts) if b < a]
    return falls[0] if falls else ""


def _longest(side: str, cu: Tensor, given: int | None, rows: int) -> int:
    """The longest sequence; on a CPU, and where the device is asked, also whether they are all the rows."""
    if given is not None and given < 0:
        raise ValueError(f"max_seqlen_{side} {given} is out of range; it must be 0 or more")
    if given is not None and cu.device.type != "cpu":
        return given
    starts = cu.tolist()
    if starts[0] != 0 or starts[-1] != rows or starts != sorted(starts):
        raise ValueError(
            f"cu_seqlens_{side} must ascend from 0 to the {rows} rows that there are;"
            f" it goes from {starts[0]} to {starts[-1]}{_falls(starts)}"
        )
    longest = max((b - a for a, b in pairwise(starts)), default=0)
    if given is not None and given < longest:
        raise ValueError(f"max_seqlen_{side} {given} is too small; the longest sequence has {longest} rows")
    return longest if given is None else given


class FlashAttention(torch.autograd.Function):  # type: ignore[misc]
    """(o, lse) of (q, k, v, bias, sinks, call, extra), with gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        call: Call,
        extra: Extra,
    ) -> tuple[Tensor, Tensor]:
        dtype = q.dtype
        q, k, v = (computable(x) for x in (q, k, v))
        extra = replace(extra, bias=None if bias is None else computable(bias), sinks=sinks)
        o, lse, launch = forward_launch(q, k, v, call, extra)
        with on(q.device):
            launch.run()
        o = o.to(dtype)
        ctx.save_for_backward(q, k, v, o, lse, extra.bias, sinks)
        ctx.call, ctx.dtype, ctx.extra = call, dtype, replace(extra, bias=None, sinks=None)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, bias, sinks = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else do
        wanted = [
            name for name, want in zip(("bias", "sinks"), ctx.needs_input_grad[3:5], strict=True) if want
        ]
        work = _differentiate(
            (q, k, v, o, lse, do), ctx.call, replace(ctx.extra, bias=bias, sinks=sinks), dlse, wanted
        )
        dq, dk, dv, dbias = (
            None if grad is None else grad.to(ctx.dtype) for grad in (work.dq, work.dk, work.dv, work.dbias)
        )
        return dq, dk, dv, dbias, work.dsinks, None, None


def _differentiate(
    tensors: tuple[Tensor, ...], call: Call, extra: Extra, dlse: Tensor | None, wanted: Sequence[str]
) -> Backward:
    """The gradients, filled. tensors: q, k, v as the kernels take them, o, lse and do."""
    q, k, v, o, lse, do = tensors
    o, do = (unit_stride(computable(x)) for x in (o, do))
    saved = Saved(q=q, k=k, v=v, o=o, lse=lse, do=do, dlse=dlse)
    work = backward_launches(saved, call, extra, wanted=wanted)
    work.run(saved)
    return work


def gradients(
    tensors: tuple[Tensor, ...],
    call: Call,
    *,
    alibi_slopes: Tensor | None,
    cu_seqlens: tuple[Tensor | None, Tensor | None],
    longest: tuple[int | None, int | None],
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), contiguous, in q's dtype, of a call of ``flash_attention`` with these arguments.

    tensors: its q, k and v, what it returned (o, lse), and the gradient of o.
    """
    q, k, v, *rest = tensors
    extra = Extra(slopes=alibi_slopes, cu_q=cu_seqlens[0], cu_k=cu_seqlens[1])
    extra = _measured(q, k, extra, *longest)
    dtype = q.dtype
    q, k, v = (computable(x) for x in (q, k, v))
    work = _differentiate((q, k, v, *rest), call, extra, None, ())
    return work.dq.to(dtype), work.dk.to(dtype), work.dv.to(dtype)


def check(q: Tensor, k: Tensor, v: Tensor, call: Call, extra: Extra) -> None:
    """Raise ValueError for arguments that do not fit together, but for shapes (``check_shapes``)."""
    check_strides(q=q, k=k, v=v)
    dtypes = f"{q.dtype}, {k.dtype}, {v.dtype}"
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"q, k and v must be of one dtype, fp16, bf16 or fp32: {dtypes}")
    check_scale(call.scale)
    check_mask(call.causal, call.window)
    if not 0 <= call.softcap < math.inf:
        raise ValueError(
            f"softcap {call.softcap} is out of range; it must be greater than 0 and finite, or 0 for none"
        )
    if not 0 <= call.dropout_p < 1:
        raise ValueError(f"dropout_p {call.dropout_p} is out of range; it must be at least 0 and below 1")
    if not (isinstance(call.seed, int) and 0 <= call.seed < 2**63):
        raise ValueError(f"seed {call.seed} is out of range; it must be a whole number, 0 to 2**63 - 1")
    _check_extra(q, k, v, extra)


def _check_extra(q: Tensor, k: Tensor, v: Tensor, extra: Extra) -> None:
    check_tensors(
        alibi_slopes=extra.slopes, bias=extra.bias, sinks=extra.sinks,
        cu_seqlens_q=extra.cu_q, cu_seqlens_k=extra.cu_k,
    )  # fmt: skip
    check_devices(
        q=q, k=k, v=v, alibi_slopes=extra.slopes, bias=extra.bias, sinks=extra.sinks,
        cu_seqlens_q=extra.cu_q, cu_seqlens_k=extra.cu_k,
    )  # fmt: skip
    heads, sequences = q.shape[1], q.shape[0] if extra.cu_q is None else extra.cu_q.numel() - 1
    each = {"alibi_slopes": f" or {(sequences, heads)}", "sinks": ""}
    for name, x in (("alibi_slopes", extra.slopes), ("sinks", extra.sinks)):
        shapes = [(heads,), (sequences, heads)][: 2 if each[name] else 1]
        if x is not None and (x.shape not in shapes or x.dtype != torch.float32 or not x.is_contiguous()):
            raise ValueError(
                f"{name} must be fp32 and contiguous, of shape ({heads},){each[name]}:"
                f" {x.dtype} {tuple(x.shape)}"
            )
    if extra.bias is not None:
        full = (*q.shape[:3], k.shape[2])
        shape = tuple(extra.bias.shape)
        if len(shape) != 4 or any(n not in (1, whole) for n, whole in zip(shape, full, strict=True)):
            raise ValueError(f"bias must be of shape {full}, any of them 1; got {shape}")
        if extra.bias.dtype != q.dtype:
            raise ValueError(f"bias must be of q's dtype {q.dtype}; got {extra.bias.dtype}")
    if (extra.cu_q is None) != (extra.cu_k is None):
        raise ValueError("cu_seqlens_q and cu_seqlens_k go together")
    if extra.cu_q is None or extra.cu_k is None:
        return
    for name, cu in (("cu_seqlens_q", extra.cu_q), ("cu_seqlens_k", extra.cu_k)):
        if cu.ndim != 1 or cu.dtype != torch.int32 or not cu.is_contiguous() or not len(cu):
            raise ValueError(f"{name} must be int32, of shape (sequences + 1,): {cu.dtype} {tuple(cu.shape)}")
    if len(extra.cu_k) != len(extra.cu_q):
        counts = f"{len(extra.cu_q) - 1} and {len(extra.cu_k) - 1} sequences"
        raise ValueError(f"cu_seqlens_q and cu_seqlens_k are of {counts}; they must be of the same")
    if q.shape[0] != 1:
        raise ValueError(f"packed sequences lie one after the other in batch 1; got batch {q.shape[0]}")
    if extra.bias is not None:
        raise ValueError("packed sequences take no bias")
