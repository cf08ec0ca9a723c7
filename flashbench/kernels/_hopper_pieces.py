"""FlashAttention-3's forward over pieces of a K/V tile, in Gluon for sm_90: experimental; no causal mask."""

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

from flashbench.kernels import _hopper_asm as asm
from flashbench.kernels import _hopper_exp2 as fast
from flashbench.kernels import _hopper_fp8_pieces as eight
from flashbench.kernels import _hopper_kernels as half
from flashbench.kernels import _hopper_tiles as one

ROWS = one.ROWS


@gluon.jit
def exponentials(s, base, unit, N: gl.constexpr, EMULATED: gl.constexpr, HALF: gl.constexpr,
                 S: gl.constexpr):  # fmt: skip
    """(P in 16 bits, row sums per thread) of one piece."""
    if EMULATED > 0:
        p, rest, sums = fast.half_parts(s, base, unit, N, EMULATED)
        p = fast.joined(p, rest, N, EMULATED, S)
    else:
        p = gl.exp2(s * unit + base[:, None])
        sums = one.partial_sums(p, N)
        p = p.to(HALF)
    return p, sums


@gluon.jit
def bases(highest, top, unit, EMULATED: gl.constexpr):
    """(new base of each row, factor of what was summed, what is added to scaled scores)."""
    SHIFT: gl.constexpr = fast.SHIFT if EMULATED > 0 else 0.0
    lazy: gl.constexpr = fast.LAZY if EMULATED > 0 else one.LAZY
    new_top = gl.where((highest - top) * unit <= lazy, top, highest)  # a NaN goes into the base
    same = (new_top == top) | (top == float("-inf"))
    alpha = gl.where(same, 1.0, gl.exp2((top - new_top) * unit))
    return new_top, alpha, gl.where(new_top == float("-inf"), SHIFT, SHIFT - new_top * unit)


