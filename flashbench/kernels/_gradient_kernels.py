"""Gradients of what a score has beside q and k: the additive bias and the attention sinks.

Source: with P from LSE and delta = rowsum(dO * O), d bias = dS = P * (dP - delta), summed over whatever the
bias is shared by (Dao 2022, arXiv:2205.14135, appendix B.2, for dS); d sink = -sum over rows of p_sink *
delta, as the sink's own dP is 0. Both sum in registers, in a fixed order: no atomics, equal bits every run.
"""

# Triton reads the bodies below, not Python: no annotations but tl.constexpr, tensors by their capitals.
# ruff: noqa: ANN001, ANN202
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from flashbench.kernels import _block_sparse as sparse
from flashbench.kernels import _flash_kernels as flash
from flashbench.kernels import _scores as scores
from flashbench.kernels import _triton_tiles as tiles

RUNTIME = [
    "num_heads", "group", "shared_batches", "shared_heads", "seqlen_q", "seqlen_k", "tiles_m", "tiles_n",
    "before", "after", "seed", "threshold", "l_b", "l_h", "batches", "rows",
]  # fmt: skip
"""Arguments whose value Triton must not compile for."""


@triton.jit(do_not_specialize=[name for name in RUNTIME if name not in ("batches", "rows")])
def backward_dbias(
    Q, K, V, DO, LSE, DELTA, NORM, DBIAS, SLOPES, BIAS, SLOTS, BITS,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, do_b, do_h, do_n, b_b, b_h, b_m, b_n, l_b, l_h,
    num_heads, group, shared_batches, shared_heads, seqlen_q, seqlen_k, tiles_m, tiles_n, before, after,
    seed, threshold, keep_scale, scale, cap,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDEST: tl.constexpr,
    LOWER: tl.constexpr, UPPER: tl.constexpr, TOP_LEFT: tl.constexpr,
    CAPPED: tl.constexpr, BIAS_ROWS: tl.constexpr, BIAS_COLS: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr, EXACT: tl.constexpr,
    REFINE: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """One block of the bias's gradient, summed over batches, heads, rows or columns that share it.

    Grid: blocks of the bias over its own rows and columns, times its own batches and heads. A program goes
    over shared_batches batches, shared_heads heads, and all query or key tiles where one entry serves all.
    """
    pid = tl.program_id(0)
    own_m, own_n = (tiles_m if BIAS_ROWS else 1), (tiles_n if BIAS_COLS else 1)
    many_m, many_n = (1 if BIAS_ROWS else tiles_m), (1 if BIAS_COLS else tiles_n)
    own, tile = pid // (own_m * own_n), pid % (own_m * own_n)
    own_heads = num_heads // shared_heads
    low, high, diagonal = scores.band(seqlen_q, seqlen_k, before, after, TOP_LEFT)
    r, c = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for index in range(shared_batches * shared_heads * many_m * many_n):
        batch = own // own_heads + index // (many_n * many_m * shared_heads)
        h = own % own_heads + index // (many_n * many_m) % shared_heads
        start_m = (tile // own_n + index // many_n % many_m) * BLOCK_M
        start_n = (tile % own_n + index % many_n) * BLOCK_N
        left, more = seqlen_q - start_m, seqlen_k - start_n
        Qh = tiles.at(tiles.head_at(Q, batch, q_b, h, q_h), start_m, q_n)
        DOh = tiles.at(tiles.head_at(DO, batch, do_b, h, do_h), start_m, do_n)
        Kh = tiles.at(tiles.head_at(K, batch, k_b, h // group, k_h), start_n, k_n)
        Vh = tiles.at(tiles.head_at(V, batch, v_b, h // group, v_h), start_n, v_n)
        row = tiles.head_at(0, batch, l_b, h, l_h) + start_m
        q = tiles.load(Qh, q_n, left, BLOCK_M, DIM, WIDEST, True, WIDE)
        k = tiles.load(Kh, k_n, more, BLOCK_N, DIM, WIDEST, True, WIDE)
        if EARLY:
            do = tiles.load(DOh, do_n, left, BLOCK_M, DIM_V, WIDEST, True, WIDE)
            v = tiles.load(Vh, v_n, more, BLOCK_N, DIM_V, WIDEST, True, WIDE)
        s, _ = scores.score(
            tiles.dot_t(q, k, PRECISION), r, c, start_m, start_n, seqlen_q, seqlen_k, scale, cap,
            flash.of_head(SLOPES, h), diagonal, flash.bias_at(BIAS, batch, b_b, h, b_h), b_m, b_n,
            CAPPED, BIAS_ROWS, BIAS_COLS, EXACT,
        )  # fmt: skip
        lse = flash.load_lse(LSE + row, left, BLOCK_M, True, BIAS)
        p = flash.probabilities(s, lse[:, None], 1.0, BIAS, EXACT)
        if REFINE:
            p *= flash.load_rows(NORM + row, left, BLOCK_M, True, 0.0)[:, None]
        seen = scores.visible(start_m + r, start_n + c, seqlen_k, low, high, LOWER, UPPER)
        if SLOTS is not None:
            seen &= sparse.visible_anywhere(SLOTS, BITS, seqlen_k, start_m, start_n, r, c, BLOCK_N)
        if ALONE:
            seen &= ~scores.alone(start_m + r, seqlen_k, low, high, LOWER, UPPER, SLOTS)
        p = tl.where(seen, p, 0.0)
        if not EARLY:
            do = tiles.load(DOh, do_n, left, BLOCK_M, DIM_V, WIDEST, True, WIDE)
            v = tiles.load(Vh, v_n, more, BLOCK_N, DIM_V, WIDEST, True, WIDE)
        dp = tiles.dot_t(do, v, PRECISION)
        if DROPS:
            kept = scores.kept(start_m + r, start_n + c, batch * num_heads + h, seed, threshold)
            dp = tl.where(kept, dp * keep_scale, 0.0)
        delta = flash.load_rows(DELTA + row, left, BLOCK_M, True, 0.0)
        total += p * (dp - delta[:, None])
    if not BIAS_ROWS:
        total = tl.sum(total, 0)[None, :]
    if not BIAS_COLS:
        total = tl.sum(total, 1)[:, None]
    _store_block(
        DBIAS,
        total,
        own,
        tile // own_n,
        tile % own_n,
        seqlen_q,
        seqlen_k,
        BLOCK_M,
        BLOCK_N,
        BIAS_ROWS,
        BIAS_COLS,
    )


@triton.jit
def _store_block(
    X, x, matrix, tile_m, tile_n, rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_ROWS: tl.constexpr, HAS_COLS: tl.constexpr,
):  # fmt: skip
    """Store a block of contiguous matrices of rows x columns, either of which may be 1."""
    if HAS_ROWS:
        r = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    else:
        r = tl.zeros([1, 1], tl.int32)
        rows = 1
    if HAS_COLS:
        c = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    else:
        c = tl.zeros([1, 1], tl.int32)
        columns = 1
    at = tiles.at(X, matrix, tl.cast(rows, tl.int64) * columns) + r.to(tl.int64) * columns + c
    tl.store(at, x.to(X.dtype.element_ty), mask=(r < rows) & (c < columns))


@triton.jit(do_not_specialize=["l_b", "l_h", "batches", "rows"])
def backward_dsinks(LSE, DELTA, SINKS, DSINKS, l_b, l_h, batches, rows, BLOCK_M: tl.constexpr):
    """d sink of one head: the negative sum over all rows of exp(sink - lse) * delta. Grid: heads."""
    h = tl.program_id(0)
    sink = tl.load(SINKS + h).to(tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    blocks = tl.cdiv(rows, BLOCK_M)
    for index in range(batches * blocks):
        start = index % blocks * BLOCK_M
        row = tiles.head_at(0, index // blocks, l_b, h, l_h) + start
        lse = flash.load_rows(LSE + row, rows - start, BLOCK_M, True, float("inf"))
        delta = flash.load_rows(DELTA + row, rows - start, BLOCK_M, True, 0.0)
        # lse is -inf, as the sink, of a row without keys: -inf + inf
        p = tl.where(sink == float("-inf"), 0.0, tiles.exp(sink - lse))
        total -= p * delta
    tl.store(DSINKS + h, tl.sum(total, 0))
