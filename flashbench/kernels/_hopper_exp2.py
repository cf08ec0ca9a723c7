"""Softmax by other instructions, as PTX: powers of two on the multiply-add units, maxima of three.

Hopper's MUFU gives 16 powers of two a cycle and SM. Here some pairs of them come from the multiply-add units,
in 16 bits (FlashAttention-4's idea, arXiv:2603.05451, there in fp32): a saturating multiply-add gives
(x + 15) / 32, 0 for all that is too small; adding 256 leaves (x + 15) * 2**10 in the low 16 bits, which are
an fp16 number's bits but for its significand, linear in place of exponential. Two such halves in a word are
set right by a polynomial in two numbers at once. x is below 16. Of NaN the word is 0, so a row's maximum must
carry a NaN (``row_max`` does).

Scores are fp32. Their bits compared as integers have the order of positive numbers, and Hopper has a maximum
of three integers, none of three floats: where a thread finds only negative scores, it looks again.
"""

# Triton reads the bodies below, not Python: no annotations but gl.constexpr, tensors by their capitals.
# ruff: noqa: ANN001, ANN202
# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.language import PropagateNan
from triton.runtime.jit import constexpr_function

ROWS = gl.constexpr(64)
SHIFT = gl.constexpr(8.0)
"""P in fp16 is up to 2**(SHIFT + LAZY): what the multiply-add units flush, below 2**-14, is little."""
LAZY = gl.constexpr(4.0)
"""By how much, in powers of two, a row's scores may outgrow its base: 8 of P in fp16 are summed in fp16."""
CUBIC = (0.45141602, 0.47851562, -0.00792694, 0.07788086)
"""2**(m - 1) of m in [1, 2), lowest power first, each an fp16 number: chosen for the least error in fp16."""
QUADRATIC = (1.45410156, -0.69287109, 0.23413086)
"""2**(m - 1) / m of the same: the relative error is up to 0.5 %, a tenth of e4m3's."""


@constexpr_function
def _twice(number):
    """Bits of two fp16 numbers, as a constant of PTX."""
    import struct

    half = struct.unpack("<H", struct.pack("<e", number))[0]
    return f"0x{half << 16 | half:08x}"


@constexpr_function
def polynomial(factors):
    """q of m, two numbers at a time."""
    lines = [f"mov.b32 c{i}, {_twice(c)};" for i, c in enumerate(factors)]
    before = f"c{len(factors) - 1}"
    for i in reversed(range(len(factors) - 1)):
        lines.append(f"fma.rn.f16x2 q, m, {before}, c{i};")
        before = "q"
    return lines


@constexpr_function
def _pair(s0, s1, factor, bias, cubic):
    """Lines that leave in m its word of significands, in y all of it and in q the polynomial."""
    return [
        f"fma.rn.ftz.sat.f32 u0, {s0}, {factor}, {bias};",
        f"fma.rn.ftz.sat.f32 u1, {s1}, {factor}, {bias};",
        "add.f32 u0, u0, 0f43800000;",
        "add.f32 u1, u1, 0f43800000;",
        "mov.b32 y0, u0;",
        "mov.b32 y1, u1;",
        "prmt.b32 y, y0, y1, 0x5410;",
        "lop3.b32 m, y, 0x03FF03FF, 0x3C003C00, 0xEA;",
        *polynomial(CUBIC if cubic else QUADRATIC),
    ]


PAIR_REGISTERS = ".reg .f32 u0, u1;\n.reg .b32 y0, y1, y, m, e, q, c0, c1, c2, c3;"


@constexpr_function
def exponentials(p, s, factor, base):
    """Lines that fill fp32 registers p with powers of two of s · factor + base."""
    lines = [f"fma.rn.f32 {q}, {x}, {factor}, {base};" for q, x in zip(p, s, strict=True)]
    return lines + [f"ex2.approx.ftz.f32 {q}, {q};" for q in p]


@constexpr_function
def _spread(share):
    """Which of eight are emulated."""
    return [(3,), (2, 5), (1, 4, 7), (1, 2, 5, 6)][share - 1]


