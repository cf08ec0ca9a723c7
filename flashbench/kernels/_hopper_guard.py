"""Exponentials of a tile of scores in fp8 without a row maximum, as PTX: row sums say whether a base held.

A row's base is that of an earlier tile. P = 2**(score - base + SHIFT) cannot pass the largest fp8 number
where a thread's sum of its P of a row, 32 of a tile, does not: so no maximum is looked for. In a warp where a
sum is larger, or a row has no base yet, rows that outgrew their base by more than NEAR get another, and the
exponentials are computed once more. So they are where a sum is more than GROWN times that of all tiles
before: the largest P of a row of few keys is to be rounded as little as if its base were its maximum.

The new base is the row's maximum in the tile, less a whole number up to LIFT where few keys are near it: P of
one key far above all others is then 2**(SHIFT + LIFT), so that those, who may be thousands, do not vanish.
Row numbers (bases, sums) are tensors (rows, 4): each thread of the four that have a row has its own copy, or
part, so that nothing need pass between threads.

A NaN is told from the sums: it always fills a tile (a scale is NaN, or all of a block), so that powers of two
which the multiply-add units compute, and of which it makes 0, never are all that a thread has of a row.
"""

# Triton reads the bodies below, not Python: no annotations but gl.constexpr, tensors by their capitals.
# ruff: noqa: ANN001, ANN202
# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from flashbench.kernels import _hopper_asm as asm
from flashbench.kernels import _hopper_exp2 as fast

_SHIFT = 3.0
SHIFT = gl.constexpr(_SHIFT)
"""P is 2**SHIFT where a score is its row's base, so that 32 of them, in a flat row, are below the limit."""
NEAR = 0.8
"""By how much a row may have outgrown its base and keep it where a warp looks at maxima: 32 times
2**(SHIFT + NEAR) is below the limit."""
GROWN = 4.0
"""What a thread's sum of a row of a tile may be, relative to its sum of that row so far."""
LIFT = 4.0
"""By how much the base of a row of few keys may be below its maximum."""
ROOM = 4.1
"""The base is ROOM - log2 of how many keys a thread has near the maximum below it, if that is more than 0."""
LIMIT = {"e4m3x2": 448.0, "e5m2x2": 1024.0}
"""What a thread's sum of a row of a tile may be; of e5m2, what 8 numbers of fp16 leave exact enough."""
SLOPE = 31.0
"""As in _hopper_exp2, but (x + 15) / 31, so that a score that is too large gives infinity."""


@constexpr_function
def number(x):
    """An fp32 number, as a constant of PTX."""
    import struct

    return "0f" + struct.pack(">f", x).hex().upper()


@constexpr_function
def _pair(y, s0, s1, small, bias):
    """Lines that leave 2**x of two scores in y, two fp16 numbers."""
    return [
        f"fma.rn.ftz.sat.f32 u0, {s0}, {small}, {bias};",
        f"fma.rn.ftz.sat.f32 u1, {s1}, {small}, {bias};",
        f"fma.rn.f32 u0, u0, {number(SLOPE / 32)}, 0f43800000;",
        f"fma.rn.f32 u1, u1, {number(SLOPE / 32)}, 0f43800000;",
        "mov.b32 y0, u0;",
        "mov.b32 y1, u1;",
        "prmt.b32 y, y0, y1, 0x5410;",
        "lop3.b32 m, y, 0x03FF03FF, 0x3C003C00, 0xEA;",
        *fast.polynomial(fast.QUADRATIC),
        f"mul.rn.f16x2 {y}, q, y;",
    ]


@constexpr_function
def _place(group, half, row, column):
    """Which of a thread's elements of 64 x N scores: of 16 columns ``group``, of 8 of them ``half``."""
    return column + 2 * row + 4 * (2 * group + half)


