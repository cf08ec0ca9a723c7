"""How a kernel walks a block mask: the lists of ``block_masks.Lists`` and the bits of partial blocks.

A position counts rows of listed blocks, 128 an entry, so that a loop over positions in steps of a tile goes
through a block tile by tile, and of the last block through the rows that exist. The place of a tile is looked
up one step ahead, in the walk's own state: were it loaded where it is used, all loads of a tile would wait.
"""

# Triton reads the bodies below, not Python: no annotations but tl.constexpr, tensors by their capitals.
# ruff: noqa: ANN001, ANN202
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from flashbench import block_masks
from flashbench.kernels import _triton_tiles as tiles

SIZE = tl.constexpr(block_masks.SIZE)
WORDS = tl.constexpr(block_masks.WORDS)
WORD_BITS = tl.constexpr(block_masks.WORD_BITS)
FULL = tl.constexpr(block_masks.FULL)


@triton.jit
def _entry(position):
    return tl.cast(position, tl.int32) // SIZE  # in the interpreter a plain int, which knows no constexpr


@triton.jit
def walk(SPANS, start):
    """(first, middle, end) of the block in which row ``start`` lies: positions of full, then partial ones."""
    at = SPANS + _entry(start) * 3
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def ahead_at(BLOCKS, position, end):
    """How far the block listed at a position lies ahead of its positions, in rows; from end on, no load."""
    entry = _entry(position)
    return (tl.load(BLOCKS + entry, mask=position < end, other=0) - entry) * SIZE


@triton.jit
def visible(SLOTS, BITS, position, start_m, start_n, r, c, COLS: tl.constexpr):
    """Which pairs of a tile of a partial block, the one at that position of the lists, the mask shows."""
    return bits_of(BITS, tl.load(SLOTS + _entry(position)), start_m, start_n, r, c, COLS)


@triton.jit
def visible_anywhere(SLOTS, BITS, seqlen_k, start_m, start_n, r, c, COLS: tl.constexpr):
    """The same of any tile, by the table of all blocks."""
    key_blocks = tl.cdiv(seqlen_k, SIZE)
    slot = tl.load(SLOTS + _entry(start_m) * key_blocks + _entry(start_n))
    seen = (slot + r * 0 + c * 0) == FULL
    if slot >= 0:
        seen = bits_of(BITS, slot, start_m, start_n, r, c, COLS)
    return seen


@triton.jit
def bits_of(BITS, slot, start_m, start_n, r, c, COLS: tl.constexpr):
    """The bits of a tile's pairs in the partial block of that slot.

    A row's words are loaded, and each pair takes its own. r and c: blocks of any orientation that broadcast,
    as in _scores.py; COLS: keys of the tile.
    """
    first = start_n - _entry(start_n) * SIZE
    row = tiles.at(BITS, slot, SIZE * WORDS) + (start_m - _entry(start_m) * SIZE + r) * WORDS
    row += first // WORD_BITS
    word = tl.load(row)
    for i in tl.static_range(1, COLS // WORD_BITS):
        word = tl.where(c < i * WORD_BITS, word, tl.load(row + i))
    return ((word >> ((first + c) % WORD_BITS)) & 1) != 0
