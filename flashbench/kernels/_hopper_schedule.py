"""Which tiles of queries each persistent program takes, and in which order.

Longest first (Graham's LPT rule): every tile, in order, goes to the program that is free first. The order is
by groups of heads whose K and V stay in L2 together, and inside a group by length, the longest first, so
that the heads of a group stream the same K/V while it is there and the last tiles to start are short.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace

TILE_COST = 1.0
"""What a tile of queries costs beside its K/V tiles, in K/V tiles."""
L2_BYTES = 16 * 2**20
"""K and V of the heads that are walked together: a share of L2, which also holds Q and O on their way."""


@dataclass(frozen=True)
class Shape:
    """What the schedule of one launch depends on."""

    heads: int
    """Of queries, of all batches together."""
    group: int
    """Query heads per K/V head."""
    seqlen_q: int
    seqlen_k: int
    block_m: int
    block_n: int
    causal: bool
    kv_bytes: int
    """Of K and V of one head."""

    @property
    def tiles(self) -> int:
        """Of queries, per head."""
        return -(-self.seqlen_q // self.block_m)

    def blocks(self, tile: int) -> int:
        """K/V tiles that the tile of queries visits; at least one, also where no key is seen."""
        end = self.seqlen_k
        if self.causal:
            end = max(1, min(end, (tile + 1) * self.block_m + self.seqlen_k - self.seqlen_q))
        return -(-end // self.block_n)

    def order(self) -> list[int]:
        """Every tile as head · tiles + tile, in the order to start them."""
        together = self.group * max(1, L2_BYTES // max(1, self.kv_bytes))
        if not self.causal:
            together = 1  # tiles of a head are alike: one head after the other is the most local order
        return [
            head * self.tiles + tile
            for first in range(0, self.heads, together)
            for tile in reversed(range(self.tiles))
            for head in range(first, min(first + together, self.heads))
        ]


@dataclass(frozen=True)
class KeyShape(Shape):
    """As a backward has it, whose programs take tiles of keys. kv_bytes: of what such a tile streams."""

    @property
    def tiles(self) -> int:
        """Of keys, per head (of K/V, as heads counts here)."""
        return -(-self.seqlen_k // self.block_n)

    def blocks(self, tile: int) -> int:
        """Tiles of queries that the tile of keys visits, of all heads of the group; at least one."""
        first = max(0, tile * self.block_n + self.seqlen_q - self.seqlen_k) if self.causal else 0
        return self.group * (-(-self.seqlen_q // self.block_m) - first // self.block_m)

    def order(self) -> list[int]:
        """Every tile as head · tiles + tile, in the order to start them."""
        together = max(1, L2_BYTES // max(1, self.kv_bytes)) if self.causal else 1
        return [
            head * self.tiles + tile
            for first in range(0, self.heads, together)
            for tile in range(self.tiles)
            for head in range(first, min(first + together, self.heads))
        ]


@lru_cache(maxsize=256)
def table(shape: Shape, programs: int) -> tuple[tuple[int, ...], ...]:
    """Rows of one entry per program: K/V tiles in all, its tiles of queries in order, 0 to read past them."""
    programs = max(1, min(programs, shape.heads * shape.tiles))
    costs = [shape.blocks(tile) for tile in range(shape.tiles)]
    free = [(0.0, program) for program in range(programs)]
    heapify(free)
    taken: list[list[int]] = [[] for _ in range(programs)]
    for entry in shape.order():
        load, program = free[0]
        taken[program].append(entry)
        heapreplace(free, (load + costs[entry % shape.tiles] + TILE_COST, program))
    rounds = max(map(len, taken))
    totals = tuple(sum(costs[entry % shape.tiles] for entry in entries) for entries in taken)
    rows = [tuple(entries[r] if r < len(entries) else 0 for entries in taken) for r in range(rounds + 1)]
    return (totals, *rows)


def packed(rows: tuple[tuple[int, ...], ...], tiles: int, heads: int) -> list[list[int]]:
    """A table whose entries tell tile, head and batch without a division: bits 0 to 23, 24 to 39, 40 on.

    tiles: per head; heads: of queries, per batch. Raises ValueError for more than 65536 heads.
    """
    if heads > 2**16:
        raise ValueError(f"num_heads {heads} is more than {2**16}")

    def pack(entry: int) -> int:
        head, tile = divmod(entry, tiles)
        b, h = divmod(head, heads)
        return b << 40 | h << 24 | tile

    return [list(rows[0]), *([pack(entry) for entry in row] for row in rows[1:])]
