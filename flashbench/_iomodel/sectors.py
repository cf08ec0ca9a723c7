"""What crosses between SM and L2 where that is not what is asked for: memory moves in sectors of 32 B.

Source: CUDA C++ Best Practices Guide, coalesced access to global memory. Counted to the byte on an H100 SXM
(docs/counters.md).
"""

from __future__ import annotations

SECTOR = 32
"""Bytes that move at once."""

_NUMBERS = SECTOR // 4
"""fp32 numbers, or int32, of a sector."""


def alone(count: int) -> int:
    """Bytes that move for so many single numbers, each in a sector of its own."""
    return count * SECTOR


def vectors(count: int, length: int, tile: int) -> int:
    """Bytes that move for so many vectors of fp32 one after the other, each taken a tile of rows at a time.

    A vector begins where the one before it ends, so in a sector's midst unless 8 divides its length. Exact
    where 8 divides the tile or a vector is one tile.
    """
    whole, rest = divmod(length, tile)
    sectors = 0
    for index in range(min(_NUMBERS, count)):
        alike = -(-(count - index) // _NUMBERS)
        start = index * length % _NUMBERS
        sectors += alike * (whole * _spanned(start, tile) + (_spanned(start, rest) if rest else 0))
    return sectors * SECTOR


def _spanned(start: int, numbers: int) -> int:
    """Sectors that hold so many numbers from the start-th of a sector on."""
    return (start + numbers - 1) // _NUMBERS + 1
