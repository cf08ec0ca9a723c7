"""FlashAttention-2's backward as one kernel, dQ by atomic additions: launched by _flash_v2_atomic.py.

Source: Dao 2023, arXiv:2307.08691, Algorithm 2. K/V outside: a program owns a K/V tile, dK and dV stay on
chip, and what each query tile gives to dQ is added to an fp32 accumulator in memory, in no fixed order:
the last bits of dQ differ from run to run. Five products a tile, where two kernels take seven.
"""

# Triton reads the bodies below, not Python: no annotations but tl.constexpr, tensors by their capitals.
# ruff: noqa: ANN001, ANN202
# mypy: ignore-errors

from __future__ import annotations

import math

import triton
import triton.language as tl

from flashbench.kernels import _kv_outside as outside
from flashbench.kernels import _triton_tiles as tiles

LOG2E = tl.constexpr(math.log2(math.e))
RUNTIME = ["num_heads", "seqlen_q", "seqlen_k", "num_tiles"]
"""Arguments whose value Triton must not compile for."""


@triton.jit
def clear(DQ_ACC, count, BLOCK: tl.constexpr):
    """The accumulator = 0. Grid: blocks of elements. A count that 16 divides lets a store be wide."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    tl.store(DQ_ACC + at, tl.zeros([BLOCK], tl.float32), mask=at < count)


@triton.jit
def convert(DQ_ACC, DQ, count, scale, BLOCK: tl.constexpr):
    """dQ = τ times the accumulator, in dQ's dtype. Grid: blocks of elements."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    dq = tl.load(DQ_ACC + at, mask=at < count, other=0.0) * scale
    tl.store(DQ + at, dq.to(DQ.dtype.element_ty), mask=at < count)


@triton.jit
def _load_rows(X, left, ROWS: tl.constexpr, OTHER: tl.constexpr):
    rows = tl.arange(0, ROWS)
    return tl.load(X + rows, mask=rows < left, other=OTHER)


@triton.jit
def _add_atomically(base, left, tile, ROWS: tl.constexpr, DIM: tl.constexpr, WIDEST: tl.constexpr):
    """Add the first ``left`` rows of a tile to a contiguous fp32 matrix."""
    rows = tl.arange(0, ROWS)[:, None]
    for i in tl.static_range(len(tile)):
        cols = tiles.start(DIM, WIDEST, i) + tl.arange(0, tiles.width(DIM, WIDEST, i))[None, :]
        # relaxed: the additions order nothing else, and the next kernel alone reads their sum
        tl.atomic_add(base + rows * DIM + cols, tile[i], mask=(rows < left) & (cols < DIM), sem="relaxed")


@triton.jit(do_not_specialize=RUNTIME)
def backward(
    Q, K, V, DO, LSE, DELTA, DQ_ACC, DK, DV, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, do_b, do_h, do_n,
    num_heads, seqlen_q, seqlen_k, num_tiles, scale, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDEST: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr,
    ALONE: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of keys, over the query heads that share it, and its part of their dQ.

    ALONE: rows that see one key have no gradient, to the last bit.
    num_heads counts K/V heads. Grid: num_tiles times K/V heads (of all batches).
    """
    head, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    batch, h = head // num_heads, head % num_heads
    start_n = tile * BLOCK_N
    more = seqlen_k - start_n
    K = tiles.at(tiles.head_at(K, batch, k_b, h, k_h), start_n, k_n)
    V = tiles.at(tiles.head_at(V, batch, v_b, h, v_h), start_n, v_n)
    k = tiles.load(K, k_n, more, BLOCK_N, DIM, WIDEST, True, WIDE)
    v = tiles.load(V, v_n, more, BLOCK_N, DIM_V, WIDEST, True, WIDE)
    dk = tiles.zeros(BLOCK_N, DIM, WIDEST)
    dv = tiles.zeros(BLOCK_N, DIM_V, WIDEST)
    rows, cols = tl.arange(0, BLOCK_M), start_n + tl.arange(0, BLOCK_N)
    first = outside.first_row(start_n, seqlen_q, seqlen_k, BLOCK_M, CAUSAL)
    for g in range(GROUP):
        Qg = tiles.head_at(Q, batch, q_b, h * GROUP + g, q_h)
        DOg = tiles.head_at(DO, batch, do_b, h * GROUP + g, do_h)
        for start_m in range(first, seqlen_q, BLOCK_M):
            left = seqlen_q - start_m
            row = tl.cast(head * GROUP + g, tl.int64) * seqlen_q + start_m
            q = tiles.load(tiles.at(Qg, start_m, q_n), q_n, left, BLOCK_M, DIM, WIDEST, True, WIDE)
            do = tiles.load(tiles.at(DOg, start_m, do_n), do_n, left, BLOCK_M, DIM_V, WIDEST, True, WIDE)
            lse = _load_rows(LSE + row, left, BLOCK_M, float("inf"))
            s = tiles.dot_t(k, q, PRECISION)
            if EXACT:
                p = tiles.exp(s * scale - lse[None, :])
            else:
                p = tl.exp2(s * (scale * LOG2E) - lse[None, :] * LOG2E)
            p = tl.where(
                outside.visible(start_m + rows[None, :], cols[:, None], seqlen_q, seqlen_k, CAUSAL), p, 0.0
            )
            delta = _load_rows(DELTA + row, left, BLOCK_M, 0.0)
            ds = p * (tiles.dot_t(v, do, PRECISION) - delta[None, :])
            if ALONE:
                alone = outside.keys_of(start_m + rows, seqlen_q, seqlen_k, CAUSAL) == 1
                ds = tl.where(alone[None, :], 0.0, ds)
            dk, dv, dq = outside.add_gradients(dk, dv, q, do, k, p, ds, BLOCK_M, DIM, WIDEST, PRECISION)
            _add_atomically(DQ_ACC + row * DIM, left, dq, BLOCK_M, DIM, WIDEST)
    row = tiles.at(tl.cast(start_n, tl.int64), head, seqlen_k)
    tiles.store(DK + row * DIM, DIM, more, tiles.times(dk, scale), BLOCK_N, DIM, WIDEST, False)
    tiles.store(DV + row * DIM_V, DIM_V, more, dv, BLOCK_N, DIM_V, WIDEST, False)
