"""FlashAttention-3's backward for head dims over 128, in Gluon for sm_90: dK and dV.

dK and dV of 64 keys by 256 columns in fp32 are half of an SM's registers, so a program has 64 keys at a time,
dQ has a kernel of its own (_hopper_wide_dq.py), and the two warpgroups divide the work by product:

- One computes S^T = K Q^T, P^T and dV += P^T dO, and hands P^T over through shared memory;
- the other dP^T = V dO^T, dS^T = P^T (dP^T - delta) and dK += dS^T Q.

Either's P^T or dS^T is in registers what wgmma wants of a first operand, and while one takes exponentials the
other's products run. K is read by the first alone and V by the second, so dV leaves through K's place and
dK through V's, with nobody to wait for. ``produce`` is one warp that loads Q, dO and their rows' LSE and
delta by TMA into rings. Nothing is added in an order that could change: every run has the same bits.
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

from flashbench.kernels import _hopper_backward_tiles as one
from flashbench.kernels import _hopper_wide_tiles as wide
from flashbench.kernels._hopper_tiles import tma_load

ROWS = one.ROWS


@gluon.jit
def sum_dv(
    QS, DOS, KS, PS, LSES, QFULL, QEMPTY, DOFULL, DOEMPTY, KFULL, KEMPTY, PFULL, PEMPTY,
    DV, TABLE, tiles, heads, group, seqlen_q, seqlen_k, unit,
    D0: gl.constexpr, D1: gl.constexpr, E0: gl.constexpr, E1: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """One warpgroup: P^T, which it hands over, and dV."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    FIRST: gl.constexpr = gl.DotOperandLayout(0, parent=S, k_width=2)
    HALF: gl.constexpr = KS.dtype
    OF_DV: gl.constexpr = 2 if E1 > 0 else 1  # products that are dV
    programs = gl.num_programs(0)
    TABLE += gl.program_id(0)
    total = gl.load(TABLE)
    tiles_q = (seqlen_q + ROWS - 1) // ROWS
    j = 0  # tile of queries of the program
    kv = 0  # tile of keys of the program
    while j < total:
        TABLE += programs
        entry = gl.load(TABLE)
        head, start_n = entry // tiles, entry % tiles * ROWS
        first = wide.first_tile(start_n, seqlen_q, seqlen_k, CAUSAL)
        begin = one.first_query(start_n, seqlen_q, seqlen_k, CAUSAL, gl.SliceLayout(1, S))
        clear = one.clear_from(start_n, seqlen_q, seqlen_k, 0, CAUSAL)
        K = wide.tile(KS, 0)
        dv0, dv1 = wide.zeros(E0, E1)
        m = first
        stage = j % 2
        mbarrier.wait(QFULL.index(stage), (j // 2) & 1)
        mbarrier.wait(KFULL.index(0), kv & 1)
        s = wide.across(K, wide.tile(QS, stage), D0, D1, S)
        s = warpgroup_mma_wait(0, [s])
        p = one.probabilities(s, LSES, stage, begin - m * ROWS, m * ROWS < clear, unit, S)
        mbarrier.arrive(QEMPTY.index(stage))
        wide.hand(p, PS, PFULL, PEMPTY, j)
        p_half = gl.convert_layout(p.to(HALF), FIRST)
        for _ in range(group * (tiles_q - first) - 1):
            before, phase = j % 2, (j // 2) & 1
            j += 1
            m += 1
            if m == tiles_q:  # the next query head of the group
                m = first
            stage = j % 2
            mbarrier.wait(QFULL.index(stage), (j // 2) & 1)
            s = wide.across(K, wide.tile(QS, stage), D0, D1, S)
            mbarrier.wait(DOFULL.index(before), phase)
            dv0, dv1 = wide.into(dv0, dv1, p_half, wide.tile(DOS, before), E0, E1)
            s = warpgroup_mma_wait(OF_DV, [s])
            p = one.probabilities(s, LSES, stage, begin - m * ROWS, m * ROWS < clear, unit, S)
            mbarrier.arrive(QEMPTY.index(stage))
            wide.hand(p, PS, PFULL, PEMPTY, j)
            dv0, dv1, p_half, p = warpgroup_mma_wait(0, [dv0, dv1, p_half, p])
            mbarrier.arrive(DOEMPTY.index(before))
            p_half = gl.convert_layout(p.to(HALF), FIRST)
        before = j % 2
        mbarrier.wait(DOFULL.index(before), (j // 2) & 1)
        dv0, dv1 = wide.into(dv0, dv1, p_half, wide.tile(DOS, before), E0, E1)
        dv0, dv1, p_half = warpgroup_mma_wait(0, [dv0, dv1, p_half])
        mbarrier.arrive(DOEMPTY.index(before))
        wide.leave(dv0, dv1, KS.index(0), DV, [head // heads, head % heads, start_n, 0], E0, E1)
        mbarrier.arrive(KEMPTY.index(0))
        j += 1
        kv += 1


@gluon.jit
def sum_dk(
    QS, DOS, VS, PS, DELTAS, QFULL, QEMPTY, DOFULL, DOEMPTY, VFULL, VEMPTY, PFULL, PEMPTY,
    DK, TABLE, tiles, heads, group, seqlen_q, seqlen_k, scale,
    D0: gl.constexpr, D1: gl.constexpr, E0: gl.constexpr, E1: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """The other warpgroup: dP^T and, with P^T from the first, dS^T and dK."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    FIRST: gl.constexpr = gl.DotOperandLayout(0, parent=S, k_width=2)
    HALF: gl.constexpr = VS.dtype
    OF_DP: gl.constexpr = 2 if E1 > 0 else 1  # products that are dP
    programs = gl.num_programs(0)
    TABLE += gl.program_id(0)
    total = gl.load(TABLE)
    tiles_q = (seqlen_q + ROWS - 1) // ROWS
    j = 0
    kv = 0
    while j < total:
        TABLE += programs
        entry = gl.load(TABLE)
        head, start_n = entry // tiles, entry % tiles * ROWS
        first = wide.first_tile(start_n, seqlen_q, seqlen_k, CAUSAL)
        V = wide.tile(VS, 0)
        dk0, dk1 = wide.zeros(D0, D1)
        stage = j % 2
        mbarrier.wait(VFULL.index(0), kv & 1)
        mbarrier.wait(DOFULL.index(stage), (j // 2) & 1)
        dp = wide.across(V, wide.tile(DOS, stage), E0, E1, S)
        dp = warpgroup_mma_wait(0, [dp])
        delta = DELTAS.index(stage).load(gl.SliceLayout(0, S))
        mbarrier.arrive(DOEMPTY.index(stage))
        p = wide.take(PS, PFULL, PEMPTY, j, S)
        ds = gl.convert_layout((p * (dp - delta[None, :])).to(HALF), FIRST)
        for _ in range(group * (tiles_q - first) - 1):
            before, phase = j % 2, (j // 2) & 1
            j += 1
            stage = j % 2
            mbarrier.wait(QFULL.index(before), phase)
            dk0, dk1 = wide.into(dk0, dk1, ds, wide.tile(QS, before), D0, D1)
            mbarrier.wait(DOFULL.index(stage), (j // 2) & 1)
            dp = wide.across(V, wide.tile(DOS, stage), E0, E1, S)
            dk0, dk1, ds = warpgroup_mma_wait(OF_DP, [dk0, dk1, ds])
            mbarrier.arrive(QEMPTY.index(before))
            dp = warpgroup_mma_wait(0, [dp])
            delta = DELTAS.index(stage).load(gl.SliceLayout(0, S))
            mbarrier.arrive(DOEMPTY.index(stage))
            p = wide.take(PS, PFULL, PEMPTY, j, S)
            ds = gl.convert_layout((p * (dp - delta[None, :])).to(HALF), FIRST)
        before = j % 2
        mbarrier.wait(QFULL.index(before), (j // 2) & 1)
        dk0, dk1 = wide.into(dk0, dk1, ds, wide.tile(QS, before), D0, D1)
        dk0, dk1, ds = warpgroup_mma_wait(0, [dk0, dk1, ds])
        mbarrier.arrive(QEMPTY.index(before))
        at = [head // heads, head % heads, start_n, 0]
        wide.leave(dk0 * scale, dk1 * scale, VS.index(0), DK, at, D0, D1)
        mbarrier.arrive(VEMPTY.index(0))
        j += 1
        kv += 1


@gluon.jit
def produce(
    Q, DO, K, V, LSE, DELTA, QS, DOS, KS, VS, LSES, DELTAS, QFULL, QEMPTY, DOFULL, DOEMPTY,
    KFULL, KEMPTY, VFULL, VEMPTY, TABLE, tiles, heads, group, seqlen_q, seqlen_k, CAUSAL: gl.constexpr,
):  # fmt: skip
    """One warp: every tile that the others will want, in their order, as soon as its place is empty."""
    BYTES: gl.constexpr = 2 * ROWS * wide.WIDTH
    programs = gl.num_programs(0)
    TABLE += gl.program_id(0)
    total = gl.load(TABLE)
    tiles_q = (seqlen_q + ROWS - 1) // ROWS
    j = 0
    kv = 0
    while j < total:
        TABLE += programs
        entry = gl.load(TABLE)
        head, start_n = entry // tiles, entry % tiles * ROWS
        first = wide.first_tile(start_n, seqlen_q, seqlen_k, CAUSAL)
        b, h = head // heads, head % heads
        g = 0
        m = first
        for i in range(group * (tiles_q - first)):
            stage, phase = j % 2, (j // 2) & 1
            at = [b, h * group + g, m * ROWS, 0]
            row = ((head * group + g) * tiles_q + m) * ROWS
            mbarrier.wait(QEMPTY.index(stage), phase ^ 1)
            mbarrier.expect(QFULL.index(stage), BYTES + 4 * ROWS)
            tma_load(Q, at, QFULL.index(stage), QS.index(stage))
            tma_load(LSE, [row], QFULL.index(stage), LSES.index(stage))
            if i == 0:
                mbarrier.wait(KEMPTY.index(0), (kv & 1) ^ 1)
                mbarrier.expect(KFULL.index(0), BYTES)
                tma_load(K, [b, h, start_n, 0], KFULL.index(0), KS.index(0))
            mbarrier.wait(DOEMPTY.index(stage), phase ^ 1)
            mbarrier.expect(DOFULL.index(stage), BYTES + 4 * ROWS)
            tma_load(DO, at, DOFULL.index(stage), DOS.index(stage))
            tma_load(DELTA, [row], DOFULL.index(stage), DELTAS.index(stage))
            if i == 0:
                mbarrier.wait(VEMPTY.index(0), (kv & 1) ^ 1)
                mbarrier.expect(VFULL.index(0), BYTES)
                tma_load(V, [b, h, start_n, 0], VFULL.index(0), VS.index(0))
            m += 1
            if m == tiles_q:
                m = first
                g += 1
            j += 1
        kv += 1


@gluon.jit(do_not_specialize=["tiles", "heads", "group", "seqlen_q", "seqlen_k"])
def backward_dkdv(
    Q, DO, K, V, LSE, DELTA, DK, DV, TABLE, tiles, heads, group, seqlen_q, seqlen_k, unit, scale,
    D0: gl.constexpr, D1: gl.constexpr, E0: gl.constexpr, E1: gl.constexpr, CAUSAL: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """dK and dV. Grid: as many programs as the table has columns.

    Q, DO, K, V, DK, DV: descriptors (batch, head, row, column) of boxes of 64 rows by 256 columns. LSE,
    DELTA: a number per query, tile after tile of 64; LSE in powers of two, infinite for rows that see no key.
    heads: of K/V. unit: the scores' scale, in powers of two; scale: dK's. D0 + D1: columns of Q and K, E0 +
    E1: of V and dO.
    """
    QS = wide.ring(2, Q)
    DOS = wide.ring(2, DO)
    KS = wide.ring(1, K)
    VS = wide.ring(1, V)
    LSES = gl.allocate_shared_memory(gl.float32, [2, ROWS], LSE.layout)
    DELTAS = gl.allocate_shared_memory(gl.float32, [2, ROWS], DELTA.layout)
    LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    PS = gl.allocate_shared_memory(gl.float32, [wide.SLOTS, ROWS * ROWS // wide.LINE, wide.LINE], LINEAR)
    QFULL = one.barriers(2, 1)
    QEMPTY = one.barriers(2, 2)
    DOFULL = one.barriers(2, 1)
    DOEMPTY = one.barriers(2, 2)
    KFULL = one.barriers(1, 1)
    KEMPTY = one.barriers(1, 1)
    VFULL = one.barriers(1, 1)
    VEMPTY = one.barriers(1, 1)
    PFULL = one.barriers(wide.SLOTS, 1)
    PEMPTY = one.barriers(wide.SLOTS, 1)
    fence_async_shared()
    gl.warp_specialize([
        (sum_dv, (QS, DOS, KS, PS, LSES, QFULL, QEMPTY, DOFULL, DOEMPTY, KFULL, KEMPTY, PFULL, PEMPTY,
                  DV, TABLE, tiles, heads, group, seqlen_q, seqlen_k, unit,
                  D0, D1, E0, E1, CAUSAL)),
        (sum_dk, (QS, DOS, VS, PS, DELTAS, QFULL, QEMPTY, DOFULL, DOEMPTY, VFULL, VEMPTY, PFULL, PEMPTY,
                  DK, TABLE, tiles, heads, group, seqlen_q, seqlen_k, scale,
                  D0, D1, E0, E1, CAUSAL)),
        (produce, (Q, DO, K, V, LSE, DELTA, QS, DOS, KS, VS, LSES, DELTAS, QFULL, QEMPTY, DOFULL, DOEMPTY,
                   KFULL, KEMPTY, VFULL, VEMPTY, TABLE, tiles, heads, group, seqlen_q, seqlen_k, CAUSAL)),
    ], [4, 1], [REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
