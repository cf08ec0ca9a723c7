"""FlashAttention-1 in portable Triton: the kernels. Launched by _flash_v1.py.

Source: Dao et al. 2022, arXiv:2205.14135, Algorithm 2 (forward) and Algorithm 4 (backward), without
dropout. K and V are outside and stay on chip; Q, O, l, m (or Q, O, dO, dQ, l, m) are read again, and O,
l, m (or dQ) written again, once per K/V tile. Of 16-bit inputs, O and dQ travel as O_TMP and DQ_TMP in
fp32 and are rounded once, at the end, as in release 1.0 of the authors' code: rounded at each of 256 K/V
tiles they are off by more than a 16-bit result may be. m is of the scores before they are scaled by τ.

A program owns a head, so it alone reads what it wrote. Two things keep that honest:

- loads of what is read again go past L1 (``load_from_l2``), which would hide the traffic that this
  algorithm is about;
- a thread reads what other threads of its block wrote, and a row of l, m is read by several threads and
  written by one. A barrier before a K/V tile makes the writes of the last one visible; a barrier between
  a query tile's loads and its stores keeps a fast warp from writing what a slow one has yet to read.
  Nothing is prefetched (one pipeline stage): a load that ran ahead could pass a barrier.
"""

# Triton reads the bodies below, not Python: no annotations but tl.constexpr, tensors by their capitals.
# ruff: noqa: ANN001, ANN202, E741, SIM108
# mypy: ignore-errors

from __future__ import annotations

import math

import triton
import triton.language as tl

from flashbench.kernels import _kv_outside as outside
from flashbench.kernels import _triton_tiles as tiles

LOG2E = tl.constexpr(math.log2(math.e))
RUNTIME = ["num_heads", "group", "seqlen_q", "seqlen_k"]
"""Arguments whose value Triton must not compile for."""


@triton.jit
def _round(FROM, TO, count, BLOCK_M: tl.constexpr, DIM: tl.constexpr, WIDEST: tl.constexpr):
    """Write ``count`` rows that this program left in fp32 in the dtype of TO."""
    tl.debug_barrier()
    for start in range(0, count, BLOCK_M):
        left = count - start
        tile = outside.load_from_l2(tiles.at(FROM, start, DIM), DIM, left, BLOCK_M, DIM, WIDEST, False, True)
        tiles.store(tiles.at(TO, start, DIM), DIM, left, tile, BLOCK_M, DIM, WIDEST, False)


