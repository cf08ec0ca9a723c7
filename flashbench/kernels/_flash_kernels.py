"""FlashAttention-2 in portable Triton: the forward and dQ, Q outside. Launched by _launches.py.

Source: Dao 2023, arXiv:2307.08691, Algorithms 1 and 2. The backward is two kernels, one per output
side (dK and dV; dQ): both sum in registers, so there are no atomics and every run gives equal bits.

Only tiles on the diagonal or at an edge are masked, and tiles that nobody sees are not visited. Row
state and accumulators are fp32. EXACT is for fp32 inputs, where nothing larger hides a rounding error.
EARLY loads both streamed tiles before the first product: where rows are not aligned to 16 elements, so that
loads are not asynchronous, ptxas 12.8 gave wrong results on sm_90 for loads between the products.
What masks, biases and dropout do to a score is in _scores.py, how a block mask is walked in _block_sparse.py;
where none is asked for, no code is made. With a block mask a tile that is masked is one of a partial block.
"""

# Triton reads the bodies below, not Python: no annotations but tl.constexpr, tensors by their capitals.
# ruff: noqa: ANN001, ANN202, E741, SIM108
# mypy: ignore-errors

from __future__ import annotations

import math

import triton
import triton.language as tl

from flashbench.kernels import _block_sparse as sparse
from flashbench.kernels import _scores as scores
from flashbench.kernels import _triton_tiles as tiles

LOG2E = tl.constexpr(math.log2(math.e))
RUNTIME = [
    "heads", "num_heads", "group", "seqlen_q", "seqlen_k", "num_tiles", "section", "before", "after",
    "l_b", "l_h", "m_b", "m_h", "seed", "threshold",
]  # fmt: skip
"""Arguments whose value Triton must not compile for."""


@triton.jit
def of_head(X, h):
    """The head's number in X, or None where there is no X."""
    if X is None:
        x = None
    else:
        x = tl.load(X + h).to(tl.float32)
    return x


@triton.jit
def slope_of(SLOPES, h, head, OWN_SLOPES: tl.constexpr):
    """The slope of a head, or with OWN_SLOPES, where each sequence has its own, of one of all batches'."""
    return of_head(SLOPES, head if OWN_SLOPES else h)


@triton.jit
def bias_at(BIAS, batch, b_b, h, b_h):
    if BIAS is None:
        base = None
    else:
        base = tiles.head_at(BIAS, batch, b_b, h, b_h)
    return base


