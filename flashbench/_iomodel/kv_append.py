"""The bundled Triton kernel that appends to a KV cache (``decode.append``), load by load.

A program takes a few new rows of K and V of one head, reads how long its sequence is and where the rows of
a paged cache lie, and writes those that the cache has room for; into an fp8 cache over a scale. There is no
product in it.
Held to the kernel, traced in Triton's interpreter, by tests/test_decode_append.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashbench import decode_configs
from flashbench._iomodel import sectors
from flashbench._iomodel.tensors import FP32, INT32
from flashbench._iomodel.types import Step


@dataclass(frozen=True, kw_only=True)
class Append:
    """New rows for a cache.

    used: keys that each sequence has. new: rows per sequence and head. capacity: rows that a sequence may
    have; what goes beyond is dropped. dtype_bytes, cache_bytes: of a number that is given and of one that is
    kept (1: fp8, with fp32 scales). page_size: rows of a page, 0: not paged.
    """

    used: tuple[int, ...]
    new: int
    capacity: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype_bytes: int = 2
    cache_bytes: int = 2
    page_size: int = 0


def append(asked: Append) -> Step:
    """What the kernel moves: each new row once and once more into the cache, and what it looks up.

    Of single numbers a whole sector crosses; of a page table each sector that a program looks into.
    """
    a, tiles = asked, range(0, asked.new, decode_configs.APPEND_ROWS)
    programs = len(a.used) * a.num_kv_heads * len(tiles)
    fitting = [max(0, min(a.new, a.capacity - used)) for used in a.used]
    rows = a.num_kv_heads * sum(fitting)
    single = {"seqused_k": programs * INT32}
    if a.cache_bytes == 1:
        single |= {"k_descale": programs * FP32, "v_descale": programs * FP32}
    read = {
        "k_new": rows * a.head_dim * a.dtype_bytes,
        "v_new": rows * a.head_dim_v * a.dtype_bytes,
        **single,
    }
    moved = {name: sectors.alone(count // INT32) for name, count in single.items()}
    if a.page_size:
        read["block_table"] = rows * INT32
        looked = [
            _sectors(used + first, used + min(first + decode_configs.APPEND_ROWS, fits), a.page_size)
            for used, fits in zip(a.used, fitting, strict=True)
            for first in tiles
        ]
        moved["block_table"] = sectors.alone(a.num_kv_heads * sum(looked))
    return Step(
        name="append",
        read=read,
        write={"k": rows * a.head_dim * a.cache_bytes, "v": rows * a.head_dim_v * a.cache_bytes},
        ctas=programs,
        moved=moved,
    )


def _sectors(first: int, stop: int, page_size: int) -> int:
    """Sectors of a page table that hold the pages of rows first..stop."""
    per_sector = sectors.SECTOR // INT32
    if stop <= first:
        return 0
    return (stop - 1) // page_size // per_sector - first // page_size // per_sector + 1
