"""FlashAttention-3's forward in 8-bit floats whose bases are guarded by row sums, in Gluon for sm_90."""

# Triton reads the bodies below, not Python: no annotations but gl.constexpr, tensors by their capitals.
# ruff: noqa: ANN001, ANN202, E741
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

from flashbench.kernels import _hopper_asm as asm
from flashbench.kernels import _hopper_fp8_kernels as whole
from flashbench.kernels import _hopper_fp8_pieces as pieces
from flashbench.kernels import _hopper_guard as guard
from flashbench.kernels import _hopper_kernels as half
from flashbench.kernels import _hopper_tiles as one

ROWS = one.ROWS
SMALLEST = whole.SMALLEST
LEAST = gl.constexpr(-3.0)
"""By how much, in powers of two, a V tile's scale may lie under the unit."""


@gluon.jit
def by_thread(x, E: gl.constexpr):
    """(ROWS, E) of a product as (E // 8, 512): four numbers of each thread side by side, and its only."""
    x = gl.permute(gl.reshape(x, [4, 2, 8, E // 8, 4, 2]), (3, 0, 2, 4, 1, 5))
    return gl.reshape(x, [E // 8, 512])


@gluon.jit
def by_row(x, E: gl.constexpr, LO: gl.constexpr):
    """What ``by_thread`` was given."""
    x = gl.permute(gl.reshape(x, [E // 8, 4, 8, 4, 2, 2]), (1, 4, 2, 0, 3, 5))
    return gl.convert_layout(gl.reshape(x, [ROWS, E]), LO, assert_trivial=True)


@gluon.jit
def scale_of(top, unit, new_top, new_unit):
    """What numbers of old bases and unit are to be multiplied by."""
    same = (top == new_top) | (top == float("-inf"))
    return gl.where(same, 1.0, gl.exp2(top - new_top)) * gl.exp2(unit - new_unit)


@gluon.jit
def set_aside(acc, MS, OS, O, LSE, kept, kept_top, kept_unit, pending, old_total, old_top, old_unit, top,
              v_unit, old_entry, heads, seqlen_q, WG: gl.constexpr, BLOCK_M: gl.constexpr, E: gl.constexpr,
              LO: gl.constexpr, ROW: gl.constexpr, SHIFT: gl.constexpr, PROMOTE: gl.constexpr):  # fmt: skip
    """Add what was set aside before; write a tile of queries that is complete, set aside another."""
    at_top = top
    at_unit = v_unit
    if pending:
        at_top = old_top
        at_unit = old_unit
    if PROMOTE > 0:
        if kept:
            flat = by_thread(acc, E)
            factor = by_thread(guard.over(scale_of(kept_top, kept_unit, at_top, at_unit), acc), E)
            flat += MS.index(WG).load(flat.type.layout) * factor
            acc = by_row(flat, E, LO)
    if pending:
        done = gl.convert_layout(gl.max(old_top, 1), ROW)
        weight = one.finish(old_total, done - SHIFT, LSE, old_entry, heads, seqlen_q, 1.0, WG, BLOCK_M, ROW,
                            1) * gl.exp2(old_unit)  # fmt: skip
        one.store_rows(acc, acc, weight, OS, OS, O, O, old_entry, WG, BLOCK_M, E, 0, LO, LO, False)
    else:
        if PROMOTE > 0:
            MS.index(WG).store(by_thread(acc, E))
    return acc


@gluon.jit
def consume(
    QS, KS, VS, OS, MS, QFULL, QEMPTY, FULL, FREE,
    O, Q_SCALE, K_SCALE, V_SCALE, LSE, TABLE, tiles, heads, group, seqlen_q, seqlen_k, unit,
    WG: gl.constexpr, NUM_WG: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, E: gl.constexpr,
    STAGES: gl.constexpr, Q_STAGES: gl.constexpr, CAUSAL: gl.constexpr, EMULATED: gl.constexpr,
    SHIFT: gl.constexpr, PROMOTE: gl.constexpr, HELD: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 rows of each of the program's tiles of queries, over all K/V tiles of each."""
    BLOCK_M: gl.constexpr = NUM_WG * ROWS
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    E5M2: gl.constexpr = KS.dtype == gl.float8e5
    programs = gl.num_programs(0)
    key_tiles = (seqlen_k + BLOCK_N - 1) // BLOCK_N
    TABLE += gl.program_id(0)
    total_blocks = gl.load(TABLE).to(gl.int32)
    entry = gl.load(TABLE + programs)
    next_entry = gl.load(TABLE + 2 * programs)  # of the next tile of queries, long before it is needed
    start_m, blocks, clear, _ = one.place(
        one.tile_of(entry), seqlen_q, seqlen_k, 0, BLOCK_M, BLOCK_N, CAUSAL)  # fmt: skip
    n = blocks - 1
    own_scale, scales = whole.scale_places(entry, tiles, heads, group, key_tiles)
    next_own, next_scales = whole.scale_places(next_entry, tiles, heads, group, key_tiles)
    q_scale = gl.load(Q_SCALE + own_scale) * unit
    factor = gl.maximum(q_scale * gl.load(K_SCALE + scales + n), SMALLEST)
    v_unit = asm.log2(gl.load(V_SCALE + scales + n))
    asm.turn_pass(0, TURNS and WG == 1)
    mbarrier.wait(QFULL.index(WG), 0)
    mbarrier.wait(FULL.index(0), 0)
    slot = WG
    q = pieces.queries(QS, slot, D, HELD)
    if HELD:
        mbarrier.arrive(QEMPTY.index(WG))
    s = pieces.scores(QS, q, KS, slot, 0, BLOCK_N, D, S, HELD)
    s = warpgroup_mma_wait(0, [s])
    if not HELD:
        if n == 0:
            mbarrier.arrive(QEMPTY.index(WG))
    if n >= clear:
        last = one.last_key(start_m, seqlen_q, seqlen_k, WG, CAUSAL, ROW)
        s = asm.mask(s, last - n * BLOCK_N, BLOCK_N)
    zero = gl.sum(gl.sum(gl.reshape(gl.zeros([ROWS, BLOCK_N], gl.float32, S), [ROWS, BLOCK_N // 8, 4, 2]), 1), 2)
    PARTS: gl.constexpr = zero.type.layout
    none = zero + float("-inf")
    p, total, top, alpha = guard.words(s, none, factor, SHIFT, True, BLOCK_N, EMULATED, E5M2)
    total = gl.convert_layout(total, PARTS)
    top = gl.convert_layout(top, PARTS)
    alpha = gl.convert_layout(alpha, PARTS)
    mbarrier.arrive(FREE.index(0))
    acc = gl.zeros([ROWS, E], gl.float32, LO)
    # numbers of their own: a loop does not carry what is another name of what it changes
    old_total = gl.full([ROWS, 4], 0.0, gl.float32, PARTS)
    old_top = gl.full([ROWS, 4], 0.0, gl.float32, PARTS)
    old_unit = v_unit * 0.0
    before = entry * 0
    written = entry * 0
    kept_top = gl.full([ROWS, 4], 0.0, gl.float32, PARTS)
    kept_unit = v_unit * 0.0
    kept = False  # part of O is set aside
    pending = False  # a tile of queries is complete but for being written
    summed = 0  # tiles that are in the accumulator
    stage = 0
    phase = 0
    tile = 0  # tile of queries of this program
    for j in range(1, total_blocks):
        n -= 1
        new = n < 0
        if new:  # the scores that are issued next are the first of another tile of queries
            before = entry
            entry = next_entry
            start_m, blocks, clear, _ = one.place(
                one.tile_of(entry), seqlen_q, seqlen_k, 0, BLOCK_M, BLOCK_N, CAUSAL)  # fmt: skip
            n = blocks - 1
            own_scale = next_own
            scales = next_scales
            tile += 1
            slot = (tile % Q_STAGES) * NUM_WG + WG
            mbarrier.wait(QFULL.index(slot), (tile // Q_STAGES) & 1)
            q = pieces.queries(QS, slot, D, HELD)
            if HELD:
                mbarrier.arrive(QEMPTY.index(slot))
        k_scale = gl.load(K_SCALE + scales + n)
        v_scale = gl.load(V_SCALE + scales + n)
        stage += 1
        phase = gl.where(stage == STAGES, phase ^ 1, phase)
        stage = gl.where(stage == STAGES, 0, stage)
        mbarrier.wait(FULL.index(stage), phase)
        asm.turn_wait(WG, TURNS)
        s = pieces.scores(QS, q, KS, slot, stage, BLOCK_N, D, S, HELD)
        aside = pending
        if PROMOTE > 0:
            aside = pending | (summed == PROMOTE)
        if aside:
            acc = set_aside(acc, MS, OS, O, LSE, kept, kept_top, kept_unit, pending, old_total, old_top,
                            old_unit, top, v_unit, written, heads, seqlen_q, WG, BLOCK_M, E, LO, ROW, SHIFT,
                            PROMOTE)  # fmt: skip
            kept = pending == False  # noqa: E712
            kept_top = top
            kept_unit = v_unit
            summed = 0
        acc = pieces.values(p, VS.index(stage), acc, summed > 0, E5M2, BLOCK_N, E, LO)
        asm.turn_pass(1 - WG, TURNS)
        if new:
            q_scale = gl.load(Q_SCALE + own_scale) * unit
            next_entry = gl.load(TABLE + (tile + 2) * programs)
            next_own, next_scales = whole.scale_places(next_entry, tiles, heads, group, key_tiles)
        summed += 1
        s = warpgroup_mma_wait(1, [s])
        if not HELD:
            if n == 0:
                mbarrier.arrive(QEMPTY.index(slot))
        if n >= clear:
            last = one.last_key(start_m, seqlen_q, seqlen_k, WG, CAUSAL, ROW)
            s = asm.mask(s, last - n * BLOCK_N, BLOCK_N)
        turned = 1.0
        v_scale = asm.log2(v_scale)
        if new:
            old_total = total
            old_top = top
            old_unit = v_unit
            written = before
            total = gl.zeros([ROWS, 4], gl.float32, PARTS)
            top = gl.full([ROWS, 4], float("-inf"), gl.float32, PARTS)
            v_unit = v_scale
        pending = new
        factor = gl.maximum(q_scale * k_scale, SMALLEST)
        lag = v_scale - v_unit
        change = (lag > 0) | (lag < LEAST)
        turned = gl.where(change, gl.exp2(-lag), 1.0)
        v_unit = gl.where(change, v_scale, v_unit)
        shift = v_scale - v_unit
        next_p, sums, next_top, alpha = guard.words(s, top, factor, shift + SHIFT, new, BLOCK_N, EMULATED, E5M2)
        top = gl.convert_layout(next_top, PARTS)
        alpha = gl.convert_layout(alpha, PARTS)
        total = total * alpha + gl.convert_layout(sums, PARTS) * gl.exp2(-shift)
        acc, p = warpgroup_mma_wait(0, [acc, p])
        mbarrier.arrive(FREE.index(stage))
        acc = guard.rescale(acc, alpha * turned, E)
        p = next_p
    stage += 1
    phase = gl.where(stage == STAGES, phase ^ 1, phase)
    stage = gl.where(stage == STAGES, 0, stage)
    mbarrier.wait(FULL.index(stage), phase)
    if pending:
        acc = set_aside(acc, MS, OS, O, LSE, kept, kept_top, kept_unit, True, old_total, old_top, old_unit, top,
                        v_unit, written, heads, seqlen_q, WG, BLOCK_M, E, LO, ROW, SHIFT, PROMOTE)  # fmt: skip
        kept = False
        summed = 0
    acc = pieces.values(p, VS.index(stage), acc, summed > 0, E5M2, BLOCK_N, E, LO)
    acc, p = warpgroup_mma_wait(0, [acc, p])
    set_aside(acc, MS, OS, O, LSE, kept, kept_top, kept_unit, True, total, top, v_unit, top, v_unit, entry, heads,
              seqlen_q, WG, BLOCK_M, E, LO, ROW, SHIFT, PROMOTE)  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def produce(
    Q, K, V, QS, KS, VS, QFULL, QEMPTY, FULL, FREE, TABLE, heads, group, seqlen_q, seqlen_k,
    NUM_WG: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, E: gl.constexpr,
    STAGES: gl.constexpr, Q_STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """One warp: K of each tile that the consumers will want with V of the one before, as soon as there is place."""
    BLOCK_M: gl.constexpr = NUM_WG * ROWS
    programs = gl.num_programs(0)
    TABLE += gl.program_id(0)
    total_blocks = gl.load(TABLE).to(gl.int32)
    b = 0
    kv = 0
    n = 0
    tile = 0
    before = 0
    before_b = 0
    before_kv = 0
    for j in range(total_blocks):
        stage, phase = j % STAGES, (j // STAGES) & 1
        n -= 1
        new = n < 0
        start_m = 0
        h = 0
        if new:
            TABLE += programs
            entry = gl.load(TABLE)
            start_m, blocks, _, _ = one.place(
                one.tile_of(entry), seqlen_q, seqlen_k, 0, BLOCK_M, BLOCK_N, CAUSAL)  # fmt: skip
            _, b, h = one.unpacked(entry)
            kv = h // group
            n = blocks - 1
        mbarrier.wait(FREE.index(stage), phase ^ 1)
        if j > 0:
            mbarrier.expect(FULL.index(stage), BLOCK_N * (D + E))
            one.tma_load(K, [b, kv, n * BLOCK_N, 0], FULL.index(stage), KS.index(stage))
            one.tma_load(V, [before_b, before_kv, 0, before * BLOCK_N], FULL.index(stage), VS.index(stage))
        else:
            mbarrier.expect(FULL.index(stage), BLOCK_N * D)
            one.tma_load(K, [b, kv, n * BLOCK_N, 0], FULL.index(stage), KS.index(stage))
        before = n
        before_b = b
        before_kv = kv
        if new:
            for WG in gl.static_range(NUM_WG):
                slot = (tile % Q_STAGES) * NUM_WG + WG
                mbarrier.wait(QEMPTY.index(slot), ((tile // Q_STAGES) & 1) ^ 1)
                mbarrier.expect(QFULL.index(slot), ROWS * D)
                one.tma_load(Q, [b, h, start_m + WG * ROWS, 0], QFULL.index(slot), QS.index(slot))
            tile += 1
    stage, phase = total_blocks % STAGES, (total_blocks // STAGES) & 1
    mbarrier.wait(FREE.index(stage), phase ^ 1)
    mbarrier.expect(FULL.index(stage), BLOCK_N * E)
    one.tma_load(V, [before_b, before_kv, 0, before * BLOCK_N], FULL.index(stage), VS.index(stage))


@gluon.jit(do_not_specialize=["tiles", "heads", "group", "seqlen_q", "seqlen_k"])
def forward(
    Q, K, V, O, Q_SCALE, K_SCALE, V_SCALE, LSE, TABLE, tiles, heads, group, seqlen_q, seqlen_k, unit,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, E: gl.constexpr,
    STAGES: gl.constexpr, Q_STAGES: gl.constexpr, CAUSAL: gl.constexpr, EMULATED: gl.constexpr,
    SHIFT: gl.constexpr, PROMOTE: gl.constexpr, HELD: gl.constexpr, TURNS: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """O and LSE. Grid: as many programs as the table has columns. As _hopper_fp8_kernels.forward."""
    NUM_WG: gl.constexpr = BLOCK_M // ROWS
    QS = half.ring(Q_STAGES * NUM_WG, Q, ROWS, D)
    KS = half.ring(STAGES, K, BLOCK_N, D)
    VS = half.ring(STAGES, V, E, BLOCK_N)
    OS = half.ring(NUM_WG, O, ROWS, E)
    MS = OS
    if PROMOTE > 0:
        MS = gl.allocate_shared_memory(gl.float32, [NUM_WG, E // 8, 512], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    QFULL = half.barriers(Q_STAGES * NUM_WG, 1)
    QEMPTY = half.barriers(Q_STAGES * NUM_WG, 1)
    FULL = half.barriers(STAGES, 1)
    FREE = half.barriers(STAGES, NUM_WG)
    fence_async_shared()
    gl.warp_specialize([
        (consume, (QS, KS, VS, OS, MS, QFULL, QEMPTY, FULL, FREE,
                  O, Q_SCALE, K_SCALE, V_SCALE, LSE, TABLE, tiles, heads, group, seqlen_q, seqlen_k, unit,
                  0, NUM_WG, BLOCK_N, D, E, STAGES, Q_STAGES, CAUSAL, EMULATED, SHIFT, PROMOTE, HELD,
                  TURNS)),
        (consume, (QS, KS, VS, OS, MS, QFULL, QEMPTY, FULL, FREE,
                  O, Q_SCALE, K_SCALE, V_SCALE, LSE, TABLE, tiles, heads, group, seqlen_q, seqlen_k, unit,
                  1, NUM_WG, BLOCK_N, D, E, STAGES, Q_STAGES, CAUSAL, EMULATED, SHIFT, PROMOTE, HELD,
                  TURNS)),
        (produce, (Q, K, V, QS, KS, VS, QFULL, QEMPTY, FULL, FREE, TABLE, heads, group, seqlen_q, seqlen_k,
                  NUM_WG, BLOCK_N, D, E, STAGES, Q_STAGES, CAUSAL)),
    ], [4, 1], [REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
