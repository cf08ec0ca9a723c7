"""Block masks as the bundled kernels walk them: tiles of listed blocks, and what of lists and bits.

A query tile (forward, dQ) or key tile (dK, dV) reads where its block's lists begin and end, of each tile
that it visits the block's number, and of a partial block its slot and, per query row of the tile, the words
that hold its keys. Inside a listed block every tile that exists is visited.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from flashbench import named_masks
from flashbench.block_masks import EMPTY, SIZE, WORD_BITS, WORDS
from flashbench.errors import SpecError
from flashbench.problem import Problem

if TYPE_CHECKING:
    from numpy import ndarray as Array

ENTRY = 4
"""Bytes of a number in a list, and of a word of bits."""


class Listed(NamedTuple):
    """Per query head: tiles visited, those of partial blocks, and rows and scores as of ``Visits``."""

    tiles: int
    partial: int
    key_rows: int
    query_rows: int
    scores: int


def listed(problem: Problem, block_q: int, block_k: int) -> Listed:
    """What tiles of that size visit, whichever loop is outside.

    Raises SpecError for tiles that do not divide a block.
    """
    if SIZE % block_q or SIZE % block_k:
        raise SpecError(
            f"tiles of {block_q}x{block_k} do not divide the {SIZE}x{SIZE} blocks of a block mask;"
            " accepted: blocks of whole tiles"
        )
    mask = named_masks.seen(problem)
    rows, columns = _lengths(problem.seqlen_q), _lengths(problem.seqlen_k)
    tall, wide = -(-rows // block_q), -(-columns // block_k)
    some, partial = mask.slots != EMPTY, mask.slots >= 0
    return Listed(
        tiles=int(tall @ some @ wide), partial=int(tall @ partial @ wide),
        key_rows=int(tall @ some @ columns), query_rows=int(rows @ some @ wide),
        scores=int(rows @ some @ columns),
    )  # fmt: skip


def metadata(problem: Problem, tile: tuple[int, int], programs: int) -> dict[str, int]:
    """Bytes of lists and bits that a kernel reads, over all heads; programs: its thread blocks."""
    if not problem.block_mask:
        return {}
    heads, seen = problem.batch * problem.num_heads, listed(problem, *tile)
    return {
        "spans": programs * 3 * ENTRY,
        "blocks": heads * seen.tiles * ENTRY,
        "slots": heads * seen.partial * ENTRY,
        "bits": heads * seen.partial * _words(tile) * ENTRY,
    }


def looked_up(problem: Problem, tile: tuple[int, int]) -> dict[str, int]:
    """The same of a kernel that visits every tile that exists and looks each up in a table of all blocks."""
    if not problem.block_mask:
        return {}
    heads, (block_q, block_k) = problem.batch * problem.num_heads, tile
    every = -(-problem.seqlen_q // block_q) * -(-problem.seqlen_k // block_k)
    bits = listed(problem, *tile).partial * _words(tile)
    return {"slots": heads * every * ENTRY, "bits": heads * bits * ENTRY}


def once(problem: Problem) -> dict[str, int]:
    """Bytes of the mask that any algorithm reads: a number per block met, bits of the partial ones."""
    mask = named_masks.seen(problem)
    rows = int((_lengths(problem.seqlen_q) @ (mask.slots >= 0)).sum())
    return {"blocks": int((mask.slots != EMPTY).sum()) * ENTRY, "bits": rows * WORDS * ENTRY}


def tensor_bytes(problem: Problem) -> dict[str, int]:
    """Bytes of the lists of one side, and of the bits."""
    mask = named_masks.seen(problem)
    blocks, visited = len(mask.slots), int((mask.slots != EMPTY).sum())
    sizes = {"spans": 3 * blocks * ENTRY, "blocks": (visited + 1) * ENTRY, "slots": visited * ENTRY}
    return {**sizes, "bits": int(mask.bits.nbytes)}


def longest(problem: Problem, *, keys_outside: bool) -> int:
    """Most blocks that a block of queries, or of keys, meets."""
    some = named_masks.seen(problem).slots != EMPTY
    return int(some.sum(0 if keys_outside else 1).max(initial=0))


def _lengths(length: int) -> Array:
    """Rows of each block of a sequence."""
    import numpy

    blocks = -(-length // SIZE)
    return (length - SIZE * numpy.arange(blocks)).clip(0, SIZE)


def _words(tile: tuple[int, int]) -> int:
    """Words of bits that a tile reads."""
    block_q, block_k = tile
    return block_q * max(1, block_k // WORD_BITS)