@constexpr_function
def _tile(cols, share, fp8):
    """Lines: words w<i> and sums sum<row> of the scores s<i>, by base<row>, bias<row>, factor and small."""
    body = []
    groups = cols // 16
    for g in range(groups):
        for r in (0, 1):
            s = [f"s{_place(g, half, r, c)}" for half in (0, 1) for c in (0, 1)]
            body += ["{", ".reg .f32 p0, p1, p2, p3;", ".reg .b32 pair;", ".reg .b16 low, high;"]
            body += [fast.PAIR_REGISTERS]
            body += fast.exponentials(("p0", "p1"), s[:2], "factor", f"base{r}")
            k = groups * r + g
            if share * k // 4 != share * (k + 1) // 4:
                body += _pair("pair", *s[2:], "small", f"bias{r}")
            else:
                body += fast.exponentials(("p2", "p3"), s[2:], "factor", f"base{r}")
                body += ["cvt.rn.f16x2.f32 pair, p3, p2;"]
            body += [f"cvt.rn.satfinite.{fp8}.f32 low, p1, p0;", f"cvt.rn.satfinite.{fp8}.f16x2 high, pair;"]
            body += [f"mov.b32 w{2 * g + r}, {{low, high}};"]
            body += ["add.f32 p0, p0, p1;"]
            if g == 0:
                body += [f"mov.f32 sum{r}, p0;", f"mov.b32 pairs{r}, pair;"]
            else:
                body += [f"add.f32 sum{r}, sum{r}, p0;", f"add.rn.f16x2 pairs{r}, pairs{r}, pair;"]
            body += ["}"]
    for r in (0, 1):
        body += ["{", ".reg .b16 l, h;", ".reg .f32 x, y;", f"mov.b32 {{l, h}}, pairs{r};"]
        body += ["cvt.f32.f16 x, l;", "cvt.f32.f16 y, h;", "add.f32 x, x, y;"]
        body += [f"add.f32 sum{r}, sum{r}, x;", "}"]
    return body


@constexpr_function
def _of_row(x, larger):
    """Lines: x0 and x1 the largest of what the four threads of a row have."""
    body = []
    for step in (2, 1):
        body += [f"shfl.sync.bfly.b32 o{r}, {x}{r}, {step}, 31, 0xffffffff;" for r in (0, 1)]
        body += [f"{larger}.f32 {x}{r}, {x}{r}, o{r};" for r in (0, 1)]
    return body


@constexpr_function
def maxima(own):
    """Lines: m0 and m1 the largest of two rows of the scores s<i> that a thread has, i of ``own`` in order.

    Two of each, m<row> and m<row + 2>, so that no chain is as long as the row.
    """
    body = []
    for n, i in enumerate(own):
        r = i % 4 // 2 + i % 2 * 2
        body += [f"max.NaN.f32 m{r}, m{r}, s{i};" if n >= 4 else f"mov.f32 m{r}, s{i};"]
    body += [f"max.NaN.f32 m{r}, m{r}, m{r + 2};" for r in (0, 1)]
    return body + _of_row("m", "max.NaN")


@constexpr_function
def rebased(r, near, lowered):
    """Lines: top<r> and alpha<r> of a row whose base would be m<r>, which it has where it outgrew its own.

    near: by how much it may. lowered: lines that come between, of a base below that.
    """
    return [
        f"sub.f32 grown, m{r}, top{r};",
        f"setp.le.f32 keep, grown, {number(near)};",
        *lowered,
        f"selp.f32 m{r}, top{r}, m{r}, keep;",
        f"sub.f32 grown, top{r}, m{r};",
        f"setp.eq.or.f32 keep, top{r}, 0fFF800000, keep;",
        f"ex2.approx.ftz.f32 alpha{r}, grown;",
        f"selp.f32 alpha{r}, 0f3F800000, alpha{r}, keep;",
        f"mov.f32 top{r}, m{r};",
    ]


