"""FlashAttention-3's forward in 8-bit floats whose bases are guarded by row sums, in Gluon for sm_90.

Launched by _flash_v3_fp8.py for head dims over 64. Schedule and layouts are those of _hopper_fp8_kernels.py.
What is its own:

- No row maxima but of tiles that need them (_hopper_guard.py).
- V is without its mean over the keys, which O gets back as it is written (``_fp8.centred``). Of products of
  one sign more would be cut off than of those of both.
- P V is summed where the product is computed, and every PROMOTE tiles what was summed so, in some 14 bits, is
  added to a sum in fp32 that shared memory holds. O is in units of V's scale of the tile: scales are powers
  of two (``_fp8.quantise_values``), and O is multiplied where they change, as where a base does.
- P V of a tile is issued beside the exponentials of the next, and the scores after that behind it, so that
  no wait for a product is without work before it. A tile of K comes with the V of the tile before, and Q
  with its first tile of K.
- Both warpgroups run one copy of their code: the loop of one fits the instruction cache of a quarter of an
  SM, two copies do not, and a warp waited for instructions in a fifth of its time. To Triton they are eight
  warps, all of which it makes meet before they look at an mbarrier. They look at none: they meet a warp each
  at a named barrier (``lead``), which has waited for what is to be read, and tell by named barriers what was
  read. So either may be ahead of the other.
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
from flashbench.kernels import _hopper_fp8_kernels as whole
from flashbench.kernels import _hopper_guard as guard
from flashbench.kernels import _hopper_kernels as half
from flashbench.kernels import _hopper_tiles as one
from flashbench.kernels._hopper_fp8_aside import BLOCK_M, set_aside

WARPS = gl.constexpr(8)
READ = gl.constexpr(32 * 8 + 32)
"""Threads of the named barriers by which consumers tell the warp that loads what they have read."""
MET = gl.constexpr(128 + 32)
"""Threads of those at which a warpgroup meets the warp that waits for it."""
LED = gl.constexpr(6)
"""The first of those, after one for each stage of K and V, at most four, and of Q, at most two."""


@gluon.jit
def scores(QS, slot, KS, stage, BLOCK_N: gl.constexpr, D: gl.constexpr, S: gl.constexpr):
    """Issue S = Q K^T of one tile."""
    zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, S)
    q = QS.index(slot).reshape([BLOCK_M, D])
    k = KS.index(stage).reshape([BLOCK_N, D]).permute((1, 0))
    return warpgroup_mma(q, k, zero, use_acc=False, is_async=True)


@gluon.jit
def values(p, V, acc, use_acc, E5M2: gl.constexpr, BLOCK_N: gl.constexpr, E: gl.constexpr, O: gl.constexpr):
    """Issue acc += P V of one tile."""
    p = gl.join(p, p)
    p = gl.reshape(gl.join(p, p), [BLOCK_M, BLOCK_N])
    p = gl.convert_layout(p, gl.DotOperandLayout(0, parent=O, k_width=4), assert_trivial=True)
    v = V.reshape([E, BLOCK_N]).permute((1, 0))
    return warpgroup_mma(asm.taken_apart(p, E5M2), v, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def softmax(s, total, top, factor, v_scale, v_unit, first, BLOCK_N: gl.constexpr, EMULATED: gl.constexpr,
            E5M2: gl.constexpr):  # fmt: skip
    """(P's words, row sums, bases, what O so far is to be multiplied by) with one more tile.

    v_scale, v_unit: log2 of the scale of its V, and of the tile's before. first: it is the first of its tile
    of queries.
    """
    PARTS: gl.constexpr = guard.parts_layout(BLOCK_M)
    if first:
        total = gl.zeros([BLOCK_M, 4], gl.float32, PARTS)
        top = gl.full([BLOCK_M, 4], float("-inf"), gl.float32, PARTS)
    p, sums, top, alpha = guard.words(s, total, top, factor, first, BLOCK_N, EMULATED, E5M2)
    top = gl.convert_layout(top, PARTS)
    alpha = gl.convert_layout(alpha, PARTS)
    total = total * alpha + gl.convert_layout(sums, PARTS)
    turned = gl.where((v_scale == v_unit) | first, 1.0, gl.exp2(v_unit - v_scale))
    return p, total, top, alpha * turned


@gluon.jit
def consume(
    QS, KS, VS, OS,
    O, Q_SCALE, K_SCALE, V_SCALE, V_MEAN, LSE, TABLE, tiles, heads, group, seqlen_q, seqlen_k, unit,
    BLOCK_N: gl.constexpr, D: gl.constexpr, E: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, EMULATED: gl.constexpr, PROMOTE: gl.constexpr,
):  # fmt: skip
    """Two warpgroups: all of the program's tiles of queries, over all K/V tiles of each."""
    gl.static_assert(STAGES > 1, "K of a tile comes while V of the one before is being read")
    gl.static_assert(STAGES + Q_STAGES <= LED, "a named barrier for each")
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_N, 32])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, E, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    PARTS: gl.constexpr = guard.parts_layout(BLOCK_M)
    WORDS: gl.constexpr = guard.words_layout(BLOCK_M, BLOCK_N)
    E5M2: gl.constexpr = KS.dtype == gl.float8e5
    programs = gl.num_programs(0)
    key_tiles = (seqlen_k + BLOCK_N - 1) // BLOCK_N
    TABLE += gl.program_id(0)
    total_blocks = gl.load(TABLE).to(gl.int32)
    entry = gl.load(TABLE + programs)
    next_entry = gl.load(TABLE + 2 * programs)  # of the next tile of queries, long before it is needed
    start_m, blocks, clear, _ = one.place(
        one.tile_of(entry), seqlen_q, seqlen_k, 0, BLOCK_M, BLOCK_N, CAUSAL)  # fmt: skip
    n = 0  # K/V tile, from the left: a base of a masked one, of few keys, would soon be found again
    last = blocks - 1
    own_scale, scales = whole.scale_places(entry, tiles, heads, group, key_tiles)
    next_own, next_scales = whole.scale_places(next_entry, tiles, heads, group, key_tiles)
    q_scale = gl.load(Q_SCALE + own_scale) * unit
    factor = gl.maximum(q_scale * gl.load(K_SCALE + scales + n), whole.SMALLEST)
    v_scale = asm.log2(gl.load(V_SCALE + scales + n))
    led = asm.by_warpgroup(LED, WARPS)
    asm.meet(led, MET)
    s = scores(QS, 0, KS, 0, BLOCK_N, D, S)
    s = warpgroup_mma_wait(0, [s])
    if n == last:
        asm.arrive(STAGES, READ, WARPS)
    s = one.masked(s, n, clear, start_m, seqlen_q, seqlen_k, 0, BLOCK_N, CAUSAL, ROW)
    total = gl.zeros([BLOCK_M, 4], gl.float32, PARTS)
    top = gl.full([BLOCK_M, 4], float("-inf"), gl.float32, PARTS)
    acc = gl.zeros([BLOCK_M, E], gl.float32, LO)
    p = gl.zeros([BLOCK_M, BLOCK_N // 4], gl.int32, WORDS)
    # Each starts as a number of its own: Triton's loop does not carry a variable that is assigned, inside,
    # what it was another name of before
    v_unit = v_scale * 0.0
    before = entry * 0  # tile of queries whose product is to come, where the scores are of the next already
    kept_top = gl.full([BLOCK_M, 4], 0.0, gl.float32, PARTS)
    kept_unit = v_scale * 0.0
    kept = False  # part of O is set aside
    first = True  # the tile whose scores are there is the first of its tile of queries
    summed = 0  # tiles that are in the accumulator; the first product, of no tile, is dropped
    stage = 0
    slot = 0
    tile = 0  # tile of queries of this program, of the scores that are issued next
    for i in range(total_blocks - 1):
        acc = values(p, VS.index(stage), acc, summed > 0, E5M2, BLOCK_N, E, LO)
        summed = gl.where(i > 0, summed + 1, 0)
        old_total = total
        old_top = top
        old_unit = v_unit
        next_p, total, top, turned = softmax(
            s, total, top, factor, v_scale, v_unit, first, BLOCK_N, EMULATED, E5M2)  # fmt: skip
        v_unit = v_scale
        new = n == last  # the scores that are issued next are the first of another tile of queries
        slot = gl.where(new, gl.where(slot + 1 == Q_STAGES, 0, slot + 1), slot)
        old_stage = stage
        stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
        asm.meet(led, MET)
        s = scores(QS, slot, KS, stage, BLOCK_N, D, S)
        n += 1
        written = before
        if new:
            before = entry
            entry = next_entry
            start_m, blocks, clear, _ = one.place(
                one.tile_of(entry), seqlen_q, seqlen_k, 0, BLOCK_M, BLOCK_N, CAUSAL)  # fmt: skip
            n = 0
            last = blocks - 1
            own_scale = next_own
            scales = next_scales
            tile += 1
        k_scale = gl.load(K_SCALE + scales + n)
        v_scale = gl.load(V_SCALE + scales + n)
        acc, p = warpgroup_mma_wait(1, [acc, p])
        asm.arrive(old_stage, READ, WARPS)
        acc = guard.rescale(acc, turned, E)
        if (first & (i > 0)) | (summed == PROMOTE):
            at_total = total
            at_top = top
            at_unit = v_unit
            if first:
                at_total = old_total
                at_top = old_top
                at_unit = old_unit
            acc = set_aside(acc, OS, O, LSE, V_MEAN, kept, kept_top, kept_unit, first, at_total, at_top,
                            at_unit, written, heads, group, seqlen_q, E, LO, ROW)  # fmt: skip
            kept = first == False  # noqa: E712
            kept_top = top
            kept_unit = v_unit
            summed = 0
        if new:
            q_scale = gl.load(Q_SCALE + own_scale) * unit
            next_entry = gl.load(TABLE + (tile + 2) * programs)
            next_own, next_scales = whole.scale_places(next_entry, tiles, heads, group, key_tiles)
        first = new
        p = next_p
        factor = gl.maximum(q_scale * k_scale, whole.SMALLEST)
        v_scale = asm.log2(v_scale)
        s = warpgroup_mma_wait(0, [s])
        if n == last:
            asm.arrive(STAGES + slot, READ, WARPS)
        s = one.masked(s, n, clear, start_m, seqlen_q, seqlen_k, 0, BLOCK_N, CAUSAL, ROW)
    acc = values(p, VS.index(stage), acc, summed > 0, E5M2, BLOCK_N, E, LO)
    summed += 1
    old_total = total
    old_top = top
    old_unit = v_unit
    next_p, total, top, turned = softmax(
        s, total, top, factor, v_scale, v_unit, first, BLOCK_N, EMULATED, E5M2)  # fmt: skip
    v_unit = v_scale
    acc, p = warpgroup_mma_wait(0, [acc, p])
    acc = guard.rescale(acc, turned, E)
    if first & (total_blocks > 1):
        acc = set_aside(acc, OS, O, LSE, V_MEAN, kept, kept_top, kept_unit, True, old_total, old_top,
                        old_unit, before, heads, group, seqlen_q, E, LO, ROW)  # fmt: skip
    if first:
        kept = False
        summed = 0
    stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
    asm.meet(led, MET)
    acc = values(next_p, VS.index(stage), acc, summed > 0, E5M2, BLOCK_N, E, LO)
    acc, next_p = warpgroup_mma_wait(0, [acc, next_p])
    set_aside(acc, OS, O, LSE, V_MEAN, kept, kept_top, kept_unit, True, total, top, v_unit, entry, heads,
              group, seqlen_q, E, LO, ROW)  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def lead(FULL, TABLE, WG: gl.constexpr, STAGES: gl.constexpr):
    """One warp: wait for each of what its warpgroup reads, in turn, and meet it then."""
    total_blocks = gl.load(TABLE + gl.program_id(0)).to(gl.int32)
    for j in range(total_blocks + 1):
        mbarrier.wait(FULL.index(j % STAGES), (j // STAGES) & 1)
        asm.meet_alone(LED + WG, MET)


@gluon.jit
def produce(
    Q, K, V, QS, KS, VS, FULL, TABLE, heads, group, seqlen_q, seqlen_k,
    BLOCK_N: gl.constexpr, D: gl.constexpr, E: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """One warp: K of each tile that the consumers will want, with V of the one before, Q with the first."""
    programs = gl.num_programs(0)
    TABLE += gl.program_id(0)
    total_blocks = gl.load(TABLE).to(gl.int32)
    b = 0
    kv = 0
    n = -1
    last = -1
    tile = 0
    before = 0
    before_b = 0
    before_kv = 0
    for j in range(total_blocks):
        stage = j % STAGES
        full = FULL.index(stage)
        n += 1
        new = n > last
        start_m = 0
        h = 0
        if new:
            TABLE += programs
            start_m, last, b, h, kv = one.to_load(TABLE, group, seqlen_q, seqlen_k, BLOCK_M, BLOCK_N, CAUSAL)
            n = 0
        if j >= STAGES:
            asm.sync(stage, READ, 1)
        if j == 0:
            mbarrier.expect(full, BLOCK_M * D + BLOCK_N * D)
        elif new:
            mbarrier.expect(full, BLOCK_M * D + BLOCK_N * (D + E))
        else:
            mbarrier.expect(full, BLOCK_N * (D + E))
        one.tma_load(K, [b, kv, n * BLOCK_N, 0], full, KS.index(stage))
        if j > 0:
            one.tma_load(V, [before_b, before_kv, 0, before * BLOCK_N], full, VS.index(stage))
        before = n
        before_b = b
        before_kv = kv
        if new:
            slot = tile % Q_STAGES
            if tile >= Q_STAGES:
                asm.sync(STAGES + slot, READ, 1)
            one.tma_load(Q, [b, h, start_m, 0], full, QS.index(slot))
            tile += 1
    stage = total_blocks % STAGES
    if total_blocks >= STAGES:
        asm.sync(stage, READ, 1)
    mbarrier.expect(FULL.index(stage), BLOCK_N * E)
    one.tma_load(V, [before_b, before_kv, 0, before * BLOCK_N], FULL.index(stage), VS.index(stage))
    # What nobody waited for: the last tile of K, and V of the one before, are not told
    for j in range(gl.maximum(total_blocks - STAGES + 1, 0), total_blocks - 1):
        asm.sync(j % STAGES, READ, 1)
    for t in range(gl.maximum(tile - Q_STAGES, 0), tile):
        asm.sync(STAGES + t % Q_STAGES, READ, 1)


@gluon.jit(do_not_specialize=["tiles", "heads", "group", "seqlen_q", "seqlen_k"])
def forward(
    Q, K, V, O, Q_SCALE, K_SCALE, V_SCALE, V_MEAN, LSE, TABLE, tiles, heads, group, seqlen_q, seqlen_k, unit,
    BLOCK_N: gl.constexpr, D: gl.constexpr, E: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, EMULATED: gl.constexpr, PROMOTE: gl.constexpr, O_BOXES: gl.constexpr,
    OTHER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """O and LSE. Grid, descriptors and scales: as _hopper_fp8_kernels.forward.

    O_BOXES: how many of O's boxes are as large as one in fp32. OTHER_REGISTERS: of threads that compute
    nothing; the eight warps that do have the others.
    """
    QS = half.ring(Q_STAGES, Q, BLOCK_M, D)
    KS = half.ring(STAGES, K, BLOCK_N, D)
    VS = half.ring(STAGES, V, E, BLOCK_N)
    OS = half.ring(O_BOXES, O, BLOCK_M, E)
    FULL = half.barriers(STAGES, 1)
    fence_async_shared()
    gl.warp_specialize([
        (consume, (QS, KS, VS, OS, O, Q_SCALE, K_SCALE, V_SCALE, V_MEAN, LSE, TABLE,
                  tiles, heads, group, seqlen_q, seqlen_k, unit,
                  BLOCK_N, D, E, STAGES, Q_STAGES, CAUSAL, EMULATED, PROMOTE)),
        (produce, (Q, K, V, QS, KS, VS, FULL, TABLE, heads, group, seqlen_q, seqlen_k,
                  BLOCK_N, D, E, STAGES, Q_STAGES, CAUSAL)),
        (lead, (FULL, TABLE, 0, STAGES)),
        (lead, (FULL, TABLE, 1, STAGES)),
    ], [1, 1, 1], [OTHER_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS])  # fmt: skip
