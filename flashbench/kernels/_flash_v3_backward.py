"""FlashAttention-3's backward for sm_90: launches. Import through ``_triton.load``.

Three kernels: rows' LSE and delta, and dQ's accumulator cleared; dK, dV and the sum of dQ
(_hopper_backward.py); dQ converted. Made ready once per layout, as the forward (``Plan``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flashbench import hopper_configs
from flashbench.hopper_configs import KEYS, ROWS, BackwardTiles
from flashbench.kernels import _hopper_backward as kernels
from flashbench.kernels import _hopper_gradient_kernels as rows_kernels
from flashbench.kernels import _hopper_schedule as schedule
from flashbench.kernels._call import Launch, like, on, unit_stride
from flashbench.kernels._flash_v3 import ALIGNMENT, Laid, bound, descriptor, loadable, programs

LINE = 32
"""fp32 of a line of dQ's accumulator."""
WIDEST = 128
"""Columns that the rows' kernel takes at once."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a backward needs of its forward, and dO; lse natural, dlse None without a gradient of it."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor
    do: Tensor
    dlse: Tensor | None = None


@dataclass(frozen=True)
class Backward:
    """The launches, in order, and the gradients that they fill."""

    launches: tuple[Launch, ...]
    dq: Tensor
    dk: Tensor
    dv: Tensor


def backward(
    saved: Saved, *, causal: bool, scale: float, tiles: BackwardTiles | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv); the last bits of dq differ from run to run, as atomic additions have no order."""
    work = backward_launches(saved, causal=causal, scale=scale, tiles=tiles)
    with on(saved.q.device):
        for launch in work.launches:
            launch.run()
    return work.dq, work.dk, work.dv


def backward_launches(
    saved: Saved, *, causal: bool, scale: float, tiles: BackwardTiles | None = None
) -> Backward:
    """The launches of a backward, for head dims up to 128 that are multiples of 8; none is empty."""
    q, k, v, do = (loadable(x) for x in (saved.q, saved.k, saved.v, saved.do))
    o = unit_stride(saved.o)
    dq, dk, dv = _gradient(q), _gradient(k), _gradient(v)
    laid = tuple(Laid(x.shape, x.stride()) for x in (q, do, k, v, dk, dv))
    plan = planned(laid, q.dtype, q.device, causal, tiles)
    lse_2, delta = torch.empty(2, plan.tiles * plan.config.block_q, dtype=torch.float32, device=q.device)
    acc = torch.empty(plan.lines, LINE, dtype=torch.float32, device=q.device)
    batch, heads, seqlen_q, dim = q.shape
    numbers = (heads, seqlen_q, plan.tiles // (batch * heads))
    prepare = Launch(
        "v3_prepare",
        rows_kernels.prepare,
        plan.tiles,
        (o, do, saved.lse, saved.dlse, lse_2, delta, acc, *o.stride()[:3], *do.stride()[:3], *numbers),
        {"BLOCK_M": plan.config.block_q, "DIM": plan.width, "DIM_V": v.shape[3], "WIDEST": WIDEST,
         "WIDE": any(KEYS * x.stride(2) >= 2**31 for x in (o, do)), "num_warps": 4},
    )  # fmt: skip
    main = Launch(
        "v3_bwd",
        kernels.backward,
        plan.programs,
        plan.arguments((q, do, k, v, lse_2, delta, acc, dk, dv), scale),
        plan.options,
    )
    convert = Launch(
        "v3_convert",
        rows_kernels.convert,
        2 * plan.tiles,
        (acc, dq, *dq.stride()[:3], *numbers, scale),
        {"BLOCK_M": plan.config.block_q, "COLUMNS": dim, "num_warps": 4},
    )
    return Backward((prepare, main, convert), dq, dk, dv)


def _gradient(x: Tensor) -> Tensor:
    """An empty gradient of x, laid out so that TMA stores it."""
    columns = x.shape[3]
    return like(x, columns + -columns % ALIGNMENT)[..., :columns]


@lru_cache(maxsize=256)
def planned(
    laid: tuple[Laid, ...], dtype: torch.dtype, device: torch.device, causal: bool,
    tiles: BackwardTiles | None,
) -> Plan:  # fmt: skip
    """The plan for q, do, k, v, dk and dv laid out so."""
    return Plan(laid, dtype, device, causal, tiles)


class Plan:
    """What backward launches over tensors of one layout share.

    tiles: of queries, of all heads. lines: of dQ's accumulator. width: columns that the head dims run in.
    """

    def __init__(
        self, laid: tuple[Laid, ...], dtype: torch.dtype, device: torch.device, causal: bool,
        tiles: BackwardTiles | None,
    ) -> None:  # fmt: skip
        q, do, k, v, dk, dv = laid
        (batch, heads, seqlen_q, dim), (_, kv_heads, seqlen_k, dim_v) = q.shape, v.shape
        config = tiles or hopper_configs.choose_backward(dim, dim_v, causal, seqlen_k)
        block, width = config.block_q, config.width
        self.config, self.width = config, width
        shape = schedule.KeyShape(
            heads=batch * kv_heads, group=heads // kv_heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k,
            block_m=block, block_n=KEYS, causal=causal,
            kv_bytes=seqlen_q * (heads // kv_heads) * (4 * width + (dim + dim_v) * dtype.itemsize),
        )  # fmt: skip
        rows = schedule.table(shape, programs(device))
        self.programs = len(rows[0])
        self.table = torch.tensor(rows, dtype=torch.int32, device=device)
        self.tiles = batch * heads * -(-seqlen_q // block)
        self.lines = self.tiles * block * width // LINE
        self.numbers = (shape.tiles, kv_heads, shape.group, seqlen_q, seqlen_k, self.lines)
        row = Laid((self.tiles * block,), (1,))
        acc = Laid((self.lines, LINE), (LINE, 1))
        f32 = torch.float32
        self.descriptors = (
            *(descriptor(x, [1, 1, ROWS, width], dtype) for x in (q, do, k, v)),
            *(descriptor(row, [ROWS], f32) for _ in range(2)),
            descriptor(acc, [ROWS * ROWS // LINE, LINE], f32),
            *(descriptor(x, [1, 1, ROWS, width], dtype) for x in (dk, dv)),
        )
        self.constants = {
            "D": width, "STAGES": config.stages, "DS_STAGES": config.ds_stages,
            "KV_STAGES": config.kv_stages, "LAG": config.lag, "CAUSAL": causal, "ADDS_DQ": True,
            "EARLY_DV": config.early_dv, "ROTATE": config.rotate, "HELD": config.held,
            "REGISTERS": 240, "PRODUCER_REGISTERS": 24,
        }  # fmt: skip
        self.options = {**self.constants, "num_warps": 4, "enable_fp_fusion": True}

    def arguments(self, tensors: tuple[Tensor, ...], scale: float) -> tuple[Any, ...]:
        """The kernel's arguments but for compile-time constants, of tensors in the descriptors' order."""
        numbers = (*self.numbers, scale * math.log2(math.e), scale)
        return *bound(self.descriptors, tensors), self.table, *numbers
