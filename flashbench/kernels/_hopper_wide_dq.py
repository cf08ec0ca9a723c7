"""FlashAttention-3's backward for head dims over 128, in Gluon for sm_90: dQ.

As the forward (_hopper_kernels.py): two warpgroups have 64 rows of queries each, whose Q and dO stay in
shared memory and whose dQ in registers; one warp loads K and V by TMA into rings. S = Q K^T and dP = dO V^T
give dS in registers, as wgmma wants a first operand, for dQ += dS K. dQ of one K/V tile is issued before
the scores of the next, so that its K makes place while those are computed: there is room for two tiles of
K and one of V. S and dP are computed a second time here (_hopper_wide_dkdv.py has them, too).
"""

# Triton reads the bodies below, not Python: no annotations but gl.constexpr, tensors by their capitals.
# ruff: noqa: ANN001, ANN202
# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from flashbench.kernels import _hopper_asm as asm
from flashbench.kernels import _hopper_backward_tiles as one
from flashbench.kernels import _hopper_tiles as forward
from flashbench.kernels import _hopper_wide_tiles as wide
from flashbench.kernels._hopper_tiles import tma_load

ROWS = one.ROWS
BLOCK_M = gl.constexpr(128)
"""Rows of queries of a tile: of two warpgroups."""


@gluon.jit
def probabilities(s, lse, last, masked, unit):
    """P of 64 queries and 64 keys. last: the last key of the 64 that each query sees."""
    if masked:
        s = asm.mask(s, last, ROWS)
    return gl.exp2(s * unit - lse[:, None])


