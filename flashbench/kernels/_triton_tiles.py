"""Tiles for Triton kernels whose head dim is any number: load, store, multiply.

A head dim is one or two column pieces, each a power of two (tensor-core tiles are), so a tile is a
tuple of one or two blocks. Rows and columns outside the tensor read as 0 and are never written.
Offsets between tiles are 64-bit, those inside a tile 32-bit unless WIDE.
"""

# Triton reads the bodies below, not Python: no annotations but tl.constexpr, tensors by their capitals.
# ruff: noqa: ANN001, ANN202, SIM108
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from flashbench.kernels._flash_configs import split

pieces = triton.constexpr_function(split)


@triton.jit
def place(num_tiles, heads, section, LAST_FIRST: tl.constexpr):
    """The (head, tile) of this program: tile by tile through sections of heads that share the L2 cache."""
    pid = tl.program_id(0)
    first = pid // (section * num_tiles) * section
    here = tl.minimum(section, heads - first)
    rest = pid - first * num_tiles
    tile = rest // here
    if LAST_FIRST:  # with a causal mask the last tiles are the longest, and should not start last
        tile = num_tiles - 1 - tile
    return first + rest % here, tile


@triton.jit
def at(base, index, stride):
    """base advanced by index times stride, in 64 bits."""
    return base + tl.cast(index, tl.int64) * stride


@triton.jit
def head_at(base, batch, batch_stride, head, head_stride):
    """The first row of one head of a (batch, head, row, column) tensor."""
    return at(at(base, batch, batch_stride), head, head_stride)


@triton.jit
def _rows(ROWS: tl.constexpr, WIDE: tl.constexpr):
    rows = tl.arange(0, ROWS)
    if WIDE:  # one tile spans 2^31 elements or more
        rows = rows.to(tl.int64)
    return rows


@triton.jit
def _load_piece(base, stride, left, ROWS: tl.constexpr, FROM: tl.constexpr, COLS: tl.constexpr,
                DIM: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    rows = _rows(ROWS, WIDE)[:, None]
    cols = FROM + tl.arange(0, COLS)[None, :]
    at = base + rows * stride + cols
    if MASKED:
        if FROM + COLS > DIM:
            piece = tl.load(at, mask=(rows < left) & (cols < DIM), other=0.0)
        else:
            piece = tl.load(at, mask=rows < left, other=0.0)
    else:
        if FROM + COLS > DIM:
            piece = tl.load(at, mask=cols < DIM, other=0.0)
        else:
            piece = tl.load(at)
    return piece


@triton.jit
def load(
    base, stride, left, ROWS: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """A tile of ROWS rows; with MASKED only the first ``left`` are read."""
    C0: tl.constexpr = pieces(DIM)[0]
    C1: tl.constexpr = pieces(DIM)[1]
    if C1 > 0:
        tile = (
            _load_piece(base, stride, left, ROWS, 0, C0, DIM, MASKED, WIDE),
            _load_piece(base, stride, left, ROWS, C0, C1, DIM, MASKED, WIDE),
        )
    else:
        tile = (_load_piece(base, stride, left, ROWS, 0, C0, DIM, MASKED, WIDE),)
    return tile


@triton.jit
def store(base, left, tile, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Write the first ``left`` rows of a tile to a contiguous matrix, in its dtype."""
    C0: tl.constexpr = pieces(DIM)[0]
    C1: tl.constexpr = pieces(DIM)[1]
    rows = tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, C0)[None, :]
    tl.store(base + rows * DIM + cols, tile[0].to(base.dtype.element_ty), mask=(rows < left) & (cols < DIM))
    if C1 > 0:
        more = C0 + tl.arange(0, C1)[None, :]
        mask = (rows < left) & (more < DIM)
        tl.store(base + rows * DIM + more, tile[1].to(base.dtype.element_ty), mask=mask)


@triton.jit
def zeros(ROWS: tl.constexpr, DIM: tl.constexpr):
    """A tile of fp32 zeros."""
    C0: tl.constexpr = pieces(DIM)[0]
    C1: tl.constexpr = pieces(DIM)[1]
    if C1 > 0:
        tile = (tl.zeros([ROWS, C0], tl.float32), tl.zeros([ROWS, C1], tl.float32))
    else:
        tile = (tl.zeros([ROWS, C0], tl.float32),)
    return tile


@triton.jit
def times(tile, factor):
    """Each row of a tile times its factor; factor broadcasts against a piece."""
    if len(tile) > 1:
        scaled = (tile[0] * factor, tile[1] * factor)
    else:
        scaled = (tile[0] * factor,)
    return scaled


@triton.jit
def dot_t(a, b, PRECISION: tl.constexpr):
    """a times b transposed, over all column pieces."""
    product = tl.dot(a[0], tl.trans(b[0]), input_precision=PRECISION)
    if len(a) > 1:
        product = tl.dot(a[1], tl.trans(b[1]), product, input_precision=PRECISION)
    return product


@triton.jit
def add_dot(acc, p, b, PRECISION: tl.constexpr):
    """acc + p times b, piece by piece; p is rounded to b's dtype."""
    p = p.to(b[0].dtype)
    if len(b) > 1:
        total = (
            tl.dot(p, b[0], acc[0], input_precision=PRECISION),
            tl.dot(p, b[1], acc[1], input_precision=PRECISION),
        )
    else:
        total = (tl.dot(p, b[0], acc[0], input_precision=PRECISION),)
    return total
