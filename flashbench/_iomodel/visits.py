"""Closed forms for sums over tiles: how many tiles a kernel visits, and how many rows it streams.

A kernel skips the tiles without a visible pair. Whichever loop is outside, the visited set is the
same, so one count of tiles gives the rows streamed by either order. No function here loops over tiles.
"""

from __future__ import annotations

from typing import NamedTuple

from flashbench.problem import Problem


class Visits(NamedTuple):
    """Per query head: tiles visited, K/V rows streamed (Q outside), Q rows streamed (K/V outside).

    Ragged last tiles count their true rows in key_rows and query_rows: loads are masked.
    """

    tiles: int
    key_rows: int
    query_rows: int


def visits(problem: Problem, block_q: int, block_k: int) -> Visits:
    """Tiles and rows that a tiled kernel visits for one query head.

    K/V tile j is needed by the query tiles from floor(max(0, j·block_k − seqlen_k + seqlen_q) / block_q)
    on (causal, bottom-right), which is the sum that FlashAttention's K/V-outer loop streams.
    """
    nq, nk = problem.seqlen_q, problem.seqlen_k
    rows_of_tiles, columns_of_tiles = -(-nq // block_q), -(-nk // block_k)
    tiles = rows_of_tiles * columns_of_tiles
    last_column = rows_of_tiles  # query tiles that visit the last K/V tile
    if problem.causal:
        tiles -= clamped_floor_sum(columns_of_tiles, block_k, nq - nk, block_q, rows_of_tiles)
        last_column -= max(0, (columns_of_tiles - 1) * block_k - nk + nq) // block_q
    # the last query row sees every key, so the last query tile visits every K/V tile
    return Visits(
        tiles=tiles,
        key_rows=block_k * tiles - (columns_of_tiles * block_k - nk) * last_column,
        query_rows=block_q * tiles - (rows_of_tiles * block_q - nq) * columns_of_tiles,
    )


def clamped_floor_sum(count: int, step: int, offset: int, divisor: int, limit: int) -> int:
    """Σ over i < count of floor((step·i + offset) / divisor) clamped to 0..limit; step ≥ 1."""
    positive = min(count, max(0, -((offset - divisor) // step)))  # first i whose term is 1 or more
    capped = min(count, max(positive, -((offset - divisor * limit) // step)))
    middle = floor_sum(capped - positive, step, step * positive + offset, divisor)
    return middle + (count - capped) * limit


def floor_sum(count: int, step: int, offset: int, divisor: int) -> int:
    """Σ over i < count of floor((step·i + offset) / divisor), in O(log) time, for step, offset ≥ 0.

    Source: lattice points under a line, by the Euclidean algorithm (Graham, Knuth, Patashnik,
    Concrete Mathematics, section 3.5).
    """
    total = 0
    while count > 0:
        quotient, step = divmod(step, divisor)
        total += quotient * (count * (count - 1) // 2)
        quotient, offset = divmod(offset, divisor)
        total += quotient * count
        count, offset = divmod(step * count + offset, divisor)
        step, divisor = divisor, step
    return total