@constexpr_function
def half_asm(cols, share):
    """A thread's P in two parts a pair of columns, and its row sums, those of its first elements.

    Operands: firsts, seconds, sums, s0, s1, factor, base, factor / 32, bias. Of exponentials the parts are
    two of P in fp32, of others two factors of two in fp16: what is in flight must not fill the operand's
    registers, and a copy would cost as much as the last product.
    """
    n = cols // 4
    body = ["{", ".reg .f32 total<4>, low, high;", ".reg .b32 pairs<2>;", ".reg .b16 l, h;", PAIR_REGISTERS]
    body += [f"mov.f32 total{i}, 0f00000000;" for i in range(4)]
    body += [f"mov.b32 pairs{i}, 0;" for i in range(2)]
    for i in range(n):
        s0, s1, factor, base, small, bias = (f"${n * k + i}" for k in range(3, 9))
        if i % 8 in _spread(share):
            body += _pair(s0, s1, small, bias, True)
            body += ["and.b32 e, y, 0x7C007C00;", f"fma.rn.f16x2 pairs{i % 2}, q, e, pairs{i % 2};"]
            body += [f"mov.b32 ${i}, q;", f"mov.b32 ${n + i}, e;"]
        else:
            body += exponentials((f"${i}", f"${n + i}"), (s0, s1), factor, base)
            body += [f"add.f32 total{i % 2}, total{i % 2}, ${i};"]
            body += [f"add.f32 total{i % 2 + 2}, total{i % 2 + 2}, ${n + i};"]
    for row in (0, 1):
        body += [f"add.f32 total{row}, total{row}, total{row + 2};"]
        body += [f"mov.b32 {{l, h}}, pairs{row};", "cvt.f32.f16 low, l;", "cvt.f32.f16 high, h;"]
        body += ["add.f32 low, low, high;", f"add.f32 total{row}, total{row}, low;"]
        body += [f"mov.f32 ${2 * n + row}, total{row};"]
    return "\n".join([*body, "}"])


@constexpr_function
def half_tied(cols):
    n = cols // 4
    return ",".join(["=&f"] * (2 * n) + ["=f"] * n + ["f"] * (6 * n))


@constexpr_function
def joined_asm(cols, share):
    """Words of two of P from their two parts."""
    n = cols // 4
    body = []
    for i in range(n):
        if i % 8 in _spread(share):
            body += ["{", ".reg .b32 q, e;", f"mov.b32 q, ${n + i};", f"mov.b32 e, ${2 * n + i};"]
            body += [f"mul.rn.f16x2 ${i}, q, e;", "}"]
        else:
            body += [f"cvt.rn.f16x2.f32 ${i}, ${2 * n + i}, ${n + i};"]
    return "\n".join(body)


@constexpr_function
def joined_tied(cols):
    n = cols // 4
    return ",".join(["=&r"] * n + ["f"] * (2 * n))


@constexpr_function
def eight_asm(share, e5m2):
    """Four words of four of P in fp8, the sum of each's first two in fp32, the other two in fp16.

    Operands: words, sums, pairs, s0, s1, s2, s3, factor, base, factor / 32, bias, by four.
    """
    fp8 = "e5m2x2" if e5m2 else "e4m3x2"
    body = []
    for i in range(4):
        s0, s1, s2, s3, factor, base, small, bias = (f"${4 * n + i}" for n in range(3, 11))
        body += ["{", ".reg .f32 p0, p1, p2, p3;", ".reg .b32 pair;", ".reg .b16 low, high;"]
        body += [PAIR_REGISTERS]
        body += exponentials(("p0", "p1"), (s0, s1), factor, base)
        body += [f"cvt.rn.satfinite.{fp8}.f32 low, p1, p0;", f"add.f32 ${4 + i}, p0, p1;"]
        if i in ((2,), (1, 2), (0, 1, 3), (0, 1, 2, 3))[share - 1]:
            body += [*_pair(s2, s3, small, bias, False), "mul.rn.f16x2 pair, q, y;"]
        else:
            body += [*exponentials(("p2", "p3"), (s2, s3), factor, base), "cvt.rn.f16x2.f32 pair, p3, p2;"]
        body += [f"cvt.rn.satfinite.{fp8}.f16x2 high, pair;", f"mov.b32 ${8 + i}, pair;"]
        body += [f"mov.b32 ${i}, {{low, high}};", "}"]
    return "\n".join(["{", *body, "}"])


EIGHT_TIED = gl.constexpr(",".join(["=r"] * 4 + ["=f"] * 4 + ["=r"] * 4 + ["f"] * 32))


