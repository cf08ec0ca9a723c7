"""How an algorithm is run where it has a choice: packing, splits, pages, sparsity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from flashbench.errors import SpecError

MAX_SPLITS = 256
"""Most splits that flash-attention's merge takes."""

AUTO = 0
"""num_splits that flash-attention's heuristic chooses, which needs a device."""


@dataclass(frozen=True)
class BlockMask:
    """Which blocks of the score matrix are computed; the same for every batch and head.

    block_q, block_k: rows of Q and of K/V per block, multiples of the kernel's tile. rows: per block
    of queries, whether each block of keys is kept. Source: FlashAttention (arXiv:2205.14135),
    section 3.3.
    """

    block_q: int
    block_k: int
    rows: tuple[tuple[bool, ...], ...]

    @classmethod
    def of(cls, block_q: int, block_k: int, rows: Iterable[Sequence[object]]) -> BlockMask:
        """From any nested sequence of truth values."""
        return cls(block_q, block_k, tuple(tuple(bool(kept) for kept in row) for row in rows))

    def __post_init__(self) -> None:
        if self.block_q < 1 or self.block_k < 1:
            raise SpecError(f"block mask of {self.block_q}x{self.block_k}: a block has 1 row or more")
        if len({len(row) for row in self.rows}) > 1:
            raise SpecError("block mask: the rows differ in length; accepted: a rectangle")

    @cached_property
    def kept(self) -> list[tuple[int, int]]:
        """(block of queries, block of keys) of every block that is kept."""
        return [(i, j) for i, row in enumerate(self.rows) for j, kept in enumerate(row) if kept]

    @cached_property
    def transposed(self) -> BlockMask:
        """The same mask by keys."""
        return BlockMask(self.block_k, self.block_q, tuple(zip(*self.rows, strict=True)))

    def entries(self, length: int, tile: int) -> int:
        """Entries of the lists that the outer tiles of one head read: a count, and each kept block.

        length, tile: rows of the outer side (by keys: of the transposed mask), and rows per tile.
        """
        listed = sum(-(-min(self.block_q, length - i * self.block_q) // tile) for i, _ in self.kept)
        return -(-length // tile) + listed

    def check(self, nq: int, nk: int, tile_q: int, tile_k: int) -> None:
        """Raise SpecError unless the blocks cover nq x nk and are made of whole tiles."""
        shape = (len(self.rows), len(self.rows[0]) if self.rows else 0)
        needed = (-(-nq // self.block_q), -(-nk // self.block_k))
        if shape != needed:
            raise SpecError(
                f"block mask of {shape[0]}x{shape[1]} blocks: {nq}x{nk} scores in blocks of"
                f" {self.block_q}x{self.block_k} have {needed[0]}x{needed[1]}"
            )
        if self.block_q % tile_q or self.block_k % tile_k:
            raise SpecError(
                f"block mask with blocks of {self.block_q}x{self.block_k}: tiles of {tile_q}x{tile_k} do not"
                " divide them; accepted: blocks of whole tiles"
            )


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Choices that are the algorithm's, not the problem's.

    pack_gqa: the query heads of a K/V head share a tile (None: as the published code does).
    num_splits: K/V is split over so many thread blocks, whose results a second kernel merges
    (AUTO, 0: flash-attention's heuristic for the device). page_size: rows of K/V per page of a paged
    cache, 0: not paged. density: share of the visible tiles that are computed, spread evenly, in
    (0, 1]; blocks: exactly which. cache_bytes: of a cached number of K and V where it is not of q's dtype
    (1: fp8, with fp32 scales), 0: it is. announced: the keys that splits are counted for, where a cache may
    hold more; 0: the longest sequence's. num_splits, page_size and pack_gqa concern the forward.

    Raises SpecError for values out of range.
    """

    pack_gqa: bool | None = None
    num_splits: int = 1
    page_size: int = 0
    density: float = 1.0
    blocks: BlockMask | None = None
    cache_bytes: int = 0
    announced: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.num_splits <= MAX_SPLITS:
            raise SpecError(
                f"num_splits {self.num_splits} is out of range; it must be 0 (auto) to {MAX_SPLITS}"
            )
        if self.page_size < 0:
            raise SpecError(f"page_size {self.page_size} is out of range; it must be 1 or more, or 0")
        if self.announced < 0:
            raise SpecError(f"announced {self.announced} is out of range; it must be 1 or more, or 0")
        if not 0 < self.density <= 1:
            raise SpecError(f"density {self.density} is out of range; it must be above 0 and at most 1")
        if self.blocks is not None and (self.density != 1 or self.pack_gqa or self.page_size):
            raise SpecError("a block mask goes with neither a density, nor packed heads, nor pages")

    @cached_property
    def given(self) -> tuple[str, ...]:
        """The names of the options that differ from their defaults."""
        return tuple(
            name for name in self.__dataclass_fields__ if getattr(self, name) != getattr(DEFAULT, name)
        )

    def only(self, names: Sequence[str]) -> Variant:
        """The same with the other options at their defaults."""
        kept = [name for name in self.given if name in names]
        if len(kept) == len(self.given):
            return self
        return Variant(**{name: getattr(self, name) for name in kept}) if kept else DEFAULT

    def packing(self, packs: bool) -> Variant:
        """The same with the heads of a group packed, or each in tiles of its own."""
        return self._packed if packs else self._unpacked

    @cached_property
    def _packed(self) -> Variant:
        return replace(self, pack_gqa=True)

    @cached_property
    def _unpacked(self) -> Variant:
        return replace(self, pack_gqa=False)

    def thin(self, count: int) -> int:
        """That share of a count, rounded up."""
        return count if self.density == 1 else math.ceil(count * Fraction(str(self.density)))


DEFAULT = Variant()
