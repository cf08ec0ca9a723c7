"""What goes before and after flash-v3's backward kernel: rows' LSE and delta, dQ's accumulator.

Plain Triton: both only move bytes.
"""

# Triton reads the bodies below, not Python: no annotations but tl.constexpr, tensors by their capitals.
# ruff: noqa: ANN001, ANN202, E741
# mypy: ignore-errors

from __future__ import annotations

import math

import triton
import triton.language as tl

from flashbench.kernels import _triton_tiles as tiles

LOG2E = tl.constexpr(math.log2(math.e))
BLOCK = tl.constexpr(64)
"""Sides of a block of dQ's accumulator."""
RUNTIME = ["num_heads", "seqlen_q", "num_tiles", "seqlen_k"]
"""Arguments whose value Triton must not compile for."""


@triton.jit(do_not_specialize=RUNTIME)
def prepare(
    O, DO, LSE, DLSE, LSE_2, DELTA, DQ_ACC, o_b, o_h, o_n, do_b, do_h, do_n, num_heads, seqlen_q, num_tiles,
    BLOCK_M: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, WIDEST: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """LSE in powers of two and delta = rowsum(dO * O) - dLSE, tile after tile; dQ's accumulator = 0.

    Rows that do not exist or see no key: an infinite LSE, so that P is 0. DIM: columns of the accumulator,
    or 0 for none. Grid: num_tiles times heads (of all batches).
    """
    tile = tl.program_id(0)
    head, start_m = tile // num_tiles, tile % num_tiles * BLOCK_M
    batch, h = head // num_heads, head % num_heads
    left = seqlen_q - start_m
    O = tiles.at(tiles.head_at(O, batch, o_b, h, o_h), start_m, o_n)
    DO = tiles.at(tiles.head_at(DO, batch, do_b, h, do_h), start_m, do_n)
    o = tiles.load(O, o_n, left, BLOCK_M, DIM_V, WIDEST, True, WIDE)
    do = tiles.load(DO, do_n, left, BLOCK_M, DIM_V, WIDEST, True, WIDE)
    delta = tiles.row_sums(o, do)
    rows = tl.arange(0, BLOCK_M)
    row = head.to(tl.int64) * seqlen_q + start_m + rows
    lse = tl.load(LSE + row, mask=rows < left, other=float("-inf"))
    if DLSE is not None:  # d lse / d s = p, as d o / d s = p (dP - delta)
        delta -= tl.load(DLSE + row, mask=rows < left, other=0.0)
    at = tile.to(tl.int64) * BLOCK_M + rows
    tl.store(LSE_2 + at, tl.where(lse == float("-inf"), float("inf"), lse * LOG2E))
    tl.store(DELTA + at, delta)
    if DIM > 0:
        zeros = tl.zeros([BLOCK_M * DIM], tl.float32)
        tl.store(DQ_ACC + tile.to(tl.int64) * (BLOCK_M * DIM) + tl.arange(0, BLOCK_M * DIM), zeros)


@triton.jit(do_not_specialize=RUNTIME)
def convert(
    DQ_ACC, DQ, dq_b, dq_h, dq_n, num_heads, seqlen_q, num_tiles, seqlen_k, scale,
    BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """dQ = τ times the accumulator, in dQ's dtype, its blocks put in order (``add_dq``).

    ALONE: rows that see one key have no gradient, to the last bit. Grid: two blocks of 64 x 64 times
    num_tiles times heads (of all batches).
    """
    block = tl.program_id(0)
    tile, half = block // 2, block % 2
    head, start_m = tile // num_tiles, tile % num_tiles * BLOCK_M
    batch, h = head // num_heads, head % num_heads
    start_d = 0
    if BLOCK_M > BLOCK:
        start_m += half * BLOCK
    else:
        start_d += half * BLOCK
    acc = tl.load(DQ_ACC + block.to(tl.int64) * (BLOCK * BLOCK) + tl.arange(0, BLOCK * BLOCK)) * scale
    acc = tl.permute(tl.reshape(acc, [4, 2, 4, 4, 2, 4, 2, 2]), [0, 1, 3, 4, 2, 6, 5, 7])
    rows = start_m + tl.arange(0, BLOCK)
    cols = start_d + tl.arange(0, BLOCK)
    at = tiles.head_at(DQ, batch, dq_b, h, dq_h) + rows.to(tl.int64)[:, None] * dq_n + cols[None, :]
    seen = (rows < seqlen_q)[:, None] & (cols < COLUMNS)[None, :]
    dq = tl.reshape(acc, [BLOCK, BLOCK])
    if ALONE:
        keys = tl.full([BLOCK], seqlen_k, tl.int32)
        if CAUSAL:
            keys = tl.minimum(keys, rows + 1 + (seqlen_k - seqlen_q))
        dq = tl.where((keys == 1)[:, None], 0.0, dq)
    tl.store(at, dq.to(DQ.dtype.element_ty), mask=seen)
