"""Block masks: which blocks of 128 keys a block of 128 queries sees in full, in part or not at all.

A kernel walks the list of full blocks without a mask, that of partial blocks with the bits of each,
and never visits the rest. Source of the idea: Dao 2022 (arXiv:2205.14135), section 3.3; of the two
lists: FlexAttention (arXiv:2412.05496).

Plain numpy, imported where it is used, so that the IO model counts a mask without torch. Builders look at
the blocks on a boundary only: 64k x 64k takes a fraction of a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from flashbench.errors import SpecError

if TYPE_CHECKING:
    from numpy import ndarray as Array

    from flashbench.problem import Problem

SIZE = 128
"""Rows of queries, and of keys, of a block."""

NAMES = ("causal", "window", "butterfly", "document")
"""Block masks by name; beside them ``random:DENSITY`` and the path of an .npz file."""

WORD_BITS = 32
WORDS = SIZE // WORD_BITS
"""Words of a row of a partial block."""

EMPTY, FULL = -1, -2
"""In the table of slots, where a partial block's slot is 0 or more."""

WINDOW = 2 * SIZE
"""Keys on either side of the diagonal that the mask named ``window`` shows."""

DOCUMENTS = 8
"""Documents in a sequence of the mask named ``document``."""

_ONES = 2**WORD_BITS - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Lists:
    """Per block of one side, the blocks of the other that it meets: rows of a sparse matrix (CSR). int32.

    Block b's full blocks are blocks[starts[2b] : starts[2b + 1]], its partial ones go on to starts[2b + 2];
    both ascending. slots: the place of each partial one in ``BlockMask.bits``, FULL for the others.
    """

    starts: Array
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
        return _lists(self.slots)

    @cached_property
    def by_key(self) -> Lists:
        """Per key block its query blocks, for dk and dv."""
        return _lists(self.slots.T)

    @property
    def density(self) -> float:
        """Share of the blocks that are visited, full or partial."""
        return float((self.slots != EMPTY).sum()) / max(1, self.slots.size)

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


def check(text: str) -> None:
    """Raise SpecError unless the text is one of NAMES, ``random:DENSITY`` or names an .npz file."""
    name, colon, density = text.partition(":")
    if text in NAMES or text.endswith(".npz"):
        return
    try:
        right = name == "random" and bool(colon) and 0 <= float(density) <= 1
    except ValueError:
        right = False
    if not right:
        raise SpecError(
            f"block_mask {text!r} is not known; it must be {', '.join(NAMES)}, random:DENSITY with a"
            " density from 0 to 1, or an .npz file"
        )


def of(problem: Problem) -> BlockMask:
    """The block mask that the problem names, without its causal mask and window.

    One name and shape is one mask, whatever the seed of the inputs: the IO model counts the same one.
    Raises SpecError for a file that holds none.
    """
    p = problem
    return _of(p.block_mask, (p.seqlen_q, p.seqlen_k), p.diagonal, _stamp(p.block_mask))


def seen(problem: Problem) -> BlockMask:
    """The same with the causal mask and the window of the problem."""
    p = problem
    mask = _of(p.block_mask, (p.seqlen_q, p.seqlen_k), p.diagonal, _stamp(p.block_mask))
    return _within(mask, p.band) if p.masked else mask


@lru_cache(maxsize=16)
def _within(mask: BlockMask, band: tuple[int, int]) -> BlockMask:
    return mask & banded(*band, mask.seqlen_q, mask.seqlen_k)


def _stamp(name: str) -> tuple[int, int] | None:
    """What changes with a file."""
    if not name.endswith(".npz"):
        return None
    try:
        found = Path(name).stat()
    except OSError as error:
        raise _unreadable(name, error) from None
    return found.st_mtime_ns, found.st_size


@lru_cache(maxsize=16)
def _of(name: str, shape: tuple[int, int], diagonal: int, stamp: object) -> BlockMask:
    seqlen_q, seqlen_k = shape
    if name.endswith(".npz"):
        return from_file(name, *shape)
    if name == "causal":
        return banded(-seqlen_q, diagonal, *shape)
    if name == "window":
        return banded(diagonal - WINDOW, diagonal + WINDOW, *shape)
    if name == "document":
        return documents(cuts(seqlen_k, seed=0), seqlen_q, seqlen_k, diagonal)
    counts = _counts(*shape)
    if name == "butterfly":
        return from_blocks(butterfly(*counts), *shape)
    return from_blocks(random(*counts, float(name.removeprefix("random:")), seed=0), *shape)


def butterfly(query_blocks: int, key_blocks: int) -> Array:
    """Boolean (query blocks, key blocks): numbers that are equal or differ in one binary digit.

    The union of an FFT's stages: Dao et al. 2022, "Pixelated Butterfly" (arXiv:2112.00029).
    """
    import numpy

    differ: Array = numpy.arange(query_blocks)[:, None] ^ numpy.arange(key_blocks)[None, :]
    return differ & (differ - 1) == 0