@triton.jit(do_not_specialize=RUNTIME)
def forward(
    Q, K, V, O, LSE, SLOPES, BIAS, SINKS, CU_Q, CU_K, SPANS, BLOCKS, SLOTS, BITS,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n, b_b, b_h, b_m, b_n, l_b, l_h,
    heads, num_heads, group, seqlen_q, seqlen_k, num_tiles, section, before, after,
    seed, threshold, keep_scale, scale, cap,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDEST: tl.constexpr,
    LOWER: tl.constexpr, UPPER: tl.constexpr, LAST_FIRST: tl.constexpr, TOP_LEFT: tl.constexpr,
    CAPPED: tl.constexpr, BIAS_ROWS: tl.constexpr, BIAS_COLS: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr, EXACT: tl.constexpr,
    OWN_SLOPES: tl.constexpr,
):  # fmt: skip
    """O and LSE of one block of queries (Algorithm 1). Grid: num_tiles times heads (of all batches)."""
    SCORED: tl.constexpr = CAPPED or SLOPES is not None or BIAS is not None
    head, tile = tiles.place(num_tiles, heads, section, LAST_FIRST)
    batch, h = head // num_heads, head % num_heads
    first_q, seqlen_q = scores.sequence(CU_Q, batch, seqlen_q)
    first_k, seqlen_k = scores.sequence(CU_K, batch, seqlen_k)
    low, high, diagonal = scores.band(seqlen_q, seqlen_k, before, after, TOP_LEFT)
    start_m = tile * BLOCK_M
    left = seqlen_q - start_m
    Q = tiles.at(tiles.head_at(Q, batch, q_b, h, q_h), first_q + start_m, q_n)
    K = tiles.at(tiles.head_at(K, batch, k_b, h // group, k_h), first_k, k_n)
    V = tiles.at(tiles.head_at(V, batch, v_b, h // group, v_h), first_k, v_n)
    BIAS = bias_at(BIAS, batch, b_b, h, b_h)
    slope = slope_of(SLOPES, h, head, OWN_SLOPES)
    q = tiles.load(Q, q_n, left, BLOCK_M, DIM, WIDEST, True, WIDE)
    acc = tiles.zeros(BLOCK_M, DIM_V, WIDEST)
    unit = 1.0 if SCORED else scale  # what a score times is a natural logarithm
    if SINKS is None:
        total = tl.zeros([BLOCK_M], tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    else:  # one key more, that has no value
        total = tl.full([BLOCK_M], 1.0, tl.float32)
        top = tl.zeros([BLOCK_M], tl.float32) + of_head(SINKS, h) / unit
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    if SPANS is None:
        first, clear, full, end = scores.keys_of(
            start_m, seqlen_q, seqlen_k, low, high, BLOCK_M, BLOCK_N, LOWER, UPPER
        )
    else:
        first, full, end = sparse.walk(SPANS, start_m)
        ahead = sparse.ahead_at(BLOCKS, first, end)
    if CU_Q is not None:
        end = tl.where(left > 0, end, 0)
    for position in range(first, end, BLOCK_N):
        if SPANS is None:
            start_n = position
        else:
            start_n = position + ahead
            ahead = sparse.ahead_at(BLOCKS, position + BLOCK_N, end)
        more = seqlen_k - start_n
        k = tiles.load(tiles.at(K, start_n, k_n), k_n, more, BLOCK_N, DIM, WIDEST, True, WIDE)
        if EARLY:
            v = tiles.load(tiles.at(V, start_n, v_n), v_n, more, BLOCK_N, DIM_V, WIDEST, True, WIDE)
        s = tiles.dot_t(q, k, PRECISION)
        if SCORED:
            s, _ = scores.score(
                s, rows[:, None], columns[None, :], start_m, start_n, seqlen_q, seqlen_k, scale, cap, slope,
                diagonal, BIAS, b_m, b_n, CAPPED, BIAS_ROWS, BIAS_COLS, EXACT,
            )  # fmt: skip
        edge = position >= full
        if LOWER:
            edge |= start_n < clear
        if edge:
            if SPANS is None:
                cols = start_n + columns
                seen = scores.visible(
                    start_m + rows[:, None], cols[None, :], seqlen_k, low, high, LOWER, UPPER
                )
            else:
                seen = sparse.visible(
                    SLOTS, BITS, position, start_m, start_n, rows[:, None], columns[None, :], BLOCK_N
                )
            s = tl.where(seen, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        # a row that has seen no key yet: exp2(-inf - 0) = 0, not exp2(-inf + inf)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        # not s * unit - base * unit in one multiply-add: rounding base * unit can overflow exp2
        p = tl.exp2((s - base[:, None]) * (unit * LOG2E))
        shrink = tl.exp2((top - base) * (unit * LOG2E))
        total = total * shrink + tl.sum(p, 1)
        acc = tiles.times(acc, shrink[:, None])
        if DROPS:
            kept = scores.kept(start_m + rows[:, None], start_n + columns[None, :], head, seed, threshold)
            p = tl.where(kept, p, 0.0)
        if not EARLY:
            v = tiles.load(tiles.at(V, start_n, v_n), v_n, more, BLOCK_N, DIM_V, WIDEST, True, WIDE)
        acc = tiles.add_dot(acc, p, v, PRECISION)
        top = new_top
    some = total != 0.0  # false for a row without keys: o = 0, lse = -inf; a NaN stays
    total = tl.where(some, total, 1.0)
    factor = keep_scale / total if DROPS else 1.0 / total
    acc = tiles.times(acc, tl.where(some, factor, 0.0)[:, None])
    lse = top * unit + (tiles.log(total) if EXACT else tl.log(total))
    row = tiles.head_at(0, batch, l_b, h, l_h) + first_q + start_m
    tl.store(LSE + row + rows, lse, mask=rows < left)
    O = tiles.at(tiles.head_at(O, batch, o_b, h, o_h), first_q + start_m, o_n)
    tiles.store(O, o_n, left, acc, BLOCK_M, DIM_V, WIDEST, WIDE)


@triton.jit(do_not_specialize=RUNTIME)
def delta_rows(
    O, DO, DELTA, CU_Q, o_b, o_h, o_n, do_b, do_h, do_n, l_b, l_h, num_heads, seqlen_q, num_tiles,
    BLOCK_M: tl.constexpr, DIM_V: tl.constexpr, WIDEST: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO * O) in fp32 (section 3.1 of the paper). Grid: num_tiles times heads."""
    head, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    batch, h = head // num_heads, head % num_heads
    first_q, seqlen_q = scores.sequence(CU_Q, batch, seqlen_q)
    start_m = tile * BLOCK_M
    left = seqlen_q - start_m
    O = tiles.at(tiles.head_at(O, batch, o_b, h, o_h), first_q + start_m, o_n)
    DO = tiles.at(tiles.head_at(DO, batch, do_b, h, do_h), first_q + start_m, do_n)
    o = tiles.load(O, o_n, left, BLOCK_M, DIM_V, WIDEST, True, WIDE)
    do = tiles.load(DO, do_n, left, BLOCK_M, DIM_V, WIDEST, True, WIDE)
    row = tiles.head_at(0, batch, l_b, h, l_h) + first_q + start_m
    rows = tl.arange(0, BLOCK_M)
    tl.store(DELTA + row + rows, tiles.row_sums(o, do), mask=rows < left)


@triton.jit
def load_rows(X, left, ROWS: tl.constexpr, MASKED: tl.constexpr, OTHER: tl.constexpr):
    """The first ``left`` of ROWS numbers, OTHER for the rest; without MASKED all are there."""
    rows = tl.arange(0, ROWS)
    if MASKED:
        x = tl.load(X + rows, mask=rows < left, other=OTHER)
    else:
        x = tl.load(X + rows)
    return x


@triton.jit
def load_lse(LSE, left, ROWS: tl.constexpr, MASKED: tl.constexpr, BIAS):
    """lse of ROWS rows; inf, which makes p 0, where there is no row or a bias of -inf hides all its keys."""
    lse = load_rows(LSE, left, ROWS, MASKED, float("inf"))
    if BIAS is not None:
        lse = tl.where(lse == float("-inf"), float("inf"), lse)
    return lse


@triton.jit
def probabilities(s, lse, unit, BIAS, EXACT: tl.constexpr):
    """exp(unit * s - lse); where a bias can bring both to the end of fp32, neither grows before they meet."""
    if EXACT:
        p = tiles.exp(s * unit - lse)
    elif BIAS is not None:
        p = tl.exp2((s * unit - lse) * LOG2E)
    else:
        p = tl.exp2(s * (unit * LOG2E) - lse * LOG2E)
    return p


@triton.jit
def of_sink(sink, lse):
    """p of a head's sink in rows of that lse. lse is -inf, as the sink, of a row without keys: -inf + inf."""
    return tl.where(sink == float("-inf"), 0.0, tiles.exp(sink - lse))


@triton.jit(do_not_specialize=RUNTIME)
def backward_dq(
    Q, K, V, DO, LSE, DELTA, NORM, DQ, SLOPES, BIAS, SINKS, CU_Q, CU_K, SPANS, BLOCKS, SLOTS, BITS,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, do_b, do_h, do_n, b_b, b_h, b_m, b_n, l_b, l_h,
    heads, num_heads, group, seqlen_q, seqlen_k, num_tiles, section, before, after,
    seed, threshold, keep_scale, scale, cap,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDEST: tl.constexpr,
    LOWER: tl.constexpr, UPPER: tl.constexpr, LAST_FIRST: tl.constexpr, TOP_LEFT: tl.constexpr,
    CAPPED: tl.constexpr, BIAS_ROWS: tl.constexpr, BIAS_COLS: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr, EXACT: tl.constexpr,
    REFINE: tl.constexpr, ALONE: tl.constexpr, OWN_SLOPES: tl.constexpr,
):  # fmt: skip
    """dQ of one block of queries, walking the keys as the forward does. Grid: num_tiles times heads.

    A row's p sums to 1 and its dS to 0, with a sink's own p and dS = -p * delta, but for rounding: LSE is
    one rounded number, and delta came from O while dP comes from V. REFINE takes both sums, corrects dQ by
    them, and hands them on to the other kernels through NORM and DELTA, so that the errors cancel as where
    a whole row is at hand.
    ALONE: rows that see one key have no gradient, to the last bit.
    """
    SCORED: tl.constexpr = CAPPED or SLOPES is not None or BIAS is not None
    head, tile = tiles.place(num_tiles, heads, section, LAST_FIRST)
    batch, h = head // num_heads, head % num_heads
    first_q, seqlen_q = scores.sequence(CU_Q, batch, seqlen_q)
    first_k, seqlen_k = scores.sequence(CU_K, batch, seqlen_k)
    low, high, diagonal = scores.band(seqlen_q, seqlen_k, before, after, TOP_LEFT)
    start_m = tile * BLOCK_M
    left = seqlen_q - start_m
    Q = tiles.at(tiles.head_at(Q, batch, q_b, h, q_h), first_q + start_m, q_n)
    DO = tiles.at(tiles.head_at(DO, batch, do_b, h, do_h), first_q + start_m, do_n)
    K = tiles.at(tiles.head_at(K, batch, k_b, h // group, k_h), first_k, k_n)
    V = tiles.at(tiles.head_at(V, batch, v_b, h // group, v_h), first_k, v_n)
    BIAS = bias_at(BIAS, batch, b_b, h, b_h)
    slope = slope_of(SLOPES, h, head, OWN_SLOPES)
    unit = 1.0 if SCORED else scale
    row = tiles.head_at(0, batch, l_b, h, l_h) + first_q + start_m
    q = tiles.load(Q, q_n, left, BLOCK_M, DIM, WIDEST, True, WIDE)
    do = tiles.load(DO, do_n, left, BLOCK_M, DIM_V, WIDEST, True, WIDE)
    lse = load_lse(LSE + row, left, BLOCK_M, True, BIAS)
    delta = load_rows(DELTA + row, left, BLOCK_M, True, 0.0)
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    dq = tiles.zeros(BLOCK_M, DIM, WIDEST)
    if REFINE:
        pk = tiles.zeros(BLOCK_M, DIM, WIDEST)
        sum_p = tl.zeros([BLOCK_M], tl.float32)
        sum_ds = tl.zeros([BLOCK_M], tl.float32)
    if SPANS is None:
        first, clear, full, end = scores.keys_of(
            start_m, seqlen_q, seqlen_k, low, high, BLOCK_M, BLOCK_N, LOWER, UPPER
        )
    else:
        first, full, end = sparse.walk(SPANS, start_m)
        ahead = sparse.ahead_at(BLOCKS, first, end)
    if CU_Q is not None:
        end = tl.where(left > 0, end, 0)
    for position in range(first, end, BLOCK_N):
        if SPANS is None:
            start_n = position
        else:
            start_n = position + ahead
            ahead = sparse.ahead_at(BLOCKS, position + BLOCK_N, end)
        more = seqlen_k - start_n
        k = tiles.load(tiles.at(K, start_n, k_n), k_n, more, BLOCK_N, DIM, WIDEST, True, WIDE)
        if EARLY:
            v = tiles.load(tiles.at(V, start_n, v_n), v_n, more, BLOCK_N, DIM_V, WIDEST, True, WIDE)
        s = tiles.dot_t(q, k, PRECISION)
        if SCORED:
            s, t = scores.score(
                s, rows[:, None], columns[None, :], start_m, start_n, seqlen_q, seqlen_k, scale, cap, slope,
                diagonal, BIAS, b_m, b_n, CAPPED, BIAS_ROWS, BIAS_COLS, EXACT,
            )  # fmt: skip
        p = probabilities(s, lse[:, None], unit, BIAS, EXACT)
        edge = position >= full
        if LOWER:
            edge |= start_n < clear
        if edge:
            if SPANS is None:
                cols = start_n + columns
                seen = scores.visible(
                    start_m + rows[:, None], cols[None, :], seqlen_k, low, high, LOWER, UPPER
                )
            else:
                seen = sparse.visible(
                    SLOTS, BITS, position, start_m, start_n, rows[:, None], columns[None, :], BLOCK_N
                )
            if ALONE:
                alone = scores.alone(start_m + rows, seqlen_k, low, high, LOWER, UPPER, SPANS)
                seen &= ~alone[:, None]
            p = tl.where(seen, p, 0.0)
        if not EARLY:
            v = tiles.load(tiles.at(V, start_n, v_n), v_n, more, BLOCK_N, DIM_V, WIDEST, True, WIDE)
        dp = tiles.dot_t(do, v, PRECISION)
        if DROPS:
            kept = scores.kept(start_m + rows[:, None], start_n + columns[None, :], head, seed, threshold)
            dp = tl.where(kept, dp * keep_scale, 0.0)
        ds = p * (dp - delta[:, None])
        if REFINE:
            sum_p += tl.sum(p, 1)
            sum_ds += tl.sum(ds, 1)
        if CAPPED:
            chain = 1.0 - t * t
            ds *= chain
            p *= chain
        dq = tiles.add_dot(dq, ds, k, PRECISION)
        if REFINE:
            pk = tiles.add_dot(pk, p, k, PRECISION)
    if REFINE:
        if SINKS is not None:
            sink = of_sink(of_head(SINKS, h), lse)
            sum_p += sink
            sum_ds -= sink * delta
        norm = tl.where(sum_p > 0.0, 1.0 / tl.where(sum_p > 0.0, sum_p, 1.0), 1.0)
        if BIAS is not None:
            norm = tl.where(lse < float("inf"), norm, 0.0)  # of a hidden row p is not 0, but tiny
        dq = tiles.times(tiles.less(dq, tiles.times(pk, sum_ds[:, None])), norm[:, None])
        tl.store(NORM + row + rows, norm, mask=rows < left)
        tl.store(DELTA + row + rows, delta + sum_ds, mask=rows < left)
    tiles.store(DQ + row * DIM, DIM, left, tiles.times(dq, scale), BLOCK_M, DIM, WIDEST, False)
