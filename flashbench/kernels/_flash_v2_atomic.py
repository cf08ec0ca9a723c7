"""FlashAttention-2 with a one-kernel backward: launches and autograd. Import through ``_triton.load``.

The forward and delta are _flash_v2's. Not deterministic: dQ is a sum of atomic additions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import cdiv

from flashbench.flash_configs import Config
from flashbench.kernels import _flash_atomic_kernels as kernels
from flashbench.kernels import _plain
from flashbench.kernels._call import NOTHING, Call, Launch, computable, on
from flashbench.kernels._launches import Backward, Saved, delta_launch, empty_gradients, forward_launch
from flashbench.kernels._layout import unit_stride

BLOCK = 1024
"""Elements that a program of the clearing and the converting kernel moves."""


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
    """softmax(q kᵀ · softmax_scale) v; differentiable, with a dq whose last bits differ from run to run.

    Shapes, dtypes, results and errors as ``_flash_v2.flash_attention``. configs: (kernel, configuration) in
    place of the table's, for the kernels ``fwd``, ``delta`` and ``atomic``.
    """
    call = _plain.call(q, k, v, causal=causal, softmax_scale=softmax_scale, tf32=tf32, configs=configs)
    o, lse = _FlashAttention2.apply(q, k, v, call)
    return (o, lse) if return_lse else o


class _FlashAttention2(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        dtype = q.dtype
        q, k, v = (computable(x) for x in (q, k, v))
        o, lse, launch = forward_launch(q, k, v, call)
        with on(q.device):
            launch.run()
        o = o.to(dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.call, ctx.dtype = call, dtype
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else do
        o, do = (unit_stride(computable(x)) for x in (o, do))
        saved = Saved(q=q, k=k, v=v, o=o, lse=lse, do=do, dlse=dlse)
        work = backward_launches(saved, ctx.call)
        work.run(saved)
        return *(grad.to(ctx.dtype) for grad in work.gradients), None


def backward_launches(saved: Saved, call: Call) -> Backward:
    """As ``_launches.backward_launches``, for a call that is causal or full and no more."""
    s = saved
    dq, dk, dv = empty_gradients(s)
    delta = torch.empty_like(s.lse)
    dq_acc = torch.empty_like(dq, dtype=torch.float32)
    count = dq_acc.numel()
    flat = {"BLOCK": BLOCK, "num_warps": 4, "enable_fp_fusion": True}
    clear = Launch("clear", kernels.clear, cdiv(count, BLOCK), (dq_acc, count), flat)
    args: tuple[Any, ...] = (dq_acc, dq, count, call.scale)
    convert = Launch("convert", kernels.convert, cdiv(count, BLOCK), args, flat)

    num_kv_heads = s.k.shape[1]
    options = _plain.options(call, "atomic", s.q, s.v, s.q, s.k, s.v, s.do)
    tiles = cdiv(s.k.shape[2], options["BLOCK_N"])
    args = (
        *(s.q, s.k, s.v, s.do, s.lse, delta, dq_acc, dk, dv),
        *(*s.q.stride()[:3], *s.k.stride()[:3], *s.v.stride()[:3], *s.do.stride()[:3]),
        *(num_kv_heads, s.q.shape[2], s.k.shape[2], tiles, call.scale),
    )
    options |= {"GROUP": s.q.shape[1] // num_kv_heads, "ALONE": s.dlse is None}
    backward = Launch("atomic", kernels.backward, tiles * s.q.shape[0] * num_kv_heads, args, options)
    launches = delta_launch(s, call, NOTHING, delta), clear, backward, convert
    return Backward(dq=dq, dk=dk, dv=dv, delta=delta, launches=launches)
