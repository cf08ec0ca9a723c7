"""Exponentials of a tile of scores in 16 bits without a row maximum, as PTX: sums say whether a base held.

As _hopper_guard, whose layouts these are, but in fp16 and bf16. P is 2**(s * unit - top). A row's base, top,
is SHIFT below the maximum of its first tile of keys; later tiles are computed by it, whatever is in them.
A thread's sum of its P of a row, of up to 32 numbers of a tile, is taken anyway: none of them is larger than
it, so where it is at most LIMIT, all are numbers of fp16. Where one is more, infinite or NaN, the warp looks
at maxima, once: rows that outgrew their base by more than NEAR get another, and the tile is computed again.

Why that is right, besides:

- After maxima were looked at P is at most 2**(SHIFT + NEAR), and the sums of a tile like that are below
  LIMIT. A new base is rounded up, so that however large scores are, P of none is more than 2**SHIFT by it.
- Large P have as many digits as others. Small ones keep all of fp16's down to 2**-22 of what is at the base,
  and some down to 2**-32; where P is 1 at the base it is 2**-14 and 2**-24. bf16 has fp32's range.
- Sums and O so far are multiplied by 2**(old base - new), which is 0 where scores jump by hundreds.
- A row that sees no key of a tile (s is -inf) gets the least finite number for base: P is 0 by it, and more
  than LIMIT with the row's first key. A row without keys has sums of 0, which ``finish`` knows.
- A NaN is in its P, in their sum, so in the maximum that the warp looks for, in the base, in all of the row's
  P and in the factor of what was summed before. Other rows may get a new base, but never a NaN.
- A score of +inf makes a base of +inf, by which its P is 2**(inf - inf), a NaN, as in fp64. Where only
  s * unit is beyond fp32, P is 0 by that base: ``finish`` takes a base of +inf for a NaN as well.
- unit is more than 0 (``check_scale``), so the largest score is that of the largest product, too.

The statement is one, so that its order is the machine code's: multiply-adds, sums and conversions of some
numbers beside the powers of two of others, which take eight cycles each. Left to itself, ptxas puts all of
one kind behind all of another, and conversions behind the wait for P V, which alone reads them.
"""

# Triton reads the bodies below, not Python: no annotations but gl.constexpr, tensors by their capitals.
# ruff: noqa: ANN001, ANN202
# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from flashbench.kernels import _hopper_exp2 as fast
from flashbench.kernels import _hopper_guard as guard

SHIFT = 8.0
"""P is 2**SHIFT where a score is the maximum that its row's base is of; a flat row's sums are LIMIT / 4."""
NEAR = 1.5
"""By how much a row may have outgrown its base and keep it where a warp looks at maxima: 32 times
2**(SHIFT + NEAR) is below the limit."""
LIMIT = 2.0**15
"""What a thread's sum of a row of a tile may be: half of what fp16 holds."""
LEAST = -(2.0**127) * (2 - 2.0**-23)
"""The least finite number of fp32, the base of a row that has seen no key."""


@constexpr_function
def _tile(pairs, half):
    """Lines: words w<pair> and sums sum<row> of the scores of some pairs, by top<row> and factor.

    Two sums a row, so that no chain is as long as the row.
    """
    body = [f"neg.f32 base{r}, top{r};" for r in (0, 1)]
    for j in pairs:
        r = j % 2
        p, sums = ("p0", "p1"), (f"sum{r}", f"sum{r + 2}")
        body += ["{", ".reg .f32 p0, p1;"]
        body += fast.exponentials(p, (f"s{2 * j}", f"s{2 * j + 1}"), "factor", f"base{r}")
        body += [f"cvt.rn.{half}x2.f32 w{j}, p1, p0;"]
        for total, x in zip(sums, p, strict=True):
            body += [f"add.f32 {total}, {total}, {x};" if j > pairs[1] else f"mov.f32 {total}, {x};"]
        body += ["}"]
    return [*body, *(f"add.f32 sum{r}, sum{r}, sum{r + 2};" for r in (0, 1))]


@constexpr_function
def _find(pairs):
    """Lines: the rows' new bases top<row>, alpha<row> for what was summed by the old ones."""
    body = ["{", ".reg .f32 m<4>, o<2>, grown;", ".reg .pred keep;"]
    body += guard.maxima([i for j in pairs for i in (2 * j, 2 * j + 1)])
    for r in (0, 1):
        body += [
            f"fma.rp.f32 m{r}, m{r}, factor, {guard.number(-SHIFT)};",
            f"max.NaN.f32 m{r}, m{r}, {guard.number(LEAST)};",
            *guard.rebased(r, NEAR, []),
        ]
    return [*body, "}"]


@constexpr_function
def _rescaled(before, half):
    """Lines: the parts before of this tile, whose words are so many, by the new bases."""
    body = ["{", ".reg .f32 x, y;", ".reg .b16 low, high;"]
    body += [f"mul.f32 {x}{r}, {x}{r}, alpha{r};" for x in ("all", "turned") for r in (0, 1)]
    for j in range(before):
        body += [f"mov.b32 {{low, high}}, w{j};", f"cvt.f32.{half} x, low;", f"cvt.f32.{half} y, high;"]
        body += [f"mul.f32 {x}, {x}, alpha{j % 2};" for x in "xy"]
        body += [f"cvt.rn.{half}x2.f32 w{j}, y, x;"]
    return [*body, "}"]


