"""What rounds q, k and v to fp8 on a GPU, to the bit as _fp8.py does in torch. Launched by _fp8_rounding.py.

A program has a block of rows of a head, which share a scale.
"""

# Triton reads the bodies below, not Python: no annotations but tl.constexpr, tensors by their capitals.
# ruff: noqa: ANN001, ANN202
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from flashbench.kernels import _fp8
from flashbench.kernels._fp8_kernels import rounded

SMALLEST = tl.constexpr(_fp8.SMALLEST)


@triton.jit
def _of_position(p):
    """The key at a position of a V whose keys are interleaved (``_fp8.interleave``)."""
    return (p & ~15) + ((p >> 1) & 1) * 8 + ((p >> 2) & 3) * 2 + (p & 1)


@triton.jit
def _load(X, stride_b, stride_h, stride_r, heads, rows, head, row, cols, WIDTH: tl.constexpr):
    """(x in fp32, 0 where there is none, where there is) of rows of a head."""
    start = X + (head // heads).to(tl.int64) * stride_b + (head % heads).to(tl.int64) * stride_h
    exists = (row < rows)[:, None] & (cols < WIDTH)[None, :]
    x = tl.load(start + row.to(tl.int64)[:, None] * stride_r + cols[None, :], mask=exists, other=0.0)
    return x.to(tl.float32), exists


@triton.jit
def columns(
    V, TOP, BOTTOM, TOTAL, COUNT, stride_b, stride_h, stride_r, heads, rows, blocks,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Of each column of a block's finite numbers the largest, the least, their sum and how many they are."""
    block, head = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    cols = tl.arange(0, COLS)
    x, exists = _load(V, stride_b, stride_h, stride_r, heads, rows, head, block * BLOCK + tl.arange(0, BLOCK),
                      cols, WIDTH)  # fmt: skip
    finite = exists & (tl.abs(x) < float("inf"))
    at = (head.to(tl.int64) * blocks + block) * WIDTH + cols
    there = cols < WIDTH
    tl.store(TOP + at, tl.max(tl.where(finite, x, float("-inf")), 0), mask=there)
    tl.store(BOTTOM + at, tl.min(tl.where(finite, x, float("inf")), 0), mask=there)
    tl.store(TOTAL + at, tl.sum(tl.where(finite, x, 0.0).to(tl.float64), 0), mask=there)
    tl.store(COUNT + at, tl.sum(finite.to(tl.int32), 0), mask=there)


@triton.jit
def quantise(
    X, MEAN, VALUES, SCALES, stride_b, stride_h, stride_r, heads, rows, blocks, wide,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr, LARGEST: tl.constexpr,
    GIVEN: tl.constexpr, TURNED: tl.constexpr, BY_HAND: tl.constexpr,
):  # fmt: skip
    """VALUES, fp8, of X over a scale per block, which are found, or GIVEN and X less MEAN is rounded.

    VALUES: (batch, heads, rows, WIDTH); TURNED: (batch, heads, WIDTH, wide), keys interleaved, 0 in the
    padding. LARGEST: number of the format.
    """
    block, head = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    place, cols = tl.arange(0, BLOCK), tl.arange(0, COLS)
    row = block * BLOCK + (_of_position(place) if TURNED else place)
    x, exists = _load(X, stride_b, stride_h, stride_r, heads, rows, head, row, cols, WIDTH)
    at = head.to(tl.int64) * blocks + block
    if GIVEN:
        scale = tl.load(SCALES + at)
        x -= tl.load(MEAN + head.to(tl.int64) * WIDTH + cols, mask=cols < WIDTH, other=0.0)[None, :]
    else:
        scale = tl.maximum(
            tl.div_rn(tl.max(tl.max(tl.abs(x), 1), 0), tl.full([], LARGEST, tl.float32)), SMALLEST
        )
        scale = tl.where(tl.max(tl.max((x != x).to(tl.int32), 1), 0) > 0, float("nan"), scale)
        tl.store(SCALES + at, scale)
    x = tl.div_rn(x, tl.broadcast_to(scale, [BLOCK, COLS]))
    x = tl.where(x > LARGEST, LARGEST * 1.0, tl.where(x < -LARGEST, -LARGEST * 1.0, x))
    x = rounded(tl.where(exists, x, 0.0), VALUES.dtype.element_ty, BY_HAND)
    if TURNED:
        place += block * BLOCK
        to = VALUES + (head.to(tl.int64) * WIDTH + cols)[:, None] * wide + place[None, :]
        tl.store(to, tl.trans(x), mask=(cols < WIDTH)[:, None] & (place < wide)[None, :])
    else:
        to = VALUES + (head.to(tl.int64) * rows + row)[:, None] * WIDTH + cols[None, :]
        tl.store(to, x, mask=exists)
