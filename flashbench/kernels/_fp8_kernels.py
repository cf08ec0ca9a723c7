"""FlashAttention-2's forward on fp8 tensors in portable Triton. Launched by _flash_fp8.py.

Source: Shah et al. 2024, FlashAttention-3 (arXiv:2407.08608), section 3.3: fp8 products with a scale per
block, P rounded to fp8 between them. Q outside, K and V streamed, as _flash_kernels.py.

Accumulation has two levels. Hopper's tensor cores keep some 14 bits of an fp8 sum, so Q.K, at most 256
long, and one tile of P.V are summed there, where their rounding is far below that of fp8 inputs; the sum
over tiles is fp32 in registers, one multiply-add a number, which also applies the scale of V's tile.
"""

# Triton reads the bodies below, not Python: no annotations but tl.constexpr, tensors by their capitals.
# ruff: noqa: ANN001, ANN202, E741, RUF005, SIM108
# mypy: ignore-errors

from __future__ import annotations

import math

import triton
import triton.language as tl

from flashbench.kernels import _fp8
from flashbench.kernels import _scores as scores
from flashbench.kernels import _triton_tiles as tiles

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))
SHIFT = tl.constexpr(_fp8.SHIFT)
NAN = tl.constexpr(0x7F)
"""The bits of a NaN in e4m3 and e5m2."""
SMALLEST = tl.constexpr(2.0**-120)
"""A product of scales that underflows must not become 0, as a hidden score times 0 is NaN."""


@triton.jit
def _to_grid(x, DROP: tl.constexpr, LEAST: tl.constexpr):
    """fp32 x without its last DROP mantissa bits; below LEAST, the smallest normal number, in its steps."""
    bits = x.to(tl.int32, bitcast=True)
    half = (1 << (DROP - 1)) - 1 + ((bits >> DROP) & 1)
    normal = (((bits + half) >> DROP) << DROP).to(tl.float32, bitcast=True)
    magic = 1.5 * LEAST * 2.0**DROP  # in its neighbourhood fp32 has the steps that are wanted
    return tl.where(tl.abs(x) < LEAST, (x + magic) - magic, normal)


@triton.jit
def rounded(x, DTYPE: tl.constexpr, BY_HAND: tl.constexpr):
    """x in fp8, to nearest, ties to even.

    BY_HAND, x is rounded in fp32 first and the cast is exact: the cast of Triton's interpreter drops the
    carry from the mantissa into the exponent, and makes numbers of NaNs.
    """
    if BY_HAND:
        if tl.float8e5 == DTYPE:
            number = _to_grid(x, 21, 2.0**-14)
        else:
            number = _to_grid(x, 20, 2.0**-6)
        number = tl.where(x == x, number.to(DTYPE).to(tl.uint8, bitcast=True), NAN).to(DTYPE, bitcast=True)
    else:
        number = x.to(DTYPE)
    return number


@triton.jit
def _load_keys(
    VT, stride, left, BLOCK_N: tl.constexpr, DIM_V: tl.constexpr, WIDEST: tl.constexpr, WIDE: tl.constexpr
):
    """A tile of turned V, transposed back: pieces (BLOCK_N, columns) of which ``left`` keys are read."""
    keys = tl.arange(0, BLOCK_N)
    tile = ()
    for i in tl.static_range(tiles.count(DIM_V, WIDEST)):
        cols = tiles.start(DIM_V, WIDEST, i) + tl.arange(0, tiles.width(DIM_V, WIDEST, i))
        if WIDE:
            cols = cols.to(tl.int64)
        mask = (cols < DIM_V)[:, None] & (keys < left)[None, :]
        piece = tl.load(VT + cols[:, None] * stride + keys[None, :], mask=mask, other=0.0)
        tile = tile + (tl.trans(piece),)
    return tile


@triton.jit
def _add(acc, shrink, p, v, scale):
    """acc * shrink + p.v * scale, the product summed on its own."""
    total = ()
    for i in tl.static_range(len(v)):
        total = total + (acc[i] * shrink + tl.dot(p, v[i]) * scale,)
    return total


@triton.jit
def _largest(tile, exists):
    """The largest magnitude in the rows that exist."""
    largest = 0.0
    for i in tl.static_range(len(tile)):
        largest = tl.maximum(largest, tl.max(tl.max(tl.where(exists, tl.abs(tile[i]), 0.0), 1), 0))
    return largest


