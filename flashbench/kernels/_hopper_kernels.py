"""FlashAttention-3 in Gluon for sm_90: the forward kernel. Launched by _flash_v3.py.

Source: Shah et al. 2024, arXiv:2407.08608; each of its ideas by its name there:

- Warp specialisation (3.1): ``produce`` is one warp that loads tiles by TMA into a ring of K/V stages;
  ``consume`` runs in NUM_WG warpgroups of 64 rows of queries each, which compute. Full and empty mbarriers
  pass the stages between them. setmaxnreg gives the producer's registers to the consumers.
- Intra-warpgroup overlap of GEMM and softmax (3.2, Algorithm 2): the scores of the next tile are issued
  before P V of this one, and the softmax of the next tile runs while P V is in flight. Here the sequence of
  K/V tiles goes on over the end of a tile of queries, so that the next tile's first scores and softmax hide
  the end of this one.
- Ping-pong scheduling (3.1): PINGPONG lets the warpgroups take turns to issue products.
- Persistent programs: each walks its row of a table that the host made, longest first (_hopper_schedule.py).

P stays in registers as the first operand of its product (wgmma's "RS" form). Beyond the paper: O is rescaled
only where a row's maximum grew by more than a factor 2**8 (exact, as numerator and denominator share the
base), and row sums are kept per thread until the end of a tile.

GUARDED: no maximum is looked for where row sums say that a row's base still holds (_hopper_guard16.py). And a
tile of queries' later K/V tiles, which need no mask, have a loop of their own, the hot loop, inside that over
all tiles: a jump over what they do not need would wait for the instructions behind it, which are not fetched.
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
    warpgroup_mma_wait,
)

from flashbench.kernels import _hopper_asm as asm
from flashbench.kernels import _hopper_guard16 as sums16
from flashbench.kernels import _hopper_softmax as rows
from flashbench.kernels import _hopper_tiles as one

ROWS = one.ROWS


@gluon.jit
def consume(
    Q0S, Q1S, K0S, K1S, V0S, V1S, O0S, O1S, QFULL, QEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
    O0, O1, LSE, TABLE, heads, seqlen_q, seqlen_k, unit,
    WG: gl.constexpr, NUM_WG: gl.constexpr, BLOCK_N: gl.constexpr,
    D0: gl.constexpr, D1: gl.constexpr, E0: gl.constexpr, E1: gl.constexpr, STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr, O_SHARED: gl.constexpr, CAUSAL: gl.constexpr, PINGPONG: gl.constexpr,
    MAX3: gl.constexpr, EMULATED: gl.constexpr, GUARDED: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 rows of each of the program's tiles of queries, over all K/V tiles of each."""
    BLOCK_M: gl.constexpr = NUM_WG * ROWS
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    LO0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E0, 16])
    LO1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E1 if E1 > 0 else E0, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    HALF: gl.constexpr = K0S.dtype
    ALONE: gl.constexpr = GUARDED > 1  # the softmax has this warpgroup's tensor cores idle: others' are not
    AFTER: gl.constexpr = (NUM_WG - 1 - WG) * ROWS
    SKIPS: gl.constexpr = CAUSAL and AFTER > 0
    NEXT: gl.constexpr = (WG + 1) % NUM_WG
    gl.static_assert(
        AFTER <= BLOCK_N * (STAGES - 1), "a tile that is passed over must not wait for one in use"
    )
    programs = gl.num_programs(0)
    TABLE += gl.program_id(0)
    total_blocks = gl.load(TABLE).to(gl.int32)
    entry = gl.load(TABLE + programs)
    start_m, blocks, clear, own = one.place(
        one.tile_of(entry), seqlen_q, seqlen_k, AFTER, BLOCK_M, BLOCK_N, CAUSAL)  # fmt: skip
    next_entry = gl.load(TABLE + 2 * programs)  # of the next tile of queries, long before it is needed
    asm.turn_pass(0, PINGPONG and WG == NUM_WG - 1)
    j = 0  # K/V tile of the program
    mbarrier.wait(QFULL.index(WG), 0)
    if SKIPS:
        j = one.pass_over(j, blocks - own, KFULL, KEMPTY, VFULL, VEMPTY, STAGES, PINGPONG, WG, NEXT)
    asm.turn_wait(WG, PINGPONG)
    before = j % STAGES
    mbarrier.wait(KFULL.index(before), (j // STAGES) & 1)
    s = one.scores(Q0S, Q1S, WG, K0S, K1S, before, BLOCK_N, D0, D1, S)
    asm.turn_pass(NEXT, PINGPONG)
    s = warpgroup_mma_wait(0, [s])
    mbarrier.arrive(KEMPTY.index(before))
    n = own - 1  # K/V tile of the tile of queries: from the right, so that those to be masked come first
    if n == 0:
        mbarrier.arrive(QEMPTY.index(WG))
    s = one.masked(s, n, clear, start_m, seqlen_q, seqlen_k, WG, BLOCK_N, CAUSAL, ROW)
    top, total = rows.nothing(ROW, GUARDED)
    p, rest, alpha, top, total = rows.softmax(
        s, top, total, unit, True, BLOCK_N, HALF, MAX3, EMULATED, GUARDED)  # fmt: skip
    if EMULATED > 0:
        p = one.operand(p, rest, BLOCK_N, EMULATED, HALF, S)
    acc0 = gl.zeros([ROWS, E0], gl.float32, LO0)
    acc1 = gl.zeros([ROWS, E1 if E1 > 0 else 16], gl.float32, LO1)
    mbarrier.wait(VFULL.index(before), (j // STAGES) & 1)
    j += 1
    tile = 0  # tile of queries of this program
    use_acc = False  # acc holds something of this tile of queries
    while j < total_blocks:
        n -= 1
        new = n < 0
        old_entry = entry
        factor = rows.no_factor(top, ROW, GUARDED)
        if new:  # the scores that are issued next are the first of another tile of queries
            factor = rows.finish(total, top, LSE, entry, heads, seqlen_q, unit,
                                 WG, BLOCK_M, ROW, EMULATED, GUARDED)  # fmt: skip
            top, total = rows.nothing(ROW, GUARDED)
            entry = next_entry
            start_m, blocks, clear, own = one.place(
                one.tile_of(entry), seqlen_q, seqlen_k, AFTER, BLOCK_M, BLOCK_N, CAUSAL)  # fmt: skip
            if SKIPS:
                j = one.pass_over(j, blocks - own, KFULL, KEMPTY, VFULL, VEMPTY,
                                  STAGES, PINGPONG, WG, NEXT)  # fmt: skip
            n = own - 1
            tile += 1
            next_entry = gl.load(TABLE + (tile + 2) * programs)
            mbarrier.wait(QFULL.index((tile % Q_STAGES) * NUM_WG + WG), (tile // Q_STAGES) & 1)
        slot = (tile % Q_STAGES) * NUM_WG + WG
        stage, phase = j % STAGES, (j // STAGES) & 1
        mbarrier.wait(KFULL.index(stage), phase)
        asm.turn_wait(WG, PINGPONG)
        s, acc0, acc1 = one.issue(Q0S, Q1S, slot, K0S, K1S, stage, V0S, V1S, before, p, acc0, acc1, use_acc,
                                  BLOCK_N, D0, D1, E0, E1, S, LO0, LO1)  # fmt: skip
        asm.turn_pass(NEXT, PINGPONG)
        s, acc0, acc1, p = one.scored(s, acc0, acc1, p, E1, ALONE)
        mbarrier.arrive(KEMPTY.index(stage))
        if n == 0:
            mbarrier.arrive(QEMPTY.index(slot))
        s = one.masked(s, n, clear, start_m, seqlen_q, seqlen_k, WG, BLOCK_N, CAUSAL, ROW)
        next_p, rest, alpha, top, total = rows.softmax(
            s, top, total, unit, new, BLOCK_N, HALF, MAX3, EMULATED, GUARDED)  # fmt: skip
        # The end of a basic block keeps ptxas from waiting for P V before the exponentials. Of tiles
        # passed over V may come to where P V reads: there K's barrier serves, complete already.
        mbarrier.wait((KFULL if SKIPS else VFULL).index(stage), phase)
        if not ALONE:
            acc0, acc1, p = one.landed(acc0, acc1, p, E1)
        mbarrier.arrive(VEMPTY.index(before))
        if SKIPS:
            mbarrier.wait(VFULL.index(stage), phase)
        if new:
            one.store_rows(acc0, acc1, factor, O0S, O1S, O0, O1, old_entry,
                       WG, BLOCK_M, E0, E1, LO0, LO1, O_SHARED)  # fmt: skip
        # of no consequence for a new tile, whose first product does not add
        acc0, acc1 = rows.rescale(acc0, acc1, alpha, E0, E1, LO0, LO1, GUARDED)
        p = next_p
        if EMULATED > 0:
            p = one.operand(next_p, rest, BLOCK_N, EMULATED, HALF, S)
        use_acc = not new
        before = stage
        j += 1
        if GUARDED > 0:  # the hot loop: tiles after that which need no mask
            for _ in range(gl.where(n <= clear, n, 0)):
                n -= 1
                stage, phase = j % STAGES, (j // STAGES) & 1
                mbarrier.wait(KFULL.index(stage), phase)
                asm.turn_wait(WG, PINGPONG)
                s, acc0, acc1 = one.issue(Q0S, Q1S, slot, K0S, K1S, stage, V0S, V1S, before, p, acc0, acc1,
                                          use_acc, BLOCK_N, D0, D1, E0, E1, S, LO0, LO1)  # fmt: skip
                asm.turn_pass(NEXT, PINGPONG)
                s, acc0, acc1, p = one.scored(s, acc0, acc1, p, E1, ALONE)
                mbarrier.arrive(KEMPTY.index(stage))
                mbarrier.arrive(QEMPTY.index(slot), pred=n == 0)
                next_p, alpha, top, total = sums16.softmax(
                    s, top, total, unit, 0.0, BLOCK_N, HALF, GUARDED, True)  # fmt: skip
                mbarrier.wait(VFULL.index(stage), phase)
                if not ALONE:
                    acc0, acc1, p = one.landed(acc0, acc1, p, E1)
                mbarrier.arrive(VEMPTY.index(before))
                acc0, acc1 = rows.rescale(acc0, acc1, alpha, E0, E1, LO0, LO1, GUARDED)
                p = next_p
                use_acc = True
                before = stage
                j += 1
    acc0 = one.values(p, V0S.index(before), acc0, use_acc, BLOCK_N, E0, LO0)
    if E1 > 0:
        acc1 = one.values(p, V1S.index(before), acc1, use_acc, BLOCK_N, E1, LO1)
    acc0, acc1, p = one.landed(acc0, acc1, p, E1)
    mbarrier.arrive(VEMPTY.index(before))
    factor = rows.finish(total, top, LSE, entry, heads, seqlen_q, unit,
                         WG, BLOCK_M, ROW, EMULATED, GUARDED)  # fmt: skip
    one.store_rows(acc0, acc1, factor, O0S, O1S, O0, O1, entry,
               WG, BLOCK_M, E0, E1, LO0, LO1, O_SHARED)  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def produce(
    Q0, Q1, K0, K1, V0, V1, Q0S, Q1S, K0S, K1S, V0S, V1S, QFULL, QEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
    TABLE, heads, group, seqlen_q, seqlen_k,
    NUM_WG: gl.constexpr, BLOCK_N: gl.constexpr,
    D0: gl.constexpr, D1: gl.constexpr, E0: gl.constexpr, E1: gl.constexpr,
    STAGES: gl.constexpr, Q_STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """One warp: every tile that the consumers will want, in their order, as soon as its place is empty.

    V of fp8 lies turned: its boxes are (column, key).
    """
    BLOCK_M: gl.constexpr = NUM_WG * ROWS
    SIZE: gl.constexpr = K0S.dtype.itemsize
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
            start_m, n, b, h, kv = one.to_load(TABLE, group, seqlen_q, seqlen_k, BLOCK_M, BLOCK_N, CAUSAL)
            for WG in gl.static_range(NUM_WG):
                slot = (tile % Q_STAGES) * NUM_WG + WG
                mbarrier.wait(QEMPTY.index(slot), ((tile // Q_STAGES) & 1) ^ 1)
                mbarrier.expect(QFULL.index(slot), SIZE * ROWS * (D0 + D1))
                row = start_m + WG * ROWS
                one.tma_load(Q0, [b, h, row, 0], QFULL.index(slot), Q0S.index(slot))
                if D1 > 0:
                    one.tma_load(Q1, [b, h, row, D0], QFULL.index(slot), Q1S.index(slot))
            tile += 1
        row_n = n * BLOCK_N
        mbarrier.wait(KEMPTY.index(stage), phase ^ 1)
        mbarrier.expect(KFULL.index(stage), SIZE * BLOCK_N * (D0 + D1))
        one.tma_load(K0, [b, kv, row_n, 0], KFULL.index(stage), K0S.index(stage))
        if D1 > 0:
            one.tma_load(K1, [b, kv, row_n, D0], KFULL.index(stage), K1S.index(stage))
        mbarrier.wait(VEMPTY.index(stage), phase ^ 1)
        mbarrier.expect(VFULL.index(stage), SIZE * BLOCK_N * (E0 + E1))
        if SIZE == 1:
            one.tma_load(V0, [b, kv, 0, row_n], VFULL.index(stage), V0S.index(stage))
        else:
            one.tma_load(V0, [b, kv, row_n, 0], VFULL.index(stage), V0S.index(stage))
        if E1 > 0:
            one.tma_load(V1, [b, kv, row_n, E0], VFULL.index(stage), V1S.index(stage))


@gluon.jit
def barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """mbarriers, each complete after COUNT arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(NUMBER):
        mbarrier.init(bars.index(n), count=COUNT)
    return bars


@gluon.jit
def ring(NUMBER: gl.constexpr, DESC, HEIGHT: gl.constexpr, D: gl.constexpr):
    """A ring of buffers for boxes of HEIGHT rows of the descriptor's tensor."""
    return gl.allocate_shared_memory(DESC.dtype, [NUMBER, 1, 1, HEIGHT, D], DESC.layout)


@gluon.jit(do_not_specialize=["heads", "group", "seqlen_q", "seqlen_k"])
def forward(
    Q0, Q1, K0, K1, V0, V1, O0, O1, LSE, TABLE, heads, group, seqlen_q, seqlen_k, unit,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    D0: gl.constexpr, D1: gl.constexpr, E0: gl.constexpr, E1: gl.constexpr,
    STAGES: gl.constexpr, Q_STAGES: gl.constexpr, O_SHARED: gl.constexpr,
    CAUSAL: gl.constexpr, PINGPONG: gl.constexpr,
    MAX3: gl.constexpr, EMULATED: gl.constexpr, GUARDED: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """O and LSE (Algorithm 2). Grid: as many programs as the table has columns.

    Q0, K0, V0, O0: descriptors (batch, head, row, column) of boxes of the first D0 (E0 of V and O) columns;
    Q1 to O1: of the D1 (E1) after those, or None. O_SHARED: both pieces of O leave through one buffer.
    """
    NUM_WG: gl.constexpr = BLOCK_M // ROWS
    Q0S = ring(Q_STAGES * NUM_WG, Q0, ROWS, D0)
    K0S = ring(STAGES, K0, BLOCK_N, D0)
    V0S = ring(STAGES, V0, BLOCK_N, E0)
    O0S = ring(NUM_WG, O0, ROWS, E0)
    Q1S = Q0S
    K1S = K0S
    V1S = V0S
    O1S = O0S
    if D1 > 0:
        Q1S = ring(Q_STAGES * NUM_WG, Q1, ROWS, D1)
        K1S = ring(STAGES, K1, BLOCK_N, D1)
    if E1 > 0:
        V1S = ring(STAGES, V1, BLOCK_N, E1)
        if not O_SHARED:
            O1S = ring(NUM_WG, O1, ROWS, E1)
    QFULL = barriers(Q_STAGES * NUM_WG, 1)
    QEMPTY = barriers(Q_STAGES * NUM_WG, 1)
    KFULL = barriers(STAGES, 1)
    KEMPTY = barriers(STAGES, NUM_WG)
    VFULL = barriers(STAGES, 1)
    VEMPTY = barriers(STAGES, NUM_WG)
    fence_async_shared()
    if NUM_WG == 2:
        gl.warp_specialize([
            (consume, (Q0S, Q1S, K0S, K1S, V0S, V1S, O0S, O1S, QFULL, QEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
                      O0, O1, LSE, TABLE, heads, seqlen_q, seqlen_k, unit, 0, NUM_WG, BLOCK_N,
                      D0, D1, E0, E1, STAGES, Q_STAGES, O_SHARED, CAUSAL, PINGPONG,
                      MAX3, EMULATED, GUARDED)),
            (consume, (Q0S, Q1S, K0S, K1S, V0S, V1S, O0S, O1S, QFULL, QEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
                      O0, O1, LSE, TABLE, heads, seqlen_q, seqlen_k, unit, 1, NUM_WG, BLOCK_N,
                      D0, D1, E0, E1, STAGES, Q_STAGES, O_SHARED, CAUSAL, PINGPONG,
                      MAX3, EMULATED, GUARDED)),
            (produce, (Q0, Q1, K0, K1, V0, V1, Q0S, Q1S, K0S, K1S, V0S, V1S,
                      QFULL, QEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
                      TABLE, heads, group, seqlen_q, seqlen_k, NUM_WG, BLOCK_N,
                      D0, D1, E0, E1, STAGES, Q_STAGES, CAUSAL)),
        ], [4, 1], [REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (Q0S, Q1S, K0S, K1S, V0S, V1S, O0S, O1S, QFULL, QEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
                      O0, O1, LSE, TABLE, heads, seqlen_q, seqlen_k, unit, 0, NUM_WG, BLOCK_N,
                      D0, D1, E0, E1, STAGES, Q_STAGES, O_SHARED, CAUSAL, PINGPONG,
                      MAX3, EMULATED, GUARDED)),
            (consume, (Q0S, Q1S, K0S, K1S, V0S, V1S, O0S, O1S, QFULL, QEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
                      O0, O1, LSE, TABLE, heads, seqlen_q, seqlen_k, unit, 1, NUM_WG, BLOCK_N,
                      D0, D1, E0, E1, STAGES, Q_STAGES, O_SHARED, CAUSAL, PINGPONG,
                      MAX3, EMULATED, GUARDED)),
            (consume, (Q0S, Q1S, K0S, K1S, V0S, V1S, O0S, O1S, QFULL, QEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
                      O0, O1, LSE, TABLE, heads, seqlen_q, seqlen_k, unit, 2, NUM_WG, BLOCK_N,
                      D0, D1, E0, E1, STAGES, Q_STAGES, O_SHARED, CAUSAL, PINGPONG,
                      MAX3, EMULATED, GUARDED)),
            (produce, (Q0, Q1, K0, K1, V0, V1, Q0S, Q1S, K0S, K1S, V0S, V1S,
                      QFULL, QEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
                      TABLE, heads, group, seqlen_q, seqlen_k, NUM_WG, BLOCK_N,
                      D0, D1, E0, E1, STAGES, Q_STAGES, CAUSAL)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
