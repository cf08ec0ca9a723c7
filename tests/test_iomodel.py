"""The closed form equals a walk over every tile, for every small problem; then the invariants.

The walks are in tilewalk.py; those of packing, splits, pages, sparsity and later kernels in
test_iomodel_variants.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tilewalk import (
    blocks,
    problems,
    sees,
    walk_v1,
    walk_v1_cuda,
    walk_v2_atomic,
    walk_v2_backward,
    walk_v2_forward,
)

from flashbench import iomodel
from flashbench._iomodel.tensors import sizes
from flashbench._iomodel.types import merge
from flashbench._iomodel.visits import clamped_floor_sum, floor_sum
from flashbench.errors import SpecError, UnknownName
from flashbench.iomodel import MODELS, Traffic, Variant, estimate
from flashbench.problem import PASSES, Problem


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
@given(problems(causal=st.just(False), windows=False), blocks, blocks, st.booleans())
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
        for pass_ in model.passes
    ]


SRAM = st.sampled_from([1, 40, 600, 10**4, 10**6])


@settings(max_examples=200, deadline=None)
@given(problems(), SRAM)
def test_reads_are_never_below_compulsory(p: Problem, sram_bytes: int) -> None:
    for row in every_estimate(p, sram_bytes=sram_bytes):
        assert row.requested.read_bytes >= row.compulsory.read_bytes, row
        if not row.model.startswith(
            "standard"
        ):  # its backward has P already and computes four products of the five
            assert row.done_flops >= row.flops


@settings(max_examples=200, deadline=None)
@given(problems(causal=st.just(True)), SRAM)
def test_causal_never_moves_more_than_full_in_flash(p: Problem, sram_bytes: int) -> None:
    for row in every_estimate(p, sram_bytes=sram_bytes):
        whole = replace(p, causal=False, window=(-1, -1))
        full = estimate(row.model, whole, row.pass_, tiles=row.tiles, variant=row.variant)
        assert row.flops <= full.flops
        if row.model.startswith("standard"):
            continue  # it masks what it has computed
        assert row.requested.read_bytes <= full.requested.read_bytes
        assert row.requested.write_bytes <= full.requested.write_bytes
        assert row.requested.atomic_bytes <= full.requested.atomic_bytes
        # delta needs a matrix product in flash where a row sees one key, as the first does under a mask
        masked, unmasked = (
            sum(step.flops for step in one.steps if step.name != "delta") for one in (row, full)
        )
        assert masked <= unmasked


@settings(max_examples=200, deadline=None)
@given(problems(), blocks, blocks)
def test_longer_is_never_cheaper(p: Problem, block_q: int, block_k: int) -> None:
    longer = replace(p, seqlen_q=p.seqlen_q + 1, seqlen_k=p.seqlen_k + 1)
    tiles = {"block_q": block_q, "block_k": block_k}
    for model in MODELS:
        if model.name == "flash-fp8" and block_k % 16:
            continue  # a ragged last tile is padded to 16 keys; a whole one of fewer is not
        for pass_ in model.passes if model.refuses(p) is None else ():
            fixed = Variant(pack_gqa=False) if "pack_gqa" in model.takes else Variant()
            short, long = (
                estimate(model.name, one, pass_, tiles=tiles, variant=fixed) for one in (p, longer)
            )
            assert short.requested.read_bytes < long.requested.read_bytes
            assert short.requested.write_bytes < long.requested.write_bytes
            assert short.compulsory.total_bytes < long.compulsory.total_bytes
            assert short.extra_bytes < long.extra_bytes
            assert short.flops < long.flops


@settings(max_examples=100, deadline=None)
@given(problems())
def test_forward_and_backward_add_up(p: Problem) -> None:
    for model in MODELS:
        if model.refuses(p) is None and model.passes == PASSES:
            both, forward, backward = (
                estimate(model.name, p, pass_) for pass_ in ("fwd+bwd", "fwd", "bwd")
            )  # fmt: skip
            kept = {"lse": sizes(p).lse} if model.name == "sdpa-cudnn" else {}  # left out without a gradient
            wanted = forward.requested + backward.requested
            assert both.requested == replace(wanted, write=merge(wanted.write, kept))
            assert both.compulsory == forward.compulsory + backward.compulsory
            assert both.flops == forward.flops + backward.flops
            assert both.done_flops == forward.done_flops + backward.done_flops
            assert both.exps == forward.exps + backward.exps
            steps = forward.steps + backward.steps
            assert [step.name for step in both.steps] == [step.name for step in steps]
            assert [step.read for step in both.steps] == [step.read for step in steps]
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
