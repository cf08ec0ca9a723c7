"""O of FlashAttention-3's forward in 8-bit floats, set aside in part, and written (_hopper_fp8_sums.py)."""

# Triton reads the bodies below, not Python: no annotations but gl.constexpr, tensors by their capitals.
# ruff: noqa: ANN001, ANN202, E741
# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from flashbench.kernels import _hopper_asm as asm
from flashbench.kernels import _hopper_backward_tiles as other
from flashbench.kernels import _hopper_guard as guard
from flashbench.kernels import _hopper_tiles as one

BLOCK_M = gl.constexpr(128)
"""Rows of a tile of queries: 64 of each warpgroup."""
SHIFT = guard.SHIFT


@gluon.jit
def by_thread(x, E: gl.constexpr):
    """(BLOCK_M, E) of a product as (E // 8, 1024): four numbers of each thread side by side, and its only."""
    x = gl.permute(gl.reshape(x, [8, 2, 8, E // 8, 4, 2]), (3, 0, 2, 4, 1, 5))
    return gl.reshape(x, [E // 8, 8 * BLOCK_M])


@gluon.jit
def by_row(x, E: gl.constexpr, LO: gl.constexpr):
    """What ``by_thread`` was given."""
    x = gl.permute(gl.reshape(x, [E // 8, 8, 8, 4, 2, 2]), (1, 4, 2, 0, 3, 5))
    return gl.convert_layout(gl.reshape(x, [BLOCK_M, E]), LO, assert_trivial=True)


@gluon.jit
def scale_of(top, unit, new_top, new_unit):
    """What numbers of old bases and unit are to be multiplied by."""
    same = (top == new_top) | (top == float("-inf"))
    return gl.where(same, 1.0, gl.exp2(top - new_top)) * gl.exp2(unit - new_unit)


@gluon.jit
def mean_of(V_MEAN, entry, heads, group, E: gl.constexpr, LO: gl.constexpr):
    """What each column of V was less, for all keys of an entry's head."""
    _, b, h = one.unpacked(entry)
    columns = gl.arange(0, E, gl.SliceLayout(0, LO))
    return gl.load(V_MEAN + (b * heads + h) // group * E + columns)


@gluon.jit
def set_aside(acc, OS, O, LSE, V_MEAN, kept, kept_top, kept_unit, done, total, top, unit, entry, heads, group,
              seqlen_q, E: gl.constexpr, LO: gl.constexpr, ROW: gl.constexpr):  # fmt: skip
    """Add to O, by the bases top and unit, what was set aside; write it where it is done, else set it aside.

    What is set aside lies where O leaves from: OS is as large as O in fp32. A row's P sums to 1, so that the
    mean that V is without is missing in O as it is; in a row without keys, none is.
    """
    OWN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    MS = other.retiled(OS, [1, E // 8, 8 * BLOCK_M], OWN, gl.float32).index(0)
    if kept:
        flat = by_thread(acc, E)
        factor = by_thread(guard.over(scale_of(kept_top, kept_unit, top, unit), acc), E)
        flat += MS.load(flat.type.layout) * factor
        acc = by_row(flat, E, LO)
    tma.store_wait(0)
    if done:
        mean = mean_of(V_MEAN, entry, heads, group, E, LO)
        base = guard.by_row(top, ROW) - SHIFT
        weight = one.finish(total, base, LSE, entry, heads, seqlen_q, 1.0, 0, BLOCK_M, ROW, 1)
        weight *= gl.exp2(unit)
        weight = gl.convert_layout(weight, gl.SliceLayout(1, LO))
        tile, b, h = one.unpacked(entry)
        o = asm.normalise_and_add(acc, weight, mean.to(gl.float32), E)
        one.send(o, OS.index(0), O, b, h, tile * BLOCK_M, 0, E)
    else:
        MS.store(by_thread(acc, E))
    return acc
