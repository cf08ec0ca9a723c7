"""Block masks: which blocks of 128 keys a block of 128 queries sees in full, in part or not at all.

A kernel walks the list of full blocks without a mask, that of partial blocks with the bits of each,
and never visits the rest. Source of the idea: Dao 2022 (arXiv:2205.14135), section 3.3; of the two
lists: FlexAttention (arXiv:2412.05496).

Plain numpy, imported where it is used, so that the IO model counts a mask without torch. What is made of
intervals is looked into at the blocks on a boundary only: 64k x 64k takes a fraction of a second. The masks
that have a name are in named_masks.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpy import ndarray as Array

SIZE = 128
"""Rows of queries, and of keys, of a block."""

WORD_BITS = 32
WORDS = SIZE // WORD_BITS
"""Words of a row of a partial block."""

EMPTY, FULL = -1, -2
"""In the table of slots, where a partial block's slot is 0 or more."""

_ONES = 2**WORD_BITS - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Lists:
    """Per block of one side, the blocks of the other that it meets: rows of a sparse matrix (CSR). int32.

    spans (blocks, 3): in rows of listed blocks, SIZE each, where block b's list begins, where its partial
    blocks begin, after the full ones, and where it ends: with the last row that exists. blocks: the listed
    numbers, full and partial ones of a list ascending; a 0 at the end is for who looks one ahead. slots: the
    place of each partial one in ``BlockMask.bits``, FULL for the others.
    """

    spans: Array
    blocks: Array
    slots: Array


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockMask:
    """One mask for every batch and head, in blocks of SIZE queries and keys.

    slots: int32 (query blocks, key blocks), EMPTY, FULL or a partial block's place in bits, row by row. A
    block is full if it lies in the matrix whole and is seen whole, so that what its list holds needs no
    mask of any kind. bits: int32 (partial blocks, SIZE, WORDS); bit t of word w of a row is 1 where the
    row's query sees key 32 * w + t of the block, 0 beyond the sequence.
    """

    seqlen_q: int
    seqlen_k: int
    slots: Array
    bits: Array

    @cached_property
    def by_query(self) -> Lists:
        """Per query block its key blocks, for the forward and dq."""
        return _lists(self.slots, self.seqlen_k)

    @cached_property
    def by_key(self) -> Lists:
        """Per key block its query blocks, for dk and dv."""
        return _lists(self.slots.T, self.seqlen_q)

    @property
    def density(self) -> float:
        """Share of the blocks that are visited, full or partial."""
        return float((self.slots != EMPTY).sum() / max(1, self.slots.size))

    @cached_property
    def grows(self) -> bool:
        """Whether later query blocks have clearly more to do, so that they should start first."""
        visited = (self.slots != EMPTY).sum(1)
        half = len(visited) // 2
        return bool(visited[half:].sum() > 2 * visited[:half].sum())

    @cached_property
    def visible_pairs(self) -> int:
        """(query, key) pairs that the mask shows."""
        import numpy

        ones = numpy.unpackbits(self.bits.view(numpy.uint8).ravel())
        return int((self.slots == FULL).sum()) * SIZE * SIZE + int(ones.sum(dtype=numpy.int64))

    @cached_property
    def queries_with_keys(self) -> int:
        """Query rows that see a key."""
        return _covered(self.slots, self.bits.any(2))

    @cached_property
    def keys_with_queries(self) -> int:
        """Key rows that a query sees."""
        import numpy

        words = numpy.ascontiguousarray(numpy.bitwise_or.reduce(self.bits, axis=1))
        seen = numpy.unpackbits(words.view(numpy.uint8), axis=1, bitorder="little")
        turned = self.slots.T
        return _covered(turned, seen.astype(bool)[turned[turned >= 0]])

    def __and__(self, other: BlockMask) -> BlockMask:
        """What both show."""
        import numpy

        either = (self.slots != EMPTY) & (other.slots != EMPTY)
        full = (self.slots == FULL) & (other.slots == FULL)
        at = (either & ~full).nonzero()
        one, two = (_words_at(mask, at) for mask in (self, other))
        return made(full, at, numpy.bitwise_and(one, two), self.seqlen_q, self.seqlen_k)


