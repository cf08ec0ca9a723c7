"""FlashAttention-2 in portable Triton: the kernels. Launched by _flash_v2.py.

Source: Dao 2023, arXiv:2307.08691, Algorithms 1 and 2. The backward is two kernels, one per output
side (dK and dV; dQ): both sum in registers, so there are no atomics and every run gives equal bits.

Only tiles on the diagonal or at an edge are masked, and tiles that nobody sees are not visited. Row
state and accumulators are fp32. EXACT is for fp32 inputs, where nothing larger hides a rounding error.
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
RUNTIME = ["heads", "num_heads", "group", "seqlen_q", "seqlen_k", "num_tiles", "section"]
"""Arguments whose value Triton must not compile for."""


@triton.jit
def _visible_to(rows, seqlen_q, seqlen_k):
    """How many keys the causal mask shows to query row(s): key j <= i + seqlen_k - seqlen_q."""
    return tl.minimum(tl.maximum(rows + 1 + (seqlen_k - seqlen_q), 0), seqlen_k)


@triton.jit
def _keys_of(start_m, seqlen_q, seqlen_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """(full, end) for a query tile: whole key tiles that every row sees end at full, keys at end."""
    if CAUSAL:
        full = _visible_to(start_m, seqlen_q, seqlen_k) // BLOCK_N * BLOCK_N
        end = _visible_to(tl.minimum(start_m + BLOCK_M, seqlen_q) - 1, seqlen_q, seqlen_k)
    else:
        full = seqlen_k // BLOCK_N * BLOCK_N
        end = seqlen_k
    return full, end


@triton.jit
def _visible(rows, cols, seqlen_q, seqlen_k, CAUSAL: tl.constexpr):
    """Which pairs the mask shows. The causal one hides keys past the end from every row that exists."""
    if CAUSAL:
        visible = cols <= rows + (seqlen_k - seqlen_q)
    else:
        visible = (cols < seqlen_k) & (rows >= 0)
    return visible


@triton.jit(do_not_specialize=RUNTIME)
def forward(
    Q, K, V, O, LSE, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    heads, num_heads, group, seqlen_q, seqlen_k, num_tiles, section, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDEST: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr,
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
    rows = tl.arange(0, BLOCK_M)
    full, end = _keys_of(start_m, seqlen_q, seqlen_k, BLOCK_M, BLOCK_N, CAUSAL)
    for start_n in range(0, end, BLOCK_N):
        more = seqlen_k - start_n
        k = tiles.load(tiles.at(K, start_n, k_n), k_n, more, BLOCK_N, DIM, WIDEST, True, WIDE)
        s = tiles.dot_t(q, k, PRECISION)
        if start_n >= full:
            cols = start_n + tl.arange(0, BLOCK_N)
            visible = _visible(start_m + rows[:, None], cols[None, :], seqlen_q, seqlen_k, CAUSAL)
            s = tl.where(visible, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        # a row that has seen no key yet: exp2(-inf - 0) = 0, not exp2(-inf + inf)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        # not s * scale - base * scale in one multiply-add: rounding base * scale can overflow exp2
        p = tl.exp2((s - base[:, None]) * (scale * LOG2E))
        shrink = tl.exp2((top - base) * (scale * LOG2E))
        total = total * shrink + tl.sum(p, 1)
        acc = tiles.times(acc, shrink[:, None])
        v = tiles.load(tiles.at(V, start_n, v_n), v_n, more, BLOCK_N, DIM_V, WIDEST, True, WIDE)
        acc = tiles.add_dot(acc, p, v, PRECISION)
        top = new_top
    some = total > 0.0  # false for a row without keys: o = 0, lse = -inf
    total = tl.where(some, total, 1.0)
    acc = tiles.times(acc, tl.where(some, 1.0 / total, 0.0)[:, None])
    lse = top * scale + (tiles.log(total) if EXACT else tl.log(total))
    row = tiles.at(tl.cast(start_m, tl.int64), head, seqlen_q)
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
        alone = _visible_to(start_m + rows, seqlen_q, seqlen_k) == 1
    else:
        alone = rows < left * (seqlen_k == 1)
    if tl.max(alone.to(tl.int32), 0) > 0:
        same_order = tiles.dot_t(do, o, PRECISION)
        diagonal = tl.sum(tl.where(rows[:, None] == rows[None, :], same_order, 0.0), 1)
        delta = tl.where(alone, diagonal, delta)
    tl.store(DELTA + row + rows, delta, mask=rows < left)


@triton.jit
def _load_rows(X, left, ROWS: tl.constexpr, MASKED: tl.constexpr, OTHER: tl.constexpr):
    rows = tl.arange(0, ROWS)
    if MASKED:
        x = tl.load(X + rows, mask=rows < left, other=OTHER)
    else:
        x = tl.load(X + rows)
    return x


@triton.jit
def _probabilities(s, lse, scale, EXACT: tl.constexpr):
    """exp(scale * s - lse); lse is inf for rows that do not exist."""
    if EXACT:
        p = tiles.exp(s * scale - lse)
    else:
        p = tl.exp2(s * (scale * LOG2E) - lse * LOG2E)
    return p


@triton.jit(do_not_specialize=RUNTIME)
def backward_dq(
    Q, K, V, DO, LSE, DELTA, NORM, DQ, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, do_b, do_h, do_n,
    heads, num_heads, group, seqlen_q, seqlen_k, num_tiles, section, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDEST: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr,
    REFINE: tl.constexpr,
):  # fmt: skip
    """dQ of one block of queries, walking the keys as the forward does. Grid: num_tiles times heads.

    A row's p sums to 1 and its dS to 0, but for rounding: LSE is one rounded number, and delta came
    from O while dP comes from V. REFINE takes both sums, corrects dQ by them, and hands them on to the
    other kernel through NORM and DELTA, so that the errors cancel as where a whole row is at hand.
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
    lse = _load_rows(LSE + row, left, BLOCK_M, True, float("inf"))
    delta = _load_rows(DELTA + row, left, BLOCK_M, True, 0.0)
    rows = tl.arange(0, BLOCK_M)
    dq = tiles.zeros(BLOCK_M, DIM, WIDEST)
    if REFINE:
        pk = tiles.zeros(BLOCK_M, DIM, WIDEST)
        sum_p = tl.zeros([BLOCK_M], tl.float32)
        sum_ds = tl.zeros([BLOCK_M], tl.float32)
    full, end = _keys_of(start_m, seqlen_q, seqlen_k, BLOCK_M, BLOCK_N, CAUSAL)
    for start_n in range(0, end, BLOCK_N):
        more = seqlen_k - start_n
        k = tiles.load(tiles.at(K, start_n, k_n), k_n, more, BLOCK_N, DIM, WIDEST, True, WIDE)
        p = _probabilities(tiles.dot_t(q, k, PRECISION), lse[:, None], scale, EXACT)
        if start_n >= full:
            cols = start_n + tl.arange(0, BLOCK_N)
            visible = _visible(start_m + rows[:, None], cols[None, :], seqlen_q, seqlen_k, CAUSAL)
            p = tl.where(visible, p, 0.0)
        v = tiles.load(tiles.at(V, start_n, v_n), v_n, more, BLOCK_N, DIM_V, WIDEST, True, WIDE)
        ds = p * (tiles.dot_t(do, v, PRECISION) - delta[:, None])
        dq = tiles.add_dot(dq, ds, k, PRECISION)
        if REFINE:
            pk = tiles.add_dot(pk, p, k, PRECISION)
            sum_p += tl.sum(p, 1)
            sum_ds += tl.sum(ds, 1)
    if REFINE:
        norm = tl.where(sum_p > 0.0, 1.0 / tl.where(sum_p > 0.0, sum_p, 1.0), 1.0)
        dq = tiles.times(tiles.less(dq, tiles.times(pk, sum_ds[:, None])), norm[:, None])
        tl.store(NORM + row + rows, norm, mask=rows < left)
        tl.store(DELTA + row + rows, delta + sum_ds, mask=rows < left)
    tiles.store(DQ + row * DIM, left, tiles.times(dq, scale), BLOCK_M, DIM, WIDEST)


