"""Tile sizes, warps, stages and split lengths of the decode kernels: one table, and the choice from it.

Plain Python, as the IO model's twin takes its tiles from here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from flashbench.flash_configs import MAX_HEAD_DIM, math_of, near, split, widest

__all__ = ["INTERPRETED", "MAX_HEAD_DIM", "TABLE", "DecodeConfig", "Shape", "block_q", "candidates",
           "choose", "keys_per_split", "math_of", "slots", "widest"]  # fmt: skip


@dataclass(frozen=True)
class DecodeConfig:
    """How the decode kernel is launched.

    block_k: keys per tile. ahead: whether a tile's page numbers are read one tile before its keys.
    resident: thread blocks of an SM that the split count is chosen for.
    """

    block_k: int
    num_warps: int
    num_stages: int
    resident: int = 2
    ahead: bool = True


@dataclass(frozen=True)
class Shape:
    """What a configuration depends on.

    math: ``half`` (q in fp16 or bf16), ``tf32`` or ``ieee``. kv_bytes: of one cached number.
    page_size: 0 for a contiguous cache.
    """

    math: str
    head_dim: int
    head_dim_v: int
    kv_bytes: int
    page_size: int = 0

    @property
    def columns(self) -> int:
        """Columns of K and V together, with what their pieces are padded by."""
        dims = self.head_dim, self.head_dim_v
        return sum(width for dim in dims for _, width in split(dim, widest(self.math)))


@dataclass(frozen=True)
class Row:
    """A table row: configs to try in order for head dims (the larger one) up to max_dim.

    cache: ``any``, ``contiguous``, ``small pages`` (smaller than a tile), ``large pages`` or ``fp8``.
    """

    family: str
    math: str
    cache: str
    max_dim: int
    configs: tuple[DecodeConfig, ...]


_C = DecodeConfig
TABLE = (
    Row("any", "half", "fp8", 128, (_C(64, 4, 4), _C(64, 4, 3), _C(32, 4, 2))),
    Row("any", "half", "any", 64, (_C(128, 4, 4), _C(64, 4, 3), _C(32, 4, 2))),
    Row("sm90", "half", "small pages", 128, (_C(64, 4, 3),)),
    Row("sm90", "half", "any", 128, (_C(64, 4, 3, resident=1),)),
    Row("any", "half", "any", 128, (_C(64, 4, 4), _C(64, 4, 3), _C(32, 4, 3), _C(32, 4, 2))),
    Row("any", "half", "any", 256, (_C(32, 4, 4), _C(32, 4, 3), _C(32, 4, 2), _C(16, 4, 1))),
    Row("any", "ieee", "any", 256, (_C(32, 4, 2), _C(16, 4, 1))),
    Row("any", "tf32", "any", 256, (_C(32, 4, 2), _C(16, 4, 1))),
)
"""The first of the card's family or any that fits its shared memory is taken. sm90: timed on an H100 SXM,
head_dim 128."""

SPACE: Mapping[str, Sequence[Any]] = {
    "block_k": (32, 64, 128), "num_warps": (2, 4, 8), "num_stages": (1, 2, 3, 4, 5, 6),
    "resident": (1, 2, 3, 4), "ahead": (True, False),
}  # fmt: skip
"""What ``flashbench tune`` tries in the place of the table; ``ahead`` in pages alone."""

INTERPRETED = DecodeConfig(64, 4, 1)
INTERPRETED_SLOTS = 16
"""Thread blocks that the split count is chosen for where there is no card: two of each of 8 SMs."""

MIN_BLOCK_Q = 16
"""Rows of a query tile: the fewest that tensor cores multiply."""

MAX_BLOCK_Q = {"half": 64, "tf32": 16, "ieee": 16}
"""The most that a tile holds; fp32 takes twice the room."""

MERGE_SPLITS, MERGE_COLUMNS = 64, 32
"""Parts and columns of a tile of the merge kernel at most. One warp takes it, and so waits for no other."""

APPEND_ROWS = 16
"""New rows of one head that a program of the append kernel writes at a time."""

MIN_SPLIT_KEYS = 256
MAX_SPLITS = 256
NEARLY = 1.03
"""Fewer splits are taken for so much more time: each has to be merged."""

START_KEYS = 64
"""What starting a thread block costs, in keys that it could have read meanwhile."""


def block_q(rows: int, math: str) -> int:
    """Rows of a query tile for so many rows (group times seqlen_q) per K/V head."""
    return min(MAX_BLOCK_Q[math], max(MIN_BLOCK_Q, 1 << (rows - 1).bit_length()))


@cache
def choose(shape: Shape, capability: tuple[int, int] | None, limit: int | None) -> DecodeConfig:
    """The kernel's configuration; capability None is the interpreter, limit None is no limit.

    limit: shared memory per block in bytes. Where nothing fits it, the smallest is returned.
    """
    if capability is None:
        return INTERPRETED
    configs = [
        config
        for row in TABLE
        if row.family in (f"sm{capability[0]}{capability[1]}", "any")
        if row.math == shape.math and _serves(row, shape)
        for config in row.configs
    ]
    needs = [shared_bytes(config, shape) for config in configs]
    for config, need in zip(configs, needs, strict=True):
        if limit is None or need <= limit:
            return config
    return configs[needs.index(min(needs))]


def candidates(own: DecodeConfig, shape: Shape) -> list[DecodeConfig]:
    """What the kernel may be tried with: own, then SPACE, the nearest to own first."""
    return near(own, SPACE if shape.page_size else {**SPACE, "ahead": (own.ahead,)})


def _serves(row: Row, shape: Shape) -> bool:
    if row.max_dim < max(shape.head_dim, shape.head_dim_v):
        return False
    if row.cache == "fp8":
        return shape.kv_bytes == 1
    paged = shape.page_size > 0
    small = paged and shape.page_size % row.configs[0].block_k != 0
    return {"any": True, "contiguous": not paged, "small pages": small, "large pages": paged and not small}[
        row.cache
    ]


def shared_bytes(config: DecodeConfig, shape: Shape) -> int:
    """Shared memory per block that the compiled kernel asks for at most.

    The tallest query tile, K and V tiles once per stage, once more where they are converted, P, page numbers,
    row statistics.
    """
    element = 2 if shape.math == "half" else 4
    rows, keys = MAX_BLOCK_Q[shape.math], config.block_k
    converted = element if shape.kv_bytes != element else 0
    resident = rows * shape.columns * element
    streamed = keys * shape.columns
    pages = 4 * keys if shape.page_size else 0
    scratch = 4 * rows * keys + 4 * rows * config.num_warps
    return (
        resident
        + config.num_stages * (streamed * shape.kv_bytes + pages)
        + streamed * converted
        + scratch
        + 2048
    )


def merge_columns(head_dim_v: int) -> int:
    """Columns that a program of the merge kernel takes."""
    return min(MERGE_COLUMNS, 1 << (head_dim_v - 1).bit_length())


def merge_tile(num_splits: int, head_dim_v: int) -> tuple[int, int]:
    """(splits that the merge kernel takes at a time, 16, 32 or 64; columns)."""
    return min(MERGE_SPLITS, max(16, 1 << (num_splits - 1).bit_length())), merge_columns(head_dim_v)


def slots(config: DecodeConfig, sms: int) -> int:
    """Thread blocks that run at once on so many SMs; 0 is the interpreter."""
    return config.resident * sms or INTERPRETED_SLOTS


@cache
def keys_per_split(seqlen_k: int, tiles: int, block_k: int, slots: int, num_splits: int = 0) -> int:
    """Keys of one split, a multiple of block_k: of num_splits equal ones, or with 0 of the best count.

    tiles: query tiles of all K/V heads, each of which is split. slots: thread blocks that run at once.
    The best count is the least within NEARLY of the shortest sum of waves, each as long as a split and its
    start; every split but the last has MIN_SPLIT_KEYS or more.
    """
    blocks = max(1, -(-seqlen_k // block_k))
    if num_splits:
        return -(-blocks // num_splits) * block_k
    most = max(1, min(blocks, seqlen_k // MIN_SPLIT_KEYS, MAX_SPLITS))

    shares = [-(-blocks // count) for count in range(1, most + 1)]
    costs = [
        -(-tiles * count // slots) * (share * block_k + START_KEYS) for count, share in enumerate(shares, 1)
    ]
    best = min(costs)
    return next(share for share, cost in zip(shares, costs, strict=True) if cost <= NEARLY * best) * block_k
