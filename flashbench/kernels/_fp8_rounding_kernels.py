"""What rounds q, k and v to fp8 on a GPU, to the numbers of _fp8.py in torch. Launched by _fp8_rounding.py.

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
SHRUNK = tl.constexpr(1 / _fp8.GROWN)
LEAST_STEP = tl.constexpr(_fp8.LEAST_STEP)
SPREAD, LEAST = tl.constexpr(_fp8.SPREAD), tl.constexpr(_fp8.LEAST)
ROUND = tl.constexpr(1.5 * 2.0**23)
"""A number of less than 2**22 that this is added to and taken off is rounded to a whole one."""


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
def _power(exponent):
    """2 ** exponent, of -126 to 127, in fp32."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _extremes(TOP, BOTTOM, at, exists):
    """(the largest, the least) of some columns of some blocks, as nothing is larger or less where none is."""
    top = tl.load(TOP + at, mask=exists, other=float("-inf"))
    return top, tl.load(BOTTOM + at, mask=exists, other=float("inf"))


@triton.jit
def _without(top, bottom, mean):
    """The largest magnitudes without the mean."""
    return tl.maximum(tl.maximum(top - mean[None, :], mean[None, :] - bottom), 0.0)


@triton.jit
def _power_of(TOP, BOTTOM, COUNT, at, exists, mean, tall, LARGEST: tl.constexpr):
    """(whether all numbers of some blocks are finite, the least power of two that may be their scale)."""
    top, bottom = _extremes(TOP, BOTTOM, at, exists)
    largest = tl.max(_without(top, bottom, mean), 1)
    missing = exists & (tl.load(COUNT + at, mask=exists, other=0) != tall[:, None])
    fine = (tl.max(missing.to(tl.int32), 1) == 0) & (largest < float("inf"))
    limit = tl.broadcast_to(tl.full([], LARGEST, tl.float32), largest.shape)
    scale = tl.where(fine, tl.maximum(tl.div_rn(largest, limit), SMALLEST), SMALLEST)
    above = scale.to(tl.int32, bitcast=True) + 0x7FFFFF  # the next exponent but of a power of two
    return fine, (above & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _of_chunk(head, first, blocks, cols, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """(blocks from the first on, where their columns are, which of those exist)."""
    block = first + tl.arange(0, CHUNK)
    at = (head * blocks + block)[:, None] * WIDTH + cols[None, :]
    return block, at, (block < blocks)[:, None] & (cols < WIDTH)[None, :]


@triton.jit
def means(
    TOP, BOTTOM, TOTAL, COUNT, MEAN, TAKEN, SCALES, DIVISORS, rows, blocks,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr, LARGEST: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """What V is without, MEAN and TAKEN, of a head, from ``columns``; then its SCALES.

    DIVISORS: those, NaN for a block in which a number is not finite. A program has a head.
    """
    head = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, COLS)
    total, count = tl.zeros([COLS], tl.float64), tl.zeros([COLS], tl.int32)
    most = tl.zeros([COLS], tl.float32)
    for first in range(0, blocks, CHUNK):
        block, at, exists = _of_chunk(head, first, blocks, cols, CHUNK, WIDTH)
        total += tl.sum(tl.load(TOTAL + at, mask=exists, other=0.0), 0)
        count += tl.sum(tl.load(COUNT + at, mask=exists, other=0), 0)
        top, bottom = _extremes(TOP, BOTTOM, at, exists)
        most = tl.maximum(most, tl.max(tl.maximum(top, -bottom), 0))
    mean = (total / tl.maximum(count, 1).to(tl.float64)).to(tl.float32)
    exponent = (tl.max(most, 0).to(tl.int32, bitcast=True) >> 23) - 126
    exponent = tl.maximum(exponent - 8, LEAST_STEP)
    mean = ((mean * _power(-exponent) + ROUND) - ROUND) * _power(exponent)
    kept = tl.full([COLS], 1, tl.int32)
    for first in range(0, blocks, CHUNK):
        block, at, exists = _of_chunk(head, first, blocks, cols, CHUNK, WIDTH)
        top, bottom = _extremes(TOP, BOTTOM, at, exists)
        before = tl.maximum(tl.maximum(top, -bottom), 0.0)
        kept &= tl.min((_without(top, bottom, mean) * SHRUNK <= before).to(tl.int32), 0)
    mean = tl.where(kept > 0, mean, 0.0)
    tl.store(MEAN + head * WIDTH + cols, mean, mask=cols < WIDTH)
    tl.store(TAKEN + head * WIDTH + cols, mean.to(TAKEN.dtype.element_ty), mask=cols < WIDTH)
    highest = tl.full([], 0.0, tl.float32)
    for first in range(0, blocks, CHUNK):
        block, at, exists = _of_chunk(head, first, blocks, cols, CHUNK, WIDTH)
        tall = tl.minimum(rows - block * BLOCK, BLOCK)
        fine, scale = _power_of(TOP, BOTTOM, COUNT, at, exists, mean, tall, LARGEST)
        highest = tl.maximum(highest, tl.max(scale, 0))
    for first in range(0, blocks, CHUNK):
        block, at, exists = _of_chunk(head, first, blocks, cols, CHUNK, WIDTH)
        tall = tl.minimum(rows - block * BLOCK, BLOCK)
        fine, scale = _power_of(TOP, BOTTOM, COUNT, at, exists, mean, tall, LARGEST)
        scale = tl.where(scale > SMALLEST, scale, highest)
        scale = tl.maximum(tl.maximum(scale, highest * SPREAD), LEAST)
        tl.store(SCALES + head * blocks + block, scale, mask=block < blocks)
        tl.store(DIVISORS + head * blocks + block, tl.where(fine, scale, float("nan")), mask=block < blocks)


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
    x = rounded(x, VALUES.dtype.element_ty, BY_HAND)
    if TURNED:
        # not before they are rounded: ptxas makes other numbers of pairs of which it knows that both are 0
        x = tl.where(exists, x.to(tl.uint8, bitcast=True), 0).to(VALUES.dtype.element_ty, bitcast=True)
        place += block * BLOCK
        to = VALUES + (head.to(tl.int64) * WIDTH + cols)[:, None] * wide + place[None, :]
        tl.store(to, tl.trans(x), mask=(cols < WIDTH)[:, None] & (place < wide)[None, :])
    else:
        to = VALUES + (head.to(tl.int64) * rows + row)[:, None] * WIDTH + cols[None, :]
        tl.store(to, x, mask=exists)
