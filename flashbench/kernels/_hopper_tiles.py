"""FlashAttention-3 in Gluon for sm_90: what the forward kernel does to one tile."""

# Triton reads the bodies below, not Python: no annotations but gl.constexpr, tensors by their capitals.
# ruff: noqa: ANN001, ANN202, E741, SIM108
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

ROWS = gl.constexpr(64)
"""Rows of queries of a warpgroup: what one wgmma covers."""
LAZY = gl.constexpr(8.0)
"""By how much, in powers of two, a row's scores may outgrow its base before O is rescaled."""
LN2 = gl.constexpr(0.6931471805599453)

# Triton's names since 3.8, and before
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@gluon.jit
def tile_of(entry):
    """Number, in its head, of the tile of queries of an entry of the table."""
    return (entry & 0xFFFFFF).to(gl.int32)


@gluon.jit
def unpacked(entry):
    """(tile of queries, batch, head) of an entry of the table (_hopper_schedule.packed)."""
    return tile_of(entry), (entry >> 40).to(gl.int32), ((entry >> 24) & 0xFFFF).to(gl.int32)


@gluon.jit
def place(tile, seqlen_q, seqlen_k, ROWS_BEFORE_END: gl.constexpr, BLOCK_M: gl.constexpr,
          BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):  # fmt: skip
    """(first row, K/V tiles, those that need no mask, K/V tiles that its first rows need) of a tile.

    ROWS_BEFORE_END: how many rows of the tile come after those first ones.
    """
    start_m = tile * BLOCK_M
    if CAUSAL:
        diagonal = start_m + seqlen_k - seqlen_q
        clear = gl.maximum(diagonal + 1, 0) // BLOCK_N
        end = gl.minimum(gl.maximum(diagonal + BLOCK_M, 1), seqlen_k)
        own_end = gl.minimum(gl.maximum(diagonal + BLOCK_M - ROWS_BEFORE_END, 1), seqlen_k)
    else:
        clear = seqlen_k // BLOCK_N
        end = seqlen_k
        own_end = seqlen_k
    blocks = (end + BLOCK_N - 1) // BLOCK_N
    return start_m, blocks, clear, (own_end + BLOCK_N - 1) // BLOCK_N


@gluon.jit
def to_load(TABLE, group, seqlen_q, seqlen_k, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
            CAUSAL: gl.constexpr):  # fmt: skip
    """(first row, last K/V tile, batch, head, head of K/V) of the tile of queries of an entry at TABLE."""
    entry = gl.load(TABLE)
    start_m, blocks, _, _ = place(tile_of(entry), seqlen_q, seqlen_k, 0, BLOCK_M, BLOCK_N, CAUSAL)
    _, b, h = unpacked(entry)
    return start_m, blocks - 1, b, h, h // group


@gluon.jit
def last_key(start_m, seqlen_q, seqlen_k, WG: gl.constexpr, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr,
             HEIGHT: gl.constexpr = ROWS):  # fmt: skip
    """The last key that each of HEIGHT rows sees, the warpgroup's first."""
    rows = start_m + WG * ROWS + gl.arange(0, HEIGHT, LAYOUT)
    if CAUSAL:
        last = rows + (seqlen_k - seqlen_q)  # no row of seqlen_q sees past seqlen_k
    else:
        last = rows * 0 + (seqlen_k - 1)
    return last


@gluon.jit
def masked(s, n, clear, start_m, seqlen_q, seqlen_k, WG: gl.constexpr, BLOCK_N: gl.constexpr,
           CAUSAL: gl.constexpr, ROW: gl.constexpr):  # fmt: skip
    """s of the n-th K/V tile with -inf where a row does not see a key."""
    if n >= clear:
        last = last_key(start_m, seqlen_q, seqlen_k, WG, CAUSAL, ROW, s.shape[0])
        s = asm.mask(s, last - n * BLOCK_N, BLOCK_N)
    return s


