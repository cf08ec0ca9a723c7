"""Flash-Decoding in portable Triton: the kernels. Launched by _flash_decode.py.

Source: Dao, Haziza, Massa, Sizov 2023, "Flash-Decoding for long-context inference"; the online softmax
is that of FlashAttention-2 (arXiv:2307.08691), Algorithm 1.

A decode step has few queries and many keys, so the keys are split over thread blocks. The query heads
that share a K/V head share a tile: row r is head r mod GROUP of query r div GROUP. Each split leaves its
own O (normalised) and LSE in fp32, and a second kernel merges them. With one split O is written at once.
With PDL (programmatic dependent launch, from sm_90 on) the merge is launched as soon as the last split has
started, and waits on the device until all of them have ended.

K and V are contiguous, or lie in pages: BLOCK_TABLE[sequence, j // PAGE_SIZE] is the page of key j.
Entries past the end of a sequence are never read, and so pages that they might name neither. A cache in
fp8 is widened to fp16 after the load, which is exact and the fastest that there is, and multiplied so;
its scales are folded into the softmax scale and into O.
"""

# Triton reads the bodies below, not Python: no annotations but tl.constexpr, tensors by their capitals.
# ruff: noqa: ANN001, ANN202, E741, RUF005
# mypy: ignore-errors

from __future__ import annotations

import math

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashbench.kernels import _fp8_kernels as fp8
from flashbench.kernels import _triton_tiles as tiles

LOG2E = tl.constexpr(math.log2(math.e))
FP8_MAX = tl.constexpr(448.0)
ANY_NAN = tl.constexpr(tl.PropagateNan.ALL)
RUNTIME = ["num_kv_heads", "num_heads", "seqlen_q", "num_tiles", "num_splits", "split_keys", "all_rows",
           "capacity"]  # fmt: skip
"""Arguments whose value Triton must not compile for."""


@triton.jit
def _visible_to(query, seqlen_q, keys, CAUSAL: tl.constexpr):
    """How many of a sequence's keys a query sees; causal ends at the last query and the last key."""
    if CAUSAL:
        keys = tl.minimum(tl.maximum(query + 1 + (keys - seqlen_q), 0), keys)
    return keys


