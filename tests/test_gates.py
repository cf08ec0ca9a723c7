"""A time that cannot be, or that contradicts the others of its implementation, is suspect and says why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from attention import problem

from flashbench._runner.gates import doubts
from flashbench.kernels import Target
from flashbench.problem import Cell
from flashbench.record import Samples

CPU = Target()
H100 = Target(device="cuda:0", name="NVIDIA H100 80GB HBM3", l2_bytes=50 * 2**20)
SHAPE = {
    "batch": 1, "num_heads": 16, "num_kv_heads": 16, "seqlen_q": 1024, "seqlen_k": 1024, "head_dim": 64,
    "head_dim_v": 64, "dtype": "fp16", "causal": False,
}  # fmt: skip


def cell(pass_: str = "fwd", name: str = "flash-v2", **changes: Any) -> Cell:
    return Cell(implementation=name, problem=problem(**{**SHAPE, **changes}), pass_=pass_)


def at(seconds: float, **changes: Any) -> Samples:
    told = {"cache": "cold", "method": "events", "load": "burst", "flush": "read", **changes}
    return Samples(samples_s=(seconds,) * 5, **told)


def said(one: Cell, samples: Samples, target: Target = CPU, **earlier: Any) -> list[str]:
    return doubts(one, samples, target, earlier.get("model"), earlier.get("times", {}))


def test_faster_than_the_dense_peak_is_suspect() -> None:
    # 4.295 GFLOP at 989 TFLOP/s cannot take less than 4.3 us
    assert said(cell(), at(4.5e-6), H100) == []
    [doubt] = said(cell(), at(4.2e-6), H100)
    assert doubt == "1.02 PFLOP/s is above the dense peak of 989 TFLOP/s"
    assert said(cell(), at(1e-9)) == []
    assert said(cell(), at(1e-9), Target(device="cuda:0", name="Some Card")) == []
    assert said(cell(), at(0.0)) == ["it took no time"]


def test_faster_than_its_inputs_can_be_read_is_suspect() -> None:
    # one query over 64k keys of 16 heads: k and v are 268 MB, 80.1 us at 3.35 TB/s
    decode = cell(seqlen_q=1, seqlen_k=65536)
    assert said(decode, at(81e-6), H100) == []
    [doubt] = said(decode, at(79e-6), H100)
    assert doubt == "268 MB cannot be read in 79.0 us at 3.35 TB/s"
    assert said(decode, at(79e-6, cache="hot"), H100) == []  # 52 MB of it may still be in the L2
    assert len(said(decode, at(64e-6, cache="hot"), H100)) == 1


def test_rows_that_nobody_has_to_read_do_not_count() -> None:
    unseen = cell(seqlen_q=1, seqlen_k=65536, causal=True, alignment="top-left")
    assert said(unseen, at(20e-6), H100) == []
    assert said(cell(seqlen_q=1, seqlen_k=65536, window=(128, 0)), at(20e-6), H100) == []


@pytest.mark.parametrize(
    ("whole", "suspect"), [(3.0e-3, False), (3.3e-3, False), (3.4e-3, True), (2.6e-3, True)]
)
@pytest.mark.parametrize("last", ["fwd", "bwd", "fwd+bwd"])
def test_the_passes_have_to_add_up(whole: float, suspect: bool, last: str) -> None:
    """Whichever is measured last has the doubt."""
    times = {"fwd": at(1e-3), "bwd": at(2e-3), "fwd+bwd": at(whole)}
    earlier = {cell(pass_): times[pass_] for pass_ in times if pass_ != last}
    found = said(cell(last), times[last], times=earlier)
    assert bool(found) is suspect
    assert all(doubt.startswith("forward and backward take 3.00 ms apart and ") for doubt in found)


def test_passes_timed_in_unlike_ways_or_too_short_are_not_added_up() -> None:
    earlier = {cell("fwd"): at(1e-3), cell("bwd"): at(2e-3)}
    assert said(cell("fwd+bwd"), at(9e-3, method="graph"), times=earlier) == []
    assert said(cell("fwd+bwd"), at(9e-3, load="sustained"), times=earlier) == []
    assert said(cell("fwd+bwd", name="sdpa"), at(9e-3), times=earlier) == []
    wild = replace(at(2e-3), samples_s=(1e-3, 1.5e-3, 2e-3, 2.5e-3, 3e-3))
    assert said(cell("fwd+bwd"), at(9e-3), times={cell("fwd"): at(1e-3), cell("bwd"): wild}) == []
    tiny = {cell("fwd"): at(1e-6), cell("bwd"): at(2e-6)}
    assert said(cell("fwd+bwd"), at(9e-6), times=tiny) == []


@pytest.mark.parametrize(
    ("ratio", "model", "doubt"),
    [
        (0.55, "flash-v2", ""),
        (0.42, "flash-v2", ""),
        (0.38, "flash-v2", "causal takes 0.38 of the time without a mask, and 0.50 of the pairs are visible"),
        (1.1, "flash-v2", ""),
        (1.4, "flash-v2", "causal takes 1.40 of the time without a mask, though it skips masked tiles"),
        (1.4, "standard", ""),  # which masks what it has multiplied
        (1.4, None, ""),
        (0.3, None, "causal takes 0.30 of the time without a mask, and 0.50 of the pairs are visible"),
    ],
)
@pytest.mark.parametrize("causal_last", [True, False])
def test_a_mask_costs_what_its_pairs_cost(
    ratio: float, model: str | None, doubt: str, causal_last: bool
) -> None:
    full, causal = cell(seqlen_q=8192, seqlen_k=8192), cell(seqlen_q=8192, seqlen_k=8192, causal=True)
    times = {full: at(1e-3), causal: at(ratio * 1e-3)}
    last = causal if causal_last else full
    earlier = {one: samples for one, samples in times.items() if one != last}
    assert said(last, times[last], model=model, times=earlier) == ([doubt] if doubt else [])


def test_another_problem_is_no_partner() -> None:
    full = cell(seqlen_q=8192, seqlen_k=8192)
    other = replace(full, problem=replace(full.problem, causal=True, batch=2))
    assert said(other, at(1e-6), times={full: at(1e-3)}) == []
