"""What Triton kernels with K/V outside and Q inside share: masks, loads past L1, one tile of a backward.

The loop order of FlashAttention-1 (both passes) and of FlashAttention-2's backward. The symbols are
the papers': S = QKᵀ, P = softmax(τS), D = rowsum(dO ∘ O), dS = P ∘ (dP − D), τ the softmax scale.
"""

# Triton reads the bodies below, not Python: no annotations but tl.constexpr, tensors by their capitals.
# ruff: noqa: ANN001, ANN202, RUF005
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from flashbench.kernels import _triton_tiles as tiles

LANES = tl.constexpr(256)
"""Threads of the largest block, and rows of the largest tile."""


@triton.jit
def keys_of(rows, seqlen_q, seqlen_k, CAUSAL: tl.constexpr):
    """How many keys each query row sees: all or, causal, those up to j = i + seqlen_k - seqlen_q."""
    diagonal = rows + (seqlen_k - seqlen_q) if CAUSAL else rows * 0 + seqlen_k
    return tl.minimum(diagonal + 1, seqlen_k)


@triton.jit
def visible(rows, cols, seqlen_q, seqlen_k, CAUSAL: tl.constexpr):
    """Which pairs the mask shows."""
    return cols < keys_of(rows, seqlen_q, seqlen_k, CAUSAL)


@triton.jit
def first_row(start_n, seqlen_q, seqlen_k, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr):
    """Where the first query tile begins that sees key start_n; every later one sees it too."""
    first = 0
    if CAUSAL:
        first = tl.maximum(start_n - (seqlen_k - seqlen_q), 0) // BLOCK_M * BLOCK_M
    return first


@triton.jit
def _load_piece_from_l2(
    base, stride, left, ROWS: tl.constexpr, FROM: tl.constexpr, COLS: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, ROWS)[:, None]
    if WIDE:
        rows = rows.to(tl.int64)
    cols = FROM + tl.arange(0, COLS)[None, :]
    at, mask = base + rows * stride + cols, (rows < left) & (cols < DIM)
    if APART:
        # A shape of its own: loads of one shape are spread over threads alike, eight numbers each where
        # one is of 16 bits; of fp32 numbers as two loads, each a half of every sector that it fetches.
        tile = tl.load(at[None, :, :], mask=mask[None, :, :], other=0.0, cache_modifier=".cg")
        tile = tl.reshape(tile, [ROWS, COLS])
    else:
        tile = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
    return tile


@triton.jit
def load_from_l2(
    base, stride, left, ROWS: tl.constexpr, DIM: tl.constexpr, WIDEST: tl.constexpr, WIDE: tl.constexpr,
    APART: tl.constexpr = False,
):  # fmt: skip
    """As ``tiles.load``, past L1: what a program reads again costs a trip to L2 each time.

    Stores need no such word: L1 writes through. APART: fp32 numbers, where 16-bit ones are loaded too.
    """
    tile = ()
    for i in tl.static_range(tiles.count(DIM, WIDEST)):
        tile = tile + (
            _load_piece_from_l2(
                base,
                stride,
                left,
                ROWS,
                tiles.start(DIM, WIDEST, i),
                tiles.width(DIM, WIDEST, i),
                DIM,
                WIDE,
                APART,
            ),
        )
    return tile


@triton.jit
def load_rows_from_l2(X, left, ROWS: tl.constexpr, OTHER: tl.constexpr):
    """One fp32 number per row, past L1; OTHER for rows that do not exist.

    By one thread each: of fewer rows than a block has threads every warp would load them all.
    """
    lane = tl.arange(0, LANES)
    once = tl.load(X + lane % ROWS, mask=(lane < ROWS) & (lane < left), other=0.0, cache_modifier=".cg")
    found = tl.sum(tl.reshape(once, [LANES // ROWS, ROWS]), 0)
    return tl.where(tl.arange(0, ROWS) < left, found, OTHER)


@triton.jit
def plus(a, b):
    """a plus b."""
    total = ()
    for i in tl.static_range(len(a)):
        total = total + (a[i] + b[i],)
    return total


@triton.jit
def add_gradients(
    dk, dv, q, do, k, p, ds, ROWS: tl.constexpr, DIM: tl.constexpr, WIDEST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """(dK / τ and dV with one query tile added, what the tile gives to dQ / τ).

    p, ds: Pᵀ and dSᵀ, (keys, queries): computed transposed they are left operands for dV and dK.
    """
    dv = tiles.add_dot(dv, p, do, PRECISION)
    dk = tiles.add_dot(dk, ds, q, PRECISION)
    dq = tiles.add_dot(tiles.zeros(ROWS, DIM, WIDEST), tl.trans(ds), k, PRECISION)
    return dk, dv, dq
