"""FlashAttention-2 in portable Triton: the kernels. Launched by _flash_v2.py.

Source: Dao 2023, arXiv:2307.08691, Algorithms 1 and 2. The backward is two kernels, one per output
side (dK and dV; dQ): both sum in registers, so there are no atomics and every run gives equal bits.

Loops over whole, fully visible tiles carry no mask; only tiles on the diagonal or at an edge do
(MASKED), and tiles that nobody sees are not visited. Row state and accumulators are fp32.
"""

# Triton reads the bodies below, not Python: no annotations but tl.constexpr, tensors by their capitals.
# ruff: noqa: ANN001, ANN202, E741, SIM108
# mypy: ignore-errors

from __future__ import annotations

import math

import triton
import triton.language as tl

from flashbench.kernels import _triton_tiles as tiles

LOG2E = tl.constexpr(math.log2(math.e))
RUNTIME = ["heads", "num_heads", "seqlen_q", "seqlen_k", "num_tiles", "section"]


@triton.jit
def _visible_to(rows, shift, seqlen_k):
    """How many keys the causal mask shows to query row(s): key j <= i + seqlen_k - seqlen_q."""
    return tl.minimum(tl.maximum(rows + 1 + shift, 0), seqlen_k)


@triton.jit
def _forward_tiles(
    acc, total, top, q, K, V, k_n, v_n, start_m, lo, hi, seqlen_q, seqlen_k, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDEST: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    FOLD: tl.constexpr,
):  # fmt: skip
    """Fold the keys lo..hi into (acc, total, top) = (sum of p·v, sum of p, largest score) of each row."""
    for start_n in range(lo, hi, BLOCK_N):
        k = tiles.load(tiles.at(K, start_n, k_n), k_n, seqlen_k - start_n, BLOCK_N, DIM, WIDEST, MASKED, WIDE)
        s = tiles.dot_t(q, k, PRECISION)
        if MASKED:
            cols = start_n + tl.arange(0, BLOCK_N)[None, :]
            if CAUSAL:  # hides the keys past the end too, from every row that is stored
                rows = start_m + tl.arange(0, BLOCK_M)[:, None]
                s = tl.where(cols <= rows + (seqlen_k - seqlen_q), s, float("-inf"))
            else:
                s = tl.where(cols < seqlen_k, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        if MASKED:  # a row that has seen no key yet: exp2(-inf - 0) = 0, not exp2(-inf + inf)
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
        else:
            base = new_top
        if FOLD:
            p = tl.exp2(s * scale_log2 - (base * scale_log2)[:, None])
        else:
            p = tl.exp2((s - base[:, None]) * scale_log2)
        shrink = tl.exp2((top - base) * scale_log2)
        total = total * shrink + tl.sum(p, 1)
        acc = tiles.times(acc, shrink[:, None])
        v = tiles.load(
            tiles.at(V, start_n, v_n), v_n, seqlen_k - start_n, BLOCK_N, DIM_V, WIDEST, MASKED, WIDE
        )
        acc = tiles.add_dot(acc, p, v, PRECISION)
        top = new_top
    return acc, total, top


@triton.jit(do_not_specialize=RUNTIME)
def forward(
    Q, K, V, O, LSE, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    heads, num_heads, group, seqlen_q, seqlen_k, num_tiles, section, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDEST: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """O and LSE of one block of queries (Algorithm 1). Grid: num_tiles times heads (of all batches)."""
    head, tile = tiles.place(num_tiles, heads, section, CAUSAL)
    batch, h = head // num_heads, head % num_heads
    start_m = tile * BLOCK_M
    left = seqlen_q - start_m
    Q = tiles.at(tiles.head_at(Q, batch, q_b, h, q_h), start_m, q_n)
    K = tiles.head_at(K, batch, k_b, h // group, k_h)
    V = tiles.head_at(V, batch, v_b, h // group, v_h)
    q = tiles.load(Q, q_n, left, BLOCK_M, DIM, WIDEST, True, WIDE)
    acc = tiles.zeros(BLOCK_M, DIM_V, WIDEST)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if CAUSAL:  # keys that the first row sees, and that the last row sees
        full = _visible_to(start_m, seqlen_k - seqlen_q, seqlen_k) // BLOCK_N * BLOCK_N
        end = _visible_to(tl.minimum(start_m + BLOCK_M, seqlen_q) - 1, seqlen_k - seqlen_q, seqlen_k)
    else:
        full = seqlen_k // BLOCK_N * BLOCK_N
        end = seqlen_k
    scale_log2 = scale * LOG2E
    acc, total, top = _forward_tiles(
        acc, total, top, q, K, V, k_n, v_n, start_m, 0, full, seqlen_q, seqlen_k, scale_log2,
        BLOCK_M, BLOCK_N, DIM, DIM_V, WIDEST, CAUSAL, False, PRECISION, WIDE, FOLD,
    )  # fmt: skip
    acc, total, top = _forward_tiles(
        acc, total, top, q, K, V, k_n, v_n, start_m, full, end, seqlen_q, seqlen_k, scale_log2,
        BLOCK_M, BLOCK_N, DIM, DIM_V, WIDEST, CAUSAL, True, PRECISION, WIDE, FOLD,
    )  # fmt: skip
    some = total > 0.0  # false for a row without keys: o = 0, lse = -inf
    acc = tiles.times(acc, tl.where(some, 1.0 / tl.where(some, total, 1.0), 0.0)[:, None])
    lse = top * scale + tl.log(tl.where(some, total, 1.0))
    row = tiles.at(tl.cast(start_m, tl.int64), head, seqlen_q)
    rows = tl.arange(0, BLOCK_M)
    tl.store(LSE + row + rows, lse, mask=rows < left)
    tiles.store(O + row * DIM_V, left, acc, BLOCK_M, DIM_V, WIDEST)


@triton.jit(do_not_specialize=RUNTIME)
def delta_rows(
    O, DO, DELTA, do_b, do_h, do_n, num_heads, seqlen_q, seqlen_k, num_tiles,
    BLOCK_M: tl.constexpr, DIM_V: tl.constexpr, WIDEST: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO * O) in fp32 (section 3.1 of the paper). Grid: num_tiles times heads.

    A row that sees one key has no gradient, as its p is 1 whatever the score. There O = V, and delta
    is summed in the order of dP, as a matrix product, so that dP - delta is 0 to the last bit.
    """
    head, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    start_m = tile * BLOCK_M
    left = seqlen_q - start_m
    row = tiles.at(tl.cast(start_m, tl.int64), head, seqlen_q)
    DO = tiles.at(tiles.head_at(DO, head // num_heads, do_b, head % num_heads, do_h), start_m, do_n)
    o = tiles.load(O + row * DIM_V, DIM_V, left, BLOCK_M, DIM_V, WIDEST, True, False)
    do = tiles.load(DO, do_n, left, BLOCK_M, DIM_V, WIDEST, True, WIDE)
    delta = tiles.row_sums(o, do)
    rows = tl.arange(0, BLOCK_M)
    if CAUSAL:
        alone = _visible_to(start_m + rows, seqlen_k - seqlen_q, seqlen_k) == 1
    else:
        alone = rows < left * (seqlen_k == 1)
    if tl.max(alone.to(tl.int32), 0) > 0:
        same_order = tiles.dot_t(do, o, PRECISION)
        diagonal = tl.sum(tl.where(rows[:, None] == rows[None, :], same_order, 0.0), 1)
        delta = tl.where(alone, diagonal, delta)
    tl.store(DELTA + row + rows, delta, mask=rows < left)


@triton.jit
def _load_stats(LSE, DELTA, left, ROWS: tl.constexpr, MASKED: tl.constexpr):
    """(lse, delta) of a tile's rows; p is exp(-inf) = 0 for rows that do not exist."""
    rows = tl.arange(0, ROWS)
    if MASKED:
        lse = tl.load(LSE + rows, mask=rows < left, other=float("inf"))
        delta = tl.load(DELTA + rows, mask=rows < left, other=0.0)
    else:
        lse = tl.load(LSE + rows)
        delta = tl.load(DELTA + rows)
    return lse, delta


@triton.jit
def _probabilities(s, lse, scale, EXACT: tl.constexpr):
    """exp(scale * s - lse) from a multiply-add and an exp2; EXACT multiplies once more, to round less."""
    if EXACT:
        p = tl.exp2((s * scale - lse) * LOG2E)
    else:
        p = tl.exp2(s * (scale * LOG2E) - lse * LOG2E)
    return p


@triton.jit
def _dkdv_tiles(
    dk, dv, k, v, Q, DO, LSE, DELTA, q_n, do_n, start_n, lo, hi, tail, seqlen_q, seqlen_k, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDEST: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Add the query tiles lo..hi to (dk, dv); with MASKED the last of them is number ``tail``.

    S and dP are computed transposed, so that P and dS are left operands in registers.
    """
    for index in range(lo, hi):
        if MASKED:
            start_m = tl.where(index < hi - 1, index, tail) * BLOCK_M
        else:
            start_m = index * BLOCK_M
        left = seqlen_q - start_m
        q = tiles.load(tiles.at(Q, start_m, q_n), q_n, left, BLOCK_M, DIM, WIDEST, MASKED, WIDE)
        lse, delta = _load_stats(LSE + start_m, DELTA + start_m, left, BLOCK_M, MASKED)
        p = _probabilities(tiles.dot_t(k, q, PRECISION), lse[None, :], scale, EXACT)
        if MASKED and CAUSAL:
            cols = start_n + tl.arange(0, BLOCK_N)[:, None]
            rows = start_m + tl.arange(0, BLOCK_M)[None, :]
            p = tl.where(cols <= rows + (seqlen_k - seqlen_q), p, 0.0)
        do = tiles.load(tiles.at(DO, start_m, do_n), do_n, left, BLOCK_M, DIM_V, WIDEST, MASKED, WIDE)
        dv = tiles.add_dot(dv, p, do, PRECISION)
        ds = p * (tiles.dot_t(v, do, PRECISION) - delta[None, :])
        dk = tiles.add_dot(dk, ds, q, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=RUNTIME)
def backward_dkdv(
    Q, K, V, DO, LSE, DELTA, DK, DV, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, do_b, do_h, do_n,
    heads, num_heads, seqlen_q, seqlen_k, num_tiles, section, scale, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDEST: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of keys, summed over the query heads that share it (Algorithm 2).

    heads and num_heads count K/V heads. Grid: num_tiles times heads.
    """
    head, tile = tiles.place(num_tiles, heads, section, False)
    batch, h = head // num_heads, head % num_heads
    start_n = tile * BLOCK_N
    left = seqlen_k - start_n
    K = tiles.at(tiles.head_at(K, batch, k_b, h, k_h), start_n, k_n)
    V = tiles.at(tiles.head_at(V, batch, v_b, h, v_h), start_n, v_n)
    k = tiles.load(K, k_n, left, BLOCK_N, DIM, WIDEST, True, WIDE)
    v = tiles.load(V, v_n, left, BLOCK_N, DIM_V, WIDEST, True, WIDE)
    dk = tiles.zeros(BLOCK_N, DIM, WIDEST)
    dv = tiles.zeros(BLOCK_N, DIM_V, WIDEST)
    whole = seqlen_q // BLOCK_M
    tail = tl.cdiv(seqlen_q, BLOCK_M) - 1
    if CAUSAL:  # query tiles that see the first key, and those whose every row sees the last one
        first = tl.maximum(start_n - (seqlen_k - seqlen_q), 0) // BLOCK_M
        last = tl.minimum(start_n + BLOCK_N, seqlen_k) - 1
        full = tl.minimum(tl.cdiv(tl.maximum(last - (seqlen_k - seqlen_q), 0), BLOCK_M), tail + 1)
    else:
        first = 0
        full = 0
    # masked tiles: first..full, then the ragged last one unless it is among them
    edge = full + tl.where((whole <= tail) & (full <= tail), 1, 0)
    tail = tl.where(edge > full, tail, full - 1)
    for g in range(GROUP):
        Qg = tiles.head_at(Q, batch, q_b, h * GROUP + g, q_h)
        DOg = tiles.head_at(DO, batch, do_b, h * GROUP + g, do_h)
        row = tl.cast(head * GROUP + g, tl.int64) * seqlen_q
        dk, dv = _dkdv_tiles(
            dk, dv, k, v, Qg, DOg, LSE + row, DELTA + row, q_n, do_n, start_n, first, edge, tail,
            seqlen_q, seqlen_k, scale,
            BLOCK_M, BLOCK_N, DIM, DIM_V, WIDEST, CAUSAL, True, PRECISION, WIDE, EXACT,
        )  # fmt: skip
        dk, dv = _dkdv_tiles(
            dk, dv, k, v, Qg, DOg, LSE + row, DELTA + row, q_n, do_n, start_n, full, whole, tail,
            seqlen_q, seqlen_k, scale,
            BLOCK_M, BLOCK_N, DIM, DIM_V, WIDEST, CAUSAL, False, PRECISION, WIDE, EXACT,
        )  # fmt: skip
    row = tiles.at(tl.cast(start_n, tl.int64), head, seqlen_k)
    tiles.store(DK + row * DIM, left, tiles.times(dk, scale), BLOCK_N, DIM, WIDEST)
    tiles.store(DV + row * DIM_V, left, dv, BLOCK_N, DIM_V, WIDEST)


@triton.jit
def _dq_tiles(
    sums, q, do, lse, delta, K, V, k_n, v_n, start_m, lo, hi, seqlen_q, seqlen_k, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDEST: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    EXACT: tl.constexpr, REFINE: tl.constexpr,
):  # fmt: skip
    """Add the keys lo..hi to (dq,), or with REFINE to (dq, sum of p·k, sum of dS)."""
    for start_n in range(lo, hi, BLOCK_N):
        left = seqlen_k - start_n
        k = tiles.load(tiles.at(K, start_n, k_n), k_n, left, BLOCK_N, DIM, WIDEST, MASKED, WIDE)
        p = _probabilities(tiles.dot_t(q, k, PRECISION), lse[:, None], scale, EXACT)
        if MASKED:
            cols = start_n + tl.arange(0, BLOCK_N)[None, :]
            if CAUSAL:
                rows = start_m + tl.arange(0, BLOCK_M)[:, None]
                p = tl.where(cols <= rows + (seqlen_k - seqlen_q), p, 0.0)
            else:
                p = tl.where(cols < seqlen_k, p, 0.0)
        v = tiles.load(tiles.at(V, start_n, v_n), v_n, left, BLOCK_N, DIM_V, WIDEST, MASKED, WIDE)
        ds = p * (tiles.dot_t(do, v, PRECISION) - delta[:, None])
        if REFINE:
            sums = (
                tiles.add_dot(sums[0], ds, k, PRECISION),
                tiles.add_dot(sums[1], p, k, PRECISION),
                sums[2] + tl.sum(ds, 1),
            )
        else:
            sums = (tiles.add_dot(sums[0], ds, k, PRECISION),)
    return sums


@triton.jit(do_not_specialize=RUNTIME)
def backward_dq(
    Q, K, V, DO, LSE, DELTA, DQ, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, do_b, do_h, do_n,
    heads, num_heads, group, seqlen_q, seqlen_k, num_tiles, section, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDEST: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr,
    REFINE: tl.constexpr,
):  # fmt: skip
    """dQ of one block of queries, walking the keys as the forward does. Grid: num_tiles times heads.

    A row's dS sums to 0, but to a rounding error where delta came from O and dP from V. REFINE moves
    delta by that sum, here and in memory for the next kernel, so that the two errors cancel as they do
    where dS is made from the whole row. In fp32 nothing larger hides them.
    """
    head, tile = tiles.place(num_tiles, heads, section, CAUSAL)
    batch, h = head // num_heads, head % num_heads
    start_m = tile * BLOCK_M
    left = seqlen_q - start_m
    Q = tiles.at(tiles.head_at(Q, batch, q_b, h, q_h), start_m, q_n)
    DO = tiles.at(tiles.head_at(DO, batch, do_b, h, do_h), start_m, do_n)
    K = tiles.head_at(K, batch, k_b, h // group, k_h)
    V = tiles.head_at(V, batch, v_b, h // group, v_h)
    row = tiles.at(tl.cast(start_m, tl.int64), head, seqlen_q)
    q = tiles.load(Q, q_n, left, BLOCK_M, DIM, WIDEST, True, WIDE)
    do = tiles.load(DO, do_n, left, BLOCK_M, DIM_V, WIDEST, True, WIDE)
    lse, delta = _load_stats(LSE + row, DELTA + row, left, BLOCK_M, True)
    if REFINE:
        sums = (
            tiles.zeros(BLOCK_M, DIM, WIDEST),
            tiles.zeros(BLOCK_M, DIM, WIDEST),
            tl.zeros([BLOCK_M], tl.float32),
        )
    else:
        sums = (tiles.zeros(BLOCK_M, DIM, WIDEST),)
    if CAUSAL:
        full = _visible_to(start_m, seqlen_k - seqlen_q, seqlen_k) // BLOCK_N * BLOCK_N
        end = _visible_to(tl.minimum(start_m + BLOCK_M, seqlen_q) - 1, seqlen_k - seqlen_q, seqlen_k)
    else:
        full = seqlen_k // BLOCK_N * BLOCK_N
        end = seqlen_k
    sums = _dq_tiles(
        sums, q, do, lse, delta, K, V, k_n, v_n, start_m, 0, full, seqlen_q, seqlen_k, scale,
        BLOCK_M, BLOCK_N, DIM, DIM_V, WIDEST, CAUSAL, False, PRECISION, WIDE, EXACT, REFINE,
    )  # fmt: skip
    sums = _dq_tiles(
        sums, q, do, lse, delta, K, V, k_n, v_n, start_m, full, end, seqlen_q, seqlen_k, scale,
        BLOCK_M, BLOCK_N, DIM, DIM_V, WIDEST, CAUSAL, True, PRECISION, WIDE, EXACT, REFINE,
    )  # fmt: skip
    dq = sums[0]
    if REFINE:
        dq = tiles.less(dq, tiles.times(sums[1], sums[2][:, None]))
        rows = tl.arange(0, BLOCK_M)
        tl.store(DELTA + row + rows, delta + sums[2], mask=rows < left)
    tiles.store(DQ + row * DIM, left, tiles.times(dq, scale), BLOCK_M, DIM, WIDEST)
