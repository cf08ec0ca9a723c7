"""FlashAttention-3's forward for sm_90: tiles, descriptors, launch. Import through ``_triton.load``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashbench.kernels import _hopper_kernels as kernels
from flashbench.kernels import _hopper_schedule as schedule
from flashbench.kernels._call import Launch, like

ROWS = 64
"""Rows of queries of a warpgroup."""


@dataclass(frozen=True)
class Tiles:
    """How the kernel is cut.

    warpgroups: consumers, of 64 rows of queries each. block_k: keys of a K/V tile. stages: K/V tiles in
    flight. q_stages: tiles of queries in flight. pingpong: warpgroups take turns. registers: of a consumer's
    thread and the producer's. o_shared: both pieces of O leave through one buffer.
    """

    warpgroups: int = 2
    block_k: int = 128
    stages: int = 2
    q_stages: int = 2
    pingpong: bool = False
    registers: tuple[int, int] = (240, 24)
    o_shared: bool = False
    anchor: bool = True

    @property
    def block_q(self) -> int:
        """Rows of queries of a program's tile."""
        return ROWS * self.warpgroups


WIDTHS = {64: (64, 0), 96: (64, 32), 128: (128, 0), 192: (128, 64), 256: (256, 0)}
"""Head dims that the kernel has, as the widths of two pieces; others run in the next larger one."""
WIDTHS_V = {**WIDTHS, 256: (128, 128)}
"""The same of V and O."""
TABLE = {
    64: Tiles(warpgroups=3, registers=(160, 32)),
    96: Tiles(),
    128: Tiles(),
    192: Tiles(block_k=64, q_stages=1),
    256: Tiles(block_k=64, q_stages=1, o_shared=True),
}


def width(dim: int) -> int:
    """The kernel's head dim that serves dim columns."""
    return next(w for w in WIDTHS if w >= dim)


def choose(head_dim: int) -> Tiles:
    """The configuration for the head dim."""
    return TABLE[width(head_dim)]


def forward_launch(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, tiles: Tiles | None = None,
    programs: int = 132,
) -> tuple[Tensor, Tensor, Launch]:  # fmt: skip
    """(o, lse, the launch that fills them); o lies in memory in the order of q's dimensions."""
    batch, heads, seqlen_q, _ = q.shape
    group, seqlen_k = heads // k.shape[1], k.shape[2]
    dims = width(q.shape[3])
    tiles = tiles or choose(dims)
    o = like(q, v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    shape = schedule.Shape(
        batch * heads, group, seqlen_q, seqlen_k, tiles.block_q, tiles.block_k, causal,
        seqlen_k * (k.shape[3] + v.shape[3]) * k.element_size(),
    )  # fmt: skip
    table = table_on(q.device, shape, programs)
    (d0, d1), (e0, e1) = WIDTHS[dims], WIDTHS_V[width(v.shape[3])]
    args = (
        *pieces(q, ROWS, d0, d1), *pieces(k, tiles.block_k, d0, d1), *pieces(v, tiles.block_k, e0, e1),
        *pieces(o, ROWS, e0, e1), lse, table,
        *(shape.tiles, heads, group, seqlen_q, seqlen_k, scale * math.log2(math.e)),
    )  # fmt: skip
    options = {
        "NUM_WG": tiles.warpgroups, "BLOCK_N": tiles.block_k, "D0": d0, "D1": d1, "E0": e0, "E1": e1,
        "STAGES": tiles.stages, "Q_STAGES": tiles.q_stages, "O_SHARED": tiles.o_shared,
        "CAUSAL": causal, "PINGPONG": tiles.pingpong, "ANCHOR": tiles.anchor,
        "REGISTERS": tiles.registers[0], "PRODUCER_REGISTERS": tiles.registers[1],
        "num_warps": 4, "enable_fp_fusion": True,
    }  # fmt: skip
    return o, lse, Launch("v3_fwd", kernels.forward, table.shape[1], args, options)


def pieces(x: Tensor, rows: int, first: int, second: int) -> tuple[Any, Any]:
    """Descriptors of boxes of x's rows by ``first`` columns, and of those by ``second`` if there are any."""
    return box(x, rows, first), box(x, rows, second) if second else None


def box(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of boxes of rows by columns of (batch, heads, rows, columns); outside is 0."""
    block = [1, 1, rows, columns]
    layout = _layout(rows, columns, x.dtype)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


@lru_cache(maxsize=64)
def _layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(
        [1, 1, rows, columns], gl.float16 if dtype == torch.float16 else gl.bfloat16
    )


@lru_cache(maxsize=256)
def table_on(device: torch.device, shape: schedule.Shape, programs: int) -> Tensor:
    """The schedule's table on the device."""
    return torch.tensor(schedule.table(shape, programs), dtype=torch.int32, device=device)
