"""What crosses between SM and L2 in whole sectors, beside a walk over addresses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashbench._iomodel import sectors
from flashbench.devices import find
from flashbench.iomodel import Variant, estimate
from flashbench.problem import Problem

H100 = find("h100-sxm")


def walked(count: int, length: int, tile: int) -> int:
    """Sectors that each tile's rows of each vector touch."""
    touched = 0
    for vector in range(count):
        for first in range(0, length, tile):
            rows = range(first, min(first + tile, length))
            touched += len({(vector * length + row) * 4 // sectors.SECTOR for row in rows})
    return touched * sectors.SECTOR


@given(st.integers(0, 40), st.integers(1, 300), st.sampled_from([8, 16, 64, 128]))
def test_vectors_take_the_sectors_that_a_walk_over_them_touches(count: int, length: int, tile: int) -> None:
    assert sectors.vectors(count, length, tile) == walked(count, length, tile)


def decode(**changes: object) -> Problem:
    shape = {"batch": 16, "num_heads": 32, "num_kv_heads": 8, "seqlen_q": 1, "seqlen_k": 8192,
             "head_dim": 128, "head_dim_v": 128, "dtype": "bf16", "causal": False}  # fmt: skip
    return Problem(**{**shape, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("page_size", [16, 64, 256])
def test_of_a_page_table_each_sector_crosses_once(page_size: int) -> None:
    """8 pages of a sector, however often their entries are looked up; splits begin at a sector's edge."""
    p = decode(seqlen_k=16384)
    tiles = {"fwd_block_q": 16, "fwd_block_k": 64, "split_block_q": 16, "split_block_k": 8192}
    row = estimate("flash-decode", p, "fwd", tiles=tiles, variant=Variant(page_size=page_size), device=H100)
    assert row.steps[0].moved["block_table"] == 16 * 8 * 16384 // page_size * 4


def test_boxes_of_tma_count_whole() -> None:
    """One query a head: of 128 rows in its two boxes 127 are zeros."""
    (step,) = estimate("flash-v3-gluon", decode(), "fwd", device=H100).steps
    assert step.moved["q"] == 128 * step.read["q"]
    (whole,) = estimate("flash-v3-gluon", decode(seqlen_q=8192), "fwd", device=H100).steps
    assert {name: whole.moved[name] for name in "qkv"} == {name: whole.read[name] for name in "qkv"}
