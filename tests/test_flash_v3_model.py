"""flash-v3 moves to the byte what its model says: walks over its schedules, box by box.

The kernels have no interpreted form. What they load is decided by the schedule and the descriptors that the
host makes, which are the real ones here; a walk does with them what ``produce`` and ``consume`` do.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from attention import problem
from hypothesis import given, settings
from hypothesis import strategies as st

from flashbench import hopper_configs, iomodel, kernels
from flashbench.devices import find
from flashbench.hopper_configs import BackwardTiles, Tiles
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
    for row, own in zip(table[1:], schedule.packed(table, shape.tiles, p.num_heads)[1:], strict=True):
        where = [((x >> 40) * p.num_heads + (x >> 24 & 0xFFFF), x & 0xFFFFFF) for x in own]
        assert where == [divmod(entry, shape.tiles) for entry in row]
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
        read["schedule"] += 8 * (tiles.warpgroups + 1)
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
                read["schedule"] += 8 * (1 + tiles.warpgroups)
                for wg in range(tiles.warpgroups):
                    row = start + wg * hopper_configs.ROWS
                    read["q"] += box(row, hopper_configs.ROWS, p.seqlen_q, "qk")
                    write["o"] += box(row, hopper_configs.ROWS, p.seqlen_q, "vo")
                    write["lse"] += 4 * inside(row, hopper_configs.ROWS, p.seqlen_q)
            read["k"] += box(n * tiles.block_k, tiles.block_k, p.seqlen_k, "qk")
            read["v"] += box(n * tiles.block_k, tiles.block_k, p.seqlen_k, "vo")
        assert n == 0, "a program ends with the last K/V tile of its last tile of queries"
        assert tile + 1 < len(table), "the entry ahead is there to be read"
        read["schedule"] += 8 * tiles.warpgroups  # the entry ahead of the last
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
    for dim, keys, causal, deterministic in itertools.product(
        (64, 128, 256), (512, 4096, 16384), (False, True), (False, True)
    ):
        p = problem(
            seqlen_q=keys, seqlen_k=keys, head_dim=dim, head_dim_v=dim, dtype="fp16", causal=causal,
            deterministic=deterministic,
        )  # fmt: skip
        config = kernels.get("flash-v3").describe(p, "fwd+bwd", target)
        tiles = iomodel.estimate("flash-v3-gluon", p, "fwd+bwd", device=find("h100-sxm")).tiles
        said = {name for name in config if name.endswith(("_block_q", "_block_k"))}
        assert said <= set(tiles)
        assert tiles == {name: config.get(name, tiles[name]) for name in tiles}


def walk_back(p: Problem, tiles: BackwardTiles, programs: int) -> tuple[Counter[str], ...]:
    """Bytes read, written and added by the kernel of dK and dV, as ``walk``."""
    width, block = tiles.width, tiles.block_q
    shape = schedule.KeyShape(
        heads=p.batch * p.num_kv_heads, group=p.group, seqlen_q=p.seqlen_q, seqlen_k=p.seqlen_k,
        block_m=block, block_n=hopper_configs.KEYS, causal=p.causal, kv_bytes=0,
    )  # fmt: skip
    table = schedule.table(shape, programs)
    read, write, added = Counter[str](), Counter[str](), Counter[str]()
    tiles_q = -(-p.seqlen_q // block)
    rows, warpgroups, half = p.batch * p.num_heads * tiles_q * block, 2, hopper_configs.ROWS

    def box(row: int, length: int, dim: int) -> int:
        return 2 * inside(row, half, length) * inside(0, width, dim)

    covered = Counter[int]()
    for program, total in enumerate(table[0]):
        roles = warpgroups + 1
        read["schedule"] += 4 * roles
        j = tile = 0
        while j < total:
            tile += 1
            entry = table[tile][program]
            read["schedule"] += 4 * roles
            covered[entry] += 1
            head, start_n = divmod(entry, shape.tiles)
            start_n *= hopper_configs.KEYS
            first = max(start_n + p.seqlen_q - p.seqlen_k, 0) // block if p.causal else 0
            for wg in range(warpgroups):
                for name, dim in (("k", p.head_dim), ("v", p.head_dim_v)):
                    size = box(start_n + wg * half, p.seqlen_k, dim)
                    read[name] += size
                    write[f"d{name}"] += size
            for g in range(p.group):
                for m in range(first, tiles_q):
                    at = ((head * p.group + g) * tiles_q + m) * block
                    for row in range(0, block, half):
                        read["q"] += box(m * block + row, p.seqlen_q, p.head_dim)
                        read["do"] += box(m * block + row, p.seqlen_q, p.head_dim_v)
                        for name in ("lse_2", "delta"):
                            read[name] += 4 * inside(at + row, half, rows)
                    lines = range(at * width // 32, (at + block) * width // 32, 128)
                    assert len(lines) == warpgroups, "each adds one block of the tile's dQ"
                    added["dq_acc"] += sum(4 * 32 * inside(line, 128, rows * width // 32) for line in lines)
                    j += 1
        assert j == total, "a program ends with the last tile of queries of its last tile of keys"
    assert set(covered) == set(range(shape.heads * shape.tiles))
    assert set(covered.values()) == {1}
    return read, write, added


@settings(max_examples=200, deadline=None)
@given(asked(), st.booleans())
def test_the_walk_back_and_the_model_agree_to_the_byte(p: Problem, deterministic: bool) -> None:
    p = replace(p, head_dim=min(128, p.head_dim), head_dim_v=min(128, p.head_dim_v))
    p = replace(p, deterministic=deterministic)
    steps = {step.name: step for step in iomodel.estimate("flash-v3-gluon", p, "bwd").steps}
    tiles = hopper_configs.choose_backward(p.head_dim, p.head_dim_v, p.causal, p.seqlen_k)
    read, write, added = walk_back(p, tiles, hopper_configs.PROGRAMS)
    main = steps["backward"]
    assert main.read == dict(read)
    assert main.write == dict(write)
    assert main.atomic == ({} if deterministic else dict(added))
    rows = p.batch * p.num_heads * -(-p.seqlen_q // tiles.block_q) * tiles.block_q
    filled = {"lse_2": 4 * rows, "delta": 4 * rows, "dq_acc": 4 * rows * tiles.width}
    if deterministic:
        assert list(steps) == ["prepare", "backward", "delta", "dq"]
        del filled["dq_acc"]
    else:
        assert list(steps) == ["prepare", "backward", "convert"]
        assert steps["convert"].read == {"dq_acc": filled["dq_acc"]}
    assert steps["prepare"].write == filled


def walk_wide(p: Problem, programs: int) -> dict[str, tuple[Counter[str], Counter[str]]]:
    """Bytes read and written by the two kernels of wide heads, as ``walk``."""
    side, heads, kv_heads = hopper_configs.ROWS, p.batch * p.num_heads, p.batch * p.num_kv_heads
    lengths = {"seqlen_q": p.seqlen_q, "seqlen_k": p.seqlen_k}
    sizes = {"group": p.group, **lengths, "causal": p.causal, "kv_bytes": 0}
    by_key = schedule.KeyShape(heads=kv_heads, block_m=side, block_n=side, **sizes)
    by_query = schedule.Shape(heads=heads, block_m=hopper_configs.WIDE_BLOCK_Q, block_n=side, **sizes)
    tiles_q = -(-p.seqlen_q // side)

    def box(row: int, length: int, dim: int) -> int:
        return 2 * inside(row, side, length) * inside(0, 256, dim)

    def keys(entry: int, read: Counter[str], write: Counter[str]) -> int:
        start_n = entry % by_key.tiles * side
        for name, dim in (("k", p.head_dim), ("v", p.head_dim_v)):
            read[name] += box(start_n, p.seqlen_k, dim)
            write[f"d{name}"] += box(start_n, p.seqlen_k, dim)
        first = max(start_n + p.seqlen_q - p.seqlen_k, 0) // side if p.causal else 0
        for m in range(first, tiles_q):
            read["q"] += p.group * box(m * side, p.seqlen_q, p.head_dim)
            read["do"] += p.group * box(m * side, p.seqlen_q, p.head_dim_v)
            for name in ("lse_2", "delta"):
                read[name] += p.group * 4 * side
        return p.group * (tiles_q - first)

    def queries(entry: int, read: Counter[str], write: Counter[str]) -> int:
        start_m = entry % by_query.tiles * by_query.block_m
        for row in range(start_m, start_m + by_query.block_m, side):
            read["q"] += box(row, p.seqlen_q, p.head_dim)
            read["do"] += box(row, p.seqlen_q, p.head_dim_v)
            write["dq"] += box(row, p.seqlen_q, p.head_dim)
            for name in ("lse_2", "delta"):
                read[name] += 4 * inside(row, side, tiles_q * side)
        end = p.seqlen_k
        if p.causal:
            end = min(max(start_m + p.seqlen_k - p.seqlen_q + by_query.block_m, 1), end)
        for n in range(0, end, side):
            read["k"] += box(n, p.seqlen_k, p.head_dim)
            read["v"] += box(n, p.seqlen_k, p.head_dim_v)
        return -(-end // side)

    walks = {}
    for name, shape, visit in (("dkdv", by_key, keys), ("dq", by_query, queries)):
        table, read, write, covered = schedule.table(shape, programs), Counter(), Counter(), Counter()
        for program, total in enumerate(table[0]):
            read["schedule"] += 4 * 3  # by both warpgroups and the warp that loads
            j = tile = 0
            while j < total:
                tile += 1
                entry = table[tile][program]
                read["schedule"] += 4 * 3
                covered[entry] += 1
                j += visit(entry, read, write)
            assert j == total, "a program ends with the last tile that its last one streams"
        assert set(covered) == set(range(shape.heads * shape.tiles))
        assert set(covered.values()) == {1}
        walks[name] = read, write
    return walks


@settings(max_examples=200, deadline=None)
@given(asked(), st.booleans())
def test_the_walk_back_of_wide_heads_and_the_model_agree_to_the_byte(p: Problem, deterministic: bool) -> None:
    p = replace(p, head_dim=min(256, p.head_dim + 128), deterministic=deterministic)
    steps = {step.name: step for step in iomodel.estimate("flash-v3-gluon", p, "bwd").steps}
    assert list(steps) == ["prepare", "dkdv", "dq"]
    rows = 4 * p.batch * p.num_heads * -(-p.seqlen_q // 64) * 64
    assert steps["prepare"].write == {"lse_2": rows, "delta": rows}
    for name, (read, write) in walk_wide(p, hopper_configs.PROGRAMS).items():
        assert steps[name].read == dict(read)
        assert steps[name].write == dict(write)
        assert not steps[name].atomic
