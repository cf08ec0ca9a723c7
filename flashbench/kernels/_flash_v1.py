"""FlashAttention-1 in portable Triton: launches and autograd. Import through ``_triton.load``."""

# l and m are the paper's symbols
# ruff: noqa: E741

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashbench.flash_configs import Config
from flashbench.kernels import _flash_v1_kernels as kernels
from flashbench.kernels import _plain
from flashbench.kernels._call import Call, Launch, computable, on
from flashbench.kernels._layout import unit_stride


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    tf32: bool = False,
    configs: tuple[tuple[str, Config], ...] = (),
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q kᵀ · softmax_scale) v in the loop order of FlashAttention-1, and differentiable as such.

    Shapes, dtypes, results and errors as ``_flash_v2.flash_attention``. configs: (kernel, configuration) in
    place of the table's, for the kernels ``v1_fwd`` and ``v1_bwd``.
    """
    call = _plain.call(q, k, v, causal=causal, softmax_scale=softmax_scale, tf32=tf32, configs=configs)
    o, lse = _FlashAttention1.apply(q, k, v, call, return_lse)
    return (o, lse) if return_lse else o


class _FlashAttention1(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        dtype = q.dtype
        q, k, v = (computable(x) for x in (q, k, v))
        o, l, m, launch = forward_launch(q, k, v, call)
        with on(q.device):
            launch.run()
        o = o.to(dtype)
        ctx.save_for_backward(q, k, v, o, l, m)
        ctx.call, ctx.dtype = call, dtype
        ctx.set_materialize_grads(False)
        return o, m * call.scale + l.log() if return_lse else None

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, o, l, m = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else do
        dlse = None if dlse is None else dlse.contiguous()
        o, do = (unit_stride(computable(x)) for x in (o, do))
        grads, launch = backward_launch((q, k, v, o, do), (l, m, dlse), ctx.call)
        with on(q.device):
            launch.run()
        return *(grad.to(ctx.dtype) for grad in grads), None, None


def forward_launch(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor, Launch]:
    """(o, l, m, the launch that fills them)."""
    batch, heads, seqlen_q, _ = q.shape
    o = q.new_empty(batch, heads, seqlen_q, v.shape[-1])
    l, m = (q.new_empty(batch, heads, seqlen_q, dtype=torch.float32) for _ in range(2))
    o_tmp = o if o.element_size() == 4 else torch.empty_like(o, dtype=torch.float32)
    options = _plain.options(call, "v1_fwd", q, v, q, k, v)
    del options["EXACT"]
    options["SCRATCH"] = o_tmp is not o
    args = (
        *(q, k, v, o, o_tmp, l, m),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
        *(heads, heads // k.shape[1], seqlen_q, k.shape[2], call.scale),
    )
    return o, l, m, Launch("v1_fwd", kernels.forward, batch * heads, args, options)


def backward_launch(
    tensors: tuple[Tensor, ...], rows: tuple[Tensor, Tensor, Tensor | None], call: Call
) -> tuple[tuple[Tensor, Tensor, Tensor], Launch]:
    """((dq, dk, dv), the launch that fills them) from (q, k, v, o, do) and (l, m, dlse or None)."""
    q, k, v, o, do = tensors
    l, m, dlse = rows
    num_kv_heads = k.shape[1]
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    dq_tmp = dq if dq.element_size() == 4 else torch.empty_like(dq, dtype=torch.float32)
    options = _plain.options(call, "v1_bwd", q, v, q, k, v, do)
    args = (
        *(q, k, v, o, do, l, m, l if dlse is None else dlse, dq, dq_tmp, dk, dv),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3]),
        *(num_kv_heads, q.shape[1] // num_kv_heads, q.shape[2], k.shape[2], call.scale),
    )
    options = {**options, "SCRATCH": dq_tmp is not dq, "HAS_DLSE": dlse is not None}
    return (dq, dk, dv), Launch("v1_bwd", kernels.backward, q.shape[0] * num_kv_heads, args, options)
