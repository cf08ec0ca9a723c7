"""Exponentials of a tile of scores in 16 bits without a row maximum, as PTX: row sums say whether a base held.

As _hopper_guard.py, whose words this takes. A row's base is the maximum of an earlier tile, P 2**SHIFT there:
what is larger has as many digits in 16 bits, until a sum of a thread's P of a row passes LIMIT. Then, and where
a row has no base yet, rows of the warp that outgrew theirs by more than NEAR get the tile's maximum for base,
and the exponentials are computed once more.

The statement is one, so that its order is the machine code's: multiply-adds, conversions and sums of some
numbers beside the powers of two of others, which take eight cycles each.
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

_SHIFT = 8.0
SHIFT = gl.constexpr(_SHIFT)
"""P is 2**SHIFT where a score is its row's base."""
NEAR = 1.5
"""By how much a row may have outgrown its base and keep it where a warp looks at maxima: 32 times
2**(SHIFT + NEAR) is below the limit."""
LIMIT = 2.0**15
"""What a thread's sum of a row of a tile may be: half of what fp16 holds."""


@constexpr_function
def _tile(pairs, half):
    """Lines: words w<pair> and sums sum<row> of the scores of some pairs, by base<row> and factor."""
    body = []
    for j in pairs:
        r = j % 2
        p, at = ("p0", "p1"), (r, r + 2)
        body += ["{", ".reg .f32 p0, p1;"]
        body += fast._exponentials(p, (f"s{2 * j}", f"s{2 * j + 1}"), "factor", f"base{r}")
        body += [f"cvt.rn.{half}x2.f32 w{j}, p1, p0;"]
        body += [f"add.f32 sum{i}, sum{i}, {x};" if j > pairs[1] else f"mov.f32 sum{i}, {x};"
                 for i, x in zip(at, p, strict=True)]  # fmt: skip
        body += ["}"]
    return [*body, *(f"add.f32 sum{r}, sum{r}, sum{r + 2};" for r in (0, 1))]


@constexpr_function
def _find(pairs):
    """Lines: the rows' new bases top<row>, alpha<row> for what was summed by the old ones."""
    body = ["{", ".reg .f32 m<4>, o<4>, grown;", ".reg .pred keep;"]
    own = [i for j in pairs for i in (2 * j, 2 * j + 1)]
    for i in own:
        r = i % 4 // 2 + i % 2 * 2
        body += [f"max.NaN.f32 m{r}, m{r}, s{i};" if i >= own[4] else f"mov.f32 m{r}, s{i};"]
    body += [f"max.NaN.f32 m{r}, m{r}, m{r + 2};" for r in (0, 1)]
    body += guard._of_row("m", "max.NaN")
    for r in (0, 1):
        body += [
            f"mul.f32 m{r}, m{r}, factor;",
            f"sub.f32 grown, m{r}, top{r};",
            f"setp.le.f32 keep, grown, {guard._float(NEAR)};",
            f"selp.f32 m{r}, top{r}, m{r}, keep;",
            f"sub.f32 grown, top{r}, m{r};",
            f"setp.eq.or.f32 keep, top{r}, 0fFF800000, keep;",
            f"ex2.approx.ftz.f32 alpha{r}, grown;",
            f"selp.f32 alpha{r}, 0f3F800000, alpha{r}, keep;",
            f"mov.f32 top{r}, m{r};",
        ]
    return [*body, "}"]


@constexpr_function
def _rebased(part, pairs, half):
    """Lines: bases of a part's scores, and what there is of this tile by those before."""
    body = _find(pairs)
    if part:
        body += ["{", ".reg .f32 x, y;", ".reg .b16 low, high;"]
        body += [f"mul.f32 {x}{r}, {x}{r}, alpha{r};" for x in ("all", "turned") for r in (0, 1)]
        for j in range(pairs[0]):
            body += [f"mov.b32 {{low, high}}, w{j};", f"cvt.f32.{half} x, low;", f"cvt.f32.{half} y, high;"]
            body += [f"mul.f32 {x}, {x}, alpha{j % 2};" for x in "xy"]
            body += [f"cvt.rn.{half}x2.f32 w{j}, y, x;"]
        body += ["}"]
    return body


