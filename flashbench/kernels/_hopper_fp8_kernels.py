"""FlashAttention-3's forward in 8-bit floats, in Gluon for sm_90. Launched by _flash_v3_fp8.py.

Source: Shah et al. 2024, arXiv:2407.08608, section 3.3. Roles, ring of stages, schedule and overlap are those
of _hopper_kernels.py, whose producer this is too. What fp8 changes:

- Layouts. An fp8 product reads its operands along the sum's index, so V lies turned, keys side by side. Of
  32 columns of scores a thread has 16a + 8b + 2t + c (t: lane % 4), and as a first operand it gives columns
  16a + 4t + 2b + c: V's keys lie in that order (``_fp8.interleave``), and P stays where it is. It goes from
  one tile to the next as words of four, which Triton would otherwise take apart into bytes.
- Two levels of accumulation, as Hopper's fp8 products keep some 14 bits of a sum: the product of one tile is
  on its own, and is added to O in fp32 by the multiply-add that applies the scale of V's tile.
- Scales: of a tile of queries, and of each tile of K and V. The base of a row is kept in scaled scores.
- P is rounded to fp8 times 2**SHIFT, so a row's base may lag its maximum by LAZY only.
"""

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
from flashbench.kernels import _hopper_exp2 as fast
from flashbench.kernels import _hopper_kernels as half
from flashbench.kernels import _hopper_tiles as one

ROWS = one.ROWS
SHIFT = gl.constexpr(8.0)
"""``_fp8.SHIFT``: P is at most 2**SHIFT where the base is the row's maximum."""
LAZY = gl.constexpr(0.8)
"""By how much a score may outgrow its row's base: 2**(SHIFT + LAZY) is below e4m3's 448."""
SMALLEST = gl.constexpr(2.0**-120)
"""A product of scales that underflows must not become 0, as a hidden score times 0 is NaN."""


@gluon.jit
def probabilities(s, top, factor):
    """(P · 2**SHIFT, the factor for what was summed before, the new base) of one tile of unscaled scores."""
    highest = gl.max(s, 1) * factor
    new_top = gl.where(highest - top > LAZY, highest, top)
    alpha = gl.where(new_top == top, 1.0, gl.exp2(top - new_top))
    base = gl.where(new_top == float("-inf"), 0.0, new_top) - SHIFT
    return gl.exp2(s * factor - base[:, None]), alpha, new_top


@gluon.jit
def words_of(s, top, factor, BLOCK_N: gl.constexpr, E5M2: gl.constexpr, EMULATED: gl.constexpr):
    """(``packed``'s words, row sums per thread, alpha, the new base) of one tile of unscaled scores."""
    highest = fast.row_max(s, BLOCK_N) * factor
    new_top = gl.where(highest - top <= LAZY, top, highest)  # a NaN goes into the base
    alpha = gl.where(new_top == top, 1.0, gl.exp2(top - new_top))
    base = SHIFT - gl.where(new_top == float("-inf"), 0.0, new_top)
    if EMULATED > 0:
        words, sums = fast.eight_words(s, base, factor, BLOCK_N, EMULATED, E5M2)
    else:
        p = gl.exp2(s * factor + base[:, None])
        sums = one.partial_sums(p, BLOCK_N)
        words = packed(p, E5M2, BLOCK_N)
    return words, sums, alpha, new_top


