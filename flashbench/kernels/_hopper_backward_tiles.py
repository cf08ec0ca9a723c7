"""FlashAttention-3's backward in Gluon for sm_90: what the kernel does to one tile."""

# Triton reads the bodies below, not Python: no annotations but gl.constexpr, tensors by their capitals.
# ruff: noqa: ANN001, ANN202, SIM108
# mypy: ignore-errors

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from flashbench.kernels import _hopper_asm as asm

ROWS = gl.constexpr(64)
"""Keys of a warpgroup, and sides of its block of dQ: what one wgmma covers."""
KEYS = gl.constexpr(128)
"""Of a tile: of two warpgroups."""
LINES = gl.constexpr(128)
LINE = gl.constexpr(32)
"""A block of dQ's accumulator: lines of 32 fp32, which is what TMA swizzles."""
NEVER = gl.constexpr(2**30)
"""A query that no sequence has."""


@builtin
def _tma_add(desc, coord, src, _semantic=None):
    """Add a box of shared memory to memory by TMA."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, desc.handle, coord, src.handle)


@builtin
def retiled(memory, shape, layout, dtype=None, _semantic=None):
    """The same shared memory as tiles of another shape and layout, of another dtype where one is given."""
    shape = [_unwrap_if_constexpr(n) for n in shape]
    dtype = _unwrap_if_constexpr(dtype) or memory.dtype
    return _semantic.memdesc_reinterpret(memory, dtype, shape, _unwrap_if_constexpr(layout))


# Triton's name since 3.8
tma_add = getattr(tma, "async_atomic_add", _tma_add)


@gluon.jit
def barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """mbarriers, each complete after COUNT arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(NUMBER):
        mbarrier.init(bars.index(n), count=COUNT)
    return bars


@gluon.jit
def place(entry, tiles, seqlen_q, seqlen_k, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr):
    """(K/V head of all batches, first key, first tile of queries that sees a key, tiles of a query head)."""
    start_n = (entry % tiles) * KEYS
    tiles_q = (seqlen_q + BLOCK_M - 1) // BLOCK_M
    first = 0
    if CAUSAL:
        first = gl.maximum(start_n + seqlen_q - seqlen_k, 0) // BLOCK_M
    return entry // tiles, start_n, first, tiles_q


@gluon.jit
def start(entry, tiles, first, tiles_q, ROTATE: gl.constexpr):
    """The tile of queries to begin with, before which the walk from first to tiles_q ends.

    ROTATE: programs of one head start apart, so that they do not add to the same part of dQ at one time.
    """
    begin = first
    if ROTATE:
        begin += (entry % tiles) * (tiles_q - first) // tiles
    return begin


@gluon.jit
def first_query(start_n, seqlen_q, seqlen_k, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr):
    """The first query that sees each of 64 keys; none sees keys after the last."""
    keys = start_n + gl.arange(0, ROWS, LAYOUT)
    if CAUSAL:
        first = keys + (seqlen_q - seqlen_k)
    else:
        first = keys * 0
    return gl.where(keys < seqlen_k, first, NEVER)


@gluon.jit
def clear_from(start_n, seqlen_q, seqlen_k, WG: gl.constexpr, CAUSAL: gl.constexpr):
    """The first query that sees all of a warpgroup's keys: tiles from it on need no mask."""
    end = start_n + (WG + 1) * ROWS
    clear = 0
    if CAUSAL:
        clear = end - 1 + (seqlen_q - seqlen_k)
    if end > seqlen_k:
        clear = NEVER
    return clear


@gluon.jit
def issue_transposed(A, BS, place, D: gl.constexpr, S: gl.constexpr):
    """Issue A B^T of 64 keys and 64 queries: S^T = K Q^T or dP^T = V dO^T."""
    zero = gl.zeros([ROWS, ROWS], gl.float32, S)
    b = BS.index(place).reshape([ROWS, D]).permute((1, 0))
    return warpgroup_mma(A, b, zero, use_acc=False, is_async=True)


@gluon.jit
def probabilities(s, LSES, place, first, masked, unit, S: gl.constexpr):
    """P^T of 64 keys and 64 queries. first: the first query of the 64 that each key is seen by."""
    lse = LSES.index(place).load(gl.SliceLayout(0, S))
    if masked:
        s = asm.mask_before(s, first, ROWS)
    return gl.exp2(s * unit - lse[None, :])


@gluon.jit
def gradient(p, dp, DELTAS, place, HALF: gl.constexpr, S: gl.constexpr):
    """dS^T = P^T (dP^T - delta), rounded for the products that take it."""
    delta = DELTAS.index(place).load(gl.SliceLayout(0, S))
    return (p * (dp - delta[None, :])).to(HALF)


@gluon.jit
def share(ds, ds1, DSS, EMPTY, DSFULL, j, WG: gl.constexpr, SUBS: gl.constexpr, STAGES: gl.constexpr,
          DS_STAGES: gl.constexpr, LAG: gl.constexpr):  # fmt: skip
    """Hand dS^T of tile j to both warpgroups, once both have finished the product that read its place.

    That product was issued with tile ``read``. To have got here, the other must have written what this one
    last waited for, of tile j - 1 - LAG: with enough places that says it.
    """
    if DS_STAGES < 2 + 2 * LAG:
        read = j + LAG - DS_STAGES
        done = gl.maximum(read, 0)
        mbarrier.wait(EMPTY.index(done % STAGES), (done // STAGES) & 1, pred=read >= 0)
    place = (WG * DS_STAGES + j % DS_STAGES) * SUBS
    DSS.index(place).store(ds)
    if SUBS == 2:
        DSS.index(place + 1).store(ds1)
    fence_async_shared()
    mbarrier.arrive(DSFULL.index(j % DS_STAGES))


@gluon.jit
def issue_dq(DSS, K0, K1, slot, dq, SUB: gl.constexpr, SUBS: gl.constexpr, DS_STAGES: gl.constexpr):
    """Issue a 64 x 64 block of dQ = dS K, over the keys of both warpgroups."""
    place = slot * SUBS + SUB
    dq = warpgroup_mma(DSS.index(place).permute((1, 0)), K0, dq, use_acc=False, is_async=True)
    return warpgroup_mma(DSS.index(place + DS_STAGES * SUBS).permute((1, 0)), K1, dq, is_async=True)


@gluon.jit
def add_dq(dq, DQ, line, STAGING):
    """Add a block of dQ to its accumulator, whose lines start at ``line``.

    The accumulator is the kernels' own, so its order is the registers': a thread's 16 bytes lie together and
    eight threads' fill a line, so that stores to shared memory meet no bank twice. Row w·16 + h·8 + r·2 + r0
    and column a·16 + a0·8 + t·2 + b are at line (w, h, a, r), number (r0, t, a0, b); ``dq_block`` undoes it.
    """
    x = gl.reshape(dq, [4, 2, 4, 2, 4, 2, 4, 2])  # w h r r0, a a0 t b
    x = gl.reshape(gl.permute(x, (0, 1, 4, 2, 3, 6, 5, 7)), [LINES, LINE])
    tma.store_wait(0)
    STAGING.store(x)
    fence_async_shared()
    tma_add(DQ, [line, 0], STAGING)
