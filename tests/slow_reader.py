"""A kernel that reads a tensor with one load in flight per program, so that it waits for each."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

BLOCKS = 16
BLOCK = 1024


@triton.jit
def read_slowly(X, SUM, length, BLOCK: tl.constexpr):
    """SUM[program] = sum of the program's part of X, each block of which waits for the sum before it."""
    lanes = tl.arange(0, BLOCK)
    total = 0.0
    for start in range(0, length, BLOCK):
        # what is always true, but only once the sum so far is known
        x = tl.load(X + tl.program_id(0) * length + start + lanes, mask=lanes + total > -1.0, other=0.0)
        total += tl.sum(x, 0)
    tl.store(SUM + tl.program_id(0), total)