def banded(low: int, high: int, seqlen_q: int, seqlen_k: int) -> BlockMask:
    """Query i sees keys i + low to i + high."""
    import numpy

    rows = numpy.arange(seqlen_q)
    return from_intervals(rows + low, rows + high + 1, seqlen_q, seqlen_k)


def from_intervals(first: Array, stop: Array, seqlen_q: int, seqlen_k: int) -> BlockMask:
    """Query i sees the keys from first[i] to stop[i] - 1, of those that there are."""
    import numpy

    query_blocks, key_blocks = counts(seqlen_q, seqlen_k)
    first, stop = first.clip(0, seqlen_k), stop.clip(0, seqlen_k)
    some = first < stop
    spans = numpy.zeros((2, query_blocks * SIZE), dtype=numpy.int64)
    spans[:, :seqlen_q] = numpy.where(some, first, 0), numpy.where(some, stop, 0)
    first, stop = spans.reshape(2, query_blocks, SIZE)
    left = numpy.arange(key_blocks) * SIZE
    full = (first.max(1)[:, None] <= left) & (stop.min(1)[:, None] >= left + SIZE)
    begin = numpy.where(first < stop, first, seqlen_k).min(1)
    met = (begin[:, None] < left + SIZE) & (stop.max(1)[:, None] > left)
    at = (met & ~full).nonzero()
    return made(full, at, _interval_words(first, stop, at), seqlen_q, seqlen_k)


def from_blocks(blocks: Array, seqlen_q: int, seqlen_k: int) -> BlockMask:
    """The mask of whole blocks: boolean (query blocks, key blocks)."""
    import numpy

    nowhere = numpy.zeros((2, 0), dtype=numpy.int64)
    return made(blocks, tuple(nowhere), packed(numpy.zeros((0, SIZE, SIZE), dtype=bool)), seqlen_q, seqlen_k)


def from_elements(matrix: Array) -> BlockMask:
    """The mask of a boolean (seqlen_q, seqlen_k) matrix."""
    import numpy

    (seqlen_q, seqlen_k), shape = matrix.shape, counts(*matrix.shape)
    words = [packed(numpy.zeros((0, SIZE, SIZE), dtype=bool))]
    for block in range(shape[0]):
        rows = numpy.zeros((SIZE, shape[1] * SIZE), dtype=bool)
        part = matrix[block * SIZE : (block + 1) * SIZE]
        rows[: len(part), :seqlen_k] = part
        words.append(packed(rows.reshape(SIZE, shape[1], SIZE).swapaxes(0, 1)))
    everywhere = numpy.ones(shape, dtype=bool)
    return made(~everywhere, everywhere.nonzero(), numpy.concatenate(words), seqlen_q, seqlen_k)


