"""flash-v3's backward of head dims over 128 in Gluon for sm_90: what its two kernels do to one tile.

A tile is 64 rows by 256 columns of shared memory; products take as many of the columns as the head dim has,
in two pieces where it is no power of two (192 = 128 + 64; the second is 0 columns wide where there is none).
"""

# Triton reads the bodies below, not Python: no annotations but gl.constexpr, tensors by their capitals.
# ruff: noqa: ANN001, ANN202
# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from flashbench.kernels._hopper_backward_tiles import ROWS
from flashbench.kernels._hopper_tiles import tma_store

WIDTH = gl.constexpr(256)
"""Columns of a tile in shared memory; TMA fills those past the head dim with zeros."""
SLOTS = gl.constexpr(2)
"""Tiles of P^T on their way from one warpgroup to the other."""
LINE = gl.constexpr(4)
"""fp32 that a thread of the one hands a thread of the other at once: 16 bytes."""


@gluon.jit
def ring(NUMBER: gl.constexpr, DESC):
    """Buffers for tiles of the descriptor's tensor."""
    return gl.allocate_shared_memory(DESC.dtype, [NUMBER, 1, 1, ROWS, WIDTH], DESC.layout)


@gluon.jit
def tile(BUFFERS, place):
    """One tile of a ring, as a matrix."""
    return BUFFERS.index(place).reshape([ROWS, WIDTH])


@gluon.jit
def across(A, B, D0: gl.constexpr, D1: gl.constexpr, S: gl.constexpr):
    """Issue A B^T of two tiles: a product over the columns, 64 x 64."""
    zero = gl.zeros([ROWS, ROWS], gl.float32, S)
    a, b = A.slice(0, D0, 1), B.slice(0, D0, 1)
    s = warpgroup_mma(a, b.permute((1, 0)), zero, use_acc=False, is_async=True)
    if D1 > 0:
        a, b = A.slice(D0, D1, 1), B.slice(D0, D1, 1)
        s = warpgroup_mma(a, b.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def into(acc0, acc1, x, B, D0: gl.constexpr, D1: gl.constexpr):
    """Issue acc += x B, x of 64 x 64 in registers, over the rows of a tile; acc in two pieces."""
    acc0 = warpgroup_mma(x, B.slice(0, D0, 1), acc0, is_async=True)
    if D1 > 0:
        acc1 = warpgroup_mma(x, B.slice(D0, D1, 1), acc1, is_async=True)
    return acc0, acc1


@gluon.jit
def zeros(D0: gl.constexpr, D1: gl.constexpr):
    """An accumulator of 64 rows, in two pieces; one that nothing is added to, where there is no second."""
    L0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D0, 16])
    L1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D1 if D1 > 0 else 16, 16])
    acc0 = gl.zeros([ROWS, D0], gl.float32, L0)
    acc1 = gl.zeros([ROWS, D1 if D1 > 0 else 16], gl.float32, L1)
    return acc0, acc1


@gluon.jit
def times(acc0, acc1, factor, D0: gl.constexpr, D1: gl.constexpr):
    """acc times a factor per row."""
    L0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D0, 16])
    L1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D1 if D1 > 0 else 16, 16])
    acc0 = acc0 * gl.convert_layout(factor, gl.SliceLayout(1, L0))[:, None]
    if D1 > 0:
        acc1 = acc1 * gl.convert_layout(factor, gl.SliceLayout(1, L1))[:, None]
    return acc0, acc1


@gluon.jit
def leave(acc0, acc1, STAGE, DESC, at, D0: gl.constexpr, D1: gl.constexpr):
    """Write an accumulator through a tile of shared memory, whose place is free again when this returns."""
    STAGE.reshape([ROWS, WIDTH]).slice(0, D0, 1).store(acc0.to(STAGE.dtype))
    if D1 > 0:
        STAGE.reshape([ROWS, WIDTH]).slice(D0, D1, 1).store(acc1.to(STAGE.dtype))
    fence_async_shared()
    tma_store(DESC, at, STAGE)
    tma.store_wait(0)


@gluon.jit
def first_tile(start_n, seqlen_q, seqlen_k, CAUSAL: gl.constexpr):
    """The first tile of 64 queries that sees a key from start_n on."""
    first = 0
    if CAUSAL:
        first = gl.maximum(start_n + seqlen_q - seqlen_k, 0) // ROWS
    return first


@gluon.jit
def hand(p, PS, PFULL, PEMPTY, j):
    """Give P^T of tile j to the other warpgroup, as soon as its place is free.

    Nobody else reads it, so its order is the registers': LINE numbers of a thread lie together and a warp's
    follow one another, so that no bank is met twice. Row w·16 + h·8 + r and column a·8 + t·2 + b are at line
    (a, w, r, t), number (h, b).
    """
    slot = j % SLOTS
    x = gl.permute(gl.reshape(p, [4, 2, 8, 8, 4, 2]), (3, 0, 2, 4, 1, 5))  # w h r a t b
    mbarrier.wait(PEMPTY.index(slot), ((j // SLOTS) & 1) ^ 1)
    PS.index(slot).store(gl.reshape(x, [ROWS * ROWS // LINE, LINE]))
    mbarrier.arrive(PFULL.index(slot))


@gluon.jit
def take(PS, PFULL, PEMPTY, j, S: gl.constexpr):
    """P^T of tile j, from the other warpgroup."""
    LINES: gl.constexpr = gl.BlockedLayout([1, LINE], [32, 1], [4, 1], [1, 0])
    slot = j % SLOTS
    mbarrier.wait(PFULL.index(slot), (j // SLOTS) & 1)
    x = PS.index(slot).load(LINES)
    mbarrier.arrive(PEMPTY.index(slot))
    x = gl.permute(gl.reshape(x, [8, 4, 8, 4, 2, 2]), (1, 4, 2, 0, 3, 5))  # a w r t h b
    return gl.convert_layout(gl.reshape(x, [ROWS, ROWS]), S, assert_trivial=True)
