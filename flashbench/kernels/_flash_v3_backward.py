"""FlashAttention-3's backward for sm_90: launches. Import through ``_triton.load``.

Three kernels: rows' LSE and delta, and dQ's accumulator cleared; dK, dV and the sum of dQ
(_hopper_backward.py); dQ converted. The deterministic form leaves dQ to flash-v2's kernel, which computes S
and dP once more. Made ready once per layout, as the forward (``Plan``).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flashbench import hopper_configs
from flashbench.hopper_configs import KEYS, ROWS, BackwardTiles
from flashbench.kernels import _flash_v2 as flash_v2
from flashbench.kernels import _hopper_backward as kernels
from flashbench.kernels import _hopper_gradient_kernels as rows_kernels
from flashbench.kernels import _hopper_schedule as schedule
from flashbench.kernels._call import Call, Launch, like, unit_stride
from flashbench.kernels._hopper_plan import (
    ALIGNMENT,
    Laid,
    Made,
    PlannedLaunch,
    bound,
    descriptor,
    loadable,
    programs,
)
from flashbench.kernels._launches import Backward, Saved

LINE = 32
"""fp32 of a line of dQ's accumulator."""
WIDEST = 128
"""Columns that the rows' kernel takes at once."""


def backward_launches(
    saved: Saved, call: Call, *, deterministic: bool = False, tiles: BackwardTiles | None = None
) -> Backward:
    """What fills (dq, dk, dv), of head dims up to 128 that are multiples of 8, none of the tensors empty.

    call: causal, scale and, for flash-v2's kernel of dq, configs. Unless deterministic, the last bits of dq
    differ from run to run, as additions by TMA have no order.
    """
    q, k, v, do = (loadable(x) for x in (saved.q, saved.k, saved.v, saved.do))
    dk, dv = gradient(k), gradient(v)
    laid = tuple(Laid(x.shape, x.stride()) for x in (q, do, k, v, dk, dv))
    plan = planned(laid, q.dtype, q.device, call.causal, deterministic, tiles)
    lse_2, delta = torch.empty(2, plan.tiles * plan.config.block_q, dtype=torch.float32, device=q.device)
    acc = lse_2  # an address that nothing is added to
    filled: tuple[Tensor, ...] = (lse_2, delta)
    if not deterministic:
        acc = torch.empty(plan.lines, LINE, dtype=torch.float32, device=q.device)
        filled = (lse_2, delta, acc)
    prepare = prepare_launch(saved, do, plan.rows, plan.config.block_q, filled)
    # the probability of an only key is 1, whatever its score
    of_dk = 0.0 if k.shape[2] == 1 and saved.dlse is None else call.scale
    args = plan.arguments((q, do, k, v, lse_2, delta, acc, dk, dv), call.scale, of_dk)
    main = PlannedLaunch("v3_bwd", kernels.backward, plan.programs, args, plan.made.options, plan.made)
    if deterministic:
        portable = replace(saved, q=q, k=k, v=v, o=unit_stride(saved.o), do=do)
        work = flash_v2.backward_launches(portable, call)
        of_dq = (one for one in work.launches if one.name != "dkdv")
        return replace(work, dk=dk, dv=dv, launches=(prepare, main, *of_dq))
    dq = gradient(q)
    return Backward(dq=dq, dk=dk, dv=dv, launches=(prepare, main, _convert(plan, saved, acc, dq, call)))


def prepare_launch(
    saved: Saved, do: Tensor, rows: tuple[int, int, int], block_q: int, filled: tuple[Tensor, ...]
) -> Launch:
    """What fills LSE in powers of two and delta, and clears dQ's accumulator, if there is one.

    rows: heads of queries, their rows, tiles of block_q of one. filled: lse_2, delta and the accumulator.
    """
    o, (lse_2, delta, *acc) = unit_stride(saved.o), filled
    dlse = None if saved.dlse is None else saved.dlse.contiguous()
    tiles = o.shape[0] * rows[0] * rows[2]
    cleared = acc[0] if acc else None
    args = (
        *(o, do, saved.lse, dlse, lse_2, delta, cleared),
        *(*o.stride()[:3], *do.stride()[:3], *rows),
    )
    options = {
        "BLOCK_M": block_q, "DIM": acc[0].numel() // (tiles * block_q) if acc else 0, "DIM_V": o.shape[3],
        "WIDEST": WIDEST, "WIDE": any(KEYS * x.stride(2) >= 2**31 for x in (o, do)), "num_warps": 4,
        "enable_fp_fusion": True,
    }  # fmt: skip
    return Launch("v3_prepare", rows_kernels.prepare, tiles, args, options)


def _convert(plan: Plan, saved: Saved, acc: Tensor, dq: Tensor, call: Call) -> Launch:
    """What makes dq of the accumulator."""
    args = acc, dq, *dq.stride()[:3], *plan.rows, saved.k.shape[2], call.scale
    options = {
        "BLOCK_M": plan.config.block_q, "COLUMNS": dq.shape[3], "CAUSAL": call.causal,
        "ALONE": saved.dlse is None, "num_warps": 4, "enable_fp_fusion": True,
    }  # fmt: skip
    return Launch("v3_convert", rows_kernels.convert, 2 * plan.tiles, args, options)


def gradient(x: Tensor) -> Tensor:
    """An empty gradient of x, laid out so that TMA stores it."""
    columns = x.shape[3]
    return like(x, columns + -columns % ALIGNMENT)[..., :columns]


@lru_cache(maxsize=256)
def planned(
    laid: tuple[Laid, ...], dtype: torch.dtype, device: torch.device, causal: bool, deterministic: bool,
    tiles: BackwardTiles | None,
) -> Plan:  # fmt: skip
    """The plan for q, do, k, v, dk and dv laid out so."""
    return Plan(laid, dtype, device, causal, deterministic, tiles)


class Plan:
    """What backward launches over tensors of one layout share.

    tiles: of queries, of all heads. lines: of dQ's accumulator. width: columns that the head dims run in.
    rows: heads of queries, their rows, tiles of one.
    """

    def __init__(
        self, laid: tuple[Laid, ...], dtype: torch.dtype, device: torch.device, causal: bool,
        deterministic: bool, tiles: BackwardTiles | None,
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
        walk = schedule.table(shape, programs(device))
        self.programs = len(walk[0])
        self.table = torch.tensor(walk, dtype=torch.int32, device=device)
        self.tiles = batch * heads * -(-seqlen_q // block)
        self.rows = (heads, seqlen_q, -(-seqlen_q // block))
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
        constants = {
            "BLOCK_M": block, "BLOCK_N": KEYS, "D": width,
            "STAGES": config.stages, "DS_STAGES": config.ds_stages, "LAG": config.lag,
            "CAUSAL": causal, "ADDS_DQ": not deterministic,
            "EARLY_DV": config.early_dv, "ROTATE": config.rotate, "HELD": config.held,
            "REGISTERS": 240, "PRODUCER_REGISTERS": 24,
        }  # fmt: skip
        self.made = Made(constants)

    def arguments(self, tensors: tuple[Tensor, ...], scale: float, of_dk: float) -> tuple[Any, ...]:
        """The kernel's arguments but for compile-time constants, of tensors in the descriptors' order."""
        numbers = (*self.numbers, scale * math.log2(math.e), of_dk)
        return *bound(self.descriptors, tensors), self.table, *numbers
