"""The closed form equals a walk over every tile, for every small problem; then the invariants.

The walk visits tiles as a kernel does, one by one, asks a brute-force mask whether a tile holds a
visible pair, and adds up what it loads and stores. It knows none of the formulas.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashbench import iomodel
from flashbench._iomodel.visits import clamped_floor_sum, floor_sum
from flashbench.errors import SpecError, UnknownName
from flashbench.iomodel import MODELS, Traffic, estimate
from flashbench.problem import DTYPES, PASSES, Problem

small = st.integers(1, 13)
blocks = st.integers(1, 7)
either = st.booleans()


@st.composite
def problems(draw: st.DrawFn, causal: st.SearchStrategy[bool] = either) -> Problem:
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    return Problem(
        batch=draw(st.integers(1, 2)),
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        seqlen_q=draw(small),
        seqlen_k=draw(small),
        head_dim=draw(st.integers(1, 5)),
        head_dim_v=draw(st.integers(1, 5)),
        dtype=draw(st.sampled_from(sorted(DTYPES))),
        causal=draw(causal),
    )


def spans(length: int, block: int) -> list[range]:
    return [range(start, min(start + block, length)) for start in range(0, length, block)]


def sees(p: Problem, i: int, j: int) -> bool:
    return not p.causal or j <= i + p.seqlen_k - p.seqlen_q


def holds_a_pair(p: Problem, rows: range, columns: range) -> bool:
    return any(sees(p, i, j) for i in rows for j in columns)


class Walk:
    """What a simulated kernel has loaded, stored, added atomically, multiplied and exponentiated."""

    def __init__(self, problem: Problem) -> None:
        self.p = problem
        self.read: Counter[str] = Counter()
        self.write: Counter[str] = Counter()
        self.atomic: Counter[str] = Counter()
        self.flops = self.exps = 0

    @property
    def heads(self) -> range:
        return range(self.p.batch * self.p.num_heads)

    def width(self, tensor: str) -> int:
        """Bytes per row of a tensor."""
        base = tensor.removesuffix("_heads")
        d, dv, e = self.p.head_dim, self.p.head_dim_v, self.p.dtype_bytes
        return {
            "q": d * e, "k": d * e, "dq": d * e, "dk": d * e, "v": dv * e, "o": dv * e, "do": dv * e,
            "dv": dv * e, "lse": 4, "delta": 4, "l, m": 8, "dq_acc": 4 * d, "dq_tmp": 4 * d, "o_tmp": 4 * dv,
        }[base]  # fmt: skip

    def load(self, rows: range, *tensors: str) -> None:
        for tensor in tensors:
            self.read[tensor] += len(rows) * self.width(tensor)

    def store(self, rows: range, *tensors: str) -> None:
        for tensor in tensors:
            self.write[tensor] += len(rows) * self.width(tensor)

    def multiply(self, block_q: int, block_k: int, d_products: int, dv_products: int) -> None:
        """Matrix products and one exponential per element of a whole tile, ragged or not."""
        self.flops += 2 * block_q * block_k * (d_products * self.p.head_dim + dv_products * self.p.head_dim_v)
        self.exps += block_q * block_k

    def per_head(self, tensor: str) -> str:
        return tensor if self.p.group == 1 else f"{tensor}_heads"

    def sum_over_groups(self) -> None:
        if self.p.group > 1:
            for _ in self.heads:
                self.load(range(self.p.seqlen_k), "dk_heads", "dv_heads")
            for _ in range(self.p.batch * self.p.num_kv_heads):
                self.store(range(self.p.seqlen_k), "dk", "dv")

    def same_as(self, row: iomodel.Estimate) -> bool:
        got = row.requested
        found = (+Counter(got.read), +Counter(got.write), +Counter(got.atomic), row.done_flops, row.exps)
        walked = (+self.read, +self.write, +self.atomic, self.flops, self.exps)
        assert found == walked
        return True


def walk_v2_forward(p: Problem, block_q: int, block_k: int) -> Walk:
    walk = Walk(p)
    for _ in walk.heads:
        for rows in spans(p.seqlen_q, block_q):
            walk.load(rows, "q")
            for columns in spans(p.seqlen_k, block_k):
                if holds_a_pair(p, rows, columns):
                    walk.load(columns, "k", "v")
                    walk.multiply(block_q, block_k, 1, 1)
            walk.store(rows, "o", "lse")
    return walk


def walk_v2_backward(p: Problem, dkdv: tuple[int, int], dq: tuple[int, int]) -> Walk:
    walk = Walk(p)
    for _ in walk.heads:
        walk.load(range(p.seqlen_q), "o", "do")
        walk.store(range(p.seqlen_q), "delta")
    for _ in range(p.batch * p.num_kv_heads):
        for columns in spans(p.seqlen_k, dkdv[1]):
            walk.load(columns, "k", "v")
            for _ in range(p.group):
                for rows in spans(p.seqlen_q, dkdv[0]):
                    if holds_a_pair(p, rows, columns):
                        walk.load(rows, "q", "do", "lse", "delta")
                        walk.multiply(*dkdv, 2, 2)
            walk.store(columns, "dk", "dv")
    for _ in walk.heads:
        for rows in spans(p.seqlen_q, dq[0]):
            walk.load(rows, "q", "do", "lse", "delta")
            for columns in spans(p.seqlen_k, dq[1]):
                if holds_a_pair(p, rows, columns):
                    walk.load(columns, "k", "v")
                    walk.multiply(*dq, 2, 1)
            walk.store(rows, "dq")
    return walk


def walk_v2_atomic(p: Problem, block_q: int, block_k: int) -> Walk:
    walk = Walk(p)
    for _ in walk.heads:
        walk.load(range(p.seqlen_q), "o", "do")
        walk.store(range(p.seqlen_q), "delta", "dq_acc")
        for columns in spans(p.seqlen_k, block_k):
            walk.load(columns, "k", "v")
            for rows in spans(p.seqlen_q, block_q):
                if holds_a_pair(p, rows, columns):
                    walk.load(rows, "q", "do", "lse", "delta")
                    walk.multiply(block_q, block_k, 3, 2)
                    walk.atomic["dq_acc"] += len(rows) * walk.width("dq_acc")
            walk.store(columns, walk.per_head("dk"), walk.per_head("dv"))
        walk.load(range(p.seqlen_q), "dq_acc")
        walk.store(range(p.seqlen_q), "dq")
    walk.sum_over_groups()
    return walk


def walk_v1(p: Problem, block_q: int, block_k: int, *, backward: bool) -> Walk:
    walk = Walk(p)
    everything_q, everything_k = range(p.seqlen_q), range(p.seqlen_k)
    for _ in walk.heads:
        if backward:
            walk.store(everything_q, "dq")
            walk.store(everything_k, walk.per_head("dk"), walk.per_head("dv"))
        else:
            walk.store(everything_q, "o", "l, m")
        for columns in spans(p.seqlen_k, block_k):
            walk.load(columns, "k", "v")
            for rows in spans(p.seqlen_q, block_q):
                if not holds_a_pair(p, rows, columns):
                    continue
                if backward:
                    walk.load(rows, "q", "o", "do", "dq", "l, m")
                    walk.store(rows, "dq")
                    walk.multiply(block_q, block_k, 3, 2)
                else:
                    walk.load(rows, "q", "o", "l, m")
                    walk.store(rows, "o", "l, m")
                    walk.multiply(block_q, block_k, 1, 1)
            if backward:
                walk.store(columns, walk.per_head("dk"), walk.per_head("dv"))
    if backward:
        walk.sum_over_groups()
    return walk


def walk_v1_cuda(p: Problem, block_q: int, block_k: int, *, backward: bool) -> Walk:
    walk = Walk(p)
    tiles = spans(p.seqlen_k, block_k)
    for _ in walk.heads:
        for index, columns in enumerate(tiles):
            first, last = index == 0, index == len(tiles) - 1
            walk.load(columns, "k", "v")
            for rows in spans(p.seqlen_q, block_q):
                walk.multiply(block_q, block_k, *((3, 2) if backward else (1, 1)))
                if backward:
                    walk.load(rows, "q", "do", "lse")
                    walk.load(rows, *(["o"] if first else ["dq_tmp", "delta"]))
                    walk.store(rows, "dq" if last else "dq_tmp", *(["delta"] if first else []))
                else:
                    walk.load(rows, "q", *([] if first else ["o_tmp", "lse"]))
                    walk.store(rows, "o" if last else "o_tmp", "lse")
            if backward:
                walk.store(columns, walk.per_head("dk"), walk.per_head("dv"))
    if backward:
        walk.sum_over_groups()
    return walk


@settings(max_examples=400, deadline=None)
@given(problems(), blocks, blocks)
def test_flash_v2_forward_equals_the_walk(p: Problem, block_q: int, block_k: int) -> None:
    walk = walk_v2_forward(p, block_q, block_k)
    tiles = {"block_q": block_q, "block_k": block_k}
    assert walk.same_as(estimate("flash-v2", p, "fwd", tiles=tiles))
    assert walk.same_as(estimate("flash-v2-atomic", p, "fwd", tiles=tiles))


@settings(max_examples=400, deadline=None)
@given(problems(), blocks, blocks, blocks, blocks)
def test_flash_v2_backward_in_two_kernels_equals_the_walk(p: Problem, a: int, b: int, c: int, d: int) -> None:
    tiles = {"dkdv_block_q": a, "dkdv_block_k": b, "dq_block_q": c, "dq_block_k": d}
    assert walk_v2_backward(p, (a, b), (c, d)).same_as(estimate("flash-v2", p, "bwd", tiles=tiles))


@settings(max_examples=400, deadline=None)
@given(problems(), blocks, blocks)
def test_flash_v2_backward_with_atomics_equals_the_walk(p: Problem, block_q: int, block_k: int) -> None:
    tiles = {"bwd_block_q": block_q, "bwd_block_k": block_k}
    assert walk_v2_atomic(p, block_q, block_k).same_as(estimate("flash-v2-atomic", p, "bwd", tiles=tiles))


@settings(max_examples=400, deadline=None)
@given(problems(), blocks, blocks, st.booleans())
def test_flash_v1_equals_the_walk(p: Problem, block_q: int, block_k: int, backward: bool) -> None:
    row = estimate(
        "flash-v1", p, "bwd" if backward else "fwd", tiles={"block_q": block_q, "block_k": block_k}
    )
    assert walk_v1(p, block_q, block_k, backward=backward).same_as(row)


@settings(max_examples=300, deadline=None)
@given(problems(causal=st.just(False)), blocks, blocks, st.booleans())
def test_flash_v1_cuda_equals_the_walk(p: Problem, block_q: int, block_k: int, backward: bool) -> None:
    tiles = {"block_q": block_q, "block_k": block_k}
    row = estimate("flash-v1-cuda", p, "bwd" if backward else "fwd", tiles=tiles)
    assert walk_v1_cuda(p, block_q, block_k, backward=backward).same_as(row)


@settings(max_examples=300, deadline=None)
@given(problems())
def test_nominal_flops_count_visible_pairs(p: Problem) -> None:
    pairs = p.batch * p.num_heads * sum(
        sees(p, i, j) for i in range(p.seqlen_q) for j in range(p.seqlen_k)
    )  # fmt: skip
    d, dv = p.head_dim, p.head_dim_v
    assert iomodel.flops(p, "fwd") == 2 * pairs * (d + dv)
    assert iomodel.flops(p, "bwd") == 2 * pairs * (3 * d + 2 * dv)
    assert iomodel.flops(p, "fwd+bwd") == 2 * pairs * (4 * d + 3 * dv)


def test_papers_count_causal_as_one_half() -> None:
    p = Problem(batch=2, num_heads=3, num_kv_heads=3, seqlen_q=7, seqlen_k=7, head_dim=5, head_dim_v=5,
                dtype="fp16", causal=True)  # fmt: skip
    assert iomodel.flops_half_convention(p, "fwd") == 4 * 7 * 7 * 5 * 2 * 3 // 2
    assert iomodel.flops_half_convention(replace(p, causal=False), "fwd") == 4 * 7 * 7 * 5 * 2 * 3
    assert iomodel.flops_half_convention(p, "bwd") * 2 == iomodel.flops_half_convention(p, "fwd") * 5
    assert iomodel.flops(p, "fwd") * 7 == iomodel.flops_half_convention(p, "fwd") * 8  # (N + 1) / N


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 30), st.integers(1, 40), st.integers(-300, 300), st.integers(1, 25), st.integers(0, 30))
def test_floor_sums_equal_the_loop(count: int, step: int, offset: int, divisor: int, limit: int) -> None:
    terms = [(step * i + offset) // divisor for i in range(count)]
    assert clamped_floor_sum(count, step, offset, divisor, limit) == sum(min(max(x, 0), limit) for x in terms)
    if offset >= 0:
        assert floor_sum(count, step, offset, divisor) == sum(terms)


def every_estimate(p: Problem, **options: int) -> list[iomodel.Estimate]:
    return [
        estimate(model.name, p, pass_, **options)
        for model in MODELS
        if model.refuses(p) is None
        for pass_ in PASSES
    ]


SRAM = st.sampled_from([1, 40, 600, 10**4, 10**6])


@settings(max_examples=200, deadline=None)
@given(problems(), SRAM)
def test_reads_are_never_below_compulsory(p: Problem, sram_bytes: int) -> None:
    for row in every_estimate(p, sram_bytes=sram_bytes):
        assert row.requested.read_bytes >= row.compulsory.read_bytes, row
        if not row.model.startswith("standard"):  # its backward has P already and computes four products of the five
            assert row.done_flops >= row.flops


@settings(max_examples=200, deadline=None)
@given(problems(causal=st.just(True)), SRAM)
def test_causal_never_moves_more_than_full_in_flash(p: Problem, sram_bytes: int) -> None:
    for row in every_estimate(p, sram_bytes=sram_bytes):
        full = estimate(row.model, replace(p, causal=False), row.pass_, sram_bytes=sram_bytes)
        assert row.flops <= full.flops
        if row.model.startswith("standard"):
            continue  # it masks what it has computed
        assert row.requested.read_bytes <= full.requested.read_bytes
        assert row.requested.write_bytes <= full.requested.write_bytes
        assert row.requested.atomic_bytes <= full.requested.atomic_bytes
        assert row.done_flops <= full.done_flops


@settings(max_examples=200, deadline=None)
@given(problems(), blocks, blocks)
def test_longer_is_never_cheaper(p: Problem, block_q: int, block_k: int) -> None:
    longer = replace(p, seqlen_q=p.seqlen_q + 1, seqlen_k=p.seqlen_k + 1)
    tiles = {"block_q": block_q, "block_k": block_k}
    for model in MODELS:
        for pass_ in PASSES if model.refuses(p) is None else ():
            short, long = (estimate(model.name, one, pass_, tiles=tiles) for one in (p, longer))
            assert short.requested.read_bytes < long.requested.read_bytes
            assert short.requested.write_bytes < long.requested.write_bytes
            assert short.compulsory.total_bytes < long.compulsory.total_bytes
            assert short.extra_bytes < long.extra_bytes
            assert short.flops < long.flops


@settings(max_examples=100, deadline=None)
@given(problems())
def test_forward_and_backward_add_up(p: Problem) -> None:
    for model in MODELS:
        if model.refuses(p) is None:
            both, forward, backward = (
                estimate(model.name, p, pass_) for pass_ in ("fwd+bwd", "fwd", "bwd")
            )  # fmt: skip
            assert both.requested == forward.requested + backward.requested
            assert both.compulsory == forward.compulsory + backward.compulsory
            assert both.flops == forward.flops + backward.flops
            assert both.done_flops == forward.done_flops + backward.done_flops
            assert both.exps == forward.exps + backward.exps
            assert both.steps == forward.steps + backward.steps
            assert both.tiles == {**forward.tiles, **backward.tiles}
            assert max(forward.extra_bytes, backward.extra_bytes) <= both.extra_bytes
            assert both.saved_bytes == forward.saved_bytes


def test_levels_do_not_add() -> None:
    one = Traffic(level="requested", read={"q": 1}, write={})
    with pytest.raises(ValueError, match="compulsory"):
        one + Traffic(level="compulsory", read={"q": 1}, write={})
    assert (one + one).read == {"q": 2}
    assert (one + one).total_bytes == 2


A_PROBLEM = Problem(batch=1, num_heads=2, num_kv_heads=2, seqlen_q=4096, seqlen_k=4096, head_dim=128,
                    head_dim_v=128, dtype="bf16", causal=False)  # fmt: skip


def test_tiles_come_from_memory_in_elements() -> None:
    v1 = estimate("flash-v1", A_PROBLEM, "fwd", sram_bytes=192 * 1024)
    assert (v1.sram_elements, v1.tiles) == (98_304, {"fwd_block_q": 128, "fwd_block_k": 192})
    assert (v1.tile_source, v1.tiles_fit) == ("sram", True)
    v2 = estimate("flash-v2", A_PROBLEM, "fwd", sram_bytes=192 * 1024)
    assert (v2.tiles["fwd_block_q"], v2.tiles_fit) == (384, True)
    wide = estimate("flash-v2", replace(A_PROBLEM, dtype="fp32"), "fwd", sram_bytes=192 * 1024)
    assert (wide.sram_elements, wide.tiles["fwd_block_q"]) == (49_152, 192)


def test_a_tile_that_does_not_fit_is_marked() -> None:
    given = estimate(
        "flash-v2", A_PROBLEM, "fwd", sram_bytes=64 * 1024, tiles={"block_q": 128, "block_k": 128}
    )
    assert (given.tile_source, given.tiles_fit) == ("given", False)
    assert estimate("flash-v1", A_PROBLEM, "fwd", sram_bytes=1).tiles_fit is False
    assert estimate("flash-v2", A_PROBLEM, "fwd", sram_bytes=256).tiles_fit is False


def test_published_tiles_depend_on_the_card() -> None:
    from flashbench import devices

    def tiles(gpu: str, pass_: str = "fwd", **changes: object) -> tuple[int, ...]:
        p = replace(A_PROBLEM, **{"head_dim_v": changes.get("head_dim", 128), **changes})
        return tuple(estimate("flash-v2-atomic", p, pass_, device=devices.find(gpu)).tiles.values())

    assert tiles("h100-sxm") == tiles("a100-sxm-80gb") == (128, 64)
    assert tiles("rtx-4090") == (128, 32)
    assert tiles("rtx-4090", causal=True) == (64, 64)
    assert tiles("a100-sxm-80gb", head_dim=256) == (128, 64)
    assert tiles("h100-sxm", head_dim=256) == (64, 64)
    assert tiles("h100-sxm", head_dim=64) == (128, 128)
    assert tiles("h100-sxm", "bwd") == (64, 128)
    assert tiles("l4", "bwd") == (64, 64)
    assert tiles("l4", "bwd", head_dim=64) == (64, 128)


def test_unknown_names_and_sizes_are_refused() -> None:
    with pytest.raises(UnknownName, match="did you mean 'flash-v1'"):
        estimate("flashv1", A_PROBLEM, "fwd")
    with pytest.raises(UnknownName, match="pass"):
        estimate("flash-v1", A_PROBLEM, "forward")
    with pytest.raises(UnknownName, match="pass"):
        iomodel.flops(A_PROBLEM, "forward")
    with pytest.raises(SpecError, match="sram_bytes 0"):
        estimate("flash-v1", A_PROBLEM, "fwd", sram_bytes=0)
    with pytest.raises(SpecError, match="block_q 0"):
        estimate("flash-v2", A_PROBLEM, "fwd", tiles={"block_q": 0})
    with pytest.raises(SpecError, match="causal"):
        estimate("flash-v1-cuda", replace(A_PROBLEM, causal=True), "fwd")


def test_other_keys_of_a_configuration_are_ignored() -> None:
    tiles = {"block_q": 64, "block_k": 32, "num_warps": 4, "num_stages": 3}
    assert estimate("flash-v2", A_PROBLEM, "fwd", tiles=tiles).tiles == {"fwd_block_q": 64, "fwd_block_k": 32}
    assert estimate("standard", A_PROBLEM, "fwd", tiles=tiles).tile_source == ""
