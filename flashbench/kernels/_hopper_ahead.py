"""The consumer with scores one tile ahead."""

# Triton reads the bodies below, not Python: no annotations but gl.constexpr, tensors by their capitals.
# ruff: noqa: ANN001, ANN202
# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from flashbench.kernels import _hopper_asm as asm
from flashbench.kernels import _hopper_tiles as one

ROWS = one.ROWS


@gluon.jit
def consume(
    Q0S, Q1S, K0S, K1S, V0S, V1S, O0S, O1S, QFULL, QEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
    O0, O1, LSE, TABLE, tiles, heads, seqlen_q, seqlen_k, unit,
    WG: gl.constexpr, NUM_WG: gl.constexpr, BLOCK_N: gl.constexpr,
    D0: gl.constexpr, D1: gl.constexpr, E0: gl.constexpr, E1: gl.constexpr,
    STAGES: gl.constexpr, Q_STAGES: gl.constexpr, O_SHARED: gl.constexpr,
    CAUSAL: gl.constexpr, PINGPONG: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 rows of each of the program's tiles of queries, over all K/V tiles of each."""
    BLOCK_M: gl.constexpr = NUM_WG * ROWS
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    LO0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E0, 16])
    LO1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E1 if E1 > 0 else E0, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    HALF: gl.constexpr = K0S.dtype
    SCORES: gl.constexpr = 2 if D1 > 0 else 1
    programs = gl.num_programs(0)
    TABLE += gl.program_id(0)
    total_blocks = gl.load(TABLE)
    entry = gl.load(TABLE + programs)
    start_m, blocks, clear, _ = one.place(entry, tiles, seqlen_q, seqlen_k, 0, BLOCK_M, BLOCK_N, CAUSAL)
    next_entry = gl.load(TABLE + 2 * programs)  # of the next tile of queries, long before it is needed
    if PINGPONG and WG == NUM_WG - 1:
        asm.turn_pass(0)
    mbarrier.wait(QFULL.index(WG), 0)
    mbarrier.wait(KFULL.index(0), 0)
    Q1 = Q1S.index(WG) if D1 > 0 else Q0S.index(WG)
    K1 = K1S.index(0) if D1 > 0 else K0S.index(0)
    s = one.scores(Q0S.index(WG), Q1, K0S.index(0), K1, BLOCK_N, D0, D1, S)
    s = warpgroup_mma_wait(0, [s])
    mbarrier.arrive(KEMPTY.index(0))
    n = blocks - 1  # K/V tile of the tile of queries: from the right, so that those to be masked come first
    mbarrier.arrive(QEMPTY.index(WG), pred=n == 0)
    # scores ahead: those of tile j + 1 are issued before the softmax of tile j, which waits for nothing
    more = total_blocks > 1
    n2 = n - 1
    new2 = (n2 < 0) & more
    entry2 = entry
    start2 = start_m
    clear2 = clear
    tile = 0
    if new2:
        entry2 = next_entry
        start2, blocks, clear2, _ = one.place(entry2, tiles, seqlen_q, seqlen_k, 0, BLOCK_M, BLOCK_N, CAUSAL)
        n2 = blocks - 1
        tile = 1
        next_entry = gl.load(TABLE + 3 * programs)
        mbarrier.wait(QFULL.index((1 % Q_STAGES) * NUM_WG + WG), (1 // Q_STAGES) & 1)
    slot = (tile % Q_STAGES) * NUM_WG + WG
    mbarrier.wait(KFULL.index(1 % STAGES), (1 // STAGES) & 1, pred=more)
    Q1 = Q1S.index(slot) if D1 > 0 else Q0S.index(slot)
    K1 = K1S.index(1 % STAGES) if D1 > 0 else K0S.index(1 % STAGES)
    s2 = one.scores(Q0S.index(slot), Q1, K0S.index(1 % STAGES), K1, BLOCK_N, D0, D1, S)
    if n >= clear:
        last = one.last_key(start_m, seqlen_q, seqlen_k, WG, CAUSAL, ROW)
        s = asm.mask(s, last - n * BLOCK_N, BLOCK_N)
    p, alpha, top = one.softmax(s, gl.full([ROWS], float("-inf"), gl.float32, ROW), unit)
    total = one.partial_sums(p, BLOCK_N)
    SUMS: gl.constexpr = total.type.layout
    ROW_SUMS: gl.constexpr = gl.SliceLayout(1, SUMS)
    p = p.to(HALF)
    acc0 = gl.zeros([ROWS, E0], gl.float32, LO0)
    acc1 = gl.zeros([ROWS, E1 if E1 > 0 else 16], gl.float32, LO1)
    mbarrier.wait(VFULL.index(0), 0)
    s = warpgroup_mma_wait(0, [s2])
    mbarrier.arrive(KEMPTY.index(1 % STAGES), pred=more)
    mbarrier.arrive(QEMPTY.index(slot), pred=(n2 == 0) & more)
    done = entry
    entry = entry2
    start_m = start2
    clear = clear2
    n = n2
    new = new2
    use_acc = False
    for j in range(1, total_blocks):
        before = (j - 1) % STAGES
        ahead = j + 1
        stage, phase = ahead % STAGES, (ahead // STAGES) & 1
        more = ahead < total_blocks
        factor = top
        if new:
            factor = one.finish(total, top, LSE, done, tiles, heads, seqlen_q, unit, WG, BLOCK_M, ROW)
            total = gl.zeros([ROWS, 4], gl.float32, SUMS)
            top = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        n2 = n - 1
        new2 = (n2 < 0) & more
        entry2 = entry
        start2 = start_m
        clear2 = clear
        if new2:
            entry2 = next_entry
            start2, blocks, clear2, _ = one.place(
                entry2, tiles, seqlen_q, seqlen_k, 0, BLOCK_M, BLOCK_N, CAUSAL
            )
            n2 = blocks - 1
            tile += 1
            next_entry = gl.load(TABLE + (tile + 2) * programs)
            mbarrier.wait(QFULL.index((tile % Q_STAGES) * NUM_WG + WG), (tile // Q_STAGES) & 1)
        slot = (tile % Q_STAGES) * NUM_WG + WG
        mbarrier.wait(KFULL.index(stage), phase, pred=more)
        Q1 = Q1S.index(slot) if D1 > 0 else Q0S.index(slot)
        K1 = K1S.index(stage) if D1 > 0 else K0S.index(stage)
        acc0 = one.values(p, V0S.index(before), acc0, use_acc, BLOCK_N, E0, LO0)
        if E1 > 0:
            acc1 = one.values(p, V1S.index(before), acc1, use_acc, BLOCK_N, E1, LO1)
        s2 = one.scores(Q0S.index(slot), Q1, K0S.index(stage), K1, BLOCK_N, D0, D1, S)
        if n >= clear:
            last = one.last_key(start_m, seqlen_q, seqlen_k, WG, CAUSAL, ROW)
            s = asm.mask(s, last - n * BLOCK_N, BLOCK_N)
        top, alpha = one.new_base(s, top, unit)
        if E1 > 0:
            acc0, acc1, p = warpgroup_mma_wait(SCORES, [acc0, acc1, p])
        else:
            acc0, p = warpgroup_mma_wait(SCORES, [acc0, p])
        mbarrier.arrive(VEMPTY.index(before))
        if new:
            one.store_rows(acc0, acc1, factor, O0S, O1S, O0, O1, done, tiles, heads,
                       WG, BLOCK_M, E0, E1, LO0, LO1, O_SHARED)  # fmt: skip
        acc0 = asm.rescale(acc0, gl.convert_layout(alpha, gl.SliceLayout(1, LO0)), E0)
        if E1 > 0:
            acc1 = asm.rescale(acc1, gl.convert_layout(alpha, gl.SliceLayout(1, LO1)), E1)
        next_p = one.exponentials(s, top, unit)
        total = total * gl.convert_layout(alpha, ROW_SUMS)[:, None] + one.partial_sums(next_p, BLOCK_N)
        next_p = next_p.to(HALF)
        mbarrier.wait(VFULL.index(j % STAGES), (j // STAGES) & 1)
        s = warpgroup_mma_wait(0, [s2])
        mbarrier.arrive(KEMPTY.index(stage), pred=more)
        mbarrier.arrive(QEMPTY.index(slot), pred=(n2 == 0) & more)
        p = next_p
        use_acc = not new
        done = entry
        entry = entry2
        start_m = start2
        clear = clear2
        n = n2
        new = new2
    before = (total_blocks - 1) % STAGES
    acc0 = one.values(p, V0S.index(before), acc0, use_acc, BLOCK_N, E0, LO0)
    if E1 > 0:
        acc1 = one.values(p, V1S.index(before), acc1, use_acc, BLOCK_N, E1, LO1)
        acc0, acc1, p = warpgroup_mma_wait(0, [acc0, acc1, p])
    else:
        acc0, p = warpgroup_mma_wait(0, [acc0, p])
    factor = one.finish(total, top, LSE, done, tiles, heads, seqlen_q, unit, WG, BLOCK_M, ROW)
    one.store_rows(acc0, acc1, factor, O0S, O1S, O0, O1, done, tiles, heads,
               WG, BLOCK_M, E0, E1, LO0, LO1, O_SHARED)  # fmt: skip
    tma.store_wait(0)