def made(full: Array, at: tuple[Array, ...], words: Array, seqlen_q: int, seqlen_k: int) -> BlockMask:
    """The mask of blocks seen as far as they exist, and of others by their words.

    full: boolean (query blocks, key blocks). at: (query blocks, key blocks) of the others, in any order;
    words: uint32 (others, SIZE, WORDS), which may turn out to be full or empty.
    """
    import numpy

    query_blocks, key_blocks = counts(seqlen_q, seqlen_k)
    # the last blocks may reach beyond the sequences, and are masked then
    whole = numpy.arange(query_blocks)[:, None] < seqlen_q // SIZE
    whole = whole & (numpy.arange(key_blocks)[None, :] < seqlen_k // SIZE)
    cut = (full & ~whole).nonzero()
    rows = numpy.arange(query_blocks * SIZE).reshape(query_blocks, SIZE)
    existing = _interval_words(numpy.zeros_like(rows), numpy.where(rows < seqlen_q, seqlen_k, 0), cut)
    i, j = (numpy.concatenate(both) for both in zip(at, cut, strict=True))
    words = numpy.concatenate((words, existing))
    every, some = (words == _ONES).all((1, 2)), words.any((1, 2))
    slots = numpy.where(full & whole, FULL, EMPTY).astype(numpy.int32)
    slots[i[every], j[every]] = FULL
    partial = numpy.flatnonzero(some & ~every)
    partial = partial[numpy.lexsort((j[partial], i[partial]))]
    slots[i[partial], j[partial]] = numpy.arange(len(partial))
    bits = numpy.ascontiguousarray(words[partial]).view(numpy.int32)
    return BlockMask(seqlen_q=seqlen_q, seqlen_k=seqlen_k, slots=slots, bits=bits)


def packed(tiles: Array) -> Array:
    """Boolean (n, SIZE, SIZE) as uint32 (n, SIZE, WORDS), the lowest bit first."""
    import numpy

    return numpy.ascontiguousarray(numpy.packbits(tiles, axis=-1, bitorder="little")).view("<u4")


def counts(seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """(query blocks, key blocks)."""
    return -(-seqlen_q // SIZE), -(-seqlen_k // SIZE)


def _interval_words(first: Array, stop: Array, at: tuple[Array, ...]) -> Array:
    """Of rows (query blocks, SIZE) that see keys first to stop, the words of the blocks there."""
    import numpy

    i, j = at
    left = (j * SIZE)[:, None, None] + numpy.arange(WORDS) * WORD_BITS
    one = numpy.uint64(1)
    below = [
        (one << (edge[i][:, :, None] - left).clip(0, WORD_BITS).astype(numpy.uint64)) - one
        for edge in (first, stop)
    ]
    return (below[0] ^ below[1]).astype(numpy.uint32)


def _words_at(mask: BlockMask, at: tuple[Array, ...]) -> Array:
    """uint32 words of blocks that are full or partial."""
    import numpy

    slots = mask.slots[at]
    words = numpy.full((len(slots), SIZE, WORDS), _ONES, dtype=numpy.uint32)
    words[slots >= 0] = mask.bits.view(numpy.uint32)[slots[slots >= 0]]
    return words


def _lists(slots: Array, length: int) -> Lists:
    """Of a table by the side of its rows; length: of the other side."""
    import numpy

    kinds = slots == FULL, slots >= 0
    starts = numpy.zeros(2 * len(slots) + 1, dtype=numpy.int64)
    starts[1:] = numpy.stack([kind.sum(1) for kind in kinds], 1).ravel().cumsum()
    i, j = (numpy.concatenate(both) for both in zip(*(kind.nonzero() for kind in kinds), strict=True))
    order = numpy.argsort(2 * i + (slots[i, j] >= 0), kind="stable")
    blocks, own = numpy.append(j[order], 0), slots[i, j][order]
    spans = SIZE * numpy.stack((starts[:-1:2], starts[1::2], starts[2::2]), 1)
    spans[:, 2] -= (slots[:, -1:] >= 0).any(1) * (-length % SIZE)  # what the last block lacks
    return Lists(spans=spans.astype(numpy.int32), blocks=blocks.astype(numpy.int32), slots=own)


def _covered(slots: Array, seen: Array) -> int:
    """Rows that see something: SIZE of a block with a full one, else the union over its partial ones.

    seen: boolean (partial blocks, SIZE), in the order of the table's rows.
    """
    import numpy

    rows = numpy.repeat((slots == FULL).any(1)[:, None], SIZE, axis=1)
    own = (slots >= 0).nonzero()[0]
    found, first = numpy.unique(own, return_index=True)
    if len(found):
        rows[found] |= numpy.logical_or.reduceat(seen, first, axis=0)
    return int(rows.sum())