@gluon.jit
def pass_over(j, count, KFULL, KEMPTY, VFULL, VEMPTY, STAGES: gl.constexpr,
              TURNS: gl.constexpr, WG: gl.constexpr, NEXT: gl.constexpr):  # fmt: skip
    """The number after ``count`` K/V tiles from j that this warpgroup's rows do not see, but others' do."""
    for _ in range(count):
        stage, phase = j % STAGES, (j // STAGES) & 1
        # not before it is full: an arrival would count for the stage's tile before
        mbarrier.wait(KFULL.index(stage), phase)
        mbarrier.arrive(KEMPTY.index(stage))
        asm.turn_wait(WG, TURNS)
        asm.turn_pass(NEXT, TURNS)
        mbarrier.wait(VFULL.index(stage), phase)
        mbarrier.arrive(VEMPTY.index(stage))
        j += 1
    return j


@gluon.jit
def scores(Q0S, Q1S, slot, K0S, K1S, stage, BLOCK_N: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr,
           S: gl.constexpr):  # fmt: skip
    """Issue S = Q K^T of one tile, in two pieces of the head dim where it has two."""
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
    q = Q0S.index(slot).reshape([ROWS, D0])
    k = K0S.index(stage).reshape([BLOCK_N, D0]).permute((1, 0))
    s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    if D1 > 0:
        q = Q1S.index(slot).reshape([ROWS, D1])
        k = K1S.index(stage).reshape([BLOCK_N, D1]).permute((1, 0))
        s = warpgroup_mma(q, k, s, is_async=True)
    return s


@gluon.jit
def values(p, V, acc, use_acc, BLOCK_N: gl.constexpr, D: gl.constexpr, O: gl.constexpr):
    """Issue acc += P V of one tile, for one piece of the head dim."""
    p = gl.convert_layout(p, gl.DotOperandLayout(0, parent=O, k_width=2))
    return warpgroup_mma(p, V.reshape([BLOCK_N, D]), acc, use_acc=use_acc, is_async=True)


@gluon.jit
def issue(Q0S, Q1S, slot, K0S, K1S, stage, V0S, V1S, before, p, acc0, acc1, use_acc, BLOCK_N: gl.constexpr,
          D0: gl.constexpr, D1: gl.constexpr, E0: gl.constexpr, E1: gl.constexpr, S: gl.constexpr,
          LO0: gl.constexpr, LO1: gl.constexpr):  # fmt: skip
    """(S, O in pieces), in flight: the scores of a tile, then P V of the one before."""
    s = scores(Q0S, Q1S, slot, K0S, K1S, stage, BLOCK_N, D0, D1, S)
    acc0 = values(p, V0S.index(before), acc0, use_acc, BLOCK_N, E0, LO0)
    if E1 > 0:
        acc1 = values(p, V1S.index(before), acc1, use_acc, BLOCK_N, E1, LO1)
    return s, acc0, acc1


@gluon.jit
def scored(s, acc0, acc1, p, E1: gl.constexpr, ALL: gl.constexpr):
    """(S, which is there; O in pieces and P, in flight still, or with ALL there too)."""
    if ALL and E1 > 0:
        s, acc0, acc1, p = warpgroup_mma_wait(0, [s, acc0, acc1, p])
    elif ALL:
        s, acc0, p = warpgroup_mma_wait(0, [s, acc0, p])
    elif E1 > 0:
        s = warpgroup_mma_wait(2, [s])
    else:
        s = warpgroup_mma_wait(1, [s])
    return s, acc0, acc1, p


@gluon.jit
def landed(acc0, acc1, p, E1: gl.constexpr):
    """O in pieces once P V is done, and P, whose registers are free."""
    if E1 > 0:
        acc0, acc1, p = warpgroup_mma_wait(0, [acc0, acc1, p])
    else:
        acc0, p = warpgroup_mma_wait(0, [acc0, p])
    return acc0, acc1, p


@gluon.jit
def new_base(s, top, unit):
    """(the new base of each row, the factor for what was summed before), given the base so far."""
    highest = gl.max(s, 1)
    new_top = gl.where((highest - top) * unit > LAZY, highest, top)
    # nothing was summed before a row's first key, so no rescale is needed for it
    same = (new_top == top) | (top == float("-inf"))
    return new_top, gl.where(same, 1.0, gl.exp2((top - new_top) * unit))


@gluon.jit
def softmax3(s, top, unit, BLOCK_N: gl.constexpr, EMULATED: gl.constexpr):
    """(P, more of it, its row sums per thread, the factor for what was summed before, the new base).

    As ``softmax``, with maxima of three scores at once, and EMULATED of eight exponentials without MUFU. P:
    fp32, or in two parts (``_hopper_exp2.half_parts``), times 2**SHIFT, where any is emulated.
    """
    SHIFT: gl.constexpr = fast.SHIFT if EMULATED > 0 else 0.0
    lazy: gl.constexpr = fast.LAZY if EMULATED > 0 else LAZY
    highest = fast.row_max(s, BLOCK_N)
    grown = (highest - top) * unit
    new_top = gl.where(grown <= lazy, top, highest)  # a NaN goes into the base
    same = (new_top == top) | (top == float("-inf"))
    alpha = gl.where(same, 1.0, gl.exp2((top - new_top) * unit))
    base = gl.where(new_top == float("-inf"), SHIFT, SHIFT - new_top * unit)
    if EMULATED > 0:
        p, rest, sums = fast.half_parts(s, base, unit, BLOCK_N, EMULATED)
    else:
        p = gl.exp2(s * unit + base[:, None])
        rest = p
        sums = partial_sums(p, BLOCK_N)
    return p, rest, sums, alpha, new_top


@gluon.jit
def operand(p, rest, BLOCK_N: gl.constexpr, EMULATED: gl.constexpr, HALF: gl.constexpr, S: gl.constexpr):
    """``softmax3``'s P in 16 bits."""
    if EMULATED > 0:
        p = fast.joined(p, rest, BLOCK_N, EMULATED, S)
    else:
        p = p.to(HALF)
    return p


@gluon.jit
def softmax(s, top, unit):
    """(P, the factor for what was summed before, the new base) of one tile of scores (Algorithm 1).

    top: the base of each row so far. unit: softmax_scale / ln 2, so that exponentials are powers of two.
    """
    top, alpha = new_base(s, top, unit)
    # a row that has seen no key yet: exp2(-inf - 0) = 0, not exp2(-inf + inf)
    base = gl.where(top == float("-inf"), 0.0, top * unit)
    return gl.exp2(s * unit - base[:, None]), alpha, top


@gluon.jit
def log_base(top, unit, EMULATED: gl.constexpr):
    """log2 of what row sums are to be multiplied by."""
    if EMULATED > 0:
        base = top * unit - fast.SHIFT
    else:
        base = top * unit
    return base


@gluon.jit
def partial_sums(p, BLOCK_N: gl.constexpr):
    """Row sums of P per thread: the columns of the product repeat every 8, so no thread needs another."""
    return gl.sum(gl.reshape(gl.sum(gl.reshape(p, [ROWS, BLOCK_N // 8, 8]), 1), [ROWS, 4, 2]), 2)


@gluon.jit
def finish(total, top, LSE, entry, heads, seqlen_q, unit, WG: gl.constexpr, BLOCK_M: gl.constexpr,
           LAYOUT: gl.constexpr, EMULATED: gl.constexpr):  # fmt: skip
    """What O is to be multiplied by (0 for a row without keys), once LSE, natural, is written."""
    total = gl.convert_layout(gl.sum(total, 1), LAYOUT)
    seen = total != 0  # a NaN stays
    if EMULATED > 0:  # a base of +inf is of a score that these exponentials count as nothing: NaN
        seen = seen | (top == float("inf"))
    lse = gl.where(seen, (top * unit + asm.log2(total)) * LN2, float("-inf"))
    tile, b, h = unpacked(entry)
    row = tile * BLOCK_M + WG * ROWS
    rows = row + gl.arange(0, total.shape[0], LAYOUT)
    gl.store(LSE + (b * heads + h).to(gl.int64) * seqlen_q + rows, lse, mask=rows < seqlen_q)
    return gl.where(seen, asm.inverse(total), 0.0)


@gluon.jit
def store_piece(acc, factor, STAGE, DESC, b, h, row, col, D: gl.constexpr, O: gl.constexpr,
                WIDE: gl.constexpr):  # fmt: skip
    factor = gl.convert_layout(factor, gl.SliceLayout(1, O))
    if WIDE:  # with all of O at once in one statement, that of two pieces would spill
        factor, _ = gl.broadcast(factor[:, None], acc)
        o = gl.where(factor != 0, acc * factor, 0.0)
    else:
        o = asm.normalise(acc, factor, D)
    send(o, STAGE, DESC, b, h, row, col, D)


@gluon.jit
def send(o, STAGE, DESC, b, h, row, col, D: gl.constexpr):
    """Write rows of O by TMA, in its dtype."""
    STAGE.reshape([o.shape[0], D]).store(o.to(STAGE.dtype))
    fence_async_shared()
    tma_store(DESC, [b, h, row, col], STAGE)


@gluon.jit
def store_rows(acc0, acc1, factor, O0S, O1S, O0, O1, entry, WG: gl.constexpr,
               BLOCK_M: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, LO0: gl.constexpr,
               LO1: gl.constexpr, SHARED: gl.constexpr):  # fmt: skip
    """Write O of one tile by TMA. SHARED: both pieces through one buffer."""
    tile, b, h = unpacked(entry)
    row = tile * BLOCK_M + WG * ROWS
    tma.store_wait(0)
    store_piece(acc0, factor, O0S.index(WG), O0, b, h, row, 0, D0, LO0, D1 > 0)
    if D1 > 0:
        if SHARED:
            tma.store_wait(0)
        store_piece(acc1, factor, O1S.index(WG), O1, b, h, row, D0, D1, LO1, True)
