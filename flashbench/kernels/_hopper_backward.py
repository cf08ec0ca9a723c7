"""FlashAttention-3 in Gluon for sm_90: the backward kernel. Launched by _flash_v3_backward.py.

Source: Shah et al. 2024, arXiv:2407.08608, appendix B.1 (Algorithm 3); its ideas by its names there:

- Warp specialisation: ``produce`` is one warp that loads Q, dO and their rows' LSE and delta by TMA into a
  ring; two warpgroups ``consume``, each with 64 of a tile's 128 keys, whose K, V, dK and dV stay on chip.
- S^T = K Q^T and dP^T = V dO^T are computed transposed, so that P^T and dS^T are in registers what wgmma
  wants of a first operand: dV += P^T dO and dK += dS^T Q need no way through shared memory.
- dQ = dS K sums over the keys of both warpgroups, so dS does go through shared memory, in a ring; each
  warpgroup computes one half of the tile's dQ, which TMA adds to an fp32 accumulator in memory
  (cp.reduce.async.bulk; the paper's dQ-writer warp), in no fixed order.

Beyond the paper: with LAG = 1, dQ is issued one tile late, so that neither warpgroup waits for the other's
dS and the exponentials of one run under the products of the other. Programs are persistent, longest first.
No product is in flight where the loop turns: ptxas would make all of them wait for each other (C7514).
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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashbench.kernels import _hopper_backward_tiles as one
from flashbench.kernels._hopper_tiles import tma_load, tma_store

ROWS = one.ROWS


@gluon.jit
def consume(
    QS, DOS, KS, VS, DSS, DQS, LSES, DELTAS, QFULL, DOFULL, EMPTY, KVFULL, KVEMPTY, DSFULL,
    DQ, DK, DV, TABLE, tiles, heads, group, seqlen_q, seqlen_k, outside, unit, scale,
    WG: gl.constexpr, SUBS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, DS_STAGES: gl.constexpr,
    LAG: gl.constexpr, CAUSAL: gl.constexpr, ADDS_DQ: gl.constexpr, EARLY_DV: gl.constexpr,
    ROTATE: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """One warpgroup: dK and dV of 64 of the keys of each of the program's tiles, and its half of dQ."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    LD: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LQ: gl.constexpr = S
    FIRST: gl.constexpr = gl.DotOperandLayout(0, parent=LD, k_width=2)
    ROWS_OF: gl.constexpr = gl.DotOperandLayout(0, parent=S, k_width=2)
    KEY: gl.constexpr = gl.SliceLayout(1, S)
    HALF: gl.constexpr = KS.dtype
    # this warpgroup's half of a tile's dQ: 64 of its rows, or where it has no more, of its columns
    DQ_SUB: gl.constexpr = WG if SUBS == 2 else 0
    DQ_COLUMN: gl.constexpr = WG * ROWS if D > ROWS else 0
    LATE_DP: gl.constexpr = HELD and SUBS == 2  # for want of registers
    AFTER_S: gl.constexpr = 2 * SUBS - (2 if LATE_DP else 1)  # products issued after a tile's first
    programs = gl.num_programs(0)
    TABLE += gl.program_id(0)
    total = gl.load(TABLE)
    K = KS.index(WG).reshape([ROWS, D])
    V = VS.index(WG).reshape([ROWS, D])
    K0 = KS.index(0).reshape([ROWS, D]).slice(DQ_COLUMN, ROWS, 1)
    K1 = KS.index(1).reshape([ROWS, D]).slice(DQ_COLUMN, ROWS, 1)
    j = 0  # tile of queries of the program
    kv = 0  # tile of keys of the program
    while j < total:
        TABLE += programs
        entry = gl.load(TABLE)
        head, start_n, first, tiles_q = one.place(entry, tiles, seqlen_q, seqlen_k, SUBS * ROWS, CAUSAL)
        begin = one.first_query(start_n + WG * ROWS, seqlen_q, seqlen_k, CAUSAL, KEY)
        clear = one.clear_from(start_n, seqlen_q, seqlen_k, WG, CAUSAL)
        dk = gl.zeros([ROWS, D], gl.float32, LD)
        dv = gl.zeros([ROWS, D], gl.float32, LD)
        dq = gl.zeros([ROWS, ROWS], gl.float32, LQ)
        line = outside  # where dq belongs: at first nowhere, which TMA leaves out
        start = one.start(entry, tiles, first, tiles_q, ROTATE)
        m = start
        before = head * group * tiles_q  # tiles of the query heads before this one
        mbarrier.wait(KVFULL.index(0), kv & 1)
        # first operands in registers spare shared memory, whose bandwidth products of 64 x 64 use up
        k_rows = K.load(ROWS_OF) if HELD else K
        v_rows = V.load(ROWS_OF) if HELD else V
        count = group * (tiles_q - first)
        for i in range(count):
            stage, phase = j % STAGES, (j // STAGES) & 1
            sub = stage * SUBS
            start_m = m * (SUBS * ROWS)
            mbarrier.wait(QFULL.index(stage), phase)
            s = one.issue_transposed(k_rows, QS, sub, D, S)
            mbarrier.wait(DOFULL.index(stage), phase)
            dp = one.issue_transposed(v_rows, DOS, sub, D, S)
            if SUBS == 2:  # the other half's products run under this half's exponentials
                s1 = one.issue_transposed(k_rows, QS, sub + 1, D, S)
                if not LATE_DP:
                    dp1 = one.issue_transposed(v_rows, DOS, sub + 1, D, S)
            s = warpgroup_mma_wait(AFTER_S, [s])
            p = one.probabilities(s, LSES, sub, begin - start_m, start_m < clear, unit, S)
            if EARLY_DV:
                p_half = gl.convert_layout(p.to(HALF), FIRST)
                dv = warpgroup_mma(
                    p_half, DOS.index(sub).reshape([ROWS, D]), dv, use_acc=i > 0, is_async=True
                )
                dp, p = warpgroup_mma_wait(AFTER_S, [dp, p])
                ds = one.gradient(p, dp, DELTAS, sub, HALF, S)
            else:
                # complete already: the end of a basic block keeps ptxas from waiting for dP at once
                mbarrier.wait(DOFULL.index(stage), phase)
                dp, p = warpgroup_mma_wait(AFTER_S - 1, [dp, p])
                ds = one.gradient(p, dp, DELTAS, sub, HALF, S)
                p_half = gl.convert_layout(p.to(HALF), FIRST)
                dv = warpgroup_mma(
                    p_half, DOS.index(sub).reshape([ROWS, D]), dv, use_acc=i > 0, is_async=True
                )
            ds_half = gl.convert_layout(ds, FIRST)
            if SUBS == 2:
                if LATE_DP:
                    dp1 = one.issue_transposed(v_rows, DOS, sub + 1, D, S)
                dk = warpgroup_mma(
                    ds_half, QS.index(sub).reshape([ROWS, D]), dk, use_acc=i > 0, is_async=True
                )
                sub += 1
                start_m += ROWS
                s1 = warpgroup_mma_wait(3, [s1])
                p1 = one.probabilities(s1, LSES, sub, begin - start_m, start_m < clear, unit, S)
                mbarrier.wait(DOFULL.index(stage), phase)
                dp1, p1 = warpgroup_mma_wait(1 if LATE_DP else 2, [dp1, p1])
                ds1 = one.gradient(p1, dp1, DELTAS, sub, HALF, S)
                p1_half = gl.convert_layout(p1.to(HALF), FIRST)
                ds1_half = gl.convert_layout(ds1, FIRST)
                dv = warpgroup_mma(p1_half, DOS.index(sub).reshape([ROWS, D]), dv, is_async=True)
            else:
                ds1, p1_half, ds1_half = ds, p_half, ds_half
            if ADDS_DQ:
                one.share(ds, ds1, DSS, EMPTY, DSFULL, j, WG, SUBS, STAGES, DS_STAGES, LAG)
                now = gl.maximum(j - LAG, 0)
                mbarrier.wait(DSFULL.index(now % DS_STAGES), (now // DS_STAGES) & 1, pred=j >= LAG)
                dq = one.issue_dq(DSS, K0, K1, now % DS_STAGES, dq, DQ_SUB, SUBS, DS_STAGES)
            dk = warpgroup_mma(
                ds1_half, QS.index(sub).reshape([ROWS, D]), dk, use_acc=i > 0 or SUBS == 2, is_async=True
            )
            if ADDS_DQ:
                dv, dq, p_half, ds_half, p1_half = warpgroup_mma_wait(1, [dv, dq, p_half, ds_half, p1_half])
                own = (2 * (before + m) + WG) * one.LINES
                one.add_dq(dq, DQ, own if LAG == 0 else line, DQS.index(WG))
                line = own
            dk, dv, p1_half, ds1_half = warpgroup_mma_wait(0, [dk, dv, p1_half, ds1_half])
            mbarrier.arrive(EMPTY.index(stage))
            m += 1
            if m == tiles_q:
                m = first
            if m == start:  # the next query head of the group
                before += tiles_q
            j += 1
        if ADDS_DQ and LAG > 0:
            mbarrier.wait(DSFULL.index((j - 1) % DS_STAGES), ((j - 1) // DS_STAGES) & 1)
            dq = one.issue_dq(DSS, K0, K1, (j - 1) % DS_STAGES, dq, DQ_SUB, SUBS, DS_STAGES)
            dq = warpgroup_mma_wait(0, [dq])
        mbarrier.arrive(KVEMPTY.index(0))
        if ADDS_DQ and LAG > 0:
            one.add_dq(dq, DQ, line, DQS.index(WG))
        # both have read all dS: dV and dK leave from its place, while the next K and V come
        mbarrier.wait(KVEMPTY.index(0), kv & 1)
        b, h = head // heads, head % heads
        key = start_n + WG * ROWS
        OUT = one.retiled(DSS, [2 * DS_STAGES * SUBS * ROWS // D, 1, 1, ROWS, D], KS.type.layout)
        place = WG * (DS_STAGES * SUBS * ROWS // D)
        OUT.index(place).reshape([ROWS, D]).store(dv.to(HALF))
        OUT.index(place + 1).reshape([ROWS, D]).store((dk * scale).to(HALF))
        fence_async_shared()
        tma_store(DV, [b, h, key, 0], OUT.index(place))
        tma_store(DK, [b, h, key, 0], OUT.index(place + 1))
        tma.store_wait(0)
        kv += 1
    tma.store_wait(0)


@gluon.jit
def produce(
    Q, DO, K, V, LSE, DELTA, QS, DOS, KS, VS, LSES, DELTAS, QFULL, DOFULL, EMPTY, KVFULL, KVEMPTY,
    TABLE, tiles, heads, group, seqlen_q, seqlen_k,
    SUBS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, ROTATE: gl.constexpr,
):  # fmt: skip
    """One warp: every tile that the consumers will want, in their order, as soon as its place is empty."""
    BLOCK_M: gl.constexpr = SUBS * ROWS
    BYTES: gl.constexpr = BLOCK_M * (2 * D + 4)
    programs = gl.num_programs(0)
    TABLE += gl.program_id(0)
    total = gl.load(TABLE)
    j = 0
    kv = 0
    while j < total:
        TABLE += programs
        entry = gl.load(TABLE)
        head, start_n, first, tiles_q = one.place(entry, tiles, seqlen_q, seqlen_k, BLOCK_M, CAUSAL)
        b, h = head // heads, head % heads
        g = 0
        start = one.start(entry, tiles, first, tiles_q, ROTATE)
        m = start
        count = group * (tiles_q - first)
        for i in range(count):
            stage, phase = j % STAGES, (j // STAGES) & 1
            row = m * BLOCK_M
            at = ((head * group + g) * tiles_q + m) * BLOCK_M
            mbarrier.wait(EMPTY.index(stage), phase ^ 1)
            mbarrier.expect(QFULL.index(stage), BYTES)
            for sub in gl.static_range(SUBS):
                place = stage * SUBS + sub
                tma_load(Q, [b, h * group + g, row + sub * ROWS, 0], QFULL.index(stage), QS.index(place))
                tma_load(LSE, [at + sub * ROWS], QFULL.index(stage), LSES.index(place))
            if i == 0:
                mbarrier.wait(KVEMPTY.index(0), kv & 1 ^ 1)
                mbarrier.expect(KVFULL.index(0), 4 * 2 * ROWS * D)
                for half in gl.static_range(2):
                    key = [b, h, start_n + half * ROWS, 0]
                    tma_load(K, key, KVFULL.index(0), KS.index(half))
                    tma_load(V, key, KVFULL.index(0), VS.index(half))
            mbarrier.expect(DOFULL.index(stage), BYTES)
            for sub in gl.static_range(SUBS):
                place = stage * SUBS + sub
                tma_load(DO, [b, h * group + g, row + sub * ROWS, 0], DOFULL.index(stage), DOS.index(place))
                tma_load(DELTA, [at + sub * ROWS], DOFULL.index(stage), DELTAS.index(place))
            m += 1
            if m == tiles_q:
                m = first
            if m == start:
                g += 1
            j += 1
        kv += 1


@gluon.jit(do_not_specialize=["tiles", "heads", "group", "seqlen_q", "seqlen_k", "outside"])
def backward(
    Q, DO, K, V, LSE, DELTA, DQ, DK, DV, TABLE, tiles, heads, group, seqlen_q, seqlen_k, outside, unit, scale,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    DS_STAGES: gl.constexpr, LAG: gl.constexpr, CAUSAL: gl.constexpr, ADDS_DQ: gl.constexpr,
    EARLY_DV: gl.constexpr, ROTATE: gl.constexpr, HELD: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """dK and dV, and dQ added to its accumulator. Grid: as many programs as the table has columns.

    A tile of queries has 128 of them for head dims up to 64, in two halves, else 64. Q, DO, K, V, DK, DV:
    descriptors (batch, head, row, column) of boxes of 64 rows by D columns. LSE, DELTA: a number per query,
    tile after tile; LSE in powers of two, infinite for rows that see no key. DQ: (lines, 32), see ``add_dq``;
    ``outside``: a line after the last. heads: of K/V. unit: the scores' scale, in powers of two; scale: dK's.
    """
    SUBS: gl.constexpr = BLOCK_M // ROWS
    gl.static_assert(BLOCK_N == one.KEYS, "a tile of keys is two warpgroups'")
    gl.static_assert(SUBS * D == 2 * ROWS, "dQ of a tile is one 64 x 64 block per warpgroup")
    gl.static_assert(DS_STAGES * SUBS * ROWS >= 2 * D, "a warpgroup's dS must have room for its dK and dV")
    gl.static_assert(DS_STAGES > LAG, "a tile's dS must outlive the product that is issued LAG tiles later")
    QS = ring(STAGES * SUBS, Q, D)
    DOS = ring(STAGES * SUBS, DO, D)
    KS = ring(2, K, D)
    VS = ring(2, V, D)
    LSES = gl.allocate_shared_memory(gl.float32, [STAGES * SUBS, ROWS], LSE.layout)
    DELTAS = gl.allocate_shared_memory(gl.float32, [STAGES * SUBS, ROWS], DELTA.layout)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], Q.dtype)
    DSS = gl.allocate_shared_memory(Q.dtype, [DS_STAGES * 2 * SUBS, ROWS, ROWS], DS)
    DQS = gl.allocate_shared_memory(gl.float32, [2, one.LINES, one.LINE], DQ.layout)
    QFULL = one.barriers(STAGES, 1)
    DOFULL = one.barriers(STAGES, 1)
    EMPTY = one.barriers(STAGES, 2)
    KVFULL = one.barriers(1, 1)
    KVEMPTY = one.barriers(1, 2)
    DSFULL = one.barriers(DS_STAGES, 2)
    fence_async_shared()
    gl.warp_specialize([
        (consume, (QS, DOS, KS, VS, DSS, DQS, LSES, DELTAS,
                   QFULL, DOFULL, EMPTY, KVFULL, KVEMPTY, DSFULL,
                   DQ, DK, DV, TABLE, tiles, heads, group, seqlen_q, seqlen_k, outside, unit, scale,
                   0, SUBS, D, STAGES, DS_STAGES, LAG, CAUSAL, ADDS_DQ, EARLY_DV, ROTATE, HELD)),
        (consume, (QS, DOS, KS, VS, DSS, DQS, LSES, DELTAS,
                   QFULL, DOFULL, EMPTY, KVFULL, KVEMPTY, DSFULL,
                   DQ, DK, DV, TABLE, tiles, heads, group, seqlen_q, seqlen_k, outside, unit, scale,
                   1, SUBS, D, STAGES, DS_STAGES, LAG, CAUSAL, ADDS_DQ, EARLY_DV, ROTATE, HELD)),
        (produce, (Q, DO, K, V, LSE, DELTA, QS, DOS, KS, VS, LSES, DELTAS,
                   QFULL, DOFULL, EMPTY, KVFULL, KVEMPTY, TABLE, tiles, heads, group, seqlen_q, seqlen_k,
                   SUBS, D, STAGES, CAUSAL, ROTATE)),
    ], [4, 1], [REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


@gluon.jit
def ring(NUMBER: gl.constexpr, DESC, D: gl.constexpr):
    """Buffers for boxes of 64 rows of the descriptor's tensor."""
    return gl.allocate_shared_memory(DESC.dtype, [NUMBER, 1, 1, ROWS, D], DESC.layout)
