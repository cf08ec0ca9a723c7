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
from flashbench.kernels import _flash_v2 as v2
from flashbench.kernels._flash_v2 import Call, Launch

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
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    v2._check(q, k, v, scale)
    o, lse = _FlashAttention2.apply(q, k, v, Call(causal=causal, scale=scale, tf32=tf32, configs=configs))
    return (o, lse) if return_lse else o


class _FlashAttention2(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        dtype = q.dtype
        q, k, v = (v2._prepare(x) for x in (q, k, v))
        o, lse, launch = v2.forward_launch(q, k, v, call)
        with v2._on(q.device):
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
        inputs = q, k, v, v2._prepare(o), lse, v2._prepare(do)
        grads, delta, launches = backward_launches(*inputs, ctx.call)
        with v2._on(q.device):
            for launch in launches:
                launch.run()
                if launch.name == "delta" and dlse is not None:
                    delta.sub_(dlse)  # d lse / d s = p, as d o / d s = p (dP - delta)
        return *(grad.to(ctx.dtype) for grad in grads), None


def backward_launches(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, call: Call
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, tuple[Launch, ...]]:
    """((dq, dk, dv), delta, the launches that fill them, in order)."""
    grads, delta, launches = v2.backward_launches(q, k, v, o, lse, do, call, False)
    dq, dk, dv = grads
    rows = next(launch for launch in launches if launch.name == "delta")
    dq_acc = torch.empty_like(dq, dtype=torch.float32)
    count = dq.numel()
    flat = {"BLOCK": BLOCK, "num_warps": 4, "enable_fp_fusion": True}
    clear = Launch("clear", kernels.clear, cdiv(count, BLOCK), (dq_acc, count), flat)
    convert = Launch("convert", kernels.convert, cdiv(count, BLOCK), (dq_acc, dq, count, call.scale), flat)

    num_kv_heads = k.shape[1]
    config, options = call.options("atomic", q, v, q, k, v, do)
    tiles = cdiv(k.shape[2], config.block_k)
    args = (
        *(q, k, v, do, lse, delta, dq_acc, dk, dv),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3]),
        *(num_kv_heads, q.shape[2], k.shape[2], tiles, call.scale),
    )
    options = {**options, "GROUP": q.shape[1] // num_kv_heads}
    backward = Launch("atomic", kernels.backward, tiles * q.shape[0] * num_kv_heads, args, options)
    return grads, delta, (rows, clear, backward, convert)
