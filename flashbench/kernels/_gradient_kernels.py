"""Gradients of what a score has beside q and k: the additive bias and the attention sinks.

Source: with P from LSE and delta = rowsum(dO * O), d bias = dS = P * (dP - delta), summed over whatever the
bias is shared by (Dao 2022, arXiv:2205.14135, appendix B.2, for dS); d sink = -sum over rows of p_sink *
delta, as the sink's own dP is 0. A row of dS and its sink's sum to 0, so that a bias shared by all keys has
sum over its rows of p_sink * delta: 0 without sinks, exactly, where a sum of dS is left with its rounding.
All sum in registers, in a fixed order: no atomics, equal bits every run.
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
    REFINE: tl.constexpr, ALONE: tl.constexpr, OWN_SLOPES: tl.constexpr,
):  # fmt: skip
    """One block of the gradient of a bias that varies along the keys, summed over what shares it.

    Grid: blocks of the bias over its own rows and columns, times its own batches and heads. A program goes
    over shared_batches batches, shared_heads heads, and all query tiles where one row serves all. Tiles of Q,
    K, V and dO come from L2 each, so that what is moved does not hang on which programs are in step.
    """
    pid = tl.program_id(0)
    own_m = tiles_m if BIAS_ROWS else 1
    many_m = 1 if BIAS_ROWS else tiles_m
    own, tile = pid // (own_m * tiles_n), pid % (own_m * tiles_n)
    own_heads = num_heads // shared_heads
    low, high, diagonal = scores.band(seqlen_q, seqlen_k, before, after, TOP_LEFT)
    r, c = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    start_n = tile % tiles_n * BLOCK_N
    for index in range(shared_batches * shared_heads * many_m):
        batch = own // own_heads + index // (many_m * shared_heads)
        h = own % own_heads + index // many_m % shared_heads
        start_m = (tile // tiles_n + index % many_m) * BLOCK_M
        left, more = seqlen_q - start_m, seqlen_k - start_n
        Qh = tiles.at(tiles.head_at(Q, batch, q_b, h, q_h), start_m, q_n)
        DOh = tiles.at(tiles.head_at(DO, batch, do_b, h, do_h), start_m, do_n)
        Kh = tiles.at(tiles.head_at(K, batch, k_b, h // group, k_h), start_n, k_n)
        Vh = tiles.at(tiles.head_at(V, batch, v_b, h // group, v_h), start_n, v_n)
        row = tiles.head_at(0, batch, l_b, h, l_h) + start_m
        q = tiles.load(Qh, q_n, left, BLOCK_M, DIM, WIDEST, True, WIDE, ".cg")
        k = tiles.load(Kh, k_n, more, BLOCK_N, DIM, WIDEST, True, WIDE, ".cg")
        if EARLY:
            do = tiles.load(DOh, do_n, left, BLOCK_M, DIM_V, WIDEST, True, WIDE, ".cg")
            v = tiles.load(Vh, v_n, more, BLOCK_N, DIM_V, WIDEST, True, WIDE, ".cg")
        s, _ = scores.score(
            tiles.dot_t(q, k, PRECISION), r, c, start_m, start_n, seqlen_q, seqlen_k, scale, cap,
            flash.slope_of(SLOPES, h, batch * num_heads + h, OWN_SLOPES), diagonal,
            flash.bias_at(BIAS, batch, b_b, h, b_h), b_m, b_n,
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
            do = tiles.load(DOh, do_n, left, BLOCK_M, DIM_V, WIDEST, True, WIDE, ".cg")
            v = tiles.load(Vh, v_n, more, BLOCK_N, DIM_V, WIDEST, True, WIDE, ".cg")
        dp = tiles.dot_t(do, v, PRECISION)
        if DROPS:
            kept = scores.kept(start_m + r, start_n + c, batch * num_heads + h, seed, threshold)
            dp = tl.where(kept, dp * keep_scale, 0.0)
        delta = flash.load_rows(DELTA + row, left, BLOCK_M, True, 0.0)
        total += p * (dp - delta[:, None])
    columns = start_n + tl.arange(0, BLOCK_N)
    if BIAS_ROWS:
        rows = tile // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
        at = tiles.at(DBIAS, own, tl.cast(seqlen_q, tl.int64) * seqlen_k)
        at += rows[:, None].to(tl.int64) * seqlen_k + columns[None, :]
        there = (rows < seqlen_q)[:, None] & (columns < seqlen_k)[None, :]
    else:
        total = tl.sum(total, 0)
        at = tiles.at(DBIAS, own, seqlen_k) + columns
        there = columns < seqlen_k
    tl.store(at, total.to(DBIAS.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["l_b", "l_h", *RUNTIME])
def backward_dbias_of_rows(
    LSE, DELTA, DLSE, SINKS, DBIAS, l_b, l_h, num_heads, shared_batches, shared_heads, seqlen_q, tiles_m,
    BIAS_ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One block of the gradient of a bias that all keys share: p_sink * delta, summed over what shares it.

    delta is less DLSE where lse has a gradient, and that is what a row of dS and its sink's then sum to.
    Without sinks the product with 0 keeps a NaN. Grid: as ``backward_dbias``, of one tile along the keys.
    """
    pid = tl.program_id(0)
    own_m = tiles_m if BIAS_ROWS else 1
    many_m = 1 if BIAS_ROWS else tiles_m
    own, tile = pid // own_m, pid % own_m
    own_heads = num_heads // shared_heads
    total = tl.zeros([BLOCK_M], tl.float32)
    for index in range(shared_batches * shared_heads * many_m):
        batch = own // own_heads + index // (many_m * shared_heads)
        h = own % own_heads + index // many_m % shared_heads
        start_m = (tile + index % many_m) * BLOCK_M
        row, left = tiles.head_at(0, batch, l_b, h, l_h) + start_m, seqlen_q - start_m
        delta = flash.load_rows(DELTA + row, left, BLOCK_M, True, 0.0)
        lse = flash.load_rows(LSE + row, left, BLOCK_M, True, float("inf"))
        p = 0.0 if SINKS is None else flash.of_sink(flash.of_head(SINKS, h), lse)
        total += p * delta
        if DLSE is not None:
            keys = lse != float("-inf")
            total += tl.where(keys, flash.load_rows(DLSE + row, left, BLOCK_M, True, 0.0), 0.0)
    if BIAS_ROWS:
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        at = tiles.at(DBIAS, own, seqlen_q) + rows
        tl.store(at, total.to(DBIAS.dtype.element_ty), mask=rows < seqlen_q)
    else:
        tl.store(DBIAS + own, tl.sum(total, 0).to(DBIAS.dtype.element_ty))


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
        total -= flash.of_sink(sink, lse) * delta
    tl.store(DSINKS + h, tl.sum(total, 0))
