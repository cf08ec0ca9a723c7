"""Masks, scores and packed batches of ``flash``: the model's bytes and FLOPs are the kernels' own.

A covering array: every two values of the factors below meet in a cell, forward and backward.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention import problem
from hypothesis import given, settings
from tiers import tiers
from tilewalk import blocks, holds_a_pair, problems, sees, spans
from traced import TILES, assert_exact

from flashbench import devices, iomodel, kernels, tracing
from flashbench._iomodel.visits import visits
from flashbench._profilers.trace import trace
from flashbench.errors import SpecError
from flashbench.kernels import Target, _triton
from flashbench.kernels._inputs import make_inputs
from flashbench.problem import PASSES, Cell, Problem

if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled, not interpreted", allow_module_level=True)
if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
REASON = kernels.get("flash").why_unavailable(Target(device="cpu", capability=None))
assert REASON is None, REASON
flash = _triton.load("cpu")

MASKS: tuple[dict[str, Any], ...] = (
    {"causal": False},
    {"causal": True},
    {"causal": True, "alignment": "top-left"},
    {"causal": True, "window": (9, -1)},
    {"causal": False, "window": (-1, 4)},
    {"causal": False, "window": (20, 7)},
    {"causal": False, "window": (3, 11), "alignment": "top-left"},
)
COMMON: dict[str, tuple[dict[str, Any], ...]] = {
    "mask": MASKS,
    "softcap": ({}, {"softcap": 5.0}),
    "alibi": ({}, {"alibi": True}),
    "sinks": ({}, {"sinks": True}),
    "dropout": ({}, {"dropout_p": 0.3}),
    "dtype": ({"dtype": "fp16"}, {"dtype": "fp32"}),
    "dims": ({"head_dim": 16, "head_dim_v": 16}, {"head_dim": 40, "head_dim_v": 24}),
    "layout": ({}, {"layout": "bshd"}),
}
HEADS = (
    {"batch": 1, "num_heads": 2, "num_kv_heads": 1},
    {"batch": 2, "num_heads": 2, "num_kv_heads": 2},
    {"batch": 2, "num_heads": 1, "num_kv_heads": 1},
)
LENGTHS = ((32, 48), (17, 40), (40, 17), (1, 33), (33, 1))
DENSE = {
    **COMMON,
    "bias along": tuple({"along": sides} for sides in ("", "qk", "q1", "1k", "11")),
    "bias of": tuple({"of": shared} for shared in ("bh", "1h", "b1", "11")),
    "lengths": tuple({"seqlen_q": q, "seqlen_k": k} for q, k in LENGTHS),
    "heads": HEADS,
    "tiles": tuple({"tiles": tile} for tile in (TILES, dict.fromkeys(TILES, (32, 16)))),
}  # fmt: skip
PACKS = (
    ((5, 9), (33, 17), (5, 9)),
    ((0, 3), (20, 35), (4, 0)),
    ((1, 40), (37, 1), (0, 0)),
)
PACKED = {
    **COMMON,
    "lengths": tuple({"lengths": pack} for pack in PACKS),
    "heads": tuple({"num_heads": h, "num_kv_heads": kv} for h, kv in ((2, 1), (2, 2))),
}

BLOCKED = {
    "blocks": tuple({"block_mask": name} for name in ("causal", "window", "random:0.4", "document")),
    "mask": ({"causal": False}, {"causal": True}, {"causal": False, "window": (70, 100)}),
    "scores": ({}, {"softcap": 5.0, "alibi": True}, {"sinks": True}, {"dropout_p": 0.3}),
    "bias along": DENSE["bias along"],
    "bias of": DENSE["bias of"],
    "dtype": COMMON["dtype"],
    "lengths": tuple({"seqlen_q": q, "seqlen_k": k} for q, k in ((130, 140), (140, 70), (3, 260))),
    "heads": tuple({"num_heads": h, "num_kv_heads": kv, "batch": b} for h, kv, b in ((2, 1, 1), (1, 1, 2))),
    "tiles": (
        {"tiles": {"fwd": (64, 128), "dq": (128, 64), "dkdv": (64, 32), "delta": (64, 64)}},
        {"tiles": {"fwd": (128, 64), "dq": (64, 32), "dkdv": (128, 128), "delta": (64, 64)}},
    ),
}  # fmt: skip


def covering(factors: dict[str, tuple[dict[str, Any], ...]]) -> list[dict[str, int]]:
    """Rows, an index per factor, in which every two values of two factors meet; greedy, seeded."""
    generator = random.Random(0)
    missing = {
        (one, i, two, j)
        for one, two in itertools.combinations(factors, 2)
        for i in range(len(factors[one]))
        for j in range(len(factors[two]))
    }

    def met(row: dict[str, int]) -> set[tuple[str, int, str, int]]:
        return {(one, row[one], two, row[two]) for one, two in itertools.combinations(factors, 2)} & missing

    rows = []
    while missing:
        one, i, two, j = min(missing)
        drawn = (
            {name: generator.randrange(len(values)) for name, values in factors.items()} for _ in range(60)
        )
        rows.append(max(({**row, one: i, two: j} for row in drawn), key=lambda row: len(met(row))))
        missing -= met(rows[-1])
    return rows


def cells(factors: dict[str, tuple[dict[str, Any], ...]]) -> list[dict[str, Any]]:
    rows = covering(factors)
    return [{k: v for name in row for k, v in factors[name][row[name]].items()} for row in rows]


@pytest.mark.parametrize("changes", cells(DENSE), ids=str)
def test_masks_and_scores_move_what_the_model_says(changes: dict[str, Any]) -> None:
    tiles, of, along = (changes.pop(name) for name in ("tiles", "of", "along"))
    assert_exact(problem(**changes, bias=along and of + along), tiles)


@pytest.mark.parametrize("changes", cells(PACKED), ids=str)
def test_packed_batches_move_what_the_model_says(changes: dict[str, Any]) -> None:
    assert_exact(packed(**changes), TILES)


@pytest.mark.parametrize("lengths", [(70, 70), (1, 70), (70, 1)], ids=str)
def test_a_bias_per_pair_has_its_own_tiles_in_kernel_row_and_model(lengths: tuple[int, int]) -> None:
    p = problem(batch=1, num_heads=1, num_kv_heads=1, bias="bhqk", seqlen_q=lengths[0], seqlen_k=lengths[1])
    row = iomodel.estimate("flash", p, "fwd")
    inputs, flash_row = make_inputs(p, "cpu", 0), kernels.get("flash")
    found = tracing.compare(trace(flash_row.prepare(p, inputs)), row)
    assert (found["difference_bytes"], found["difference_flops"]) == (0, 0)
    said = flash_row.describe(p, "fwd", tracing.CPU)
    assert row.tiles == {name: said[name] for name in row.tiles}
    assert row.tiles["fwd_block_k"] == (64 if 1 in lengths else 32)


@pytest.mark.parametrize("changes", tiers(cells(BLOCKED)[:6], cells(BLOCKED)[6:]), ids=str)
def test_block_masks_move_what_the_model_says(changes: dict[str, Any]) -> None:
    tiles, of, along = (changes.pop(name) for name in ("tiles", "of", "along"))
    assert_exact(problem(**changes, bias=along and of + along), tiles)


def packed(**changes: Any) -> Problem:
    q, k = (max(side) for side in zip(*changes["lengths"], strict=True))
    return problem(**{"batch": len(changes["lengths"]), "seqlen_q": q, "seqlen_k": k, **changes})


def test_every_two_values_meet_in_a_cell() -> None:
    for factors in (DENSE, PACKED, BLOCKED):
        rows = covering(factors)
        for one, two in itertools.combinations(factors, 2):
            met = {(row[one], row[two]) for row in rows}
            assert len(met) == len(factors[one]) * len(factors[two]), (one, two)


SMALL = {"batch": 2, "num_heads": 4, "num_kv_heads": 2, "seqlen_q": 20, "seqlen_k": 30, "dtype": "fp16"}
FEATURED: dict[str, dict[str, Any]] = {
    "sinks": {"sinks": True, "alibi": True, "window": (5, 3)},
    "bias of its own": {"bias": "bhqk"},
    "bias of all": {"bias": "11qk", "sinks": True},
    "bias of a batch": {"bias": "b11k"},
    "bias of a head": {"bias": "1hq1", "alibi": True},
    "block mask": {"block_mask": "document", "bias": "11qk"},
    "packed": {"lengths": ((0, 3), (20, 30)), "sinks": True, "alibi": True},
}


@pytest.mark.parametrize("name", FEATURED)
def test_one_head_scaled_is_the_whole_cell(name: str) -> None:
    cell = Cell(implementation="flash", pass_="fwd+bwd", problem=problem(**SMALL, **FEATURED[name]))
    part, whole = tracing.trace_cell(cell, one_head=True), tracing.trace_cell(cell)
    said = {key: part.pop(key) for key in ("traced_as", "scaled_by", "traced_share")}
    assert part == whole
    assert (whole["difference_bytes"], whole["difference_flops"]) == (0, 0)
    assert (said["traced_as"]["batch"], said["scaled_by"]) == ((2, 2) if name == "packed" else (1, 4))


@pytest.mark.parametrize("name", FEATURED)
def test_the_predicted_memory_is_that_of_the_backwards_own_tensors(name: str) -> None:
    p = problem(**{**SMALL, "dtype": "fp32"}, **FEATURED[name])
    x = make_inputs(p, "cpu", 0)
    call = flash.Call(causal=p.causal, scale=p.softmax_scale, window=p.window)
    extra = flash.Extra(
        slopes=x.alibi_slopes, bias=x.bias, sinks=x.sinks, cu_q=x.cu_seqlens_q, cu_k=x.cu_seqlens_k,
        longest_q=p.seqlen_q, longest_k=p.seqlen_k, block_mask=x.block_mask,
    )  # fmt: skip
    o, lse, _ = flash.forward_launch(x.q, x.k, x.v, call, extra)
    work = flash.backward_launches(flash.Saved(q=x.q, k=x.k, v=x.v, o=o, lse=lse, do=x.dout), call, extra)
    args = [arg for launch in work.launches for arg in launch.args if isinstance(arg, torch.Tensor)]
    inputs = [*x.leaves, o, lse, x.dout, x.alibi_slopes, x.cu_seqlens_q, x.cu_seqlens_k]
    if (mask := x.block_mask) is not None:
        inputs += [mask.slots, mask.bits, *vars(mask.by_query).values(), *vars(mask.by_key).values()]
    known = {tensor.data_ptr() for tensor in inputs if tensor is not None}
    new = {y.data_ptr(): y.nbytes for y in (*work.gradients, work.delta, *args) if y.data_ptr() not in known}
    assert sum(new.values()) == iomodel.estimate("flash", p, "bwd").extra_bytes
    assert o.nbytes + lse.nbytes == iomodel.estimate("flash", p, "fwd").extra_bytes


@pytest.mark.parametrize("name", FEATURED)
def test_dram_time_and_explanation_exist_and_say_what_time_leaves_out(name: str) -> None:
    p = problem(**{**SMALL, "dtype": "bf16"}, **FEATURED[name])
    card = devices.find("h100-sxm")
    for pass_ in PASSES:
        row = iomodel.estimate("flash", p, pass_)
        found = iomodel.predict(row, card)
        assert 0 < found.dram_read.low <= found.dram_read.value <= found.dram_read.high
        assert found.dram_read.high <= row.requested.read_bytes
        assert row.compulsory.read_bytes <= row.requested.read_bytes
        assert [part.name for part in found.parts] == [step.name for step in row.steps]
        left_out = [op for op in ("alibi", "bias") if getattr(p, op)]
        assert found.note.endswith(f"; time without the arithmetic of {', '.join(left_out)}") == bool(
            left_out
        )
        text = iomodel.explain(row, found)
        assert all(step.name in text for step in row.steps)
        assert pass_ == "fwd" or ("  dbias: read" in text, "  dsinks: read" in text) == (
            bool(p.bias),
            p.sinks,
        )


def test_a_tensor_that_every_tile_reads_is_fetched_about_once() -> None:
    """A shared bias of 2 MiB stays in the L2 of an H100, however many heads read it."""
    heads = {"batch": 8, "num_heads": 16, "num_kv_heads": 16, "head_dim": 64, "head_dim_v": 64}
    p = problem(**heads, seqlen_q=1024, seqlen_k=1024, dtype="bf16", causal=False)
    with_bias, card = replace(p, bias="11qk"), devices.find("h100-sxm")
    one, two = (iomodel.predict(iomodel.estimate("flash", x, "fwd"), card) for x in (p, with_bias))
    size = 1024 * 1024 * 2
    assert iomodel.estimate("flash", with_bias, "fwd").requested.read["bias"] == 8 * 16 * size
    assert size <= two.dram_read.value - one.dram_read.value < 3 * size


@pytest.mark.parametrize("bias", ["bhqk", "1hq1", "b11k", "1111"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_compulsory_of_a_bias_are_entries_that_a_visible_pair_has(mask: dict[str, Any], bias: str) -> None:
    p = problem(seqlen_q=9, seqlen_k=6, bias=bias, **mask)
    pairs = [(i, j) for i in range(9) for j in range(6) if sees(p, i, j)]
    entries = {(i if bias[2] == "q" else 0, j if bias[3] == "k" else 0) for i, j in pairs}
    least = iomodel.compulsory(p, "bwd")
    assert least.read["bias"] == len(entries) * p.bias_shape[0] * p.bias_shape[1] * 4
    assert least.write["dbias"] == math.prod(p.bias_shape) * 4


@settings(max_examples=150, deadline=None)
@given(p=problems(), block_q=blocks, block_k=blocks)
def test_scores_of_visited_tiles_are_rows_times_columns(p: Problem, block_q: int, block_k: int) -> None:
    walked = sum(
        len(rows) * len(columns)
        for rows in spans(p.seqlen_q, block_q)
        for columns in spans(p.seqlen_k, block_k)
        if holds_a_pair(p, rows, columns)
    )
    assert visits(p, block_q, block_k).scores == walked


def test_what_no_kernel_of_a_row_does_is_refused() -> None:
    with pytest.raises(SpecError, match=r"it does not count block-mask$"):
        iomodel.estimate("flash-v2", problem(block_mask="document"), "fwd")
    with pytest.raises(SpecError, match="tiles of 96x64 do not divide the 128x128 blocks"):
        iomodel.estimate("flash", problem(block_mask="document"), "fwd", tiles={"block_q": 96})
    with pytest.raises(SpecError, match=r"block mask 'document': the papers' view \(--paper\) has none"):
        iomodel.paper_view(problem(block_mask="document"), 1024)
    for model in ("flash-v1-triton", "flash-v2-atomic-triton"):
        with pytest.raises(SpecError, match="no window, no dropout and no packed batches"):
            iomodel.estimate(model, problem(window=(4, 0)), "fwd")