@triton.jit(do_not_specialize=RUNTIME)
def forward(
    Q, K, V, O, O_TMP, L, M, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    num_heads, group, seqlen_q, seqlen_k, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDEST: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, SCRATCH: tl.constexpr,
):  # fmt: skip
    """O, l and m of one head (Algorithm 2). Grid: heads (of all batches). Without SCRATCH O_TMP is O."""
    head = tl.program_id(0)
    batch, h = head // num_heads, head % num_heads
    Q = tiles.head_at(Q, batch, q_b, h, q_h)
    K = tiles.head_at(K, batch, k_b, h // group, k_h)
    V = tiles.head_at(V, batch, v_b, h // group, v_h)
    row = tl.cast(head, tl.int64) * seqlen_q
    O_TMP, L, M = O_TMP + row * DIM_V, L + row, M + row
    rows = tl.arange(0, BLOCK_M)
    for start_m in range(0, seqlen_q, BLOCK_M):  # line 2: O = 0, l = 0, m = -inf
        left = seqlen_q - start_m
        nothing = tiles.zeros(BLOCK_M, DIM_V, WIDEST)
        tiles.store(tiles.at(O_TMP, start_m, DIM_V), DIM_V, left, nothing, BLOCK_M, DIM_V, WIDEST, False)
        tl.store(L + start_m + rows, tl.zeros([BLOCK_M], tl.float32), mask=rows < left)
        tl.store(M + start_m + rows, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=rows < left)
    for start_n in range(0, seqlen_k, BLOCK_N):  # line 5
        more = seqlen_k - start_n
        k = tiles.load(tiles.at(K, start_n, k_n), k_n, more, BLOCK_N, DIM, WIDEST, True, WIDE)
        v = tiles.load(tiles.at(V, start_n, v_n), v_n, more, BLOCK_N, DIM_V, WIDEST, True, WIDE)
        cols = start_n + tl.arange(0, BLOCK_N)
        tl.debug_barrier()
        first = outside.first_row(start_n, seqlen_q, seqlen_k, BLOCK_M, CAUSAL)
        for start_m in range(first, seqlen_q, BLOCK_M):  # line 7
            left = seqlen_q - start_m
            Om = tiles.at(O_TMP, start_m, DIM_V)
            q = outside.load_from_l2(tiles.at(Q, start_m, q_n), q_n, left, BLOCK_M, DIM, WIDEST, WIDE)
            o = outside.load_from_l2(Om, DIM_V, left, BLOCK_M, DIM_V, WIDEST, False, SCRATCH)
            l = outside.load_rows_from_l2(L + start_m, left, BLOCK_M, 0.0)
            m = outside.load_rows_from_l2(M + start_m, left, BLOCK_M, float("-inf"))
            s = tiles.dot_t(q, k, PRECISION)
            seen = outside.visible(start_m + rows[:, None], cols[None, :], seqlen_q, seqlen_k, CAUSAL)
            s = tl.where(seen, s, float("-inf"))
            new_m = tl.maximum(m, tl.max(s, 1))
            # a row that has seen no key yet: exp2(-inf - 0) = 0, not exp2(-inf + inf)
            base = tl.where(new_m == float("-inf"), 0.0, new_m)
            p = tl.exp2((s - base[:, None]) * (scale * LOG2E))
            kept = l * tl.exp2((m - base) * (scale * LOG2E))
            new_l = kept + tl.sum(p, 1)
            o = tiles.add_dot(tiles.times(o, kept[:, None]), p, v, PRECISION)
            o = tiles.times(o, (1.0 / tl.where(new_l > 0.0, new_l, 1.0))[:, None])  # line 12
            tl.debug_barrier()
            tiles.store(Om, DIM_V, left, o, BLOCK_M, DIM_V, WIDEST, False)
            tl.store(L + start_m + rows, new_l, mask=rows < left)
            tl.store(M + start_m + rows, new_m, mask=rows < left)
    if SCRATCH:
        _round(O_TMP, O + row * DIM_V, seqlen_q, BLOCK_M, DIM_V, WIDEST)


@triton.jit
def _probabilities(s, m, l, scale, EXACT: tl.constexpr):
    """exp(τ(s − m)) / l for rows that have seen a key."""
    if EXACT:
        p = tiles.exp((s - m) * scale) / l
    else:
        p = tl.exp2((s - m) * (scale * LOG2E)) / l
    return p


@triton.jit(do_not_specialize=RUNTIME)
def backward(
    Q, K, V, O, DO, L, M, DLSE, DQ, DQ_TMP, DK, DV,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, do_b, do_h, do_n,
    num_heads, group, seqlen_q, seqlen_k, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDEST: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr,
    SCRATCH: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """dQ, dK and dV of one K/V head and the query heads that share it (Algorithm 4).

    num_heads counts K/V heads. Grid: K/V heads (of all batches). dK and dV of a tile stay on chip until
    it is done; dQ does not. Without SCRATCH DQ_TMP is DQ.
    """
    head = tl.program_id(0)
    batch, h = head // num_heads, head % num_heads
    K = tiles.head_at(K, batch, k_b, h, k_h)
    V = tiles.head_at(V, batch, v_b, h, v_h)
    heads_row = tl.cast(head, tl.int64) * group * seqlen_q
    DQ_TMP += heads_row * DIM
    rows = tl.arange(0, BLOCK_M)
    for start in range(0, group * seqlen_q, BLOCK_M):  # line 4: dQ = 0, the group's heads in a row
        nothing = tiles.zeros(BLOCK_M, DIM, WIDEST)
        left = group * seqlen_q - start
        tiles.store(tiles.at(DQ_TMP, start, DIM), DIM, left, nothing, BLOCK_M, DIM, WIDEST, False)
    for start_n in range(0, seqlen_k, BLOCK_N):  # line 6
        more = seqlen_k - start_n
        k = tiles.load(tiles.at(K, start_n, k_n), k_n, more, BLOCK_N, DIM, WIDEST, True, WIDE)
        v = tiles.load(tiles.at(V, start_n, v_n), v_n, more, BLOCK_N, DIM_V, WIDEST, True, WIDE)
        dk = tiles.zeros(BLOCK_N, DIM, WIDEST)
        dv = tiles.zeros(BLOCK_N, DIM_V, WIDEST)
        cols = start_n + tl.arange(0, BLOCK_N)
        tl.debug_barrier()
        first = outside.first_row(start_n, seqlen_q, seqlen_k, BLOCK_M, CAUSAL)
        for g in range(group):
            Qg = tiles.head_at(Q, batch, q_b, h * group + g, q_h)
            DOg = tiles.head_at(DO, batch, do_b, h * group + g, do_h)
            for start_m in range(first, seqlen_q, BLOCK_M):  # line 9
                left = seqlen_q - start_m
                in_group = tl.cast(g, tl.int64) * seqlen_q + start_m
                row = heads_row + in_group
                q = outside.load_from_l2(tiles.at(Qg, start_m, q_n), q_n, left, BLOCK_M, DIM, WIDEST, WIDE)
                do = outside.load_from_l2(
                    tiles.at(DOg, start_m, do_n), do_n, left, BLOCK_M, DIM_V, WIDEST, WIDE
                )
                o = outside.load_from_l2(O + row * DIM_V, DIM_V, left, BLOCK_M, DIM_V, WIDEST, False)
                DQm = DQ_TMP + in_group * DIM
                dq = outside.load_from_l2(DQm, DIM, left, BLOCK_M, DIM, WIDEST, False, SCRATCH)
                l = outside.load_rows_from_l2(L + row, left, BLOCK_M, 1.0)
                m = outside.load_rows_from_l2(M + row, left, BLOCK_M, 0.0)
                some = l > 0.0  # false for a row without keys
                m, l = tl.where(some, m, 0.0), tl.where(some, l, 1.0)
                seen = outside.visible(start_m + rows[None, :], cols[:, None], seqlen_q, seqlen_k, CAUSAL)
                p = _probabilities(tiles.dot_t(k, q, PRECISION), m[None, :], l[None, :], scale, EXACT)
                p = tl.where(seen, p, 0.0)
                dp = tiles.dot_t(v, do, PRECISION)
                d = tiles.row_sums(o, do)  # line 19
                # of a row that sees one key dP - D is 0 to the last bit
                alone = outside.keys_of(start_m + rows, seqlen_q, seqlen_k, CAUSAL) == 1
                d = tl.where(alone, tl.sum(tl.where(seen, dp, 0.0), 0), d)
                if HAS_DLSE:  # d lse / d s = p, as d o / d s = p (dP - D)
                    d -= outside.load_rows_from_l2(DLSE + row, left, BLOCK_M, 0.0)
                ds = p * (dp - d[None, :])
                dk, dv, more_dq = outside.add_gradients(
                    dk, dv, q, do, k, p, ds, BLOCK_M, DIM, WIDEST, PRECISION
                )
                dq = outside.plus(dq, tiles.times(more_dq, scale))  # line 21
                tl.debug_barrier()
                tiles.store(DQm, DIM, left, dq, BLOCK_M, DIM, WIDEST, False)
        row = tiles.at(tl.cast(start_n, tl.int64), head, seqlen_k)
        tiles.store(DK + row * DIM, DIM, more, tiles.times(dk, scale), BLOCK_N, DIM, WIDEST, False)  # line 24
        tiles.store(DV + row * DIM_V, DIM_V, more, dv, BLOCK_N, DIM_V, WIDEST, False)
    if SCRATCH:
        _round(DQ_TMP, DQ + heads_row * DIM, group * seqlen_q, BLOCK_M, DIM, WIDEST)
