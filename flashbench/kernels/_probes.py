"""Triton kernels that do one thing as fast as the card can: read, and compute exponentials.

Used by ``flashbench calibrate``. Both are launched with as many programs as run at once.
"""

# Triton reads the bodies below, not Python: no annotations but tl.constexpr.
# ruff: noqa: ANN001, ANN202
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

READ_BLOCK = 4096
"""Elements (4 bytes each) that one program loads at once."""
EXP_BLOCK = 1024
"""Independent chains of exponentials per program."""
EXP_UNROLL = 16


@triton.jit(do_not_specialize=["num_blocks", "repeats"])
def read(X, Out, num_blocks, repeats, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    """Sum num_blocks blocks of X, repeats times over, past the L1; one sum per program into Out.

    num_blocks is a multiple of programs times UNROLL. With each repetition a program takes the
    blocks of its neighbour, so that no SM reads the same bytes twice in a row.
    """
    pid, programs = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for turn in range(repeats):
        place = (pid + turn) % programs
        for start in range(0, num_blocks, programs * UNROLL):
            for step in tl.static_range(UNROLL):
                block = (start + step * programs + place).to(tl.int64)
                total += tl.load(X + block * BLOCK + columns, cache_modifier=".cg")
    tl.store(Out + pid, tl.sum(total))


@triton.jit(do_not_specialize=["rounds"])
def exp2(Out, rounds, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    """x -> 2^-x, UNROLL times per round, in BLOCK independent chains; their sum per program into Out."""
    pid = tl.program_id(0)
    x = (tl.arange(0, BLOCK) + pid % 7).to(tl.float32) / BLOCK
    for _ in range(rounds):
        for _ in tl.static_range(UNROLL):
            x = tl.exp2(-x)
    tl.store(Out + pid, tl.sum(x))
