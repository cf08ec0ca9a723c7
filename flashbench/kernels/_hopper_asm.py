"""What Gluon has no word for, as PTX: masks with immediates, a rescale behind a vote, named barriers.

A thread of a warpgroup holds, of a 64-row product, elements 4j and 4j+1 of row r and 4j+2 and 4j+3 of row
r + 8, in columns 8j + 2 · (lane % 4) + {0, 1} (PTX ISA, wgmma, D fragment). One asm statement takes all of
a thread's elements (``pack``), so that what is the same for a row is done once for it.
"""

# Triton reads the bodies below, not Python: no annotations but gl.constexpr, tensors by their capitals.
# ruff: noqa: ANN001, ANN202
# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

NAMED_FROM = gl.constexpr(8)
"""First named barrier that Triton leaves free: 0 is the kernel's, 1 a switch, then one per partition."""


@constexpr_function
def packed(cols):
    """Elements that a thread holds of 64 rows of cols columns."""
    return cols // 2


@constexpr_function
def tied(cols, register):
    """Constraints of a statement that changes such elements, given a ``register`` for each of them."""
    n = cols // 2
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + [register] * n)


@constexpr_function
def mask_asm(cols):
    n = cols // 2
    body = [
        "{",
        ".reg .b32 lane, low, high;",
        ".reg .pred p;",
        "mov.u32 lane, %laneid;",
        "and.b32 lane, lane, 3;",
        "shl.b32 lane, lane, 1;",
        f"sub.s32 low, ${2 * n}, lane;",
        f"sub.s32 high, ${2 * n + 2}, lane;",
    ]
    for i in range(n):
        col = 8 * (i // 4) + i % 2
        row = "high" if i % 4 >= 2 else "low"
        body += [f"setp.ge.s32 p, {row}, {col};", f"selp.f32 ${i}, ${i}, 0fFF800000, p;"]
    return "\n".join([*body, "}"])


@constexpr_function
def mask_before_asm(cols):
    return mask_asm(cols).replace("setp.ge", "setp.le")


@constexpr_function
def rescale_asm(cols):
    n = cols // 2
    low, high = f"${2 * n}", f"${2 * n + 2}"
    body = [
        "{",
        ".reg .pred p, q;",
        f"setp.neu.f32 p, {low}, 0f3F800000;",
        f"setp.neu.f32 q, {high}, 0f3F800000;",
        "or.pred p, p, q;",
        "vote.sync.any.pred p, p, 0xffffffff;",
        "@!p bra SKIP;",
    ]
    body += [f"mul.f32 ${i}, ${i}, {high if i % 4 >= 2 else low};" for i in range(n)]
    return "\n".join([*body, "SKIP:", "}"])


@constexpr_function
def normalise_asm(cols, more=False):
    n = cols // 2
    op = "fma.rn" if more else "mul"
    low, high = f"${2 * n}", f"${2 * n + 2}"
    body = [
        "{",
        ".reg .pred p, q, some;",
        f"setp.eq.f32 p, {low}, 0f00000000;",
        f"setp.eq.f32 q, {high}, 0f00000000;",
        "or.pred some, p, q;",
        "vote.sync.any.pred some, some, 0xffffffff;",
    ]
    for i in range(n):
        added = f", ${3 * n + i}" if more else ""
        body += [f"{op}.f32 ${i}, ${i}, {high if i % 4 >= 2 else low}{added};"]
    body += ["@!some bra SKIP;"]
    body += [f"selp.f32 ${i}, 0f00000000, ${i}, {'q' if i % 4 >= 2 else 'p'};" for i in range(n)]
    return "\n".join([*body, "SKIP:", "}"])


@gluon.jit
def mask(s, last, COLS: gl.constexpr):
    """s with -inf in the columns after ``last``, a column number per row, from 0 at the tile's edge."""
    N: gl.constexpr = packed(COLS)
    ASM: gl.constexpr = mask_asm(COLS)
    TIED: gl.constexpr = tied(COLS, "r")
    last, _ = gl.broadcast(last[:, None], s)
    return gl.inline_asm_elementwise(ASM, TIED, [s, last], gl.float32, is_pure=True, pack=N)


@gluon.jit
def mask_before(s, first, COLS: gl.constexpr):
    """s with -inf in the columns before ``first``, a column number per row, from 0 at the tile's edge."""
    N: gl.constexpr = packed(COLS)
    ASM: gl.constexpr = mask_before_asm(COLS)
    TIED: gl.constexpr = tied(COLS, "r")
    first, _ = gl.broadcast(first[:, None], s)
    return gl.inline_asm_elementwise(ASM, TIED, [s, first], gl.float32, is_pure=True, pack=N)


@gluon.jit
def rescale(acc, alpha, COLS: gl.constexpr):
    """acc · alpha, a factor per row; nothing in warps where all factors are 1."""
    alpha, _ = gl.broadcast(alpha[:, None], acc)
    return rescale_by(acc, alpha, COLS)


@gluon.jit
def rescale_by(acc, factor, COLS: gl.constexpr):
    """The same by a tensor of acc's shape that is alike along each row."""
    N: gl.constexpr = packed(COLS)
    ASM: gl.constexpr = rescale_asm(COLS)
    TIED: gl.constexpr = tied(COLS, "f")
    return gl.inline_asm_elementwise(ASM, TIED, [acc, factor], gl.float32, is_pure=True, pack=N)


_FOUR = """{
.reg .b16 low, high;
cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
mov.b32 $0, {low, high};
}"""
FOUR = gl.constexpr(_FOUR)
FOUR_E5M2 = gl.constexpr(_FOUR.replace("e4m3", "e5m2"))
TAKEN_APART = gl.constexpr("mov.b32 $0, $1;")


@gluon.jit
def four(x0, x1, x2, x3, E5M2: gl.constexpr):
    """Four fp32 tensors in fp8, to nearest, as the bytes of an int32, the first the lowest."""
    ASM: gl.constexpr = FOUR_E5M2 if E5M2 else FOUR
    return gl.inline_asm_elementwise(ASM, "=r,f,f,f,f", [x0, x1, x2, x3], gl.int32, is_pure=True, pack=1)


@gluon.jit
def taken_apart(x, E5M2: gl.constexpr):
    """The fp8 elements of an int32 tensor that has every four of them in each of their four places."""
    if E5M2:
        p = gl.inline_asm_elementwise(TAKEN_APART, "=r,r,r,r,r", [x], gl.float8e5, is_pure=True, pack=4)
    else:
        p = gl.inline_asm_elementwise(TAKEN_APART, "=r,r,r,r,r", [x], gl.float8e4nv, is_pure=True, pack=4)
    return p


@constexpr_function
def words(cols):
    """Words of four that a thread holds of 64 rows of cols columns."""
    return cols // 8


@constexpr_function
def known_asm(cols):
    body = ["{", ".reg .b32 all;", "mov.b32 all, $0;"]
    body += [f"or.b32 all, all, ${i};" for i in range(1, words(cols))]
    # all lanes, as no word has its highest bit: but that is known only once the words are
    return "\n".join([*body, "shr.s32 all, all, 31;", "not.b32 all, all;", "bar.warp.sync all;", "}"])


@constexpr_function
def tied_words(cols):
    n = words(cols)
    return ",".join(["=r"] * n + [str(i) for i in range(n)])


@gluon.jit
def known(p, COLS: gl.constexpr):
    """``four``'s words of 64 rows of COLS numbers, none negative: what follows waits until they are known."""
    N: gl.constexpr = words(COLS)
    ASM: gl.constexpr = known_asm(COLS)
    TIED: gl.constexpr = tied_words(COLS)
    return gl.inline_asm_elementwise(ASM, TIED, [p], gl.int32, is_pure=False, pack=N)


@gluon.jit
def normalise(acc, factor, COLS: gl.constexpr):
    """acc · factor, a factor per row; 0 where that is 0, whatever acc holds."""
    N: gl.constexpr = packed(COLS)
    ASM: gl.constexpr = normalise_asm(COLS)
    TIED: gl.constexpr = tied(COLS, "f")
    factor, _ = gl.broadcast(factor[:, None], acc)
    return gl.inline_asm_elementwise(ASM, TIED, [acc, factor], gl.float32, is_pure=True, pack=N)


@constexpr_function
def tied_with_more(cols):
    return ",".join([tied(cols, "f"), *["f"] * (cols // 2)])


@gluon.jit
def normalise_and_add(acc, factor, more, COLS: gl.constexpr):
    """acc · factor + more, one per row, one per column; 0 where the factor is 0, whatever acc holds."""
    N: gl.constexpr = packed(COLS)
    ASM: gl.constexpr = normalise_asm(COLS, True)
    TIED: gl.constexpr = tied_with_more(COLS)
    factor, _ = gl.broadcast(factor[:, None], acc)
    more, _ = gl.broadcast(more[None, :], acc)
    return gl.inline_asm_elementwise(ASM, TIED, [acc, factor, more], gl.float32, is_pure=True, pack=N)


LOG2 = gl.constexpr("lg2.approx.ftz.f32 $0, $1;")
INVERSE = gl.constexpr("rcp.approx.ftz.f32 $0, $1;")


@gluon.jit
def log2(x):
    """log2 of row sums, 1 or more; within 2 ** -22."""
    return gl.inline_asm_elementwise(LOG2, "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def inverse(x):
    """1 / x of row sums, within one unit in the last place."""
    return gl.inline_asm_elementwise(INVERSE, "=f,f", [x], gl.float32, is_pure=True, pack=1)


@constexpr_function
def named_asm(what, threads):
    return f"{what} $1, {threads};\nmov.b32 $0, $1;"


@constexpr_function
def of_threads(warps):
    """Layout of a number for each thread of so many warps."""
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.jit
def arrive(number, THREADS: gl.constexpr, WARPS: gl.constexpr):
    """Arrive, with all of so many warps, at a named barrier of THREADS; nothing is waited for.

    Triton has one thread arrive at an mbarrier, after a barrier of all that are in its partition.
    """
    ASM: gl.constexpr = named_asm("bar.arrive", THREADS)
    _named(ASM, gl.full([32 * WARPS], NAMED_FROM + number, gl.int32, of_threads(WARPS)))


@gluon.jit
def sync(number, THREADS: gl.constexpr, WARPS: gl.constexpr):
    """Arrive so, and wait for the others of THREADS."""
    ASM: gl.constexpr = named_asm("bar.sync", THREADS)
    _named(ASM, gl.full([32 * WARPS], NAMED_FROM + number, gl.int32, of_threads(WARPS)))


@gluon.jit
def by_warpgroup(number, WARPS: gl.constexpr):
    """Numbers of named barriers, for each thread: that of the first warpgroup, and those after it."""
    return NAMED_FROM + number + gl.arange(0, 32 * WARPS, of_threads(WARPS)) // 128


@gluon.jit
def meet(numbers, THREADS: gl.constexpr):
    """Arrive at the named barrier of ``by_warpgroup``, and wait for the others of THREADS.

    Others wait at another instruction, in code of their own: ``bar.sync`` is ``barrier.sync.aligned``, which
    compute-sanitizer takes for one that all of them are to execute. The machine has one instruction for both.
    """
    ASM: gl.constexpr = named_asm("barrier.sync", THREADS)
    _named(ASM, numbers)


@gluon.jit
def meet_alone(number, THREADS: gl.constexpr):
    """The same by one warp, which is all of its partition."""
    meet(gl.full([32], NAMED_FROM + number, gl.int32, of_threads(1)), THREADS)


@gluon.jit
def turn_wait(WG: gl.constexpr, TURNS: gl.constexpr):
    """Wait for this warpgroup's turn: a named barrier of two warpgroups, who waits and who passes."""
    if TURNS:
        sync(WG, 256, 4)


@gluon.jit
def turn_pass(WG: gl.constexpr, HERE: gl.constexpr):
    """Give the turn to warpgroup WG, where it is to be given here."""
    if HERE:
        arrive(WG, 256, 4)


@gluon.jit
def _named(ASM: gl.constexpr, numbers):
    gl.inline_asm_elementwise(ASM, "=r,r", [numbers], gl.int32, is_pure=False, pack=1)
