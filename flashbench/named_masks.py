"""Block masks by name: causal, window, butterfly, document, random:DENSITY, or a file.

Plain numpy, as block_masks.py, which says what a mask is.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import ZipFile

from flashbench import paths
from flashbench.block_masks import (
    SIZE,
    BlockMask,
    banded,
    counts,
    from_blocks,
    from_elements,
    from_intervals,
)
from flashbench.errors import SpecError

if TYPE_CHECKING:
    from numpy import ndarray as Array

    from flashbench.problem import Problem

NAMES = ("causal", "window", "butterfly", "document")
"""Block masks by name; beside them ``random:DENSITY`` and the path of an .npz file."""

WINDOW = 2 * SIZE
"""Keys on either side of the diagonal that the mask named ``window`` shows."""

HEADERS = 2**16
"""Bytes that an archive may have beside its matrix."""

DOCUMENTS = 8
"""Documents in a sequence of the mask named ``document``."""


def is_file(text: str) -> bool:
    """Whether the mask is one of a file."""
    return text.endswith(".npz")


def check(text: str) -> None:
    """Raise SpecError unless the text is one of NAMES, ``random:DENSITY`` or names an .npz file."""
    name, colon, density = text.partition(":")
    if text in NAMES or is_file(text):
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
    if not is_file(name):
        return None
    try:
        found = Path(name).stat()
    except OSError as error:
        raise _unreadable(name, error) from None
    return found.st_mtime_ns, found.st_size


@lru_cache(maxsize=16)
def _of(name: str, shape: tuple[int, int], diagonal: int, stamp: object) -> BlockMask:
    seqlen_q, seqlen_k = shape
    if is_file(name):
        return from_file(name, *shape)
    if name == "causal":
        return banded(-seqlen_q, diagonal, *shape)
    if name == "window":
        return banded(diagonal - WINDOW, diagonal + WINDOW, *shape)
    if name == "document":
        return documents(cuts(seqlen_k, seed=0), seqlen_q, seqlen_k, diagonal)
    blocks = counts(*shape)
    if name == "butterfly":
        return from_blocks(butterfly(*blocks), *shape)
    return from_blocks(random(*blocks, float(name.removeprefix("random:")), seed=0), *shape)


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
    return [end - start for start, end in pairwise(edges)]


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


def from_file(path: str, seqlen_q: int, seqlen_k: int) -> BlockMask:
    """Of an .npz file with one boolean matrix, of blocks or of elements. Raises SpecError."""
    import numpy

    try:
        # numpy.load takes other files, too, whatever they are called
        with paths.opened(path) as packed, ZipFile(packed) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
            if unpacked > seqlen_q * seqlen_k + HEADERS:
                raise ValueError(
                    f"it unpacks to {unpacked} bytes, more than {seqlen_q} x {seqlen_k} elements"
                )
            broken = archive.testzip()
        if broken is not None:
            raise ValueError(f"{broken} is damaged")
        with numpy.load(Path(path), allow_pickle=False) as file:
            arrays = [file[name] for name in file.files]
    except Exception as error:  # a damaged archive raises whatever it likes
        raise _unreadable(path, error) from None
    blocks, elements = counts(seqlen_q, seqlen_k), (seqlen_q, seqlen_k)
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
