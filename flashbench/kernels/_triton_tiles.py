"""Tiles for Triton kernels whose head dim is any number: load, store, multiply.

A head dim is cut into pieces, each a power of two wide (tensor-core tiles are), so a tile is a tuple
of blocks side by side. Rows and columns outside the tensor read as 0 and are never written. Offsets
between tiles are 64-bit, those inside a tile 32-bit unless WIDE.
"""

# Triton reads the bodies below, not Python: no annotations but tl.constexpr, tensors by their capitals.
# ruff: noqa: ANN001, ANN202, RUF005
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from flashbench.kernels import _flash_configs

split = triton.constexpr_function(_flash_configs.split)


@triton.constexpr_function
def count(dim, widest):
    """How many pieces a head dim is cut into."""
    return len(split(dim, widest))


@triton.constexpr_function
def start(dim, widest, i):
    """The first column of piece i."""
    return split(dim, widest)[i][0]


@triton.constexpr_function
def width(dim, widest, i):
    """The number of columns of piece i."""
    return split(dim, widest)[i][1]


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
def _load_piece(
    base, stride, left, ROWS: tl.constexpr, FROM: tl.constexpr, COLS: tl.constexpr, DIM: tl.constexpr,
    MASKED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    rows = _rows(ROWS, WIDE)[:, None]
    cols = FROM + tl.arange(0, COLS)[None, :]
    at = base + rows * stride + cols
    if FROM + COLS > DIM:
        mask = (rows < left) & (cols < DIM) if MASKED else cols < DIM
        piece = tl.load(at, mask=mask, other=0.0)
    elif MASKED:
        piece = tl.load(at, mask=rows < left, other=0.0)
    else:
        piece = tl.load(at)
    return piece


@triton.jit
def load(
    base, stride, left, ROWS: tl.constexpr, DIM: tl.constexpr, WIDEST: tl.constexpr,
    MASKED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A tile of ROWS rows; with MASKED only the first ``left`` are read."""
    tile = ()
    for i in tl.static_range(count(DIM, WIDEST)):
        tile = tile + (
            _load_piece(
                base, stride, left, ROWS, start(DIM, WIDEST, i), width(DIM, WIDEST, i), DIM, MASKED, WIDE
            ),
        )
    return tile


@triton.jit
def store(base, left, tile, ROWS: tl.constexpr, DIM: tl.constexpr, WIDEST: tl.constexpr):
    """Write the first ``left`` rows of a tile to a contiguous matrix, in its dtype."""
    rows = tl.arange(0, ROWS)[:, None]
    for i in tl.static_range(len(tile)):
        cols = start(DIM, WIDEST, i) + tl.arange(0, width(DIM, WIDEST, i))[None, :]
        piece = tile[i].to(base.dtype.element_ty)
        tl.store(base + rows * DIM + cols, piece, mask=(rows < left) & (cols < DIM))


@triton.jit
def zeros(ROWS: tl.constexpr, DIM: tl.constexpr, WIDEST: tl.constexpr):
    """A tile of fp32 zeros."""
    tile = ()
    for i in tl.static_range(count(DIM, WIDEST)):
        tile = tile + (tl.zeros([ROWS, width(DIM, WIDEST, i)], tl.float32),)
    return tile


@triton.jit
def times(tile, factor):
    """A tile times a factor for each row, (rows, 1), or one for all."""
    scaled = ()
    for i in tl.static_range(len(tile)):
        scaled = scaled + (tile[i] * factor,)
    return scaled


@triton.jit
def less(a, b):
    """a minus b."""
    difference = ()
    for i in tl.static_range(len(a)):
        difference = difference + (a[i] - b[i],)
    return difference


@triton.jit
def row_sums(a, b):
    """The sum over all columns of a times b, for each row, in fp32."""
    total = tl.sum(a[0].to(tl.float32) * b[0].to(tl.float32), 1)
    for i in tl.static_range(1, len(a)):
        total += tl.sum(a[i].to(tl.float32) * b[i].to(tl.float32), 1)
    return total


@triton.jit
def dot_t(a, b, PRECISION: tl.constexpr):
    """a times b transposed; in IEEE fp32 each piece is summed apart, which halves the rounding error."""
    product = tl.dot(a[0], tl.trans(b[0]), input_precision=PRECISION)
    for i in tl.static_range(1, len(a)):
        if PRECISION == "ieee" and a[0].dtype == tl.float32:
            # a limit on imprecise sums means nothing in fp32, but keeps Triton from chaining the products
            product += tl.dot(a[i], tl.trans(b[i]), input_precision=PRECISION, max_num_imprecise_acc=1)
        else:
            product = tl.dot(a[i], tl.trans(b[i]), product, input_precision=PRECISION)
    return product


@triton.jit
def add_dot(acc, p, b, PRECISION: tl.constexpr):
    """acc + p times b; p is rounded to b's dtype."""
    p = p.to(b[0].dtype)
    total = ()
    for i in tl.static_range(len(b)):
        total = total + (tl.dot(p, b[i], acc[i], input_precision=PRECISION),)
    return total
