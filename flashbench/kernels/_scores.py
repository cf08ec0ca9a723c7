"""Which pairs a kernel sees, and what becomes of their scores: bands, softcap, ALiBi, bias, dropout.

Shared by every Triton attention kernel of this folder. Query i sees key j if i + low <= j <= i + high
(``band``); LOWER and UPPER say which of the two bounds exist. A tile's rows and columns are given as
start_m + r and start_n + c, where r and c are blocks of any orientation that broadcast: (rows, 1) and
(1, columns), or turned.
"""

# Triton reads the bodies below, not Python: no annotations but tl.constexpr, tensors by their capitals.
# ruff: noqa: ANN001, ANN202, SIM108
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from flashbench.kernels import _triton_tiles as tiles


@triton.jit
def sequence(CU, batch, length):
    """(first row, rows) of one sequence: of a packed batch as CU says, else all ``length`` of them."""
    if CU is None:
        start = 0
    else:
        start = tl.load(CU + batch)
        length = tl.load(CU + batch + 1) - start
    return start, length


@triton.jit
def band(seqlen_q, seqlen_k, before, after, TOP_LEFT: tl.constexpr):
    """(low, high, diagonal) from a window of so many keys before and after the diagonal."""
    if TOP_LEFT:
        diagonal = 0
    else:
        diagonal = seqlen_k - seqlen_q
    return diagonal - before, diagonal + after, diagonal


@triton.jit
def _held(x, limit):
    return tl.minimum(tl.maximum(x, 0), limit)


@triton.jit
def keys_of(
    start_m, seqlen_q, seqlen_k, low, high, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LOWER: tl.constexpr, UPPER: tl.constexpr,
):  # fmt: skip
    """(first, clear, full, end) for a query tile.

    Its keys are those from first, a tile's edge, to end; a key tile that starts at clear or later and
    before full is seen whole by every row.
    """
    last = tl.minimum(start_m + BLOCK_M, seqlen_q) - 1
    if UPPER:
        full = _held(start_m + high + 1, seqlen_k) // BLOCK_N * BLOCK_N
        end = _held(last + high + 1, seqlen_k)
    else:
        full = seqlen_k // BLOCK_N * BLOCK_N
        end = seqlen_k
    if LOWER:
        first = _held(start_m + low, seqlen_k) // BLOCK_N * BLOCK_N
        first = tl.where(start_m + low < seqlen_k, first, seqlen_k)
        clear = last + low
    else:
        first = 0
        clear = 0
    return first, clear, full, end


@triton.jit
def queries_of(
    start_n, seqlen_q, seqlen_k, low, high, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LOWER: tl.constexpr, UPPER: tl.constexpr,
):  # fmt: skip
    """(first, clear, full, end) for a key tile, in query tiles.

    Query tiles first to end see one of its keys; those from clear to full exist and see them all.
    """
    last = tl.minimum(start_n + BLOCK_N, seqlen_k) - 1
    end = tl.cdiv(seqlen_q, BLOCK_M)
    full = seqlen_q // BLOCK_M
    if UPPER:
        first = tl.maximum(start_n - high, 0) // BLOCK_M
        first = tl.where(start_n - high < seqlen_q, first, end)
        clear = tl.minimum(tl.cdiv(tl.maximum(last - high, 0), BLOCK_M), end)
    else:
        first = 0
        clear = 0
    if LOWER:
        end = tl.cdiv(_held(last - low + 1, seqlen_q), BLOCK_M)
        full = tl.minimum(_held(start_n - low + 1, seqlen_q) // BLOCK_M, full)
        first = tl.minimum(first, end)
        clear = tl.minimum(clear, end)
    if start_n == last:  # a row that sees this key alone is told apart in masked tiles only
        clear = end
    if full < clear:
        full = end
        clear = end
    return first, clear, full, end


@triton.jit
def visible(rows, cols, seqlen_k, low, high, LOWER: tl.constexpr, UPPER: tl.constexpr):
    """Which pairs of a tile the mask shows, of rows and columns in the sequence."""
    seen = (cols < seqlen_k) & (rows >= 0)
    if UPPER:
        seen &= cols <= rows + high
    if LOWER:
        seen &= cols >= rows + low
    return seen


@triton.jit
def alone(rows, seqlen_k, low, high, LOWER: tl.constexpr, UPPER: tl.constexpr, BLOCKS):
    """Rows that see no key but one: their p is 1 whatever the score, so that it has no gradient.

    Asked of a block mask (BLOCKS) only where a window in it leaves each row its own key or none.
    """
    if BLOCKS is not None:
        few = rows == rows
    else:
        first = tl.maximum(rows + low, 0) if LOWER else rows * 0
        end = tl.minimum(rows + high + 1, seqlen_k) if UPPER else rows * 0 + seqlen_k
        few = end - first <= 1
    return few


@triton.jit
def score(
    s, r, c, start_m, start_n, seqlen_q, seqlen_k, scale, cap, slope, diagonal, BIAS, b_m, b_n,
    CAPPED: tl.constexpr, BIAS_ROWS: tl.constexpr, BIAS_COLS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """(score in natural units, tanh of the cap) from q.k.

    cap * tanh(scale * q.k / cap), less slope times the distance to the diagonal, plus bias. BIAS points
    at the head's first row; BIAS_ROWS and BIAS_COLS: along which sides it varies. CAPPED: 2 of a cap so high
    that scores lie where the short form of tanh cancels.
    """
    ACCURATE: tl.constexpr = EXACT or CAPPED > 1
    t = s * scale
    if CAPPED:
        t = tiles.tanh(t / cap, ACCURATE)
        s = t * cap
    else:
        s = t
    if slope is not None:
        s -= slope * tl.abs((start_m + r + diagonal) - (start_n + c)).to(tl.float32)
    if BIAS is not None:
        if BIAS_ROWS and BIAS_COLS:
            at = tiles.at(tiles.at(BIAS, start_m, b_m), start_n, b_n) + r * b_m + c * b_n
            bias = tl.load(at, mask=(r < seqlen_q - start_m) & (c < seqlen_k - start_n), other=0.0)
        elif BIAS_ROWS:
            bias = tl.load(tiles.at(BIAS, start_m, b_m) + r * b_m, mask=r < seqlen_q - start_m, other=0.0)
        elif BIAS_COLS:
            bias = tl.load(tiles.at(BIAS, start_n, b_n) + c * b_n, mask=c < seqlen_k - start_n, other=0.0)
        else:
            bias = tl.load(BIAS)
        s += bias.to(tl.float32)
    return s, t


@triton.jit
def kept(rows, cols, head, seed, threshold):
    """Which pairs dropout keeps: Philox4x32-10 keyed by seed at (column, row, head), first word.

    threshold: round(dropout_p * 2**32) - 2**31, an int32; the word, less 2**31 too, is kept from it on.
    Keyed by position alone, so that every kernel and every tile shape draws the same.
    Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3.
    """
    here = rows * 0 + cols * 0
    word, _, _, _ = tl.philox(
        seed, (here + cols).to(tl.uint32), (here + rows).to(tl.uint32), (here + head).to(tl.uint32),
        here.to(tl.uint32),
    )  # fmt: skip
    return (word.to(tl.int32, bitcast=True) ^ -0x80000000) >= threshold
