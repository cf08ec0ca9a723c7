"""Block masks: which blocks of 128 keys a block of 128 queries sees in full, in part or not at all.

A kernel walks the list of full blocks without a mask, that of partial blocks with the bits of each,
and never visits the rest. Source of the idea: Dao 2022 (arXiv:2205.14135), section 3.3; of the two
lists: FlexAttention (arXiv:2412.05496).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashbench.errors import SpecError
from flashbench.problem import BLOCK_MASK_SIZE, Problem

WORD_BITS = 32
EMPTY, FULL = -1, -2
"""In the table of slots, where a partial block's slot is 0 or more."""

WINDOW = 2 * BLOCK_MASK_SIZE
"""Keys on either side of the diagonal that the mask named ``window`` shows."""

DOCUMENTS = 8
"""Documents in a sequence of the mask named ``document``."""

Visible = Callable[[Tensor, Tensor], Tensor]
"""visible(rows (n, 1), columns (1, m)) → boolean (n, m): whether a query sees a key."""


@dataclass(frozen=True, kw_only=True)
class Lists:
    """Per block of one side, the blocks of the other that it meets: rows of a sparse matrix (CSR).

    Block b's full blocks are full[full_starts[b] : full_starts[b + 1]], ascending; its partial ones
    likewise, and slots has the place of each partial one in ``BlockMask.bits``. All int32.
    """

    full_starts: Tensor
    full: Tensor
    partial_starts: Tensor
    partial: Tensor
    slots: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockMask:
    """One mask for every batch and head, in blocks of ``size`` queries and keys.

    by_query: per query block its key blocks, for the forward and dq; by_key: per key block its query
    blocks, for dk and dv. bits: int32 (partial blocks, size, size / 32), in by_query's order; bit t of
    word w of a row is 1 where the row's query sees key 32 * w + t of the block. Bits beyond the
    sequence are 0; a block is full if every key that exists is seen by every query that exists.
    """

    seqlen_q: int
    seqlen_k: int
    by_query: Lists
    by_key: Lists
    bits: Tensor
    size: int = BLOCK_MASK_SIZE

    @property
    def density(self) -> float:
        """Share of the blocks that are visited, full or partial."""
        visited = len(self.by_query.full) + len(self.by_query.partial)
        return visited / float(self._slots.numel())

    @cached_property
    def _slots(self) -> Tensor:
        """(query blocks, key blocks) int64: EMPTY, FULL or the slot of a partial block."""
        lists, device = self.by_query, self.bits.device
        table = torch.full((len(lists.full_starts) - 1, -(-self.seqlen_k // self.size)), EMPTY, device=device)
        blocks = torch.arange(len(table), device=device)
        for starts, keys, what in (
            (lists.full_starts, lists.full, torch.full_like(lists.full, FULL)),
            (lists.partial_starts, lists.partial, lists.slots),
        ):
            table[blocks.repeat_interleave(starts.diff().long()), keys.long()] = what.long()
        return table

    def dense(self, rows: Tensor | None = None, columns: Tensor | None = None) -> Tensor:
        """Boolean (rows, columns), True where a query sees a key; all of them, or of those int64 numbers."""
        device = self.bits.device
        rows = torch.arange(self.seqlen_q, device=device) if rows is None else rows
        columns = torch.arange(self.seqlen_k, device=device) if columns is None else columns
        slots = self._slots[rows // self.size][:, columns // self.size]
        seen = slots == FULL
        if len(self.bits):
            inside = columns % self.size
            words = self.bits[slots.clamp_min(0), (rows % self.size)[:, None], inside // WORD_BITS]
            seen |= (slots >= 0) & (words >> inside % WORD_BITS & 1).bool()
        return seen


def build(problem: Problem, device: str, seed: int) -> BlockMask:
    """The block mask that the problem names. Raises SpecError for a file that holds none."""
    p, name = problem, problem.block_mask
    shape = p.seqlen_q, p.seqlen_k
    shift = p.diagonal
    if name.endswith(".npz"):
        return from_file(name, *shape, device)
    if name == "butterfly":
        return from_blocks(butterfly(*_counts(*shape)), *shape, device)
    if name == "causal":
        return from_elements(lambda i, j: j <= i + shift, *shape, device)
    if name == "window":
        return from_elements(lambda i, j: (i + shift - j).abs() <= WINDOW, *shape, device)
    if name == "document":
        return from_elements(document(_cuts(p.seqlen_k, seed), p.seqlen_k, shift, device), *shape, device)
    return from_blocks(random(*_counts(*shape), float(name.removeprefix("random:")), seed), *shape, device)


def butterfly(query_blocks: int, key_blocks: int) -> Tensor:
    """Boolean (query blocks, key blocks): numbers that are equal or differ in one binary digit.

    The union of an FFT's stages: Dao et al. 2022, "Pixelated Butterfly" (arXiv:2112.00029).
    """
    differ = torch.arange(query_blocks)[:, None] ^ torch.arange(key_blocks)[None, :]
    return differ & (differ - 1) == 0


def random(query_blocks: int, key_blocks: int, density: float, seed: int) -> Tensor:
    """Boolean (query blocks, key blocks) with that share of True, but at least a diagonal of them."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(query_blocks, key_blocks, generator=generator)
    rows = torch.arange(query_blocks)
    order[rows, (rows + key_blocks - query_blocks).clamp(0, key_blocks - 1)] = -1
    count = max(query_blocks, round(density * order.numel()))
    chosen = torch.zeros(order.numel(), dtype=torch.bool)
    chosen[order.flatten().argsort()[:count]] = True
    return chosen.view_as(order)


def document(lengths: list[int], seqlen_k: int, shift: int, device: str) -> Visible:
    """Documents of those lengths, one after another: a query sees the keys of its own.

    Query i stands at key i + shift; one before the first key sees nothing.
    """
    ends = torch.tensor(lengths, device=device).cumsum(0)
    assert int(ends[-1]) == seqlen_k, "documents fill the sequence"

    def visible(rows: Tensor, columns: Tensor) -> Tensor:
        at = rows + shift
        same = torch.bucketize(at, ends, right=True) == torch.bucketize(columns, ends, right=True)
        return same & (at >= 0)

    return visible


def from_elements(visible: Visible, seqlen_q: int, seqlen_k: int, device: str | torch.device) -> BlockMask:
    """The mask of a function of query and key numbers, evaluated a block of queries at a time."""
    query_blocks, key_blocks = _counts(seqlen_q, seqlen_k)
    size = BLOCK_MASK_SIZE
    columns = torch.arange(key_blocks * size, device=device)[None, :]
    inside = columns < seqlen_k
    slots = torch.full((query_blocks, key_blocks), EMPTY)
    tiles: list[Tensor] = []
    for block in range(query_blocks):
        rows = torch.arange(block * size, (block + 1) * size, device=device)[:, None]
        exists = inside & (rows < seqlen_q)
        seen = visible(rows.clamp_max(seqlen_q - 1), columns.clamp_max(seqlen_k - 1)) & exists
        seen, exists = (_tiles(x.expand(size, key_blocks * size)) for x in (seen, exists))
        full = (seen == exists).flatten(1).all(1)
        partial = seen.flatten(1).any(1) & ~full
        slots[block, full.cpu()] = FULL
        slots[block, partial.cpu()] = 0
        tiles.append(seen[partial])
    return _mask(slots, torch.cat(tiles), seqlen_q, seqlen_k, device)


def from_blocks(blocks: Tensor, seqlen_q: int, seqlen_k: int, device: str | torch.device) -> BlockMask:
    """The mask of whole blocks: boolean (query blocks, key blocks)."""
    slots = torch.where(blocks.cpu(), FULL, EMPTY)
    none = torch.zeros(0, BLOCK_MASK_SIZE, BLOCK_MASK_SIZE, dtype=torch.bool, device=device)
    return _mask(slots, none, seqlen_q, seqlen_k, device)


def from_flex(mask: Any) -> BlockMask:
    """Of a ``torch.nn.attention.flex_attention.BlockMask``, its mask_mod evaluated on partial blocks only.

    Raises ValueError for one with blocks other than 128 x 128 or of more than one batch or head.
    """
    size = BLOCK_MASK_SIZE
    if tuple(mask.BLOCK_SIZE) != (size, size):
        raise ValueError(f"block_mask has blocks of {tuple(mask.BLOCK_SIZE)}; ({size}, {size}) is taken")
    if tuple(mask.kv_indices.shape[:2]) != (1, 1):
        raise ValueError(
            f"block_mask is of {tuple(mask.kv_indices.shape[:2])} batches and heads; (1, 1) is taken"
        )
    seqlen_q, seqlen_k = mask.seq_lengths
    slots = torch.full(_counts(seqlen_q, seqlen_k), EMPTY)
    for counts, indices, what in (
        (mask.kv_num_blocks, mask.kv_indices, 0),
        (mask.full_kv_num_blocks, mask.full_kv_indices, FULL),
    ):
        for block, count in enumerate(counts[0, 0].tolist() if counts is not None else ()):
            slots[block, indices[0, 0, block, :count].long().cpu()] = what
    at = (slots == 0).nonzero().to(mask.kv_indices.device)
    offsets = torch.arange(size, device=at.device)
    rows, columns = at[:, :1] * size + offsets, at[:, 1:] * size + offsets
    of_columns = torch.vmap(mask.mask_mod, in_dims=(None, None, None, 0))
    of_tile = torch.vmap(of_columns, in_dims=(None, None, 0, None))
    zero = torch.zeros((), dtype=torch.int64, device=at.device)
    tiles = torch.vmap(of_tile, in_dims=(None, None, 0, 0))(
        zero, zero, rows.clamp_max(seqlen_q - 1), columns.clamp_max(seqlen_k - 1)
    )
    tiles = tiles & (rows < seqlen_q)[:, :, None] & (columns < seqlen_k)[:, None, :]
    return _mask(slots, tiles, seqlen_q, seqlen_k, at.device)


def from_file(path: str, seqlen_q: int, seqlen_k: int, device: str) -> BlockMask:
    """Of an .npz file with one boolean matrix, of blocks or of elements. Raises SpecError."""
    import numpy

    label = f"block_mask {path!r}"
    try:
        with numpy.load(Path(path), allow_pickle=False) as file:
            arrays = [file[name] for name in file.files]
    except (OSError, ValueError, EOFError, KeyError) as error:
        raise SpecError(f"{label} cannot be read ({' '.join(str(error).split())[:100]})") from None
    blocks, elements = _counts(seqlen_q, seqlen_k), (seqlen_q, seqlen_k)
    if len(arrays) != 1 or arrays[0].dtype != numpy.bool_ or arrays[0].shape not in (blocks, elements):
        found = ", ".join(f"{array.dtype} {array.shape}" for array in arrays) or "nothing"
        raise SpecError(
            f"{label} holds {found}; it must be one boolean matrix of {blocks} blocks or {elements} elements"
        )
    matrix = torch.from_numpy(arrays[0]).to(device)
    if arrays[0].shape == elements:
        return from_elements(lambda i, j: matrix[i, j], seqlen_q, seqlen_k, device)
    return from_blocks(matrix, seqlen_q, seqlen_k, device)


def _counts(seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    return -(-seqlen_q // BLOCK_MASK_SIZE), -(-seqlen_k // BLOCK_MASK_SIZE)


def _cuts(seqlen: int, seed: int) -> list[int]:
    """Lengths of up to DOCUMENTS documents, drawn by the seed, that fill the sequence."""
    generator = torch.Generator().manual_seed(seed)
    cuts = (torch.randperm(seqlen - 1, generator=generator)[: DOCUMENTS - 1] + 1).sort().values.tolist()
    return [end - start for start, end in zip([0, *cuts], [*cuts, seqlen], strict=True)]


def _tiles(block: Tensor) -> Tensor:
    """(rows of a block, columns) as (column blocks, rows, columns of a block)."""
    return block.unflatten(1, (-1, BLOCK_MASK_SIZE)).transpose(0, 1)


def _mask(
    slots: Tensor, tiles: Tensor, seqlen_q: int, seqlen_k: int, device: str | torch.device
) -> BlockMask:
    """From the table of slots (any number for a partial block) and the partial blocks in its order."""
    partial = slots >= 0
    slots = slots.clone()
    slots[partial] = torch.arange(int(partial.sum()))
    return BlockMask(
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        by_query=_lists(slots, device),
        by_key=_lists(slots.T, device),
        bits=_packed(tiles),
    )


def _lists(slots: Tensor, device: str | torch.device) -> Lists:
    def csr(chosen: Tensor) -> tuple[Tensor, Tensor]:
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), chosen.sum(1).cumsum(0)))
        return ints(starts), ints(chosen.nonzero()[:, 1])

    def ints(x: Tensor) -> Tensor:
        return x.to(device, torch.int32)

    full_starts, full = csr(slots == FULL)
    partial_starts, partial = csr(slots >= 0)
    return Lists(
        full_starts=full_starts,
        full=full,
        partial_starts=partial_starts,
        partial=partial,
        slots=ints(slots[slots >= 0]),
    )


def _packed(tiles: Tensor) -> Tensor:
    """Boolean (n, rows, columns) as int32 (n, rows, columns / 32), the lowest bit first."""
    words = tiles.unflatten(2, (-1, WORD_BITS)).long()
    values = (words << torch.arange(WORD_BITS, device=tiles.device)).sum(-1)
    return torch.where(values >= 2 ** (WORD_BITS - 1), values - 2**WORD_BITS, values).to(torch.int32)
