"""Closed forms for sums over tiles: how many tiles a kernel visits, and how many rows it streams.

A mask leaves a band of the score matrix visible: query i sees keys i + lo to i + hi. A kernel skips
the tiles without a visible pair. Whichever loop is outside, the visited set is the same, so one
count of tiles gives the rows streamed by either order. No function here loops over tiles; where a
mask of blocks is given, over its blocks.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from flashbench._iomodel.listed import listed
from flashbench._iomodel.variant import DEFAULT, BlockMask, Variant
from flashbench.problem import Problem


class Visits(NamedTuple):
    """Per head: tiles visited, K/V rows streamed (Q outside), Q rows streamed (K/V outside), scores.

    Ragged last tiles count their true rows in key_rows and query_rows, and rows times columns in scores:
    loads are masked.
    """

    tiles: int
    key_rows: int
    query_rows: int
    scores: int


class Band(NamedTuple):
    """A score matrix: nq rows, nk columns, visible where lo <= column - row <= hi."""

    nq: int
    nk: int
    lo: int
    hi: int


def visits(problem: Problem, block_q: int, block_k: int, variant: Variant = DEFAULT) -> Visits:
    """Tiles and rows that a tiled kernel visits for one query head."""
    if problem.block_mask:
        walk = listed(problem, block_q, block_k)
        return Visits(walk.tiles, walk.key_rows, walk.query_rows, walk.scores)
    band = Band(problem.seqlen_q, problem.seqlen_k, *problem.band)
    if variant is DEFAULT:
        return band_visits(band, block_q, block_k)
    if variant.blocks is not None:
        return _masked_visits(band, variant.blocks, block_q, block_k)
    seen = band_visits(band, block_q, block_k)
    return Visits(*map(variant.thin, seen)) if variant.density < 1 else seen


def packed_visits(problem: Problem, block_q: int, block_k: int, variant: Variant = DEFAULT) -> Visits:
    """The same for one K/V head whose group's query heads are packed: row r is head r mod g of query r div g.

    A tile's first and last query are floors of its rows over g, and floors of floors are floors: the
    packed band is the band of a matrix with every column, and lo and hi, g times as wide.
    """
    g = problem.group
    lo, hi = problem.band
    wide = Band(g * problem.seqlen_q, g * problem.seqlen_k, g * lo, g * hi)
    seen = band_visits(wide, block_q, g * block_k)
    seen = Visits(seen.tiles, seen.key_rows // g, seen.query_rows, seen.scores // g)
    return Visits(*map(variant.thin, seen)) if variant.density < 1 else seen


@lru_cache(maxsize=8)
def band_visits(band: Band, block_q: int, block_k: int) -> Visits:
    """Tiles of block_q x block_k that hold a pair of the band, and the rows that they stream.

    Query tile r, rows R0..R1, visits K/V tiles floor(max(0, R0 + lo) / block_k) to
    floor(min(nk - 1, R1 + hi) / block_k): a difference of two floor sums.
    """
    nq, nk, lo, hi = band
    if not (nq and nk):
        return Visits(0, 0, 0, 0)
    rows, columns = -(-nq // block_q), -(-nk // block_k)
    if lo <= 1 - nq and hi >= nk - 1:
        return Visits(rows * columns, rows * nk, columns * nq, nq * nk)
    reach = min(rows, max(0, (nk - 1 - lo) // block_q + 1))  # query tiles that begin before the band ends
    whole = min(reach, rows - 1)  # of those, all but the last query tile, which may be ragged
    tiles = clamped_floor_sum(whole, block_q, block_q - 1 + hi + block_k, block_k, columns)
    if (whole - 1) * block_q + lo >= block_k:  # else the band begins within the first K/V tile
        tiles -= clamped_floor_sum(whole, block_q, lo, block_k, columns)
    last_row = _span((rows - 1) * block_q + lo, nq - 1 + hi, nk, block_k)
    last_column = _span((columns - 1) * block_k - hi, nk - 1 - lo, nq, block_q)
    tiles += last_row
    short_q, short_k = rows * block_q - nq, columns * block_k - nk  # what the last tiles lack
    key_rows, query_rows = block_k * tiles - short_k * last_column, block_q * tiles - short_q * last_row
    scores = block_q * key_rows - short_q * block_k * last_row
    if nk - 1 - (rows - 1) * block_q >= lo and (columns - 1) * block_k - (nq - 1) <= hi:
        scores += short_q * short_k  # the tile in the corner lacks both, and is one
    return Visits(tiles, key_rows, query_rows, scores)


def _span(first: int, last: int, length: int, block: int) -> int:
    """Blocks that hold one of the positions first..last of 0..length - 1."""
    first, last = max(0, first), min(length - 1, last)
    return last // block - first // block + 1 if first <= last else 0


def _masked_visits(band: Band, mask: BlockMask, block_q: int, block_k: int) -> Visits:
    """The visits inside the blocks that the mask keeps; their sizes are multiples of the tiles'."""
    mask.check(band.nq, band.nk, block_q, block_k)
    total = Visits(0, 0, 0, 0)
    for i, j in mask.kept:
        top, left = i * mask.block_q, j * mask.block_k
        part = Band(
            min(mask.block_q, band.nq - top), min(mask.block_k, band.nk - left),
            band.lo + top - left, band.hi + top - left,
        )  # fmt: skip
        seen = band_visits(part, block_q, block_k)
        total = Visits(*(a + b for a, b in zip(total, seen, strict=True)))
    return total