@triton.jit
def _pages(BLOCK_TABLE, start, stop, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Where keys start.. are: the page of a tile that lies within one, else each row's page."""
    if PAGE_SIZE % BLOCK_N == 0:
        pages = tl.load(BLOCK_TABLE + start // PAGE_SIZE, mask=start < stop, other=0)
    else:
        keys = start + tl.arange(0, BLOCK_N)
        pages = tl.load(BLOCK_TABLE + keys // PAGE_SIZE, mask=keys < stop, other=0)
    return pages


@triton.jit
def _place(X, x_b, x_n, start, pages, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDE: tl.constexpr):
    """(pointer, offsets of rows) of the tile of keys that begins at start; PAGE_SIZE 0: contiguous."""
    rows = tl.arange(0, BLOCK_N)
    if WIDE:
        rows = rows.to(tl.int64)
    if PAGE_SIZE == 0:
        base, offsets = tiles.at(X, start, x_n), rows * x_n
    elif PAGE_SIZE % BLOCK_N == 0:
        base, offsets = tiles.at(tiles.at(X, pages, x_b), start % PAGE_SIZE, x_n), rows * x_n
    else:
        base = X
        offsets = pages.to(tl.int64) * x_b + ((start + tl.arange(0, BLOCK_N)) % PAGE_SIZE).to(tl.int64) * x_n
    return base, offsets


@triton.jit
def _load(base, offsets, there, DIM: tl.constexpr, WIDEST: tl.constexpr):
    """A tile of the rows at these offsets; rows that are not there read as 0."""
    tile = ()
    for i in tl.static_range(tiles.count(DIM, WIDEST)):
        cols = tiles.start(DIM, WIDEST, i) + tl.arange(0, tiles.width(DIM, WIDEST, i))[None, :]
        mask = there[:, None]
        if tiles.start(DIM, WIDEST, i) + tiles.width(DIM, WIDEST, i) > DIM:
            mask = mask & (cols < DIM)
        tile = tile + (tl.load(base + offsets[:, None] + cols, mask=mask, other=0.0),)
    return tile


@triton.jit
def _store(base, offsets, there, tile, DIM: tl.constexpr, WIDEST: tl.constexpr):
    """Write a tile to the rows at these offsets, in the dtype of the tensor."""
    for i in tl.static_range(len(tile)):
        cols = tiles.start(DIM, WIDEST, i) + tl.arange(0, tiles.width(DIM, WIDEST, i))[None, :]
        piece = tile[i].to(base.dtype.element_ty)
        tl.store(base + offsets[:, None] + cols, piece, mask=there[:, None] & (cols < DIM))


@triton.jit
def _as(tile, dtype: tl.constexpr):
    """A tile in another dtype."""
    cast = ()
    for i in tl.static_range(len(tile)):
        cast = cast + (tile[i].to(dtype),)
    return cast


@triton.jit
def _in_fp16(tile):
    """(a tile in fp16, factors of its rows): rows over the power of two that brings them below 2.

    What is too small for fp16 then is so beside its row.
    """
    size = tl.max(tl.abs(tile[0].to(tl.float32)), 1)
    for i in tl.static_range(1, len(tile)):
        size = tl.maximum(size, tl.max(tl.abs(tile[i].to(tl.float32)), 1))
    unit = (size.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    unit = tl.where(unit > 0.0, unit, 1.0)
    cast = ()
    for i in tl.static_range(len(tile)):
        cast = cast + ((tile[i].to(tl.float32) / unit[:, None]).to(tl.float16),)
    return cast, unit


@triton.jit(do_not_specialize=RUNTIME)
def decode(
    Q, K, V, O, LSE, O_PART, LSE_PART, BLOCK_TABLE, SEQUSED_K, K_DESCALE, V_DESCALE,
    q_b, q_h, q_n, o_b, o_h, o_n, k_b, k_h, k_n, v_b, v_h, v_n, table_b, descale_h,
    num_kv_heads, seqlen_q, num_tiles, num_splits, split_keys, all_rows, capacity, scale,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDEST: tl.constexpr, PAGE_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr, FP8: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """O and LSE of one query tile over one split of the keys. Grid: tiles, splits, K/V heads of all batches.

    all_rows: query rows of all heads and batches, which lie between two splits of O_PART and LSE_PART.
    """
    if PDL:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    tile = pid % num_tiles
    split = pid // num_tiles % num_splits
    head = pid // num_tiles // num_splits
    batch, h = head // num_kv_heads, head % num_kv_heads
    keys = tl.minimum(tl.load(SEQUSED_K + batch), capacity)
    last = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, seqlen_q - 1)
    end = _visible_to(last, seqlen_q, keys, CAUSAL)
    first = split * split_keys
    if O_PART is not None:  # noqa: SIM102 - Triton drops a branch that is known on compiling
        if first >= end:  # the merge knows, and does not read what is not written here
            return
    # longer than was announced: the last split takes the rest
    stop = tl.where(split == num_splits - 1, end, tl.minimum(first + split_keys, end))

    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    there = packed < seqlen_q * GROUP
    query, member = packed // GROUP, packed % GROUP
    Q = tiles.head_at(Q, batch, q_b, h * GROUP, q_h)
    q = _load(Q, member.to(tl.int64) * q_h + query.to(tl.int64) * q_n, there, DIM, WIDEST)
    visible = _visible_to(query, seqlen_q, keys, CAUSAL)

    K, V = tiles.at(K, h, k_h), tiles.at(V, h, v_h)
    pages = 0
    if PAGE_SIZE == 0:
        K, V = tiles.at(K, batch, k_b), tiles.at(V, batch, v_b)
    else:
        BLOCK_TABLE = tiles.at(BLOCK_TABLE, batch, table_b)
        if AHEAD:
            pages = _pages(BLOCK_TABLE, first, stop, BLOCK_N, PAGE_SIZE)
    scale = tl.full([BLOCK_M], 1.0, tl.float32) * scale
    if FP8:
        q, unit = _in_fp16(q)
        scale *= unit
    if K_DESCALE is not None:
        scale *= tl.load(K_DESCALE + h * descale_h)

    acc = tiles.zeros(BLOCK_M, DIM_V, WIDEST)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for start in range(first, stop, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        following = pages
        if PAGE_SIZE > 0:
            if AHEAD:
                following = _pages(BLOCK_TABLE, start + BLOCK_N, stop, BLOCK_N, PAGE_SIZE)
            else:
                pages = _pages(BLOCK_TABLE, start, stop, BLOCK_N, PAGE_SIZE)
        base, offsets = _place(K, k_b, k_n, start, pages, BLOCK_N, PAGE_SIZE, WIDE)
        k = _as(_load(base, offsets, cols < stop, DIM, WIDEST), q[0].dtype)
        s = tiles.dot_t(q, k, PRECISION)
        shown = (cols < stop)[None, :]
        if CAUSAL:
            shown = shown & (cols[None, :] < visible[:, None])
        s = tl.where(shown, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        # a row that has seen no key yet: exp2(-inf - 0) = 0, not exp2(-inf + inf)
        lift = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2((s - lift[:, None]) * (scale * LOG2E)[:, None])
        shrink = tl.exp2((top - lift) * (scale * LOG2E))
        total = total * shrink + tl.sum(p, 1)
        acc = tiles.times(acc, shrink[:, None])
        base, offsets = _place(V, v_b, v_n, start, pages, BLOCK_N, PAGE_SIZE, WIDE)
        v = _as(_load(base, offsets, cols < stop, DIM_V, WIDEST), q[0].dtype)
        acc = tiles.add_dot(acc, p, v, PRECISION)
        top = new_top
        pages = following

    some = total != 0.0  # false for a row without keys: o = 0, lse = -inf; a NaN stays
    total = tl.where(some, total, 1.0)
    norm = tl.where(some, 1.0 / total, 0.0)
    if V_DESCALE is not None:
        norm *= tl.load(V_DESCALE + h * descale_h)
    acc = tiles.times(acc, norm[:, None])
    lse = top * scale + (tiles.log(total) if EXACT else tl.log(total))
    row = (head.to(tl.int64) * GROUP + member) * seqlen_q + query
    if O_PART is not None:
        row += split.to(tl.int64) * all_rows
        tl.store(LSE_PART + row, lse, mask=there)
        _store(O_PART, row * DIM_V, there, acc, DIM_V, WIDEST)
    else:
        tl.store(LSE + row, lse, mask=there)
        O = tiles.head_at(O, batch, o_b, h * GROUP, o_h)
        _store(O, member.to(tl.int64) * o_h + query.to(tl.int64) * o_n, there, acc, DIM_V, WIDEST)


@triton.jit(do_not_specialize=RUNTIME)
def merge(
    O_PART, LSE_PART, O, LSE, SEQUSED_K, o_b, o_h, o_n,
    num_heads, seqlen_q, num_splits, split_keys, all_rows, capacity,
    SPLITS: tl.constexpr, COLS: tl.constexpr, DIM_V: tl.constexpr, CAUSAL: tl.constexpr, EXACT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """O and LSE of one row from those of its splits, COLS columns a program. Grid: their pieces, all rows."""
    pieces = (DIM_V + COLS - 1) // COLS
    piece, row = tl.program_id(0) % pieces, tl.program_id(0) // pieces
    query, head = row % seqlen_q, row // seqlen_q
    batch = head // num_heads
    keys = tl.minimum(tl.load(SEQUSED_K + batch), capacity)
    visible = _visible_to(query, seqlen_q, keys, CAUSAL)
    count = tl.minimum((visible + split_keys - 1) // split_keys, num_splits)
    cols = piece * COLS + tl.arange(0, COLS)
    inside = cols < DIM_V
    acc = tl.zeros([COLS], tl.float32)
    total = 0.0
    top = float("-inf")
    if PDL:
        gdc_wait()  # before the first read of what the splits write, after all that need not wait
    for first in range(0, count, SPLITS):
        part = first + tl.arange(0, SPLITS)
        at = part.to(tl.int64) * all_rows + row
        lse = tl.load(LSE_PART + at, mask=part < count, other=float("-inf"))
        mask = (part < count)[:, None] & inside[None, :]
        o = tl.load(O_PART + at[:, None] * DIM_V + cols[None, :], mask=mask, other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        lift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2((lse - lift) * LOG2E)
        shrink = tl.exp2((top - lift) * LOG2E)
        acc = acc * shrink + tl.sum(weight[:, None] * o, 0)
        total = total * shrink + tl.sum(weight, 0)
        top = new_top
    some = total != 0.0
    total = tl.where(some, total, 1.0)
    acc = acc * tl.where(some, 1.0 / total, 0.0)
    lse = top + (tiles.log(total) if EXACT else tl.log(total))
    O = tiles.at(tiles.head_at(O, batch, o_b, head % num_heads, o_h), query, o_n)
    tl.store(O + cols, acc.to(O.dtype.element_ty), mask=inside)
    tl.store(LSE + row, lse, mask=piece == 0)


@triton.jit
def _quantised(tile, DESCALE, at, DTYPE: tl.constexpr, BY_HAND: tl.constexpr):
    """A tile over its scale in e4m3, within what that holds; a NaN stays. BY_HAND: as of ``fp8.rounded``."""
    descale = 1.0
    if DESCALE is not None:
        descale = tl.load(DESCALE + at)
    scaled = ()
    for i in tl.static_range(len(tile)):
        x = tl.div_rn(tile[i].to(tl.float32), descale)  # "/" may be off by 2 ulp: a tie goes the wrong way
        x = tl.minimum(tl.maximum(x, -FP8_MAX, ANY_NAN), FP8_MAX, ANY_NAN)
        scaled = scaled + (fp8.rounded(x, DTYPE, BY_HAND),)
    return scaled


@triton.jit(do_not_specialize=RUNTIME)
def append(
    K_NEW, V_NEW, K, V, BLOCK_TABLE, SEQUSED_K, K_DESCALE, V_DESCALE,
    kn_b, kn_h, kn_n, vn_b, vn_h, vn_n, k_b, k_h, k_n, v_b, v_h, v_n, table_b, descale_h,
    num_kv_heads, seqlen_q, num_tiles, capacity,
    BLOCK_M: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, WIDEST: tl.constexpr,
    PAGE_SIZE: tl.constexpr, FP8: tl.constexpr, BY_HAND: tl.constexpr,
):  # fmt: skip
    """Write seqlen_q new rows of each sequence behind those that it has. Grid: row tiles, K/V heads.

    Rows past the capacity of the cache are dropped.
    """
    tile, head = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    batch, h = head // num_kv_heads, head % num_kv_heads
    new = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    to = tl.load(SEQUSED_K + batch) + new
    there = (new < seqlen_q) & (to < capacity)
    K_NEW = tiles.head_at(K_NEW, batch, kn_b, h, kn_h)
    V_NEW = tiles.head_at(V_NEW, batch, vn_b, h, vn_h)
    if PAGE_SIZE == 0:
        K, V = tiles.head_at(K, batch, k_b, h, k_h), tiles.head_at(V, batch, v_b, h, v_h)
        to = to.to(tl.int64)
        k_at, v_at = to * k_n, to * v_n
    else:
        K, V = tiles.at(K, h, k_h), tiles.at(V, h, v_h)
        TABLE = tiles.at(BLOCK_TABLE, batch, table_b)
        page = tl.load(TABLE + to // PAGE_SIZE, mask=there, other=0).to(tl.int64)
        within = (to % PAGE_SIZE).to(tl.int64)
        k_at, v_at = page * k_b + within * k_n, page * v_b + within * v_n
    k = _load(K_NEW, new.to(tl.int64) * kn_n, there, DIM, WIDEST)
    v = _load(V_NEW, new.to(tl.int64) * vn_n, there, DIM_V, WIDEST)
    if FP8:
        k = _quantised(k, K_DESCALE, h * descale_h, K.dtype.element_ty, BY_HAND)
        v = _quantised(v, V_DESCALE, h * descale_h, V.dtype.element_ty, BY_HAND)
    _store(K, k_at, there, k, DIM, WIDEST)
    _store(V, v_at, there, v, DIM_V, WIDEST)
