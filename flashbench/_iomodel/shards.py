"""Which rows of a sequence each rank holds, and which pairs of chunks one step of a ring computes.

A sequence is cut into chunks whose lengths differ by one row at most. Contiguous, each rank has one. Zigzag,
there are two per rank, and rank r of P has the r-th from the start and the r-th from the end: of a causal
mask every rank then sees as many keys, in each step of the ring, up to that one row. Source: the load
balance of causal rings as Megatron and Llama 3 (arXiv:2407.21783, section 3.3.2) describe it; striping rows
instead is Brandon et al. 2023, arXiv:2311.09431.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

Chunk = tuple[int, int]
"""First row and the one after the last."""

Shard = tuple[Chunk, ...]
"""The chunks of one rank, ascending."""


class Block(NamedTuple):
    """One local step: rows of the rank's queries against rows of one shard's keys, both counted in the
    order of their shards; causal: bottom-right over the two."""

    rows: Chunk
    keys: Chunk
    causal: bool


def cut(rows: int, count: int) -> tuple[Chunk, ...]:
    """``count`` chunks of rows 0 … rows - 1; the lengths differ by one at most."""
    return tuple((i * rows // count, (i + 1) * rows // count) for i in range(count))


@lru_cache(maxsize=64)
def shards(rows: int, ranks: int, *, zigzag: bool) -> tuple[Shard, ...]:
    """The rows of each rank; together every row once."""
    if not zigzag:
        return tuple((chunk,) for chunk in cut(rows, ranks))
    chunks = cut(rows, 2 * ranks)
    return tuple((chunks[rank], chunks[2 * ranks - 1 - rank]) for rank in range(ranks))


def length(shard: Shard) -> int:
    """Rows of a shard."""
    return sum(stop - start for start, stop in shard)


@lru_cache(maxsize=64)
def longest(cut: tuple[Shard, ...]) -> int:
    """Rows of the longest shard."""
    return max(map(length, cut))


def block(mine: Shard, theirs: Shard, *, causal: bool) -> Block:
    """What queries of ``mine`` see of the keys of ``theirs``: one rectangle, or the own triangle.

    Of a causal mask over zigzag shards: with the own keys, both chunks in a row are causal as they stand;
    keys of an earlier rank (its first chunk before, its last after all queries) show their first chunk to
    all queries; those of a later rank show both to the queries of the last chunk.
    """
    rows, keys = (0, length(mine)), (0, length(theirs))
    if not causal:
        return Block(rows, keys, False)
    if mine == theirs:
        return Block(rows, keys, True)
    if theirs[0] < mine[0]:
        return Block(rows, (0, length(theirs[:1])), False)
    return Block((length(mine[:1]), rows[1]), keys, False)


def pairs(step: Block) -> int:
    """(query, key) pairs that a block computes, of one head."""
    rows, keys = (stop - start for start, stop in (step.rows, step.keys))
    return rows * (rows + 1) // 2 if step.causal else rows * keys