def page_entries(problem: Problem, block_q: int, block_k: int, page_size: int, packed: bool) -> int:
    """Entries of the block table read per head: every visited K/V tile reads those of its pages.

    A K/V tile has the fewest pages that hold it or one more, which repeats with the period of block_k and
    page_size; within one residue class the query tiles that visit it are a difference of floor sums. The
    last K/V tile may be ragged.
    """
    g = problem.group if packed else 1
    lo, hi = problem.band
    band = Band(g * problem.seqlen_q, problem.seqlen_k, g * lo, g * hi)
    columns = -(-band.nk // block_k)
    start = (columns - 1) * block_k
    last = _span(g * start - band.hi, g * band.nk - 1 - band.lo, band.nq, block_q)
    seen = (packed_visits if packed else visits)(problem, block_q, block_k)
    fewest = -(-block_k // page_size)
    total = fewest * (seen.tiles - last) + last * _pages(start, band.nk, page_size)
    period = page_size // math.gcd(page_size, block_k)
    for first in range(min(period, columns - 1)):
        if _pages(first * block_k, (first + 1) * block_k, page_size) > fewest:
            count = -(-(columns - 1 - first) // period)
            total += _visits_of_columns(band, g, block_q, block_k, (first, period, count))
    return total


def _pages(start: int, stop: int, page_size: int) -> int:
    return (stop - 1) // page_size - start // page_size + 1


def _visits_of_columns(band: Band, g: int, block_q: int, block_k: int, columns: tuple[int, int, int]) -> int:
    """Query tiles that visit the whole K/V tiles first, first + period, …, count of them, together."""
    first, period, count = columns
    rows, step, start = -(-band.nq // block_q), g * period * block_k, g * first * block_k
    stop = start + g * block_k - 1
    # K/V tiles that begin before the band leaves the last query
    count = min(count, max(0, (band.nq - 1 + band.hi - start) // step + 1))
    upper = clamped_floor_sum(count, step, stop - band.lo + block_q, block_q, rows)
    return upper - clamped_floor_sum(count, step, start - band.hi, block_q, rows)


def seen_rows(problem: Problem, variant: Variant = DEFAULT) -> tuple[int, int]:
    """(query rows that see a key, key rows that a query sees) of one head."""
    p, mask = problem, variant.blocks
    if mask is None:
        return p.seqlen_q - p.rows_without_keys, p.seqlen_k - p.keys_without_queries
    lo, hi = p.band
    rows = _covered(mask.kept, (mask.block_q, mask.block_k), (p.seqlen_q, p.seqlen_k), (lo, hi))
    turned = [(j, i) for i, j in mask.kept]
    keys = _covered(turned, (mask.block_k, mask.block_q), (p.seqlen_k, p.seqlen_q), (-hi, -lo))
    return rows, keys


def _covered(
    kept: list[tuple[int, int]], block: tuple[int, int], length: tuple[int, int], band: tuple[int, int]
) -> int:
    """Rows with a visible pair in a kept block: the union, block row by block row, of intervals."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for i, j in kept:
        first, stop = j * block[1], min((j + 1) * block[1], length[1])
        top = max(i * block[0], first - band[1])
        bottom = min((i + 1) * block[0], length[0], stop - band[0])
        if top < bottom:
            spans.setdefault(i, []).append((top, bottom))
    count = 0
    for row in spans.values():
        reached = 0
        for top, bottom in sorted(row):
            count += max(0, bottom - max(top, reached))
            reached = max(reached, bottom)
    return count


def visible_pairs(problem: Problem, variant: Variant = DEFAULT) -> int:
    """Pairs that mask and blocks leave visible, over batch and query heads."""
    p = problem
    if p.lengths:
        return sum(visible_pairs(part, variant) for part in p.parts())
    if variant.blocks is not None:
        band = Band(p.seqlen_q, p.seqlen_k, *p.band)
        return p.batch * p.num_heads * _masked_visits(band, variant.blocks, 1, 1).tiles
    return variant.thin(p.visible_pairs)


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
