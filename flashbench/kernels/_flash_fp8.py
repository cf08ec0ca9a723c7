"""Attention of fp8 tensors in portable Triton: operands and launch. Import through ``_triton.load``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton import cdiv

from flashbench.flash_configs import Config, choose, section, widest
from flashbench.kernels import _fp8
from flashbench.kernels import _fp8_kernels as kernels
from flashbench.kernels._call import INTERPRETED, Launch, card, check_devices, check_scale, check_shapes, on
from flashbench.kernels._fp8 import Quantised

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, kw_only=True, eq=False)
class Operands:
    """What the kernel reads: q, k and v with a scale per tile of its configuration; v is turned."""

    q: Quantised
    k: Quantised
    v: Quantised
    config: Config


def operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dtype: torch.dtype,
    share: str = "block",
    hadamard: bool = False,
    config: Config | None = None,
) -> Operands:
    """q, k (batch, heads, rows, head_dim) and v (…, head_dim_v) of any float dtype, rounded to fp8.

    dtype: e4m3fn or e5m2. share: what shares a scale, of problem.FP8_SCALES. hadamard: rotate q and k first
    (``_fp8.rotate``). config: in place of the table's. Raises ValueError for shapes that do not fit.
    """
    _check(q, k, v, dtype)
    config = config or choose("fwd", "fp8", q.shape[3], v.shape[3], *card(q.device))
    if hadamard:
        q, k = _fp8.rotate(q), _fp8.rotate(k)
    return Operands(
        q=_fp8.quantise(q, dtype, share, config.block_q),
        k=_fp8.quantise(k, dtype, share, config.block_k),
        v=_fp8.turn(_fp8.quantise(v, dtype, share, config.block_k)),
        config=config,
    )


def flash_attention(
    x: Operands, *, causal: bool, softmax_scale: float | None = None, out_dtype: torch.dtype = torch.float16
) -> tuple[Tensor | Quantised, Tensor]:
    """(o, lse): softmax(q kᵀ · softmax_scale) v in fp8 products, forward only.

    causal: bottom-right aligned. softmax_scale: head_dim**-0.5 by default, more than 0. o: contiguous
    (batch, num_heads, seqlen_q, head_dim_v) in out_dtype; of an fp8 one Quantised, with a scale per tile
    of queries. lse: (batch, num_heads, seqlen_q) fp32, natural logarithm. Rows without keys: o = 0,
    lse = -inf. Raises ValueError for a scale out of range.
    """
    scale = x.q.values.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    check_scale(scale)
    garbled = INTERPRETED and out_dtype == torch.bfloat16  # it truncates where it should round
    stored = torch.float32 if garbled else out_dtype
    o, lse, launch = forward_launch(x, causal=causal, scale=scale, out_dtype=stored)
    with on(lse.device):
        launch.run()
    return (o if o.scales.numel() else o.values.to(out_dtype)), lse


def forward_launch(
    x: Operands, *, causal: bool, scale: float, out_dtype: torch.dtype
) -> tuple[Quantised, Tensor, Launch]:
    """(o, lse, the launch that fills them); o has no scales where out_dtype is not fp8."""
    q, k, v, config = x.q.values, x.k.values, x.v.values, x.config
    batch, heads, seqlen_q, dim = q.shape
    num_kv_heads, seqlen_k, dim_v = k.shape[1], k.shape[2], v.shape[2]
    tiles = cdiv(seqlen_q, config.block_q)
    o = torch.empty((batch, heads, seqlen_q, dim_v), dtype=out_dtype, device=q.device)
    lse, o_scales = (torch.empty(shape, dtype=torch.float32, device=q.device)
                     for shape in ((batch, heads, seqlen_q),
                                   (batch, heads, tiles) if out_dtype in FORMATS else (0,)))  # fmt: skip
    shared = section(seqlen_k * (dim + dim_v), batch * heads) if causal else 1
    args: tuple[Any, ...] = (
        *(q, k, v, x.q.scales, x.k.scales, x.v.scales, o, o_scales, lse),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], v.shape[3]),
        *(batch * heads, heads, heads // num_kv_heads, seqlen_q, seqlen_k, tiles, shared, scale),
    )
    options = {
        "BLOCK_M": config.block_q, "BLOCK_N": config.block_k, "DIM": dim, "DIM_V": dim_v,
        "WIDEST": widest("fp8"), "CAUSAL": causal,
        "WIDE": max(config.block_q * q.stride(2), config.block_k * k.stride(2), dim_v * v.stride(2)) >= 2**31,
        "BY_HAND": INTERPRETED, "LARGEST": int(torch.finfo(out_dtype).max) if out_dtype in FORMATS else 0,
        "num_warps": config.num_warps, "num_stages": config.num_stages,
        "enable_fp_fusion": True,  # off by default from Triton 3.10 on: an operation more per score
    }  # fmt: skip
    launch = Launch("fwd", kernels.forward, tiles * batch * heads, args, options)
    return Quantised(o, o_scales, config.block_q), lse, launch


def _check(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> None:
    check_shapes(q, k, v)
    check_devices(q=q, k=k, v=v)
    if dtype not in FORMATS:
        raise ValueError(f"fp8 is {' or '.join(map(str, FORMATS))}; got {dtype}")