@gluon.jit
def consume(
    QS, KS, VS, OS, QFULL, QEMPTY, KFULL, KEMPTY, VFULL, VEMPTY, O, LSE, TABLE, heads, seqlen_q, seqlen_k, unit,
    WG: gl.constexpr, NUM_WG: gl.constexpr, PIECE: gl.constexpr, PIECES: gl.constexpr, D: gl.constexpr,
    E: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr, EMULATED: gl.constexpr, TURNS: gl.constexpr,
    VALUES_FIRST: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 rows of each of the program's tiles of queries, over all K/V tiles of each."""
    BLOCK_M: gl.constexpr = NUM_WG * ROWS
    BLOCK_N: gl.constexpr = PIECE * PIECES
    NEXT: gl.constexpr = (WG + 1) % NUM_WG
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    HALF: gl.constexpr = KS.dtype
    programs = gl.num_programs(0)
    TABLE += gl.program_id(0)
    total_blocks = gl.load(TABLE).to(gl.int32)
    entry = gl.load(TABLE + programs)
    next_entry = gl.load(TABLE + 2 * programs)  # of the next tile of queries, long before it is needed
    start_m, blocks, clear, _ = one.place(
        one.tile_of(entry), seqlen_q, seqlen_k, 0, BLOCK_M, BLOCK_N, False)  # fmt: skip
    n = blocks - 1
    top = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    p0, total = exponentials(gl.zeros([ROWS, PIECE], gl.float32, S), top, unit, PIECE, EMULATED, HALF, S)
    SUMS: gl.constexpr = total.type.layout
    total = gl.zeros([ROWS, 4], gl.float32, SUMS)
    p1 = p0
    weight = top
    acc = gl.zeros([ROWS, E], gl.float32, LO)
    asm.turn_pass(0, TURNS and WG == NUM_WG - 1)
    mbarrier.wait(QFULL.index(WG), 0)
    mbarrier.wait(KFULL.index(0), 0)
    s0 = eight.scores(QS, KS, WG, 0, PIECE, D, S)
    s1 = s0
    if PIECES > 1:
        s1 = eight.scores(QS, KS, WG, 1, PIECE, D, S)
    s0, s1, s2 = eight.waited(s0, s1, s0, 0, PIECES)
    mbarrier.arrive(KEMPTY.index(0))
    mbarrier.arrive(QEMPTY.index(WG), pred=n == 0)
    _unused = s0
    if n >= clear:
        s0, s1, _unused = eight.masked(s0, s1, s0, n, start_m, seqlen_q, seqlen_k, WG, PIECE, PIECES, False, ROW)
    top, alpha, base = bases(eight.row_max(s0, s1, s0, PIECES, PIECE), top, unit, EMULATED)
    mbarrier.wait(VFULL.index(0), 0)
    stage = 0  # of the tile whose scores are there
    tile = 0  # tile of queries of this program, of the next scores
    use = False  # the tile is not the first of its tile of queries
    for j in range(1, total_blocks):
        n -= 1
        new = n < 0
        old_entry = entry
        if new:  # the scores that are issued next are the first of another tile of queries
            entry = next_entry
            start_m, blocks, clear, _ = one.place(
                one.tile_of(entry), seqlen_q, seqlen_k, 0, BLOCK_M, BLOCK_N, False)  # fmt: skip
            n = blocks - 1
            tile += 1
            next_entry = gl.load(TABLE + (tile + 2) * programs)
            mbarrier.wait(QFULL.index((tile % Q_STAGES) * NUM_WG + WG), (tile // Q_STAGES) & 1)
        slot = (tile % Q_STAGES) * NUM_WG + WG
        next_stage, phase = j % STAGES, (j // STAGES) & 1
        asm.turn_wait(WG, TURNS)
        p0, sums = exponentials(s0, base, unit, PIECE, EMULATED, HALF, S)
        if VALUES_FIRST or PIECES == 1:
            acc = one.values(p0, VS.index(stage * PIECES), acc, use, PIECE, E, LO)
        mbarrier.wait(KFULL.index(next_stage), phase)
        t0 = eight.scores(QS, KS, slot, next_stage * PIECES, PIECE, D, S)
        t1 = t0
        if not (VALUES_FIRST or PIECES == 1):
            acc = one.values(p0, VS.index(stage * PIECES), acc, use, PIECE, E, LO)
        # the end of a basic block: ptxas would issue the products one by one between what follows
        mbarrier.wait(VFULL.index(next_stage), phase)
        if PIECES > 1:
            p1, more = exponentials(s1, base, asm.later(unit), PIECE, EMULATED, HALF, S)
            sums += more
            sums = asm.hold(sums)
            t1 = eight.scores(QS, KS, slot, next_stage * PIECES + 1, PIECE, D, S)
            acc = one.values(p1, VS.index(stage * PIECES + 1), acc, True, PIECE, E, LO)
        asm.turn_pass(NEXT, TURNS)
        total = total * gl.convert_layout(alpha, gl.SliceLayout(1, SUMS))[:, None] + gl.convert_layout(sums, SUMS)
        if new:
            weight = one.finish(total, one.log_base(top, unit, EMULATED), LSE, old_entry, heads, seqlen_q, 1.0,
                                WG, BLOCK_M, ROW, EMULATED)  # fmt: skip
            total = gl.zeros([ROWS, 4], gl.float32, SUMS)
            top = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        s0, s1, s2 = eight.waited(t0, t1, t0, 1, PIECES)
        mbarrier.arrive(KEMPTY.index(next_stage))
        if n == 0:
            mbarrier.arrive(QEMPTY.index(slot))
        _unused = s0
        if n >= clear:
            s0, s1, _unused = eight.masked(s0, s1, s0, n, start_m, seqlen_q, seqlen_k, WG, PIECE, PIECES, False, ROW)
        top, alpha, base = bases(eight.row_max(s0, s1, s0, PIECES, PIECE), top, unit, EMULATED)
        if PIECES > 1:
            acc, p0, p1 = warpgroup_mma_wait(0, [acc, p0, p1])
        else:
            acc, p0 = warpgroup_mma_wait(0, [acc, p0])
        mbarrier.arrive(VEMPTY.index(stage))
        if new:
            one.store_rows(acc, acc, weight, OS, OS, O, O, old_entry,
                       WG, BLOCK_M, E, 0, LO, LO, False)  # fmt: skip
        acc = asm.rescale(acc, gl.convert_layout(alpha, gl.SliceLayout(1, LO)), E)
        use = new == False  # noqa: E712
        stage = next_stage
    p0, sums = exponentials(s0, base, unit, PIECE, EMULATED, HALF, S)
    acc = one.values(p0, VS.index(stage * PIECES), acc, use, PIECE, E, LO)
    if PIECES > 1:
        p1, more = exponentials(s1, base, unit, PIECE, EMULATED, HALF, S)
        sums += more
        acc = one.values(p1, VS.index(stage * PIECES + 1), acc, True, PIECE, E, LO)
    total = total * gl.convert_layout(alpha, gl.SliceLayout(1, SUMS))[:, None] + gl.convert_layout(sums, SUMS)
    weight = one.finish(total, one.log_base(top, unit, EMULATED), LSE, entry, heads, seqlen_q, 1.0,
                        WG, BLOCK_M, ROW, EMULATED)  # fmt: skip
    if PIECES > 1:
        acc, p0, p1 = warpgroup_mma_wait(0, [acc, p0, p1])
    else:
        acc, p0 = warpgroup_mma_wait(0, [acc, p0])
    one.store_rows(acc, acc, weight, OS, OS, O, O, entry,
               WG, BLOCK_M, E, 0, LO, LO, False)  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def produce(
    Q, K, V, QS, KS, VS, QFULL, QEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
    TABLE, heads, group, seqlen_q, seqlen_k,
    NUM_WG: gl.constexpr, PIECE: gl.constexpr, PIECES: gl.constexpr, D: gl.constexpr, E: gl.constexpr,
    STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: every tile that the consumers will want, in their order, as soon as its place is empty."""
    BLOCK_M: gl.constexpr = NUM_WG * ROWS
    BLOCK_N: gl.constexpr = PIECE * PIECES
    SIZE: gl.constexpr = KS.dtype.itemsize
    programs = gl.num_programs(0)
    TABLE += gl.program_id(0)
    total_blocks = gl.load(TABLE).to(gl.int32)
    b = 0
    kv = 0
    n = 0
    tile = 0
    for j in range(total_blocks):
        stage, phase = j % STAGES, (j // STAGES) & 1
        n -= 1
        if n < 0:
            TABLE += programs
            entry = gl.load(TABLE)
            start_m, blocks, _, _ = one.place(
                one.tile_of(entry), seqlen_q, seqlen_k, 0, BLOCK_M, BLOCK_N, False)  # fmt: skip
            _, b, h = one.unpacked(entry)
            kv = h // group
            n = blocks - 1
            for WG in gl.static_range(NUM_WG):
                slot = (tile % Q_STAGES) * NUM_WG + WG
                mbarrier.wait(QEMPTY.index(slot), ((tile // Q_STAGES) & 1) ^ 1)
                mbarrier.expect(QFULL.index(slot), SIZE * ROWS * D)
                row = start_m + WG * ROWS
                one.tma_load(Q, [b, h, row, 0], QFULL.index(slot), QS.index(slot))
            tile += 1
        row_n = n * BLOCK_N
        mbarrier.wait(KEMPTY.index(stage), phase ^ 1)
        mbarrier.expect(KFULL.index(stage), SIZE * BLOCK_N * D)
        for PART in gl.static_range(PIECES):
            one.tma_load(K, [b, kv, row_n + PART * PIECE, 0], KFULL.index(stage),
                         KS.index(stage * PIECES + PART))  # fmt: skip
        mbarrier.wait(VEMPTY.index(stage), phase ^ 1)
        mbarrier.expect(VFULL.index(stage), SIZE * BLOCK_N * E)
        for PART in gl.static_range(PIECES):
            one.tma_load(V, [b, kv, row_n + PART * PIECE, 0], VFULL.index(stage),
                         VS.index(stage * PIECES + PART))  # fmt: skip


@gluon.jit(do_not_specialize=["heads", "group", "seqlen_q", "seqlen_k"])
def forward(
    Q, K, V, O, LSE, TABLE, heads, group, seqlen_q, seqlen_k, unit,
    BLOCK_M: gl.constexpr, PIECE: gl.constexpr, PIECES: gl.constexpr, D: gl.constexpr, E: gl.constexpr,
    STAGES: gl.constexpr, Q_STAGES: gl.constexpr, EMULATED: gl.constexpr, TURNS: gl.constexpr,
    VALUES_FIRST: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """O and LSE."""
    NUM_WG: gl.constexpr = BLOCK_M // ROWS
    QS = half.ring(Q_STAGES * NUM_WG, Q, ROWS, D)
    KS = half.ring(STAGES * PIECES, K, PIECE, D)
    VS = half.ring(STAGES * PIECES, V, PIECE, E)
    OS = half.ring(NUM_WG, O, ROWS, E)
    QFULL = half.barriers(Q_STAGES * NUM_WG, 1)
    QEMPTY = half.barriers(Q_STAGES * NUM_WG, 1)
    KFULL = half.barriers(STAGES, 1)
    KEMPTY = half.barriers(STAGES, NUM_WG)
    VFULL = half.barriers(STAGES, 1)
    VEMPTY = half.barriers(STAGES, NUM_WG)
    fence_async_shared()
    if NUM_WG == 2:
        gl.warp_specialize([
            (consume, (QS, KS, VS, OS, QFULL, QEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
                      O, LSE, TABLE, heads, seqlen_q, seqlen_k, unit, 0, NUM_WG, PIECE, PIECES, D, E,
                      STAGES, Q_STAGES, EMULATED, TURNS, VALUES_FIRST)),
            (consume, (QS, KS, VS, OS, QFULL, QEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
                      O, LSE, TABLE, heads, seqlen_q, seqlen_k, unit, 1, NUM_WG, PIECE, PIECES, D, E,
                      STAGES, Q_STAGES, EMULATED, TURNS, VALUES_FIRST)),
            (produce, (Q, K, V, QS, KS, VS, QFULL, QEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
                      TABLE, heads, group, seqlen_q, seqlen_k, NUM_WG, PIECE, PIECES, D, E, STAGES, Q_STAGES)),
        ], [4, 1], [REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (QS, KS, VS, OS, QFULL, QEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
                      O, LSE, TABLE, heads, seqlen_q, seqlen_k, unit, 0, NUM_WG, PIECE, PIECES, D, E,
                      STAGES, Q_STAGES, EMULATED, TURNS, VALUES_FIRST)),
            (consume, (QS, KS, VS, OS, QFULL, QEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
                      O, LSE, TABLE, heads, seqlen_q, seqlen_k, unit, 1, NUM_WG, PIECE, PIECES, D, E,
                      STAGES, Q_STAGES, EMULATED, TURNS, VALUES_FIRST)),
            (consume, (QS, KS, VS, OS, QFULL, QEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
                      O, LSE, TABLE, heads, seqlen_q, seqlen_k, unit, 2, NUM_WG, PIECE, PIECES, D, E,
                      STAGES, Q_STAGES, EMULATED, TURNS, VALUES_FIRST)),
            (produce, (Q, K, V, QS, KS, VS, QFULL, QEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
                      TABLE, heads, group, seqlen_q, seqlen_k, NUM_WG, PIECE, PIECES, D, E, STAGES, Q_STAGES)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
