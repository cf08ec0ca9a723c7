"""The tensors of a problem, as every implementation and the oracle get them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashbench.kernels._precision import input_dtype
from flashbench.problem import LAYOUTS, Problem

if TYPE_CHECKING:
    from flashbench.kernels._block_mask import DeviceMask

DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")
"""Inputs that have a gradient, in the order of ``Inputs.leaves``; a problem without one leaves it out."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """q, k, v and the gradient of o, shaped as in Problem, and what else the problem asks; None without.

    A packed batch has one leading index: q is (1, num_heads, total_q, head_dim), k and v
    (1, num_kv_heads, total_k, …), dout as o; cu_seqlens_q and cu_seqlens_k, int32 (sequences + 1,),
    say where each sequence begins. bias: in q's dtype, its shape as Problem.bias says. sinks: fp32
    (num_heads,) logits. alibi_slopes: fp32 (num_heads,). seed: of the dropout mask
    (``_philox.keep_mask``).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    bias: Tensor | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    block_mask: DeviceMask | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seed: int = 0

    def differentiable(self) -> dict[str, Tensor]:
        """The inputs that have a gradient, by name: q, k, v, then bias and sinks where they are."""
        found = {name: getattr(self, name) for name in DIFFERENTIABLE}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors of ``differentiable``; gradients come in this order."""
        return tuple(self.differentiable().values())

    def widened(self) -> Inputs:
        """The same numbers in fp32."""
        tensors = (*self.differentiable(), "dout")
        return replace(self, **{name: getattr(self, name).detach().float() for name in tensors})

    def detached(self, *, grad: bool) -> Inputs:
        """The same storage behind fresh leaves, which require grad where asked."""
        fresh = {name: x.detach().requires_grad_(grad) for name, x in self.differentiable().items()}
        return replace(self, **fresh)


def make_inputs(problem: Problem, device: str, seed: int) -> Inputs:
    """Standard normal tensors in the problem's dtype (fp16 for fp8), the same for one seed and device.

    The values of q, k, v and dout do not depend on layout or options. None requires grad. The device
    meta has no values, only shapes and strides.
    """
    generator = None if device == "meta" else torch.Generator(device=device).manual_seed(seed)
    p, dtype = problem, input_dtype(problem)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    def laid_out(x: Tensor) -> Tensor:
        return x if p.layout == LAYOUTS[0] else x.transpose(1, 2).contiguous().transpose(1, 2)

    batch, rows, keys = (1, *p.rows) if p.lengths else (p.batch, p.seqlen_q, p.seqlen_k)
    q = laid_out(normal(batch, p.num_heads, rows, p.head_dim))
    k = laid_out(normal(batch, p.num_kv_heads, keys, p.head_dim))
    v = laid_out(normal(batch, p.num_kv_heads, keys, p.head_dim_v))
    dout = laid_out(normal(batch, p.num_heads, rows, p.head_dim_v))
    starts = [_starts(side, device) for side in zip(*p.lengths, strict=True)] or [None, None]
    return Inputs(
        q=q,
        k=k,
        v=v,
        dout=dout,
        bias=normal(*p.bias_shape) if p.bias else None,
        sinks=normal(p.num_heads, dtype=torch.float32) if p.sinks else None,
        alibi_slopes=torch.tensor(alibi_slopes(p.num_heads), device=device) if p.alibi else None,
        block_mask=block_mask(p, device),
        cu_seqlens_q=starts[0],
        cu_seqlens_k=starts[1],
        seed=seed,
    )


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """ALiBi's slope of each query head: 2**(-8(h+1)/H) for H a power of two.

    Any other H takes the slopes of the next lower power, then every second one of the next higher.
    Source: Press et al. 2022 (arXiv:2108.12409), and their published rule for other H.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    finer = [2 ** (-8 * (head + 1) / (2 * power)) for head in range(2 * power)]
    return tuple(slopes + finer[0::2][: num_heads - power])


def _starts(lengths: tuple[int, ...], device: str) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def block_mask(problem: Problem, device: str) -> DeviceMask | None:
    """The problem's block mask on the device, None without one."""
    if not problem.block_mask:
        return None
    from flashbench.kernels._block_mask import build

    return build(problem, device)