@gluon.jit
def packed(p, E5M2: gl.constexpr, BLOCK_N: gl.constexpr):
    """P (ROWS, BLOCK_N) in fp8 as words (ROWS, BLOCK_N // 4) of four keys, in the order of V's."""
    p = gl.permute(gl.reshape(p, [ROWS, BLOCK_N // 32, 2, 2, 4, 2]), (0, 1, 2, 4, 3, 5))
    even, odd = gl.split(gl.reshape(p, [ROWS, BLOCK_N // 4, 2, 2]))
    p0, p2 = gl.split(even)
    p1, p3 = gl.split(odd)
    return asm.four(p0, p1, p2, p3, E5M2)


@gluon.jit
def values(p, V, E5M2: gl.constexpr, BLOCK_N: gl.constexpr, E: gl.constexpr, O: gl.constexpr):
    """Issue P V of one tile, on its own."""
    p = gl.join(p, p)
    p = gl.reshape(gl.join(p, p), [ROWS, BLOCK_N])
    p = gl.convert_layout(p, gl.DotOperandLayout(0, parent=O, k_width=4), assert_trivial=True)
    v = V.reshape([E, BLOCK_N]).permute((1, 0))
    zero = gl.zeros([ROWS, E], gl.float32, O)
    return warpgroup_mma(asm.taken_apart(p, E5M2), v, zero, use_acc=False, is_async=True)


@gluon.jit
def scale_places(entry, tiles, heads, group, key_tiles):
    """Where the scale of an entry's tile of queries is, and the first of its head's tiles of keys."""
    tile, b, h = one.unpacked(entry)
    head = b * heads + h
    return head * tiles + tile, head // group * key_tiles


@gluon.jit
def consume(
    QS, KS, VS, OS, QFULL, QEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
    O, Q_SCALE, K_SCALE, V_SCALE, LSE, TABLE, tiles, heads, group, seqlen_q, seqlen_k, unit,
    WG: gl.constexpr, NUM_WG: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, E: gl.constexpr,
    STAGES: gl.constexpr, Q_STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    MAX3: gl.constexpr, EMULATED: gl.constexpr,
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
    n = blocks - 1  # K/V tile of the tile of queries: from the right, so that those to be masked come first
    own_scale, scales = scale_places(entry, tiles, heads, group, key_tiles)
    q_scale = gl.load(Q_SCALE + own_scale) * unit
    factor = gl.maximum(q_scale * gl.load(K_SCALE + scales + n), SMALLEST)
    v_scale = gl.load(V_SCALE + scales + n)
    mbarrier.wait(QFULL.index(WG), 0)
    mbarrier.wait(KFULL.index(0), 0)
    s = one.scores(QS, QS, WG, KS, KS, 0, BLOCK_N, D, 0, S)
    s = warpgroup_mma_wait(0, [s])
    mbarrier.arrive(KEMPTY.index(0))
    mbarrier.arrive(QEMPTY.index(WG), pred=n == 0)
    s = one.masked(s, n, clear, start_m, seqlen_q, seqlen_k, WG, BLOCK_N, CAUSAL, ROW)
    top = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    if MAX3:
        p, total, alpha, top = words_of(s, top, factor, BLOCK_N, E5M2, EMULATED)
    else:
        p, alpha, top = probabilities(s, top, factor)
        total = one.partial_sums(p, BLOCK_N)
        p = packed(p, E5M2, BLOCK_N)
    SUMS: gl.constexpr = total.type.layout
    acc = gl.zeros([ROWS, E], gl.float32, LO)
    mbarrier.wait(VFULL.index(0), 0)
    before = 0  # stage of the tile whose P V is to be issued
    tile = 0  # tile of queries of this program
    for j in range(1, total_blocks):
        n -= 1
        new = n < 0
        old_entry = entry
        old_scale = v_scale
        weight = top
        if new:  # the scores that are issued next are the first of another tile of queries
            weight = one.finish(total, top - SHIFT, LSE, entry, heads, seqlen_q, 1.0, WG, BLOCK_M, ROW,
                        EMULATED)  # fmt: skip
            total = gl.zeros([ROWS, 4], gl.float32, SUMS)
            top = gl.full([ROWS], float("-inf"), gl.float32, ROW)
            entry = next_entry
            start_m, blocks, clear, _ = one.place(
                one.tile_of(entry), seqlen_q, seqlen_k, 0, BLOCK_M, BLOCK_N, CAUSAL)  # fmt: skip
            n = blocks - 1
            own_scale, scales = scale_places(entry, tiles, heads, group, key_tiles)
            q_scale = gl.load(Q_SCALE + own_scale) * unit
            tile += 1
            next_entry = gl.load(TABLE + (tile + 2) * programs)
            mbarrier.wait(QFULL.index((tile % Q_STAGES) * NUM_WG + WG), (tile // Q_STAGES) & 1)
        factor = gl.maximum(q_scale * gl.load(K_SCALE + scales + n), SMALLEST)
        v_scale = gl.load(V_SCALE + scales + n)
        slot = (tile % Q_STAGES) * NUM_WG + WG
        stage, phase = j % STAGES, (j // STAGES) & 1
        mbarrier.wait(KFULL.index(stage), phase)
        s = one.scores(QS, QS, slot, KS, KS, stage, BLOCK_N, D, 0, S)
        product = values(p, VS.index(before), E5M2, BLOCK_N, E, LO)
        s = warpgroup_mma_wait(1, [s])
        mbarrier.arrive(KEMPTY.index(stage))
        if n == 0:
            mbarrier.arrive(QEMPTY.index(slot))
        s = one.masked(s, n, clear, start_m, seqlen_q, seqlen_k, WG, BLOCK_N, CAUSAL, ROW)
        if MAX3:
            next_p, sums, alpha, top = words_of(s, top, factor, BLOCK_N, E5M2, EMULATED)
            sums = gl.convert_layout(sums, SUMS)
        else:
            next_p, alpha, top = probabilities(s, top, factor)
            sums = one.partial_sums(next_p, BLOCK_N)
            next_p = packed(next_p, E5M2, BLOCK_N)
        grown = gl.convert_layout(alpha, gl.SliceLayout(1, SUMS))[:, None]
        total = total * grown + sums
        # ptxas would leave the exponentials, whose registers P V gives back, until after the wait for it
        next_p = asm.known(next_p, BLOCK_N)
        mbarrier.wait(VFULL.index(stage), phase)
        product, p = warpgroup_mma_wait(0, [product, p])
        mbarrier.arrive(VEMPTY.index(before))
        acc += product * old_scale
        if new:
            one.store_rows(acc, acc, weight, OS, OS, O, O, old_entry,
                       WG, BLOCK_M, E, 0, LO, LO, False)  # fmt: skip
            acc = gl.zeros([ROWS, E], gl.float32, LO)
        acc = asm.rescale(acc, gl.convert_layout(alpha, gl.SliceLayout(1, LO)), E)
        p = next_p
        before = stage
    product = values(p, VS.index(before), E5M2, BLOCK_N, E, LO)
    weight = one.finish(total, top - SHIFT, LSE, entry, heads, seqlen_q, 1.0, WG, BLOCK_M, ROW,
                        EMULATED)  # fmt: skip
    product, p = warpgroup_mma_wait(0, [product, p])
    acc += product * v_scale
    one.store_rows(acc, acc, weight, OS, OS, O, O, entry,
               WG, BLOCK_M, E, 0, LO, LO, False)  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "heads", "group", "seqlen_q", "seqlen_k"])
def forward(
    Q, K, V, O, Q_SCALE, K_SCALE, V_SCALE, LSE, TABLE, tiles, heads, group, seqlen_q, seqlen_k, unit,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, E: gl.constexpr,
    STAGES: gl.constexpr, Q_STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    MAX3: gl.constexpr, EMULATED: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """O and LSE. Grid: as many programs as the table has columns.

    Q, K, O: descriptors (batch, head, row, column) of boxes of D columns, O's of E; V's: (batch, head,
    column, key) of E by BLOCK_N. Q_SCALE: one per tile of queries; K_SCALE, V_SCALE: per tile of keys.
    """
    NUM_WG: gl.constexpr = BLOCK_M // ROWS
    QS = half.ring(Q_STAGES * NUM_WG, Q, ROWS, D)
    KS = half.ring(STAGES, K, BLOCK_N, D)
    VS = half.ring(STAGES, V, E, BLOCK_N)
    OS = half.ring(NUM_WG, O, ROWS, E)
    QFULL = half.barriers(Q_STAGES * NUM_WG, 1)
    QEMPTY = half.barriers(Q_STAGES * NUM_WG, 1)
    KFULL = half.barriers(STAGES, 1)
    KEMPTY = half.barriers(STAGES, NUM_WG)
    VFULL = half.barriers(STAGES, 1)
    VEMPTY = half.barriers(STAGES, NUM_WG)
    fence_async_shared()
    gl.warp_specialize([
        (consume, (QS, KS, VS, OS, QFULL, QEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
                  O, Q_SCALE, K_SCALE, V_SCALE, LSE, TABLE, tiles, heads, group, seqlen_q, seqlen_k, unit,
                  0, NUM_WG, BLOCK_N, D, E, STAGES, Q_STAGES, CAUSAL, MAX3, EMULATED)),
        (consume, (QS, KS, VS, OS, QFULL, QEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
                  O, Q_SCALE, K_SCALE, V_SCALE, LSE, TABLE, tiles, heads, group, seqlen_q, seqlen_k, unit,
                  1, NUM_WG, BLOCK_N, D, E, STAGES, Q_STAGES, CAUSAL, MAX3, EMULATED)),
        (half.produce, (Q, Q, K, K, V, V, QS, QS, KS, KS, VS, VS,
                       QFULL, QEMPTY, KFULL, KEMPTY, VFULL, VEMPTY,
                       TABLE, heads, group, seqlen_q, seqlen_k, NUM_WG, BLOCK_N,
                       D, 0, E, 0, STAGES, Q_STAGES, CAUSAL)),
    ], [4, 1], [REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
