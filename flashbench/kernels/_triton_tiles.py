"""Tiles for Triton kernels whose head dim is any number: load, store, multiply.

A head dim is cut into pieces, each a power of two wide (tensor-core tiles are), so a tile is a tuple
of blocks side by side. Rows and columns outside the tensor read as 0 and are never written. Offsets
between tiles are 64-bit, those inside a tile 32-bit unless WIDE.
"""

# Triton reads the bodies below, not Python: no annotations but tl.constexpr, tensors by their capitals.
# ruff: noqa: ANN001, ANN202, RUF005, SIM108
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from flashbench import flash_configs

split = triton.constexpr_function(flash_configs.split)


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
    MASKED: tl.constexpr, WIDE: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    rows = _rows(ROWS, WIDE)[:, None]
    cols = FROM + tl.arange(0, COLS)[None, :]
    at = base + rows * stride + cols
    if FROM + COLS > DIM:
        mask = (rows < left) & (cols < DIM) if MASKED else cols < DIM
        piece = tl.load(at, mask=mask, other=0.0, cache_modifier=CACHE)
    elif MASKED:
        piece = tl.load(at, mask=rows < left, other=0.0, cache_modifier=CACHE)
    else:
        piece = tl.load(at, cache_modifier=CACHE)
    return piece


AS_USUAL = tl.constexpr("")
"""No cache modifier; bare, Triton 3.6 would not know it for a constant where ``load`` hands it on."""


@triton.jit
def load(
    base, stride, left, ROWS: tl.constexpr, DIM: tl.constexpr, WIDEST: tl.constexpr,
    MASKED: tl.constexpr, WIDE: tl.constexpr, CACHE: tl.constexpr = AS_USUAL,
):  # fmt: skip
    """A tile of ROWS rows; with MASKED only the first ``left`` are read. CACHE: ``.cg`` for past L1."""
    tile = ()
    for i in tl.static_range(count(DIM, WIDEST)):
        tile = tile + (
            _load_piece(
                base,
                stride,
                left,
                ROWS,
                start(DIM, WIDEST, i),
                width(DIM, WIDEST, i),
                DIM,
                MASKED,
                WIDE,
                CACHE,
            ),
        )
    return tile


@triton.jit
def store(
    base, stride, left, tile, ROWS: tl.constexpr, DIM: tl.constexpr, WIDEST: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write the first ``left`` rows of a tile, in the dtype of the tensor."""
    rows = _rows(ROWS, WIDE)[:, None]
    for i in tl.static_range(len(tile)):
        cols = start(DIM, WIDEST, i) + tl.arange(0, width(DIM, WIDEST, i))[None, :]
        piece = tile[i].to(base.dtype.element_ty)
        tl.store(base + rows * stride + cols, piece, mask=(rows < left) & (cols < DIM))


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
def _products(a, b):
    """a times b in fp32, of fp32 as rounded: none becomes half of a multiply-add of the sum over it.

    Such a one would add this lane's exact product to another's rounded one, and a row's lanes, which take it
    for one sum and write it to one place, would differ in the last bit. Of 16 bits a product is exact.
    """
    if a.dtype == tl.float32:
        product = tl.fma(a, b, tl.zeros_like(a))
    else:
        product = a.to(tl.float32) * b.to(tl.float32)
    return product


@triton.jit
def row_sums(a, b):
    """The sum over all columns of a times b, for each row, in fp32."""
    total = tl.sum(_products(a[0], b[0]), 1)
    for i in tl.static_range(1, len(a)):
        total += tl.sum(_products(a[i], b[i]), 1)
    return total


@triton.jit
def _operand(x, PRECISION: tl.constexpr):
    """x as a product reads it; in TF32 rounded to nearest, where the hardware would cut bits off."""
    if PRECISION == "tf32":
        bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)  # a NaN's bits would wrap around
    return x


@triton.jit
def _sum_of_sums(a, b, acc, PRECISION: tl.constexpr):
    """acc + a times b, each in fp32 on its own, which rounds less than one long sum.

    A limit on imprecise sums means nothing in fp32, but keeps Triton from adding on to acc.
    """
    return acc + tl.dot(a, b, input_precision=PRECISION, max_num_imprecise_acc=1)


@triton.jit
def dot_t(a, b, PRECISION: tl.constexpr):
    """a times b transposed."""
    left, right = _operand(a[0], PRECISION), _operand(b[0], PRECISION)
    product = tl.dot(left, tl.trans(right), input_precision=PRECISION)
    for i in tl.static_range(1, len(a)):
        left, right = _operand(a[i], PRECISION), _operand(b[i], PRECISION)
        if PRECISION == "ieee" and a[0].dtype == tl.float32:
            product = _sum_of_sums(left, tl.trans(right), product, PRECISION)
        else:
            product = tl.dot(left, tl.trans(right), product, input_precision=PRECISION)
    return product


@triton.jit
def add_dot(acc, p, b, PRECISION: tl.constexpr):
    """acc + p times b; p is rounded to b's dtype."""
    p = _operand(p.to(b[0].dtype), PRECISION)
    total = ()
    for i in tl.static_range(len(b)):
        right = _operand(b[i], PRECISION)
        if PRECISION == "ieee" and right.dtype == tl.float32:
            total = total + (_sum_of_sums(p, right, acc[i], PRECISION),)
        else:
            total = total + (tl.dot(p, right, acc[i], input_precision=PRECISION),)
    return total


@triton.jit
def exp(x):
    """e to the x in fp32 to one unit in the last place; the hardware's exp2 alone is off by four.

    Source: the polynomial of Cephes' expf. x is held to -87..88, where the result is a normal number.
    """
    x = tl.where(x < -87.0, -87.0, x)
    x = tl.where(x > 88.0, 88.0, x)
    n = tl.floor(x * 1.44269504088896341 + 0.5)
    r = (x - n * 0.693359375) + n * 2.12194440e-4
    y = r * 1.9875691500e-4 + 1.3981999507e-3
    y = y * r + 8.3334519073e-3
    y = y * r + 4.1665795894e-2
    y = y * r + 1.6666665459e-1
    y = y * r + 5.0000001201e-1
    y = y * (r * r) + r + 1.0
    return y * ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def tanh(x, EXACT: tl.constexpr):
    """The hyperbolic tangent in fp32, with EXACT to two units in the last place.

    Source: (1 - e) / (1 + e) with e = exp(-2 |x|); near 0, where that cancels, the polynomial of Cephes'
    tanhf.
    """
    size = tl.abs(x)
    if EXACT:
        e = exp(-2.0 * size)
        z = x * x
        y = z * -5.70498872745e-3 + 2.06390887954e-2
        y = y * z - 5.37397155531e-2
        y = y * z + 1.33314422036e-1
        y = y * z - 3.33332819422e-1
        small = y * z * x + x
    else:
        e = tl.exp2(-2.8853900817779268 * size)
    large = (1.0 - e) / (1.0 + e)
    large = tl.where(x < 0.0, -large, large)
    if EXACT:
        large = tl.where(size < 0.625, small, large)
    return large


@triton.jit
def log(x):
    """The natural logarithm of x >= 1 in fp32, one Newton step after the hardware's."""
    y = tl.log(x)
    return y + (x * exp(-y) - 1.0)