@constexpr_function
def _find(cols):
    """Lines: the rows' new bases top<row>, alpha<row> for what was summed by the old ones.

    How many keys are near a maximum: the largest, of a row's four threads, sum of 1 - distance / 4 or 0.
    """
    n = cols // 2
    body = ["{", ".reg .f32 m<4>, o<4>, near<4>, grown, slope, ramp<2>;", ".reg .pred keep;"]
    body += maxima(range(n))
    body += ["mul.f32 slope, factor, 0f3E800000;"]
    for r in (0, 1):
        body += [f"mul.f32 m{r}, m{r}, factor;", f"fma.rn.f32 ramp{r}, m{r}, 0fBE800000, 0f3F800000;"]
    for i in range(n):
        r, row = i % 4 // 2 + i % 2 * 2, i % 4 // 2
        to = f"o{r}" if i >= 4 else f"near{r}"
        body += [f"fma.rn.ftz.sat.f32 {to}, s{i}, slope, ramp{row};"]
        body += [f"add.f32 near{r}, near{r}, o{r};"] if i >= 4 else []
    body += [f"add.f32 near{r}, near{r}, near{r + 2};" for r in (0, 1)]
    body += _of_row("near", "max")
    for r in (0, 1):
        body += [
            f"lg2.approx.ftz.f32 near{r}, near{r};",
            f"sub.f32 near{r}, {number(ROOM)}, near{r};",
            f"cvt.rmi.f32.f32 near{r}, near{r};",
            f"max.f32 near{r}, near{r}, 0f00000000;",
            f"min.f32 near{r}, near{r}, {number(LIFT)};",
            *rebased(r, NEAR, [f"sub.f32 m{r}, m{r}, near{r};"]),
        ]
    return [*body, "}"]


@constexpr_function
def _bases():
    """Lines: base<row> and bias<row> of top<row>."""
    body = ["{", ".reg .pred none;"]
    for r in (0, 1):
        body += [
            f"sub.f32 base{r}, {number(_SHIFT)}, top{r};",
            f"setp.eq.and.f32 none, top{r}, 0fFF800000, found;",
            f"selp.f32 base{r}, 0f00000000, base{r}, none;",
            f"fma.rn.f32 bias{r}, base{r}, {number(1 / SLOPE)}, {number(15 / SLOPE)};",
        ]
    return [*body, "}"]