@triton.jit(do_not_specialize=["heads", "num_heads", "group", "seqlen_q", "seqlen_k", "num_tiles", "section"])
def forward(
    Q, K, V, Q_SCALE, K_SCALE, V_SCALE, O, O_SCALE, LSE,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_d, padded_k,
    heads, num_heads, group, seqlen_q, seqlen_k, num_tiles, section, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDEST: tl.constexpr,
    CAUSAL: tl.constexpr, WIDE: tl.constexpr, BY_HAND: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """O and LSE of one block of queries. Grid: num_tiles times heads (of all batches).

    V is turned (``_fp8.turn``), padded_k keys long. Scores are kept in powers of two. With LARGEST, O is
    fp8, the largest magnitude of a tile being LARGEST, and O_SCALE holds the scale of each tile.
    """
    head, tile = tiles.place(num_tiles, heads, section, CAUSAL)
    batch, h = head // num_heads, head % num_heads
    start_m = tile * BLOCK_M
    left = seqlen_q - start_m
    Q = tiles.at(tiles.head_at(Q, batch, q_b, h, q_h), start_m, q_n)
    K = tiles.head_at(K, batch, k_b, h // group, k_h)
    V = tiles.head_at(V, batch, v_b, h // group, v_h)
    key_scales = (head // num_heads * (num_heads // group) + h // group) * tl.cdiv(seqlen_k, BLOCK_N)
    q = tiles.load(Q, q_n, left, BLOCK_M, DIM, WIDEST, True, WIDE)
    q_scale = tl.load(Q_SCALE + head * num_tiles + tile) * (scale * LOG2E)
    acc = tiles.zeros(BLOCK_M, DIM_V, WIDEST)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    rows = tl.arange(0, BLOCK_M)
    _, _, full, end = scores.keys_of(
        start_m, seqlen_q, seqlen_k, 0, seqlen_k - seqlen_q, BLOCK_M, BLOCK_N, False, CAUSAL
    )
    for start_n in range(0, end, BLOCK_N):
        k = tiles.load(tiles.at(K, start_n, k_n), k_n, seqlen_k - start_n, BLOCK_N, DIM, WIDEST, True, WIDE)
        k_scale = tl.load(K_SCALE + key_scales + start_n // BLOCK_N)
        s = tiles.dot_t(q, k, "ieee")
        if start_n >= full:
            cols = start_n + tl.arange(0, BLOCK_N)[None, :]
            seen = scores.visible(
                start_m + rows[:, None], cols, seqlen_k, 0, seqlen_k - seqlen_q, False, CAUSAL
            )
            s = tl.where(seen, s, float("-inf"))
        # scales are positive: the largest product has the largest score
        factor = tl.maximum(q_scale * k_scale, SMALLEST, tl.PropagateNan.ALL)
        new_top = tl.maximum(top, tl.max(s, 1) * factor)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(s * factor - (base - SHIFT)[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        v = _load_keys(V + start_n, v_d, padded_k - start_n, BLOCK_N, DIM_V, WIDEST, WIDE)
        v_scale = tl.load(V_SCALE + key_scales + start_n // BLOCK_N)
        acc = _add(acc, shrink[:, None], rounded(p, v[0].dtype, BY_HAND), v, v_scale)
        top = new_top
    some = total != 0.0  # false for a row without keys: o = 0, lse = -inf; a NaN stays
    total = tl.where(some, total, 1.0)
    acc = tiles.times(acc, tl.where(some, 1.0 / total, 0.0)[:, None])
    row = tiles.at(tl.cast(start_m, tl.int64), head, seqlen_q)
    tl.store(LSE + row + rows, (top + tl.log2(total) - SHIFT) * LN2, mask=rows < left)
    if LARGEST:
        largest = _largest(acc, rows[:, None] < left)
        o_scale = tl.maximum(largest / LARGEST, 2.0**-126)
        tl.store(O_SCALE + head * num_tiles + tile, o_scale)
        acc = _quantised(acc, o_scale, O.dtype.element_ty, BY_HAND)
    tiles.store(O + row * DIM_V, DIM_V, left, acc, BLOCK_M, DIM_V, WIDEST, False)


@triton.jit
def _quantised(tile, scale, DTYPE: tl.constexpr, BY_HAND: tl.constexpr):
    """A tile over its scale, in fp8."""
    quantised = ()
    for i in tl.static_range(len(tile)):
        quantised = quantised + (rounded(tile[i] / scale, DTYPE, BY_HAND),)
    return quantised
