"""FlashAttention-2 in portable Triton: dK and dV, K/V outside; see _flash_kernels.py."""

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


@triton.jit
def _dkdv_tiles(
    dk, dv, k, v, Q, DO, LSE, DELTA, NORM, BIAS, SPANS, BLOCKS, SLOTS, BITS, q_n, do_n, b_m, b_n,
    start_n, lo, hi, middle, skip, seqlen_q, seqlen_k, low, high, diagonal, slope, head, seed, threshold,
    keep_scale, scale, cap,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDEST: tl.constexpr,
    LOWER: tl.constexpr, UPPER: tl.constexpr, MASKED: tl.constexpr,
    CAPPED: tl.constexpr, BIAS_ROWS: tl.constexpr, BIAS_COLS: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr, EXACT: tl.constexpr,
    REFINE: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """Add the query tiles lo..hi to (dk, dv); with MASKED those from middle on are ``skip`` further.

    Of a block mask lo and hi are places in its lists, of partial blocks with MASKED.
    S and dP are computed transposed, so that P and dS are left operands in registers.
    """
    SCORED: tl.constexpr = CAPPED or slope is not None or BIAS is not None
    unit = 1.0 if SCORED else scale
    r, c = tl.arange(0, BLOCK_M)[None, :], tl.arange(0, BLOCK_N)[:, None]
    if SPANS is not None:
        ahead = sparse.ahead_at(BLOCKS, lo * BLOCK_M, hi * BLOCK_M)
    for index in range(lo, hi):
        if SPANS is not None:
            start_m = index * BLOCK_M + ahead
            ahead = sparse.ahead_at(BLOCKS, (index + 1) * BLOCK_M, hi * BLOCK_M)
        elif MASKED:
            start_m = tl.where(index < middle, index, index + skip) * BLOCK_M
        else:
            start_m = index * BLOCK_M
        left = seqlen_q - start_m
        q = tiles.load(tiles.at(Q, start_m, q_n), q_n, left, BLOCK_M, DIM, WIDEST, MASKED, WIDE)
        if EARLY:
            do = tiles.load(tiles.at(DO, start_m, do_n), do_n, left, BLOCK_M, DIM_V, WIDEST, MASKED, WIDE)
        lse = flash.load_lse(LSE + start_m, left, BLOCK_M, MASKED, BIAS)
        s = tiles.dot_t(k, q, PRECISION)
        if SCORED:
            s, t = scores.score(
                s, r, c, start_m, start_n, seqlen_q, seqlen_k, scale, cap, slope, diagonal, BIAS, b_m, b_n,
                CAPPED, BIAS_ROWS, BIAS_COLS, EXACT,
            )  # fmt: skip
        p = flash.probabilities(s, lse[None, :], unit, BIAS, EXACT)
        if MASKED and SPANS is not None:
            seen = sparse.visible(SLOTS, BITS, index * BLOCK_M, start_m, start_n, r, c, BLOCK_N)
            p = tl.where(seen, p, 0.0)
        elif MASKED and (LOWER or UPPER):
            seen = scores.visible(start_m + r, start_n + c, seqlen_k, low, high, LOWER, UPPER)
            p = tl.where(seen, p, 0.0)
        if REFINE:
            p *= flash.load_rows(NORM + start_m, left, BLOCK_M, MASKED, 0.0)[None, :]
        if not EARLY:
            do = tiles.load(tiles.at(DO, start_m, do_n), do_n, left, BLOCK_M, DIM_V, WIDEST, MASKED, WIDE)
        delta = flash.load_rows(DELTA + start_m, left, BLOCK_M, MASKED, 0.0)
        if DROPS:
            kept = scores.kept(start_m + r, start_n + c, head, seed, threshold)
            dv = tiles.add_dot(dv, tl.where(kept, p * keep_scale, 0.0), do, PRECISION)
            dp = tl.where(kept, tiles.dot_t(v, do, PRECISION) * keep_scale, 0.0)
        else:
            dv = tiles.add_dot(dv, p, do, PRECISION)
            dp = tiles.dot_t(v, do, PRECISION)
        ds = p * (dp - delta[None, :])
        if CAPPED:
            ds *= 1.0 - t * t
        if MASKED and ALONE:
            alone = scores.alone(start_m + r, seqlen_k, low, high, LOWER, UPPER, SPANS)
            ds = tl.where(alone, 0.0, ds)
        dk = tiles.add_dot(dk, ds, q, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=flash.RUNTIME)
def backward_dkdv(
    Q, K, V, DO, LSE, DELTA, NORM, DK, DV, SLOPES, BIAS, CU_Q, CU_K, SPANS, BLOCKS, SLOTS, BITS,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, do_b, do_h, do_n, b_b, b_h, b_m, b_n, l_b, l_h, m_b, m_h,
    heads, num_heads, seqlen_q, seqlen_k, num_tiles, section, before, after,
    seed, threshold, keep_scale, scale, cap, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDEST: tl.constexpr,
    LOWER: tl.constexpr, UPPER: tl.constexpr, TOP_LEFT: tl.constexpr,
    CAPPED: tl.constexpr, BIAS_ROWS: tl.constexpr, BIAS_COLS: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr, EXACT: tl.constexpr,
    REFINE: tl.constexpr, ALONE: tl.constexpr, OWN_SLOPES: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of keys, summed over the query heads that share it (Algorithm 2).

    heads and num_heads count K/V heads. Grid: num_tiles times heads. Two loops, not one with a branch
    as above: on an H100 the masks in the loads of the one cost more here than the code of the other.
    """
    head, tile = tiles.place(num_tiles, heads, section, False)
    batch, h = head // num_heads, head % num_heads
    first_q, seqlen_q = scores.sequence(CU_Q, batch, seqlen_q)
    first_k, seqlen_k = scores.sequence(CU_K, batch, seqlen_k)
    low, high, diagonal = scores.band(seqlen_q, seqlen_k, before, after, TOP_LEFT)
    start_n = tile * BLOCK_N
    left = seqlen_k - start_n
    K = tiles.at(tiles.head_at(K, batch, k_b, h, k_h), first_k + start_n, k_n)
    V = tiles.at(tiles.head_at(V, batch, v_b, h, v_h), first_k + start_n, v_n)
    k = tiles.load(K, k_n, left, BLOCK_N, DIM, WIDEST, True, WIDE)
    v = tiles.load(V, v_n, left, BLOCK_N, DIM_V, WIDEST, True, WIDE)
    dk = tiles.zeros(BLOCK_N, DIM, WIDEST)
    dv = tiles.zeros(BLOCK_N, DIM_V, WIDEST)
    if SPANS is None:
        first, clear, full, end = scores.queries_of(
            start_n, seqlen_q, seqlen_k, low, high, BLOCK_M, BLOCK_N, LOWER, UPPER
        )
        if CU_K is not None:
            end = tl.where(left > 0, end, first)
            full = tl.where(left > 0, full, clear)
        # masked tiles: first..clear, then full..end
        skip = full - clear
    else:
        clear, full, end = sparse.walk(SPANS, start_n)
        clear, full, end = clear // BLOCK_M, full // BLOCK_M, tl.cdiv(end, BLOCK_M)
        first, skip = full, 0  # masked are those of partial blocks, from full on
    for g in range(GROUP):
        hq = h * GROUP + g
        Qg = tiles.at(tiles.head_at(Q, batch, q_b, hq, q_h), first_q, q_n)
        DOg = tiles.at(tiles.head_at(DO, batch, do_b, hq, do_h), first_q, do_n)
        BIASg = flash.bias_at(BIAS, batch, b_b, hq, b_h)
        slope = flash.slope_of(SLOPES, hq, head * GROUP + g, OWN_SLOPES)
        row = tiles.head_at(0, batch, l_b, hq, l_h) + first_q
        dk, dv = _dkdv_tiles(
            dk, dv, k, v, Qg, DOg, LSE + row, DELTA + row, NORM + row, BIASg, SPANS, BLOCKS,
            SLOTS, BITS, q_n, do_n, b_m, b_n, start_n, first, end - skip, clear, skip,
            seqlen_q, seqlen_k, low, high, diagonal, slope, head * GROUP + g, seed, threshold,
            keep_scale, scale, cap, BLOCK_M, BLOCK_N, DIM, DIM_V, WIDEST, LOWER, UPPER, True,
            CAPPED, BIAS_ROWS, BIAS_COLS, DROPS, PRECISION, WIDE, EARLY, EXACT, REFINE, ALONE,
        )  # fmt: skip
        dk, dv = _dkdv_tiles(
            dk, dv, k, v, Qg, DOg, LSE + row, DELTA + row, NORM + row, BIASg, SPANS, BLOCKS,
            SLOTS, BITS, q_n, do_n, b_m, b_n, start_n, clear, full, clear, skip,
            seqlen_q, seqlen_k, low, high, diagonal, slope, head * GROUP + g, seed, threshold,
            keep_scale, scale, cap, BLOCK_M, BLOCK_N, DIM, DIM_V, WIDEST, LOWER, UPPER, False,
            CAPPED, BIAS_ROWS, BIAS_COLS, DROPS, PRECISION, WIDE, EARLY, EXACT, REFINE, ALONE,
        )  # fmt: skip
    row = tiles.head_at(0, batch, m_b, h, m_h) + first_k + start_n
    tiles.store(DK + row * DIM, DIM, left, tiles.times(dk, scale), BLOCK_N, DIM, WIDEST, False)
    tiles.store(DV + row * DIM_V, DIM_V, left, dv, BLOCK_N, DIM_V, WIDEST, False)
