"""FlashAttention-3's forward in 8-bit floats over pieces of a K/V tile, in Gluon for sm_90: experimental.

As _hopper_fp8_kernels.py, but for three things:

- A tile of keys is cut into pieces. As soon as one piece's exponentials are done, its registers take the next
  tile's scores of that piece, so that no wait for a product is without work of the softmax before it.
- P V is summed where the product is computed: V's scale goes into P, relative to that of a unit that follows
  the largest one; the row sums leave it out.
- Every PROMOTE tiles what was summed so is added to a sum in fp32.
"""

# Triton reads the bodies below, not Python: no annotations but gl.constexpr, tensors by their capitals.
# ruff: noqa: ANN001, ANN202, E741, SIM102
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
from triton.runtime.jit import constexpr_function

from flashbench.kernels import _hopper_asm as asm
from flashbench.kernels import _hopper_exp2 as fast
from flashbench.kernels import _hopper_fp8_kernels as whole
from flashbench.kernels import _hopper_kernels as half
from flashbench.kernels import _hopper_tiles as one

ROWS = one.ROWS
SMALLEST = whole.SMALLEST
LEAST = gl.constexpr(-3.0)
"""By how much, in powers of two, a V tile's scale may lie under the unit."""


@gluon.jit
def row_max(s0, s1, s2, PIECES: gl.constexpr, N: gl.constexpr):
    """Maxima of the rows over all pieces."""
    if PIECES == 1:
        top = fast.row_max(s0, N)
    elif PIECES == 2:
        top = fast.row_max2(s0, s1, N)
    else:
        top = fast.row_max3(s0, s1, s2, N)
    return top


@gluon.jit
def exponentials(s, base, factor, N: gl.constexpr, EMULATED: gl.constexpr, E5M2: gl.constexpr):
    """(words of four of P, row sums per thread) of one piece."""
    if EMULATED > 0:
        words, sums = fast.eight_words(s, base, factor, N, EMULATED, E5M2)
    else:
        p = gl.exp2(s * factor + base[:, None])
        sums = one.partial_sums(p, N)
        words = whole.packed(p, E5M2, N)
    return words, sums