@gluon.jit
def sum_dq(
    QS, DOS, KS, VS, QFULL, QEMPTY, DOFULL, DOEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
    LSE, DELTA, DQ, TABLE, tiles, heads, seqlen_q, seqlen_k, unit, scale,
    WG: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, E0: gl.constexpr, E1: gl.constexpr,
    CAUSAL: gl.constexpr, ALONE: gl.constexpr,
):  # fmt: skip
    """One warpgroup: dQ of 64 rows of each of the program's tiles of queries."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    FIRST: gl.constexpr = gl.DotOperandLayout(0, parent=S, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    HALF: gl.constexpr = KS.dtype
    OF_S: gl.constexpr = 2 if D1 > 0 else 1  # products that are S, and that are dP
    OF_DP: gl.constexpr = 2 if E1 > 0 else 1
    programs = gl.num_programs(0)
    TABLE += gl.program_id(0)
    total = gl.load(TABLE)
    rows_of_head = (seqlen_q + ROWS - 1) // ROWS * ROWS
    j = 0  # K/V tile of the program
    t = 0  # tile of queries of the program
    while j < total:
        TABLE += programs
        entry = gl.load(TABLE)
        head = entry // tiles
        start_m, blocks, clear, own = forward.place(
            entry % tiles, seqlen_q, seqlen_k, (1 - WG) * ROWS, BLOCK_M, ROWS, CAUSAL)  # fmt: skip
        last = forward.last_key(start_m, seqlen_q, seqlen_k, WG, CAUSAL, ROW)
        rows = start_m + WG * ROWS + gl.arange(0, ROWS, ROW)
        at = head.to(gl.int64) * rows_of_head + rows
        lse = gl.load(LSE + at, mask=rows < rows_of_head, other=float("inf"))
        delta = gl.load(DELTA + at, mask=rows < rows_of_head, other=0.0)
        Q, DO = wide.tile(QS, WG), wide.tile(DOS, WG)
        dq0, dq1 = wide.zeros(D0, D1)
        mbarrier.wait(QFULL.index(WG), t & 1)
        mbarrier.wait(KFULL.index(j % 2), (j // 2) & 1)
        s = wide.across(Q, wide.tile(KS, j % 2), D0, D1, S)
        mbarrier.wait(DOFULL.index(WG), t & 1)
        mbarrier.wait(VFULL.index(0), j & 1)
        dp = wide.across(DO, wide.tile(VS, 0), E0, E1, S)
        s = warpgroup_mma_wait(OF_DP, [s])
        p = probabilities(s, lse, last, clear <= 0, unit)
        dp, p = warpgroup_mma_wait(0, [dp, p])
        mbarrier.arrive(VEMPTY.index(0))
        ds = gl.convert_layout((p * (dp - delta[:, None])).to(HALF), FIRST)
        for n in range(1, own):
            before = j % 2
            j += 1
            stage, phase = j % 2, (j // 2) & 1
            dq0, dq1 = wide.into(dq0, dq1, ds, wide.tile(KS, before), D0, D1)
            mbarrier.wait(KFULL.index(stage), phase)
            s = wide.across(Q, wide.tile(KS, stage), D0, D1, S)
            # dP not before dS is done with: there are not the registers for both
            dq0, dq1, ds = warpgroup_mma_wait(OF_S, [dq0, dq1, ds])
            mbarrier.arrive(KEMPTY.index(before))
            mbarrier.wait(VFULL.index(0), j & 1)
            dp = wide.across(DO, wide.tile(VS, 0), E0, E1, S)
            s = warpgroup_mma_wait(OF_DP, [s])
            p = probabilities(s, lse, last - n * ROWS, n >= clear, unit)
            # complete already: the end of a basic block keeps ptxas from waiting for dP at once
            mbarrier.wait(VFULL.index(0), j & 1)
            dp, p = warpgroup_mma_wait(0, [dp, p])
            mbarrier.arrive(VEMPTY.index(0))
            ds = gl.convert_layout((p * (dp - delta[:, None])).to(HALF), FIRST)
        mbarrier.arrive(DOEMPTY.index(WG))
        dq0, dq1 = wide.into(dq0, dq1, ds, wide.tile(KS, j % 2), D0, D1)
        dq0, dq1, ds = warpgroup_mma_wait(0, [dq0, dq1, ds])
        mbarrier.arrive(KEMPTY.index(j % 2))
        j += 1
        for _ in range(blocks - own):  # K/V tiles that this warpgroup's rows do not see, but the other's do
            mbarrier.wait(KFULL.index(j % 2), (j // 2) & 1)
            mbarrier.arrive(KEMPTY.index(j % 2))
            mbarrier.wait(VFULL.index(0), j & 1)
            mbarrier.arrive(VEMPTY.index(0))
            j += 1
        if ALONE:
            keys = last + 1
            if not CAUSAL:
                keys = rows * 0 + seqlen_k
            factor = gl.where(keys == 1, 0.0, scale)
        else:
            factor = gl.where(rows >= 0, scale, 0.0)
        dq0, dq1 = wide.times(dq0, dq1, factor, D0, D1)
        place = [head // heads, head % heads, start_m + WG * ROWS, 0]
        wide.leave(dq0, dq1, QS.index(WG), DQ, place, D0, D1)
        mbarrier.arrive(QEMPTY.index(WG))
        t += 1


@gluon.jit
def produce(
    Q, DO, K, V, QS, DOS, KS, VS, QFULL, QEMPTY, DOFULL, DOEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
    TABLE, tiles, heads, group, seqlen_q, seqlen_k, CAUSAL: gl.constexpr,
):  # fmt: skip
    """One warp: every tile that the warpgroups will want, in their order, as soon as its place is empty."""
    BYTES: gl.constexpr = 2 * ROWS * wide.WIDTH
    programs = gl.num_programs(0)
    TABLE += gl.program_id(0)
    total = gl.load(TABLE)
    j = 0
    t = 0
    while j < total:
        TABLE += programs
        entry = gl.load(TABLE)
        head = entry // tiles
        b, h = head // heads, head % heads
        start_m, blocks, _, _ = forward.place(
            entry % tiles, seqlen_q, seqlen_k, 0, BLOCK_M, ROWS, CAUSAL)  # fmt: skip
        for n in range(blocks):
            key = [b, h // group, n * ROWS, 0]
            mbarrier.wait(KEMPTY.index(j % 2), ((j // 2) & 1) ^ 1)
            mbarrier.expect(KFULL.index(j % 2), BYTES)
            tma_load(K, key, KFULL.index(j % 2), KS.index(j % 2))
            if n == 0:
                for wg in gl.static_range(2):
                    at = [b, h, start_m + wg * ROWS, 0]
                    mbarrier.wait(QEMPTY.index(wg), (t & 1) ^ 1)
                    mbarrier.expect(QFULL.index(wg), BYTES)
                    tma_load(Q, at, QFULL.index(wg), QS.index(wg))
                    mbarrier.wait(DOEMPTY.index(wg), (t & 1) ^ 1)
                    mbarrier.expect(DOFULL.index(wg), BYTES)
                    tma_load(DO, at, DOFULL.index(wg), DOS.index(wg))
            mbarrier.wait(VEMPTY.index(0), (j & 1) ^ 1)
            mbarrier.expect(VFULL.index(0), BYTES)
            tma_load(V, key, VFULL.index(0), VS.index(0))
            j += 1
        t += 1


@gluon.jit(do_not_specialize=["tiles", "heads", "group", "seqlen_q", "seqlen_k"])
def backward_dq(
    Q, DO, K, V, LSE, DELTA, DQ, TABLE, tiles, heads, group, seqlen_q, seqlen_k, unit, scale,
    D0: gl.constexpr, D1: gl.constexpr, E0: gl.constexpr, E1: gl.constexpr,
    CAUSAL: gl.constexpr, ALONE: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """dQ. Grid: as many programs as the table has columns.

    Q, DO, K, V, DQ: descriptors (batch, head, row, column) of boxes of 64 rows by 256 columns. LSE, DELTA: a
    number per query, tile after tile of 64; LSE in powers of two, infinite for rows that see no key. heads:
    of queries. unit: the scores' scale, in powers of two; scale: dQ's. ALONE: rows that see one key have
    no gradient, to the last bit. D0 + D1: columns of Q and K, E0 + E1: of V and dO.
    """
    QS = wide.ring(2, Q)
    DOS = wide.ring(2, DO)
    KS = wide.ring(2, K)
    VS = wide.ring(1, V)
    QFULL = one.barriers(2, 1)
    QEMPTY = one.barriers(2, 1)
    DOFULL = one.barriers(2, 1)
    DOEMPTY = one.barriers(2, 1)
    KFULL = one.barriers(2, 1)
    KEMPTY = one.barriers(2, 2)
    VFULL = one.barriers(1, 1)
    VEMPTY = one.barriers(1, 2)
    fence_async_shared()
    gl.warp_specialize([
        (sum_dq, (QS, DOS, KS, VS, QFULL, QEMPTY, DOFULL, DOEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
                  LSE, DELTA, DQ, TABLE, tiles, heads, seqlen_q, seqlen_k, unit, scale,
                  0, D0, D1, E0, E1, CAUSAL, ALONE)),
        (sum_dq, (QS, DOS, KS, VS, QFULL, QEMPTY, DOFULL, DOEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
                  LSE, DELTA, DQ, TABLE, tiles, heads, seqlen_q, seqlen_k, unit, scale,
                  1, D0, D1, E0, E1, CAUSAL, ALONE)),
        (produce, (Q, DO, K, V, QS, DOS, KS, VS, QFULL, QEMPTY, DOFULL, DOEMPTY, KFULL, KEMPTY,
                   VFULL, VEMPTY, TABLE, tiles, heads, group, seqlen_q, seqlen_k, CAUSAL)),
    ], [4, 1], [REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