@triton.jit
def _dkdv_tiles(
    dk, dv, k, v, Q, DO, LSE, DELTA, NORM, q_n, do_n, start_n, lo, hi, tail, seqlen_q, seqlen_k, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDEST: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    EXACT: tl.constexpr, REFINE: tl.constexpr,
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
        lse = _load_rows(LSE + start_m, left, BLOCK_M, MASKED, float("inf"))
        p = _probabilities(tiles.dot_t(k, q, PRECISION), lse[None, :], scale, EXACT)
        if MASKED and CAUSAL:
            cols = start_n + tl.arange(0, BLOCK_N)
            rows = start_m + tl.arange(0, BLOCK_M)
            p = tl.where(_visible(rows[None, :], cols[:, None], seqlen_q, seqlen_k, CAUSAL), p, 0.0)
        if REFINE:
            p *= _load_rows(NORM + start_m, left, BLOCK_M, MASKED, 0.0)[None, :]
        do = tiles.load(tiles.at(DO, start_m, do_n), do_n, left, BLOCK_M, DIM_V, WIDEST, MASKED, WIDE)
        dv = tiles.add_dot(dv, p, do, PRECISION)
        delta = _load_rows(DELTA + start_m, left, BLOCK_M, MASKED, 0.0)
        ds = p * (tiles.dot_t(v, do, PRECISION) - delta[None, :])
        dk = tiles.add_dot(dk, ds, q, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=RUNTIME)
def backward_dkdv(
    Q, K, V, DO, LSE, DELTA, NORM, DK, DV, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, do_b, do_h, do_n,
    heads, num_heads, seqlen_q, seqlen_k, num_tiles, section, scale, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDEST: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr,
    REFINE: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of keys, summed over the query heads that share it (Algorithm 2).

    heads and num_heads count K/V heads. Grid: num_tiles times heads. Two loops, not one with a branch
    as above: on an H100 the masks in the loads of the one cost more here than the code of the other.
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
            dk, dv, k, v, Qg, DOg, LSE + row, DELTA + row, NORM + row, q_n, do_n,
            start_n, first, edge, tail, seqlen_q, seqlen_k, scale, BLOCK_M, BLOCK_N, DIM, DIM_V, WIDEST,
            CAUSAL, True, PRECISION, WIDE, EXACT, REFINE,
        )  # fmt: skip
        dk, dv = _dkdv_tiles(
            dk, dv, k, v, Qg, DOg, LSE + row, DELTA + row, NORM + row, q_n, do_n,
            start_n, full, whole, tail, seqlen_q, seqlen_k, scale, BLOCK_M, BLOCK_N, DIM, DIM_V, WIDEST,
            CAUSAL, False, PRECISION, WIDE, EXACT, REFINE,
        )  # fmt: skip
    row = tiles.at(tl.cast(start_n, tl.int64), head, seqlen_k)
    tiles.store(DK + row * DIM, left, tiles.times(dk, scale), BLOCK_N, DIM, WIDEST)
    tiles.store(DV + row * DIM_V, left, dv, BLOCK_N, DIM_V, WIDEST)