@gluon.jit
def values(p, V, acc, use_acc, E5M2: gl.constexpr, N: gl.constexpr, E: gl.constexpr, O: gl.constexpr):
    """Issue acc += P V of one piece."""
    p = gl.join(p, p)
    p = gl.reshape(gl.join(p, p), [ROWS, N])
    p = gl.convert_layout(p, gl.DotOperandLayout(0, parent=O, k_width=4), assert_trivial=True)
    v = V.reshape([E, N]).permute((1, 0))
    return warpgroup_mma(asm.taken_apart(p, E5M2), v, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def masked(s0, s1, s2, n, start_m, seqlen_q, seqlen_k, WG: gl.constexpr, N: gl.constexpr,
           PIECES: gl.constexpr, CAUSAL: gl.constexpr, ROW: gl.constexpr):  # fmt: skip
    """The pieces with -inf where a row does not see a key."""
    last = one.last_key(start_m, seqlen_q, seqlen_k, WG, CAUSAL, ROW) - n * (N * PIECES)
    s0 = asm.mask(s0, last, N)
    if PIECES > 1:
        s1 = asm.mask(s1, last - N, N)
    if PIECES > 2:
        s2 = asm.mask(s2, last - 2 * N, N)
    return s0, s1, s2


@gluon.jit
def bases(highest, top, v_scale, v_unit, first, SHIFT: gl.constexpr, LAZY: gl.constexpr):
    """(new base of each row, factor of sums, new unit, its factor of O, of this tile's sums, shift of P)."""
    new_top = gl.where(highest - top <= LAZY, top, highest)  # a NaN goes into the base
    alpha = gl.where((new_top == top) | (top == float("-inf")), 1.0, gl.exp2(top - new_top))
    lag = v_scale - v_unit
    new_unit = v_unit
    if first | (lag > 0) | (lag < LEAST):
        new_unit = v_scale
    shift = v_scale - new_unit
    base = gl.where(new_top == float("-inf"), 0.0, -new_top) + (shift + SHIFT)
    return new_top, alpha, new_unit, gl.exp2(v_unit - new_unit), gl.exp2(-shift), base


@constexpr_function
def words_layout(columns):
    """Layout of words of four of a first operand of 64 rows of so many bytes."""
    places = [[0, 4 << i] for i in range((columns // 32).bit_length())]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0], *places], lanes, [[16, 0], [32, 0]], [], [64, columns // 4])


@gluon.jit
def queries(QS, slot, D: gl.constexpr, HELD: gl.constexpr):
    """Q of a warpgroup in registers, as words of four, where it is to be held there."""
    LAYOUT: gl.constexpr = words_layout(D)
    if HELD:
        whole = QS.index(slot).reshape([ROWS, D])
        SHARED: gl.constexpr = gl.NVMMASharedLayout(D, 32, 2)
        q = whole._reinterpret(gl.int32, [ROWS, D // 4], SHARED).load(LAYOUT)
    else:
        q = slot
    return q


@gluon.jit
def scores(QS, q, KS, slot, place, PIECE: gl.constexpr, D: gl.constexpr, S: gl.constexpr, HELD: gl.constexpr):
    """Issue the scores of one piece, Q in shared memory or held in registers."""
    if HELD:
        q = gl.join(q, q)
        q = gl.reshape(gl.join(q, q), [ROWS, D])
        q = gl.convert_layout(q, gl.DotOperandLayout(0, parent=S, k_width=4), assert_trivial=True)
        q = asm.taken_apart(q, KS.dtype == gl.float8e5)
        k = KS.index(place).reshape([PIECE, D]).permute((1, 0))
        zero = gl.zeros([ROWS, PIECE], gl.float32, S)
        s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    else:
        s = one.scores(QS, QS, slot, KS, KS, place, PIECE, D, 0, S)
    return s


@gluon.jit
def consume(
    QS, KS, VS, OS, MS, QFULL, QEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
    O, Q_SCALE, K_SCALE, V_SCALE, LSE, TABLE, tiles, heads, group, seqlen_q, seqlen_k, unit,
    WG: gl.constexpr, NUM_WG: gl.constexpr, PIECE: gl.constexpr, PIECES: gl.constexpr, D: gl.constexpr,
    E: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    EMULATED: gl.constexpr, SHIFT: gl.constexpr, LAZY: gl.constexpr, TURNS: gl.constexpr,
    KNOWN: gl.constexpr, VALUES_FIRST: gl.constexpr, PROMOTE: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 rows of each of the program's tiles of queries, over all K/V tiles of each."""
    BLOCK_M: gl.constexpr = NUM_WG * ROWS
    BLOCK_N: gl.constexpr = PIECE * PIECES
    NEXT: gl.constexpr = (WG + 1) % NUM_WG
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 32])
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
    q_scale = gl.load(Q_SCALE + own_scale) * unit
    factor = gl.maximum(q_scale * gl.load(K_SCALE + scales + n), SMALLEST)
    v_scale = asm.log2(gl.load(V_SCALE + scales + n))
    v_unit = v_scale
    top = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    p0, total = exponentials(gl.zeros([ROWS, PIECE], gl.float32, S), top, factor, PIECE, EMULATED, E5M2)
    p1 = p0
    p2 = p0
    SUMS: gl.constexpr = total.type.layout
    total = gl.zeros([ROWS, 4], gl.float32, SUMS)
    weight = top
    acc = gl.zeros([ROWS, E], gl.float32, LO)
    kept = False  # part of O is in MS
    kept_factor = gl.full([ROWS], 1.0, gl.float32, ROW)
    asm.turn_pass(0, TURNS and WG == NUM_WG - 1)
    mbarrier.wait(QFULL.index(WG), 0)
    mbarrier.wait(KFULL.index(0), 0)
    slot = WG
    q = queries(QS, slot, D, HELD)
    if HELD:
        mbarrier.arrive(QEMPTY.index(WG))
    s0 = scores(QS, q, KS, slot, 0, PIECE, D, S, HELD)
    s1 = s0
    s2 = s0
    if PIECES > 1:
        s1 = scores(QS, q, KS, slot, 1, PIECE, D, S, HELD)
    if PIECES > 2:
        s2 = scores(QS, q, KS, slot, 2, PIECE, D, S, HELD)
    s0, s1, s2 = waited(s0, s1, s2, 0, PIECES)
    mbarrier.arrive(KEMPTY.index(0))
    if not HELD:
        if n == 0:
            mbarrier.arrive(QEMPTY.index(WG))
    if n >= clear:
        s0, s1, s2 = masked(s0, s1, s2, n, start_m, seqlen_q, seqlen_k, WG, PIECE, PIECES, CAUSAL, ROW)
    highest = row_max(s0, s1, s2, PIECES, PIECE) * factor
    top, alpha, v_unit, turned, unweighted, base = bases(highest, top, v_scale, v_unit, True, SHIFT, LAZY)
    mbarrier.wait(VFULL.index(0), 0)
    stage = 0  # of the tile whose scores are there
    tile = 0  # tile of queries of this program, of the next scores
    use = False  # the tile is not the first of its tile of queries
    for j in range(1, total_blocks):
        n -= 1
        new = n < 0
        old_entry = entry
        this_factor = factor
        if new:  # the scores that are issued next are the first of another tile of queries
            entry = next_entry
            start_m, blocks, clear, _ = one.place(
                one.tile_of(entry), seqlen_q, seqlen_k, 0, BLOCK_M, BLOCK_N, CAUSAL)  # fmt: skip
            n = blocks - 1
            own_scale, scales = whole.scale_places(entry, tiles, heads, group, key_tiles)
            q_scale = gl.load(Q_SCALE + own_scale) * unit
            tile += 1
            next_entry = gl.load(TABLE + (tile + 2) * programs)
            mbarrier.wait(QFULL.index((tile % Q_STAGES) * NUM_WG + WG), (tile // Q_STAGES) & 1)
            slot = (tile % Q_STAGES) * NUM_WG + WG
            q = queries(QS, slot, D, HELD)
            if HELD:
                mbarrier.arrive(QEMPTY.index(slot))
        k_scale = gl.load(K_SCALE + scales + n)
        v_scale = gl.load(V_SCALE + scales + n)
        next_stage, phase = j % STAGES, (j // STAGES) & 1
        asm.turn_wait(WG, TURNS)
        p0, sums = exponentials(s0, base, this_factor, PIECE, EMULATED, E5M2)
        if KNOWN:
            p0 = asm.known(p0, PIECE)
        if VALUES_FIRST and PIECES > 1:
            acc = values(p0, VS.index(stage * PIECES), acc, use, E5M2, PIECE, E, LO)
        mbarrier.wait(KFULL.index(next_stage), phase)
        t0 = scores(QS, q, KS, slot, next_stage * PIECES, PIECE, D, S, HELD)
        t1 = t0
        t2 = t0
        if not (VALUES_FIRST and PIECES > 1):
            acc = values(p0, VS.index(stage * PIECES), acc, use, E5M2, PIECE, E, LO)
        # the end of a basic block: ptxas would issue the products one by one between what follows
        mbarrier.wait(VFULL.index(next_stage), phase)
        if PIECES > 1:
            this_factor = asm.later(this_factor)
            p1, more = exponentials(s1, base, this_factor, PIECE, EMULATED, E5M2)
            sums += more
            p1 = asm.known(p1, PIECE)
            t1 = scores(QS, q, KS, slot, next_stage * PIECES + 1, PIECE, D, S, HELD)
            acc = values(p1, VS.index(stage * PIECES + 1), acc, True, E5M2, PIECE, E, LO)
        if PIECES > 2:
            mbarrier.wait(KFULL.index(next_stage), phase)
            this_factor = asm.later(this_factor)
            p2, more = exponentials(s2, base, this_factor, PIECE, EMULATED, E5M2)
            sums += more
            p2 = asm.known(p2, PIECE)
            t2 = scores(QS, q, KS, slot, next_stage * PIECES + 2, PIECE, D, S, HELD)
            acc = values(p2, VS.index(stage * PIECES + 2), acc, True, E5M2, PIECE, E, LO)
        asm.turn_pass(NEXT, TURNS)
        grown = gl.convert_layout(alpha, gl.SliceLayout(1, SUMS))[:, None]
        total = total * grown + gl.convert_layout(sums, SUMS) * unweighted
        factor = gl.maximum(q_scale * k_scale, SMALLEST)
        v_scale = asm.log2(v_scale)
        if new:
            weight = one.finish(total, top - SHIFT, LSE, old_entry, heads, seqlen_q, 1.0, WG, BLOCK_M, ROW,
                                EMULATED) * gl.exp2(v_unit)  # fmt: skip
            total = gl.zeros([ROWS, 4], gl.float32, SUMS)
            top = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        s0, s1, s2 = waited(t0, t1, t2, 1, PIECES)
        mbarrier.arrive(KEMPTY.index(next_stage))
        if not HELD:
            if n == 0:
                mbarrier.arrive(QEMPTY.index(slot))
        if n >= clear:
            s0, s1, s2 = masked(s0, s1, s2, n, start_m, seqlen_q, seqlen_k, WG, PIECE, PIECES,
                                CAUSAL, ROW)  # fmt: skip
        highest = row_max(s0, s1, s2, PIECES, PIECE) * factor
        top, alpha, v_unit, turned, unweighted, base = bases(
            highest, top, v_scale, v_unit, new, SHIFT, LAZY)  # fmt: skip
        acc, p0, p1, p2 = settled(acc, p0, p1, p2, PIECES)
        mbarrier.arrive(VEMPTY.index(stage))
        if PROMOTE > 0:
            aside = new | (n % PROMOTE == PROMOTE - 1)
            if aside:
                if kept:
                    acc += (
                        MS.index(WG).load(LO) * gl.convert_layout(kept_factor, gl.SliceLayout(1, LO))[:, None]
                    )
                if new:
                    one.store_rows(acc, acc, weight, OS, OS, O, O, old_entry,
                               WG, BLOCK_M, E, 0, LO, LO, False)  # fmt: skip
                else:
                    MS.index(WG).store(acc)
                kept_factor = gl.full([ROWS], 1.0, gl.float32, ROW)
                kept = new == False  # noqa: E712
        elif new:
            one.store_rows(acc, acc, weight, OS, OS, O, O, old_entry,
                       WG, BLOCK_M, E, 0, LO, LO, False)  # fmt: skip
        shrunk = alpha * turned
        acc = asm.rescale(acc, gl.convert_layout(shrunk, gl.SliceLayout(1, LO)), E)
        if PROMOTE > 0:
            kept_factor *= shrunk
            use = aside == False  # noqa: E712
        else:
            use = new == False  # noqa: E712
        stage = next_stage
    p0, sums = exponentials(s0, base, factor, PIECE, EMULATED, E5M2)
    acc = values(p0, VS.index(stage * PIECES), acc, use, E5M2, PIECE, E, LO)
    if PIECES > 1:
        p1, more = exponentials(s1, base, factor, PIECE, EMULATED, E5M2)
        sums += more
        acc = values(p1, VS.index(stage * PIECES + 1), acc, True, E5M2, PIECE, E, LO)
    if PIECES > 2:
        p2, more = exponentials(s2, base, factor, PIECE, EMULATED, E5M2)
        sums += more
        acc = values(p2, VS.index(stage * PIECES + 2), acc, True, E5M2, PIECE, E, LO)
    grown = gl.convert_layout(alpha, gl.SliceLayout(1, SUMS))[:, None]
    total = total * grown + gl.convert_layout(sums, SUMS) * unweighted
    weight = one.finish(total, top - SHIFT, LSE, entry, heads, seqlen_q, 1.0, WG, BLOCK_M, ROW,
                        EMULATED) * gl.exp2(v_unit)  # fmt: skip
    acc, p0, p1, p2 = settled(acc, p0, p1, p2, PIECES)
    if PROMOTE > 0:
        if kept:
            acc += MS.index(WG).load(LO) * gl.convert_layout(kept_factor, gl.SliceLayout(1, LO))[:, None]
    one.store_rows(acc, acc, weight, OS, OS, O, O, entry,
               WG, BLOCK_M, E, 0, LO, LO, False)  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def waited(s0, s1, s2, IN_FLIGHT: gl.constexpr, PIECES: gl.constexpr):
    """The scores once they are there; so many younger products may be in flight."""
    if PIECES == 1:
        s0 = warpgroup_mma_wait(IN_FLIGHT, [s0])
    elif PIECES == 2:
        s0, s1 = warpgroup_mma_wait(IN_FLIGHT, [s0, s1])
    else:
        s0, s1, s2 = warpgroup_mma_wait(IN_FLIGHT, [s0, s1, s2])
    return s0, s1, s2


@gluon.jit
def settled(acc, p0, p1, p2, PIECES: gl.constexpr):
    """O so far, and P whose registers are free."""
    if PIECES == 1:
        acc, p0 = warpgroup_mma_wait(0, [acc, p0])
    elif PIECES == 2:
        acc, p0, p1 = warpgroup_mma_wait(0, [acc, p0, p1])
    else:
        acc, p0, p1, p2 = warpgroup_mma_wait(0, [acc, p0, p1, p2])
    return acc, p0, p1, p2


@gluon.jit
def produce(
    Q, K, V, QS, KS, VS, QFULL, QEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
    TABLE, heads, group, seqlen_q, seqlen_k,
    NUM_WG: gl.constexpr, PIECE: gl.constexpr, PIECES: gl.constexpr, D: gl.constexpr, E: gl.constexpr,
    STAGES: gl.constexpr, Q_STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """One warp: every tile that the consumers will want, in their order, as soon as its place is empty."""
    BLOCK_M: gl.constexpr = NUM_WG * ROWS
    BLOCK_N: gl.constexpr = PIECE * PIECES
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
                one.tile_of(entry), seqlen_q, seqlen_k, 0, BLOCK_M, BLOCK_N, CAUSAL)  # fmt: skip
            _, b, h = one.unpacked(entry)
            kv = h // group
            n = blocks - 1
            for WG in gl.static_range(NUM_WG):
                slot = (tile % Q_STAGES) * NUM_WG + WG
                mbarrier.wait(QEMPTY.index(slot), ((tile // Q_STAGES) & 1) ^ 1)
                mbarrier.expect(QFULL.index(slot), ROWS * D)
                row = start_m + WG * ROWS
                one.tma_load(Q, [b, h, row, 0], QFULL.index(slot), QS.index(slot))
            tile += 1
        row_n = n * BLOCK_N
        mbarrier.wait(KEMPTY.index(stage), phase ^ 1)
        mbarrier.expect(KFULL.index(stage), BLOCK_N * D)
        for PART in gl.static_range(PIECES):
            one.tma_load(K, [b, kv, row_n + PART * PIECE, 0], KFULL.index(stage),
                         KS.index(stage * PIECES + PART))  # fmt: skip
        mbarrier.wait(VEMPTY.index(stage), phase ^ 1)
        mbarrier.expect(VFULL.index(stage), BLOCK_N * E)
        for PART in gl.static_range(PIECES):
            one.tma_load(V, [b, kv, 0, row_n + PART * PIECE], VFULL.index(stage),
                         VS.index(stage * PIECES + PART))  # fmt: skip


@gluon.jit(do_not_specialize=["tiles", "heads", "group", "seqlen_q", "seqlen_k"])
def forward(
    Q, K, V, O, Q_SCALE, K_SCALE, V_SCALE, LSE, TABLE, tiles, heads, group, seqlen_q, seqlen_k, unit,
    BLOCK_M: gl.constexpr, PIECE: gl.constexpr, PIECES: gl.constexpr, D: gl.constexpr, E: gl.constexpr,
    STAGES: gl.constexpr, Q_STAGES: gl.constexpr, CAUSAL: gl.constexpr, EMULATED: gl.constexpr,
    SHIFT: gl.constexpr, LAZY: gl.constexpr, TURNS: gl.constexpr, KNOWN: gl.constexpr,
    VALUES_FIRST: gl.constexpr, PROMOTE: gl.constexpr, HELD: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """O and LSE. Grid: as many programs as the table has columns. As _hopper_fp8_kernels.forward."""
    NUM_WG: gl.constexpr = BLOCK_M // ROWS
    QS = half.ring(Q_STAGES * NUM_WG, Q, ROWS, D)
    KS = half.ring(STAGES * PIECES, K, PIECE, D)
    VS = half.ring(STAGES * PIECES, V, E, PIECE)
    OS = half.ring(NUM_WG, O, ROWS, E)
    MS = OS
    if PROMOTE > 0:
        MS = gl.allocate_shared_memory(
            gl.float32, [NUM_WG, ROWS, E], gl.SwizzledSharedLayout(2, 1, 8, [1, 0])
        )
    QFULL = half.barriers(Q_STAGES * NUM_WG, 1)
    QEMPTY = half.barriers(Q_STAGES * NUM_WG, 1)
    KFULL = half.barriers(STAGES, 1)
    KEMPTY = half.barriers(STAGES, NUM_WG)
    VFULL = half.barriers(STAGES, 1)
    VEMPTY = half.barriers(STAGES, NUM_WG)
    fence_async_shared()
    if NUM_WG == 2:
        gl.warp_specialize([
            (consume, (QS, KS, VS, OS, MS, QFULL, QEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
                      O, Q_SCALE, K_SCALE, V_SCALE, LSE, TABLE, tiles, heads, group, seqlen_q, seqlen_k,
                      unit, 0, NUM_WG, PIECE, PIECES, D, E, STAGES, Q_STAGES, CAUSAL, EMULATED,
                      SHIFT, LAZY, TURNS, KNOWN, VALUES_FIRST, PROMOTE, HELD)),
            (consume, (QS, KS, VS, OS, MS, QFULL, QEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
                      O, Q_SCALE, K_SCALE, V_SCALE, LSE, TABLE, tiles, heads, group, seqlen_q, seqlen_k,
                      unit, 1, NUM_WG, PIECE, PIECES, D, E, STAGES, Q_STAGES, CAUSAL, EMULATED,
                      SHIFT, LAZY, TURNS, KNOWN, VALUES_FIRST, PROMOTE, HELD)),
            (produce, (Q, K, V, QS, KS, VS, QFULL, QEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
                      TABLE, heads, group, seqlen_q, seqlen_k, NUM_WG, PIECE, PIECES, D, E,
                      STAGES, Q_STAGES, CAUSAL)),
        ], [4, 1], [REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (QS, KS, VS, OS, MS, QFULL, QEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
                      O, Q_SCALE, K_SCALE, V_SCALE, LSE, TABLE, tiles, heads, group, seqlen_q, seqlen_k,
                      unit, 0, NUM_WG, PIECE, PIECES, D, E, STAGES, Q_STAGES, CAUSAL, EMULATED,
                      SHIFT, LAZY, TURNS, KNOWN, VALUES_FIRST, PROMOTE, HELD)),
            (consume, (QS, KS, VS, OS, MS, QFULL, QEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
                      O, Q_SCALE, K_SCALE, V_SCALE, LSE, TABLE, tiles, heads, group, seqlen_q, seqlen_k,
                      unit, 1, NUM_WG, PIECE, PIECES, D, E, STAGES, Q_STAGES, CAUSAL, EMULATED,
                      SHIFT, LAZY, TURNS, KNOWN, VALUES_FIRST, PROMOTE, HELD)),
            (consume, (QS, KS, VS, OS, MS, QFULL, QEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
                      O, Q_SCALE, K_SCALE, V_SCALE, LSE, TABLE, tiles, heads, group, seqlen_q, seqlen_k,
                      unit, 2, NUM_WG, PIECE, PIECES, D, E, STAGES, Q_STAGES, CAUSAL, EMULATED,
                      SHIFT, LAZY, TURNS, KNOWN, VALUES_FIRST, PROMOTE, HELD)),
            (produce, (Q, K, V, QS, KS, VS, QFULL, QEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
                      TABLE, heads, group, seqlen_q, seqlen_k, NUM_WG, PIECE, PIECES, D, E,
                      STAGES, Q_STAGES, CAUSAL)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
