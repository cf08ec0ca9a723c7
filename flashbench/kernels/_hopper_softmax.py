"""What flash-v3's forward keeps of each row while it walks over K/V tiles, by maxima or by guarded sums.

Of a row there are a base and the sum of its P so far (Algorithm 1), and once a tile has changed the base the
factor for O. By maxima (``_hopper_tiles``) a base is one number of a row, of which all its threads have the
same. GUARDED (``_hopper_guard16``): each thread's own, a tensor (rows, 4), so that they need not meet.
"""

# Triton reads the bodies below, not Python: no annotations but gl.constexpr, tensors by their capitals.
# ruff: noqa: ANN001, ANN202, SIM108
# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashbench.kernels import _hopper_asm as asm
from flashbench.kernels import _hopper_guard as guard
from flashbench.kernels import _hopper_guard16 as sums16
from flashbench.kernels import _hopper_tiles as one

ROWS = one.ROWS


@gluon.jit
def nothing(ROW: gl.constexpr, GUARDED: gl.constexpr):
    """(bases, sums) of rows that have seen no key. ROW: layout of a number per row."""
    PARTS: gl.constexpr = guard.parts_layout(ROWS)
    if GUARDED > 0:
        top = gl.full([ROWS, 4], float("-inf"), gl.float32, PARTS)
    else:
        top = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    return top, gl.zeros([ROWS, 4], gl.float32, PARTS)


@gluon.jit
def softmax(s, top, total, unit, first, BLOCK_N: gl.constexpr, HALF: gl.constexpr,
            MAX3: gl.constexpr, EMULATED: gl.constexpr, GUARDED: gl.constexpr):  # fmt: skip
    """(P, more of it, the factor for what was summed before, the new base, row sums) of one more tile.

    first: whether it is the first of its tile of queries. More of P: what ``_hopper_tiles.operand`` takes.
    """
    if GUARDED > 0:
        p, alpha, top, total = sums16.softmax(
            s, top, total, unit, gl.where(first, 1.0, 0.0), BLOCK_N, HALF, GUARDED, False)  # fmt: skip
        rest = p
    else:
        if MAX3:
            p, rest, sums, alpha, top = one.softmax3(s, top, unit, BLOCK_N, EMULATED)
        else:
            p, alpha, top = one.softmax(s, top, unit)
            rest = p
            sums = one.partial_sums(p, BLOCK_N)
        PARTS: gl.constexpr = guard.parts_layout(ROWS)
        total *= gl.convert_layout(alpha, gl.SliceLayout(1, PARTS))[:, None]
        total += gl.convert_layout(sums, PARTS)
        if EMULATED == 0:
            p = p.to(HALF)
    return p, rest, alpha, top, total


@gluon.jit
def rescale(acc0, acc1, alpha, E0: gl.constexpr, E1: gl.constexpr, LO0: gl.constexpr, LO1: gl.constexpr,
            GUARDED: gl.constexpr):  # fmt: skip
    """O in pieces, times what a new base of each row makes of it."""
    if GUARDED > 0:
        acc0 = guard.rescale(acc0, alpha, E0)
        if E1 > 0:
            acc1 = guard.rescale(acc1, alpha, E1)
    else:
        acc0 = asm.rescale(acc0, gl.convert_layout(alpha, gl.SliceLayout(1, LO0)), E0)
        if E1 > 0:
            acc1 = asm.rescale(acc1, gl.convert_layout(alpha, gl.SliceLayout(1, LO1)), E1)
    return acc0, acc1


@gluon.jit
def no_factor(top, ROW: gl.constexpr, GUARDED: gl.constexpr):
    """A number per row in place of ``finish``'s, where no tile of queries is done: any that is at hand."""
    if GUARDED > 0:
        factor = gl.zeros([ROWS], gl.float32, ROW)
    else:
        factor = top
    return factor


@gluon.jit
def finish(total, top, LSE, entry, heads, seqlen_q, unit, WG: gl.constexpr, BLOCK_M: gl.constexpr,
           ROW: gl.constexpr, EMULATED: gl.constexpr, GUARDED: gl.constexpr):  # fmt: skip
    """What O is to be multiplied by, once LSE is written (``_hopper_tiles.finish``)."""
    if GUARDED > 0:
        base = guard.by_row(top, ROW)
    else:
        base = one.log_base(top, unit, EMULATED)
    return one.finish(total, base, LSE, entry, heads, seqlen_q, 1.0, WG, BLOCK_M, ROW, EMULATED + GUARDED)