@constexpr_function
def max_asm(cols):
    """A thread's maxima of its two rows, in its elements 0 and 2; the others are not set."""
    n = cols // 2
    body = ["{", ".reg .pred p;", ".reg .f32 f0, f1;", f".reg .b32 i<{n}>, t<{n}>, h0, h1;"]
    body += [f"mov.b32 i{i}, ${n + i};" for i in range(n)]
    trees, slow, made = [], [], 0
    for row in (0, 1):
        own = [i for i in range(n) if i % 4 // 2 == row]
        slow.append(
            [f"mov.f32 f{row}, ${n + own[0]};"] + [f"max.NaN.f32 f{row}, f{row}, ${n + i};" for i in own[1:]]
        )
        left, lines = [f"i{i}" for i in own], []
        while len(left) > 1:
            a, b, *c = left[:3]
            lines.append(f"max.s32 t{made}, {a}, {b};")
            lines += [f"max.s32 t{made}, t{made}, {one};" for one in c]
            left = [*left[3:], f"t{made}"]
            made += 1
        trees.append([*lines, f"mov.b32 h{row}, {left[0]};", f"mov.b32 f{row}, {left[0]};"])
    body += [line for both in zip(*trees, strict=True) for line in both]
    body += [
        "setp.lt.s32 p, h0, 0;",
        "setp.lt.or.s32 p, h1, 0, p;",
        "vote.sync.any.pred p, p, 0xffffffff;",
        "@!p bra DONE;",
        *(line for both in zip(*slow, strict=True) for line in both),
    ]
    return "\n".join([*body, "DONE:", "mov.f32 $0, f0;", "mov.f32 $2, f1;", "}"])


@constexpr_function
def max_tied(cols):
    return ",".join(["=f"] * (cols // 2) + ["f"] * (cols // 2))


@builtin
def several(asm, tied, operands, dtypes, pack, _semantic=None):
    """Outputs of more dtypes than one, which Triton has to be given bare from 3.7 on."""
    bare = [_unwrap_if_constexpr(dtype) for dtype in dtypes]
    return gl.inline_asm_elementwise(asm, tied, operands, bare, is_pure=True, pack=pack, _semantic=_semantic)


@gluon.jit
def first_halves(x, TIMES: gl.constexpr):
    """(rows, N, 4): of every 2**TIMES along the second dimension the first, where a thread has them all."""
    for _ in gl.static_range(TIMES):
        x, _unused = gl.split(gl.permute(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2, 4]), (0, 1, 3, 2)))
    return x


@constexpr_function
def log2_of(n):
    return n.bit_length() - 1


NAN_TOO = gl.constexpr(PropagateNan.ALL)


@gluon.jit
def larger(a, b):
    """NaN where either is: without that, threads of a row that have none would hide another's."""
    return gl.maximum(a, b, propagate_nan=NAN_TOO)


@gluon.jit
def row_max(s, BLOCK_N: gl.constexpr):
    """Maxima of the rows of s; NaN where one is in a row."""
    N: gl.constexpr = BLOCK_N // 2
    ASM: gl.constexpr = max_asm(BLOCK_N)
    TIED: gl.constexpr = max_tied(BLOCK_N)
    own = gl.inline_asm_elementwise(ASM, TIED, [s], gl.float32, is_pure=True, pack=N)
    own, _unused = gl.split(gl.reshape(own, [ROWS, BLOCK_N // 8, 4, 2]))
    TIMES: gl.constexpr = log2_of(BLOCK_N // 8)
    return gl.convert_layout(
        gl.reduce(gl.reshape(first_halves(own, TIMES), [ROWS, 4]), 1, larger),
        gl.SliceLayout(1, s.type.layout),
    )


ADD = gl.constexpr("add.rn.f16x2 $0, $1, $2;")
BOTH = gl.constexpr(
    "{\n.reg .b16 low, high;\n.reg .f32 x, y;\nmov.b32 {low, high}, $1;\n"
    "cvt.f32.f16 x, low;\ncvt.f32.f16 y, high;\nadd.f32 $0, x, y;\n}"
)


@gluon.jit
def added(x, y):
    """Sums of two fp16 numbers a word."""
    return gl.inline_asm_elementwise(ADD, "=r,r,r", [x, y], gl.int32, is_pure=True, pack=1)


@gluon.jit
def both(x):
    """In fp32 the sum of the two fp16 numbers of a word."""
    return gl.inline_asm_elementwise(BOTH, "=f,r", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def word_sums(x, TIMES: gl.constexpr):
    """(ROWS, N, 4) words of two numbers, summed 2**TIMES at a time along the second dimension."""
    for _ in gl.static_range(TIMES):
        low, high = gl.split(gl.permute(gl.reshape(x, [ROWS, x.shape[1] // 2, 2, 4]), (0, 1, 3, 2)))
        x = added(low, high)
    return x


@gluon.jit
def over(row, like):
    """A number per row as a tensor of like's shape and layout."""
    row = gl.convert_layout(row, gl.SliceLayout(1, like.type.layout))
    row, _unused = gl.broadcast(row[:, None], like)
    return row


@gluon.jit
def half_parts(s, base, unit, BLOCK_N: gl.constexpr, SHARE: gl.constexpr):
    """(two parts of P in fp16, row sums per thread): 2**(s · unit + base), SHARE of 8 without MUFU.

    Parts: (ROWS, BLOCK_N // 2), one for each pair of columns (``half_asm``). base: a number per row.
    """
    s0, s1 = gl.split(gl.reshape(s, [ROWS, BLOCK_N // 2, 2]))
    factor = gl.full([ROWS, BLOCK_N // 2], unit, gl.float32, s0.type.layout)
    small = gl.full([ROWS, BLOCK_N // 2], unit * (1 / 32), gl.float32, s0.type.layout)
    bias = over(base * (1 / 32) + 15 / 32, s0)
    first, second, sums = parts(s0, s1, factor, over(base, s0), small, bias, BLOCK_N, SHARE)
    TIMES: gl.constexpr = log2_of(BLOCK_N // 8)
    sums = first_halves(gl.reshape(sums, [ROWS, BLOCK_N // 8, 4]), TIMES)
    return first, second, gl.reshape(sums, [ROWS, 4])


@gluon.jit
def parts(s0, s1, factor, base, small, bias, BLOCK_N: gl.constexpr, SHARE: gl.constexpr):
    ASM: gl.constexpr = half_asm(BLOCK_N, SHARE)
    TIED: gl.constexpr = half_tied(BLOCK_N)
    N: gl.constexpr = BLOCK_N // 4
    operands = [s0, s1, factor, base, small, bias]
    return several(ASM, TIED, operands, [gl.float32, gl.float32, gl.float32], N)


TAKEN_APART = gl.constexpr("mov.b32 $0, $1;")


@gluon.jit
def joined(first, second, BLOCK_N: gl.constexpr, SHARE: gl.constexpr, LAYOUT: gl.constexpr):
    """P in fp16, (ROWS, BLOCK_N), of its parts."""
    p = words(first, second, BLOCK_N, SHARE)
    p = gl.convert_layout(gl.reshape(gl.join(p, p), [ROWS, BLOCK_N]), LAYOUT, assert_trivial=True)
    return gl.inline_asm_elementwise(TAKEN_APART, "=r,r,r", [p], gl.float16, is_pure=True, pack=2)


@gluon.jit
def words(first, second, BLOCK_N: gl.constexpr, SHARE: gl.constexpr):
    ASM: gl.constexpr = joined_asm(BLOCK_N, SHARE)
    TIED: gl.constexpr = joined_tied(BLOCK_N)
    N: gl.constexpr = BLOCK_N // 4
    return gl.inline_asm_elementwise(ASM, TIED, [first, second], gl.int32, is_pure=True, pack=N)


@gluon.jit
def eight_words(s, base, factor, BLOCK_N: gl.constexpr, SHARE: gl.constexpr, E5M2: gl.constexpr):
    """(words of four of P in fp8, row sums per thread): 2**(s · factor + base), SHARE of 8 without MUFU."""
    s = gl.permute(gl.reshape(s, [ROWS, BLOCK_N // 32, 2, 2, 4, 2]), (0, 1, 2, 4, 3, 5))
    even, odd = gl.split(gl.reshape(s, [ROWS, BLOCK_N // 4, 2, 2]))
    s0, s2 = gl.split(even)
    s1, s3 = gl.split(odd)
    ASM: gl.constexpr = eight_asm(SHARE, E5M2)
    scale = gl.full([ROWS, BLOCK_N // 4], factor, gl.float32, s0.type.layout)
    small = gl.full([ROWS, BLOCK_N // 4], factor * (1 / 32), gl.float32, s0.type.layout)
    bias = over(base * (1 / 32) + 15 / 32, s0)
    words, sums, others = fours(s0, s1, s2, s3, scale, over(base, s0), small, bias, ASM)
    sums = gl.sum(gl.reshape(sums, [ROWS, BLOCK_N // 16, 4]), 1)
    others = word_sums(gl.reshape(others, [ROWS, BLOCK_N // 16, 4]), 3)
    others = gl.sum(gl.reshape(both(others), [ROWS, BLOCK_N // 128, 4]), 1)
    return words, sums + gl.convert_layout(others, sums.type.layout)


@gluon.jit
def fours(s0, s1, s2, s3, factor, base, small, bias, ASM: gl.constexpr):
    operands = [s0, s1, s2, s3, factor, base, small, bias]
    return several(ASM, EIGHT_TIED, operands, [gl.int32, gl.float32, gl.int32], 4)