def random(query_blocks: int, key_blocks: int, density: float, seed: int) -> Array:
    """Boolean (query blocks, key blocks) with that share of True, but at least a diagonal of them."""
    import numpy

    order = numpy.random.RandomState(seed).random_sample((query_blocks, key_blocks))  # frozen for ever
    if order.size:
        rows = numpy.arange(query_blocks)
        order[rows, (rows + key_blocks - query_blocks).clip(0, key_blocks - 1)] = -1
    count = max(query_blocks, round(density * order.size))
    chosen = numpy.zeros(order.size, dtype=bool)
    chosen[order.ravel().argsort(kind="stable")[:count]] = True
    return chosen.reshape(order.shape)


def cuts(seqlen: int, seed: int) -> list[int]:
    """Lengths of up to DOCUMENTS documents, drawn by the seed, that fill the sequence."""
    import numpy

    inside = numpy.random.RandomState(seed).permutation(max(0, seqlen - 1))[: DOCUMENTS - 1] + 1
    edges = [0, *sorted(inside.tolist()), seqlen]
    return [end - start for start, end in zip(edges, edges[1:], strict=False)]


def documents(lengths: list[int], seqlen_q: int, seqlen_k: int, diagonal: int) -> BlockMask:
    """Documents of those lengths, one after another: a query sees the keys of its own.

    Query i stands at key i + diagonal; one before the first key or after the last sees nothing.
    """
    import numpy

    ends = numpy.cumsum(lengths)
    at = numpy.arange(seqlen_q) + diagonal
    number = numpy.searchsorted(ends, at, side="right").clip(0, len(ends) - 1)
    exists = (at >= 0) & (at < seqlen_k)
    return from_intervals((ends - lengths)[number], numpy.where(exists, ends[number], 0), seqlen_q, seqlen_k)


def banded(low: int, high: int, seqlen_q: int, seqlen_k: int) -> BlockMask:
    """Query i sees keys i + low to i + high."""
    import numpy

    rows = numpy.arange(seqlen_q)
    return from_intervals(rows + low, rows + high + 1, seqlen_q, seqlen_k)


def from_intervals(first: Array, stop: Array, seqlen_q: int, seqlen_k: int) -> BlockMask:
    """Query i sees the keys from first[i] to stop[i] - 1, of those that there are."""
    import numpy

    query_blocks, key_blocks = _counts(seqlen_q, seqlen_k)
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

    (seqlen_q, seqlen_k), counts = matrix.shape, _counts(*matrix.shape)
    words = [packed(numpy.zeros((0, SIZE, SIZE), dtype=bool))]
    for block in range(counts[0]):
        rows = numpy.zeros((SIZE, counts[1] * SIZE), dtype=bool)
        part = matrix[block * SIZE : (block + 1) * SIZE]
        rows[: len(part), :seqlen_k] = part
        words.append(packed(rows.reshape(SIZE, counts[1], SIZE).swapaxes(0, 1)))
    everywhere = numpy.ones(counts, dtype=bool)
    return made(~everywhere, everywhere.nonzero(), numpy.concatenate(words), seqlen_q, seqlen_k)


def from_file(path: str, seqlen_q: int, seqlen_k: int) -> BlockMask:
    """Of an .npz file with one boolean matrix, of blocks or of elements. Raises SpecError."""
    import numpy

    try:
        with numpy.load(Path(path), allow_pickle=False) as file:
            arrays = [file[name] for name in file.files]
    except (OSError, ValueError, EOFError, KeyError) as error:
        raise _unreadable(path, error) from None
    blocks, elements = _counts(seqlen_q, seqlen_k), (seqlen_q, seqlen_k)
    if len(arrays) != 1 or arrays[0].dtype != numpy.bool_ or arrays[0].shape not in (blocks, elements):
        found = ", ".join(f"{array.dtype} {array.shape}" for array in arrays) or "nothing"
        raise SpecError(
            f"block_mask {path!r} holds {found}; it must be one boolean matrix of {blocks} blocks or"
            f" {elements} elements"
        )
    (matrix,) = arrays
    return from_elements(matrix) if matrix.shape == elements else from_blocks(matrix, *elements)


def _unreadable(path: str, error: Exception) -> SpecError:
    return SpecError(f"block_mask {path!r} cannot be read ({' '.join(str(error).split())[:100]})")


def made(full: Array, at: tuple[Array, ...], words: Array, seqlen_q: int, seqlen_k: int) -> BlockMask:
    """The mask of blocks seen as far as they exist, and of others by their words.

    full: boolean (query blocks, key blocks). at: (query blocks, key blocks) of the others, in any order;
    words: uint32 (others, SIZE, WORDS), which may turn out to be full or empty.
    """
    import numpy

    query_blocks, key_blocks = _counts(seqlen_q, seqlen_k)
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


def _counts(seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
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


def _lists(slots: Array) -> Lists:
    import numpy

    kinds = slots == FULL, slots >= 0
    starts = numpy.zeros(2 * len(slots) + 1, dtype=numpy.int64)
    starts[1:] = numpy.stack([kind.sum(1) for kind in kinds], 1).ravel().cumsum()
    i, j = (numpy.concatenate(both) for both in zip(*(kind.nonzero() for kind in kinds), strict=True))
    order = numpy.argsort(2 * i + (slots[i, j] >= 0), kind="stable")
    blocks, own = j[order], slots[i, j][order]
    return Lists(starts=starts.astype(numpy.int32), blocks=blocks.astype(numpy.int32), slots=own)


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