@constexpr_function
def _guarded(part, pairs, half, hot):
    """Lines: a tile's part of some pairs, by bases that hold. found: they are to be looked for at once.

    hot: they never are, so that there is no jump before the tile; what looks for them lies behind it, and the
    tile once more, as the compiler knows what found is. Otherwise the loop is entered at one place, else the
    compiler would have to write the tile twice there, too.
    """
    look = [*_find(pairs), *(_rescaled(pairs[0], half) if part else [])]
    body = [] if hot else [f"AGAIN{part}:", f"@!found bra TILE{part};", *look]
    body += [
        f"TILE{part}:",
        *_tile(pairs, half),
        f"setp.gtu.f32 over, sum0, {guard.number(LIMIT)};",
        f"setp.gtu.or.f32 over, sum1, {guard.number(LIMIT)}, over;",
        "vote.sync.any.pred over, over, 0xffffffff;",
        f"@!over bra DONE{part};",
        f"@found bra DONE{part};",
        # found, which is true as no P is negative, reads P: else the compiler would convert it where it is
        # wanted, behind the wait for P V
        f"mov.b32 all_words, w{pairs[0]};",
        *(f"or.b32 all_words, all_words, w{j};" for j in pairs[1:]),
        "setp.ne.b32 found, all_words, 0x80008000;",
        "vote.sync.any.pred found, found, 0xffffffff;",
        *([*look, f"bra TILE{part};"] if hot else [f"bra AGAIN{part};"]),
        f"DONE{part}:",
    ]
    for r in (0, 1):
        if part:
            body += [f"add.f32 all{r}, all{r}, sum{r};"]
        else:
            body += [f"mov.f32 all{r}, sum{r};", f"mov.f32 turned{r}, alpha{r};"]
    return body


@constexpr_function
def guarded_asm(cols, half, parts, hot):
    """Operands, a thread's elements each: words and row numbers out; scores, factor, bases and ``first`` in.

    half: f16 or bf16. parts: the tile in so many, each by bases of its own: half of the scores' registers are
    free before words of the other half are made. hot: of a tile that is not the first, without ``first``.
    Out: a word of two of P at column 0 of each pair of columns; at column 1 of the first three pairs of a row
    its sum, base and alpha. Others are not set.
    """
    n = cols // 2
    body = [
        "{",
        ".reg .pred over, found;",
        f".reg .f32 s<{n}>, factor, top<2>, base<2>, alpha<2>, sum<4>, all<2>, turned<2>;",
        f".reg .b32 w<{n // 2}>, all_words;",
        *(f"mov.b32 s{i}, ${n + i};" for i in range(n)),
        f"mov.f32 factor, ${2 * n};",
        *(f"mov.f32 top{r}, ${3 * n + 2 * r};" for r in (0, 1)),
        *(f"mov.f32 alpha{r}, 0f3F800000;" for r in (0, 1)),
        "setp.ne.u32 found, 0, 0;" if hot else f"setp.ne.f32 found, ${4 * n}, 0f00000000;",
    ]
    size = n // 2 // parts
    for part in range(parts):
        body += ["setp.ne.u32 found, 0, 0;"] if part else []
        body += _guarded(part, range(part * size, (part + 1) * size), half, hot)
    body += [f"mov.b32 ${2 * j}, w{j};" for j in range(n // 2)]
    for place, name in enumerate(("all", "top", "turned")):
        body += [f"mov.b32 ${4 * place + 2 * r + 1}, {name}{r};" for r in (0, 1)]
    return "\n".join([*body, "}"])


@constexpr_function
def guarded_tied(cols, hot):
    n = cols // 2
    return ",".join(["=&r"] * n + ["f"] * ((3 if hot else 4) * n))


@constexpr_function
def named(half):
    """PTX's name of the dtype."""
    return "bf16" if half == gl.bfloat16 else "f16"


@gluon.jit
def softmax(s, top, total, unit, first, BLOCK_N: gl.constexpr, HALF: gl.constexpr, IN: gl.constexpr,
            HOT: gl.constexpr):  # fmt: skip
    """(P in HALF, the factor for what was summed before, new bases, new row sums) of one more tile.

    top, total: bases and row sums so far, (rows, 4), each thread's own (``_hopper_guard``). unit:
    softmax_scale / ln 2. first: 1.0 where no row has a base, which is -inf then, else 0.0. IN: parts. HOT:
    first is 0.0, and a tile whose bases hold is one piece of code.
    """
    ASM: gl.constexpr = guarded_asm(BLOCK_N, named(HALF), IN, HOT)
    TIED: gl.constexpr = guarded_tied(BLOCK_N, HOT)
    N: gl.constexpr = BLOCK_N // 2
    ROWS: gl.constexpr = s.shape[0]
    PARTS: gl.constexpr = guard.parts_layout(ROWS)
    factor = gl.full([ROWS, BLOCK_N], unit, gl.float32, s.type.layout)
    if HOT:
        operands = [s, factor, guard.over(top, s)]
    else:
        none = gl.full([ROWS, BLOCK_N], first, gl.float32, s.type.layout)
        operands = [s, factor, guard.over(top, s), none]
    out = gl.inline_asm_elementwise(ASM, TIED, operands, gl.int32, is_pure=False, pack=N)
    p, numbers = gl.split(gl.reshape(out, [ROWS, BLOCK_N // 8, 4, 2]))
    p = gl.reshape(p, [ROWS, BLOCK_N // 2])
    p = gl.convert_layout(gl.reshape(gl.join(p, p), [ROWS, BLOCK_N]), s.type.layout, assert_trivial=True)
    p = fast.several(fast.TAKEN_APART, "=r,r,r", [p], [HALF], 2)[0]
    sums, tops, alphas = guard.of_rows(numbers)
    alpha = gl.convert_layout(alphas, PARTS)
    total = total * alpha + gl.convert_layout(sums, PARTS)
    return p, alpha, gl.convert_layout(tops, PARTS), total