@constexpr_function
def _guarded(part, pairs, half, hot):
    """Lines: a tile's part of so many pairs, by bases that hold. found: they are to be looked for at once."""
    # one way into the loop: else the compiler would have to write the tile twice
    rebased = _rebased(part, pairs, half)
    body = [] if hot else [f"AGAIN{part}:", f"@!found bra TILE{part};", *rebased]
    body += [f"TILE{part}:", "{", ".reg .pred none;"]
    for r in (0, 1):
        body += [
            f"sub.f32 base{r}, {guard._float(_SHIFT)}, top{r};",
            f"setp.eq.and.f32 none, top{r}, 0fFF800000, found;",
            f"selp.f32 base{r}, 0f00000000, base{r}, none;",
        ]
    body += ["}", *_tile(pairs, half)]
    first = pairs[0]
    body += [
        f"setp.gtu.f32 over, sum0, {guard._float(LIMIT)};",
        f"setp.gtu.or.f32 over, sum1, {guard._float(LIMIT)}, over;",
        "vote.sync.any.pred over, over, 0xffffffff;",
        f"@!over bra DONE{part};",
        f"@found bra DONE{part};",
        # what reads P here keeps the compiler from converting it where it is wanted, behind the wait for P V
        f"mov.b32 all_words, w{first};",
        *(f"or.b32 all_words, all_words, w{j};" for j in pairs[1:]),
        "setp.ne.b32 found, all_words, 0x80008000;",
        "vote.sync.any.pred found, found, 0xffffffff;",
        *(rebased if hot else []),
        f"bra TILE{part};" if hot else f"bra AGAIN{part};",
        f"DONE{part}:",
    ]
    if part:
        body += [f"add.f32 all{r}, all{r}, sum{r};" for r in (0, 1)]
    else:
        body += [f"mov.f32 all{r}, sum{r};" for r in (0, 1)]
        body += [f"mov.f32 turned{r}, alpha{r};" for r in (0, 1)]
    return body


@constexpr_function
def guarded_asm(cols, half, parts, hot):
    """Operands, a thread's elements each: words and row numbers out; scores, factor, bases and ``first`` in.

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
        if part:
            body += ["setp.ne.u32 found, 0, 0;"]
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
    return "bf16" if half == gl.bfloat16 else "f16"


@gluon.jit
def softmax(s, top, total, unit, first, BLOCK_N: gl.constexpr, HALF: gl.constexpr, IN: gl.constexpr,
            HOT: gl.constexpr):  # fmt: skip
    """(P in 16 bits, the factor for what was summed before, the new base, row sums) of one more tile.

    top, total: bases, times unit, and sums so far, (rows, 4); first: 1.0 where no row has any, else 0.0. P: 2**(s * unit - top +
    SHIFT).
    """
    ASM: gl.constexpr = guarded_asm(BLOCK_N, named(HALF), IN, HOT)
    TIED: gl.constexpr = guarded_tied(BLOCK_N, HOT)
    N: gl.constexpr = BLOCK_N // 2
    ROWS: gl.constexpr = s.shape[0]
    PARTS: gl.constexpr = guard.parts_layout(ROWS)
    factor = gl.full([ROWS, BLOCK_N], unit, gl.float32, s.type.layout)
    if HOT:
        out = gl.inline_asm_elementwise(
            ASM, TIED, [s, factor, guard.over(top, s)], gl.int32, is_pure=False, pack=N)  # fmt: skip
    else:
        none = gl.full([ROWS, BLOCK_N], first, gl.float32, s.type.layout)
        operands = [s, factor, guard.over(top, s), none]
        out = gl.inline_asm_elementwise(ASM, TIED, operands, gl.int32, is_pure=False, pack=N)
    p, numbers = gl.split(gl.reshape(out, [ROWS, BLOCK_N // 8, 4, 2]))
    p = gl.reshape(p, [ROWS, BLOCK_N // 2])
    p = gl.convert_layout(gl.reshape(gl.join(p, p), [ROWS, BLOCK_N]), s.type.layout, assert_trivial=True)
    if HALF == gl.bfloat16:
        p = gl.inline_asm_elementwise(fast.TAKEN_APART, "=r,r,r", [p], gl.bfloat16, is_pure=True, pack=2)
    else:
        p = gl.inline_asm_elementwise(fast.TAKEN_APART, "=r,r,r", [p], gl.float16, is_pure=True, pack=2)
    sums, tops = guard.halves(numbers)
    sums, alphas = guard.halves(sums)
    TIMES: gl.constexpr = fast.log2_of(BLOCK_N // 32)
    alpha = gl.convert_layout(guard.alone(alphas, TIMES), PARTS)
    total = total * alpha + gl.convert_layout(guard.alone(sums, TIMES), PARTS)
    return p, alpha, gl.convert_layout(guard.alone(tops, TIMES + 1), PARTS), total


@gluon.jit
def log_base(top, ROW: gl.constexpr):
    """log2 of what row sums are to be multiplied by, a number per row."""
    return gl.convert_layout(gl.max(top, 1), ROW) - SHIFT