@constexpr_function
def guarded_asm(cols, share, e5m2):
    """Operands, a thread's elements each: words and row numbers out; scores, factor, bases and sums in.

    Out: word (group, row) at ``_place(group, 0, row, 0)``; at column 1 of halves 0, 1 of the first 16 columns
    and 0 of the second a row's sum, base and alpha. Others are not set.
    """
    n = cols // 2
    fp8 = "e5m2x2" if e5m2 else "e4m3x2"
    body = [
        "{",
        ".reg .pred over, found;",
        f".reg .f32 s<{n}>, factor, small, top<2>, base<2>, bias<2>, alpha<2>, sum<2>, most<2>;",
        f".reg .b32 w<{cols // 8}>, pairs<2>;",
        *(f"mov.b32 s{i}, ${n + i};" for i in range(n)),
        f"mov.f32 factor, ${2 * n};",
        f"mul.f32 small, factor, {number(1 / SLOPE)};",
        *(f"mov.f32 top{r}, ${3 * n + 2 * r};" for r in (0, 1)),
        *(f"mul.f32 most{r}, ${4 * n + 2 * r}, {number(GROWN)};" for r in (0, 1)),
        *(f"max.f32 most{r}, most{r}, {number(2.0 ** (_SHIFT + NEAR))};" for r in (0, 1)),
        *(f"min.f32 most{r}, most{r}, {number(LIMIT[fp8])};" for r in (0, 1)),
        *(f"mov.f32 alpha{r}, 0f3F800000;" for r in (0, 1)),
        f"setp.ne.f32 found, ${5 * n}, 0f00000000;",
        "AGAIN:",  # one way into the loop: else the compiler would have to write the tile twice
        "@!found bra TILE;",
        *_find(cols),
        "TILE:",
        *_bases(),
        *_tile(cols, share, fp8),
        "setp.gtu.f32 over, sum0, most0;",
        "setp.gtu.or.f32 over, sum1, most1, over;",
        "vote.sync.any.pred over, over, 0xffffffff;",
        "@!over bra DONE;",
        "@found bra DONE;",
        "setp.eq.u32 found, 0, 0;",
        "bra AGAIN;",
        "DONE:",
    ]
    for g in range(cols // 16):
        body += [f"mov.b32 ${_place(g, 0, r, 0)}, w{2 * g + r};" for r in (0, 1)]
    for g, half, name in ((0, 0, "sum"), (0, 1, "top"), (1, 0, "alpha")):
        body += [f"mov.b32 ${_place(g, half, r, 1)}, {name}{r};" for r in (0, 1)]
    return "\n".join([*body, "}"])


@constexpr_function
def guarded_tied(cols):
    n = cols // 2
    return ",".join(["=&r"] * n + ["f"] * (5 * n))


@constexpr_function
def _warps(rows):
    return [[16 << i, 0] for i in range((rows // 32).bit_length())]


@constexpr_function
def words_layout(rows, columns):
    """Layout of ``words``'s words, of so many rows and columns."""
    places = [[0, 4 << i] for i in range((columns // 32).bit_length())]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0], *places], lanes, _warps(rows), [], [rows, columns // 4])


@constexpr_function
def parts_layout(rows):
    """Layout of numbers of rows, (rows, 4), of which each thread has its own."""
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0]], lanes, _warps(rows), [], [rows, 4])


@gluon.jit
def over(row, like):
    """A number per row and thread, (rows, 4), as a tensor of like's shape and layout."""
    N: gl.constexpr = like.shape[1] // 8
    row = gl.reshape(row, [like.shape[0], 1, 4, 1])
    wide = gl.reshape(like, [like.shape[0], N, 4, 2])
    LAYOUT: gl.constexpr = wide.type.layout
    row = gl.convert_layout(row, LAYOUT)
    row, _unused = gl.broadcast(row, wide)
    return gl.convert_layout(gl.reshape(row, like.shape), like.type.layout, assert_trivial=True)


@gluon.jit
def halves(x):
    """(rows, N, 4) as those of even and of odd places along the second dimension."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2, 4]), (0, 1, 3, 2)))


@gluon.jit
def alone(x, TIMES: gl.constexpr):
    """(rows, 4) of (rows, 2**TIMES, 4): the first, as a number."""
    x = fast.first_halves(x, TIMES)
    return gl.reshape(x, [x.shape[0], 4]).to(gl.float32, bitcast=True)


@gluon.jit
def of_rows(x):
    """(sums, bases, factors), (rows, 4), where a thread's numbers (rows, N, 4) begin with them."""
    sums, tops = halves(x)
    sums, alphas = halves(sums)
    TIMES: gl.constexpr = fast.log2_of(x.shape[1] // 4)
    return alone(sums, TIMES), alone(tops, TIMES + 1), alone(alphas, TIMES)


@gluon.jit
def by_row(x, ROW: gl.constexpr):
    """A number per row of (rows, 4), of which the four are alike."""
    return gl.convert_layout(gl.max(x, 1), ROW)


@gluon.jit
def words(s, total, top, factor, first, BLOCK_N: gl.constexpr, SHARE: gl.constexpr, E5M2: gl.constexpr):
    """(words of four of P in fp8, row sums per thread, the new base, the factor for what was summed before).

    P: 2**(s * factor - base + SHIFT), SHARE of 8 exponentials without MUFU. total, top: sums and bases so
    far, (rows, 4); -inf where a row has no base. first: no row has.
    """
    ASM: gl.constexpr = guarded_asm(BLOCK_N, SHARE, E5M2)
    TIED: gl.constexpr = guarded_tied(BLOCK_N)
    N: gl.constexpr = BLOCK_N // 2
    ROWS: gl.constexpr = s.shape[0]
    scale = gl.full([ROWS, BLOCK_N], factor, gl.float32, s.type.layout)
    none = gl.full([ROWS, BLOCK_N], gl.where(first, 1.0, 0.0), gl.float32, s.type.layout)
    operands = [s, scale, over(top, s), over(total, s), none]
    out = gl.inline_asm_elementwise(ASM, TIED, operands, gl.int32, is_pure=False, pack=N)
    p, numbers = gl.split(gl.reshape(out, [ROWS, BLOCK_N // 8, 4, 2]))
    p, _unused = halves(p)
    WORDS: gl.constexpr = words_layout(ROWS, BLOCK_N)
    p = gl.convert_layout(gl.reshape(p, [ROWS, BLOCK_N // 4]), WORDS, assert_trivial=True)
    sums, tops, alphas = of_rows(numbers)
    return p, sums, tops, alphas


@gluon.jit
def rescale(acc, alpha, COLS: gl.constexpr):
    """acc · alpha, numbers per row (rows, 4); nothing in warps where all are 1."""
    return asm.rescale_by(acc, over(alpha, acc), COLS)
