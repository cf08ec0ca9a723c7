"""flash-v3's forward moves to the byte what its model says: a walk over its schedule, box by box.

The kernel has no interpreted form. What it loads is decided by the schedule and the descriptors that the
host makes, which are the real ones here; the walk does with them what ``produce`` and ``consume`` do.
"""

from __future__ import annotations

from collections import Counter

import pytest
from attention import problem
from hypothesis import given, settings
from hypothesis import strategies as st

from flashbench import hopper_configs, iomodel, kernels
from flashbench.hopper_configs import Tiles
from flashbench.kernels import _hopper_schedule as schedule
from flashbench.problem import Problem

SIZES = [1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 200, 320, 333]


@st.composite
def asked(draw: st.DrawFn) -> Problem:
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return problem(
        batch=draw(st.integers(1, 2)), num_heads=kv_heads * group, num_kv_heads=kv_heads,
        seqlen_q=draw(st.sampled_from(SIZES)), seqlen_k=draw(st.sampled_from(SIZES)),
        head_dim=8 * draw(st.integers(1, 32)), head_dim_v=8 * draw(st.integers(1, 32)),
        dtype="bf16", causal=draw(st.booleans()),
    )  # fmt: skip


TILES = st.builds(Tiles, warpgroups=st.sampled_from([2, 3]), block_k=st.sampled_from([64, 128]))


def inside(start: int, size: int, length: int) -> int:
    return max(0, min(start + size, length) - start)


def walk(p: Problem, tiles: Tiles, programs: int) -> tuple[Counter[str], Counter[str]]:
    """Bytes read and written by tensor: what of each box lies in the tensor."""
    shape = schedule.Shape(
        heads=p.batch * p.num_heads, group=p.group, seqlen_q=p.seqlen_q, seqlen_k=p.seqlen_k,
        block_m=tiles.block_q, block_n=tiles.block_k, causal=p.causal, kv_bytes=0,
    )  # fmt: skip
    table = schedule.table(shape, programs)
    read, write = Counter[str](), Counter[str]()
    columns = {
        name: [(start, width) for start, width in zip((0, cut[0]), cut, strict=True) if width]
        for name, cut in (
            ("qk", hopper_configs.pieces(p.head_dim)),
            ("vo", hopper_configs.pieces(p.head_dim_v, of_v=True)),
        )
    }

    def box(row: int, rows: int, length: int, of: str) -> int:
        dim = p.head_dim if of == "qk" else p.head_dim_v
        return 2 * inside(row, rows, length) * sum(inside(*piece, dim) for piece in columns[of])

    covered = Counter[int]()
    for program, total in enumerate(table[0]):
        read["schedule"] += 4 * (tiles.warpgroups + 1)
        n = tile = 0
        for _ in range(total):
            n -= 1
            if n < 0:
                tile += 1
                entry = table[tile][program]
                covered[entry] += 1
                start = entry % shape.tiles * tiles.block_q
                end = p.seqlen_k
                if p.causal:
                    end = min(max(start + p.seqlen_k - p.seqlen_q + tiles.block_q, 1), end)
                n = -(-end // tiles.block_k) - 1
                read["schedule"] += 4 * (1 + tiles.warpgroups)
                for wg in range(tiles.warpgroups):
                    row = start + wg * hopper_configs.ROWS
                    read["q"] += box(row, hopper_configs.ROWS, p.seqlen_q, "qk")
                    write["o"] += box(row, hopper_configs.ROWS, p.seqlen_q, "vo")
                    write["lse"] += 4 * inside(row, hopper_configs.ROWS, p.seqlen_q)
            read["k"] += box(n * tiles.block_k, tiles.block_k, p.seqlen_k, "qk")
            read["v"] += box(n * tiles.block_k, tiles.block_k, p.seqlen_k, "vo")
        assert n == 0, "a program ends with the last K/V tile of its last tile of queries"
        assert tile + 1 < len(table), "the entry ahead is there to be read"
        read["schedule"] += 4 * tiles.warpgroups  # the entry ahead of the last
    assert set(covered) == set(range(shape.heads * shape.tiles))
    assert set(covered.values()) == {1}
    return read, write


@settings(max_examples=200, deadline=None)
@given(asked(), TILES)
def test_the_walk_and_the_model_agree_to_the_byte(p: Problem, tiles: Tiles) -> None:
    given_tiles = {"fwd_block_q": tiles.block_q, "fwd_block_k": tiles.block_k}
    row = iomodel.estimate("flash-v3-gluon", p, "fwd", tiles=given_tiles)
    read, write = walk(p, tiles, hopper_configs.PROGRAMS)
    assert row.requested.read == dict(read)
    assert row.requested.write == dict(write)
    assert not row.requested.atomic


@pytest.mark.parametrize("causal", [False, True])
def test_a_tile_of_queries_without_keys_loads_one_of_keys(causal: bool) -> None:
    p = problem(seqlen_q=1024, seqlen_k=64, head_dim=64, head_dim_v=64, dtype="bf16", causal=causal)
    row = iomodel.estimate("flash-v3-gluon", p, "fwd", tiles={"fwd_block_q": 128, "fwd_block_k": 64})
    assert row.requested.read["k"] == p.batch * p.num_heads * 1024 // 128 * 64 * 64 * 2


def test_the_model_has_the_tiles_that_the_row_says() -> None:
    target = kernels.Target(device="cuda", capability=(9, 0))
    for dim in (64, 128, 256):
        for keys in (512, 4096, 16384):
            for causal in (False, True):
                p = problem(
                    seqlen_q=keys, seqlen_k=keys, head_dim=dim, head_dim_v=dim, dtype="fp16", causal=causal
                )
                config = kernels.get("flash-v3").describe(p, "fwd", target)
                tiles = iomodel.estimate("flash-v3-gluon", p, "fwd").tiles
                assert tiles == {name: config[name] for name in tiles}


def test_the_backward_is_flashs() -> None:
    p = problem(seqlen_q=200, seqlen_k=200, head_dim=64, head_dim_v=64, dtype="bf16")
    tiles = {"block_q": 64, "block_k": 32}
    assert (
        iomodel.estimate("flash-v3-gluon", p, "bwd", tiles=tiles).requested
        == iomodel.estimate("flash", p, "bwd", tiles=tiles).requested
    )
