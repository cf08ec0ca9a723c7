"""The DRAM model of a bias: what heads share is fetched once a turn where L2 does not keep it in between."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashbench._iomodel.again import Turns
from flashbench.devices import find
from flashbench.iomodel import Alone, estimate, kernels_alone
from flashbench.problem import Problem

H100 = find("h100-sxm")


def problem(**changes: object) -> Problem:
    base = Problem(
        batch=4, num_heads=16, num_kv_heads=16, seqlen_q=4096, seqlen_k=4096, head_dim=128, head_dim_v=128,
        dtype="fp16", causal=False, bias="1hqk",
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def forward(p: Problem) -> Alone:
    (one,) = kernels_alone(estimate("flash", p, "fwd", device=H100), H100)
    return one


def of_bias(p: Problem) -> tuple[int, int, int]:
    """What reading the bias adds: beside a problem whose bias is one number per head."""
    small = replace(p, bias="1h11")
    return tuple(a - b for a, b in zip(forward(p).read, forward(small).read, strict=True))  # type: ignore[return-value]


def test_what_goes_by_between_two_turns_is_a_batch_or_a_head() -> None:
    """A bias of every head is come back to after a batch; one that heads share after the next head."""
    assert Turns.of(problem()) == (4, 1.0, 1 / 4)
    assert Turns.of(problem(bias="b1qk")) == (16, 1 / 4, 1 / 64)
    assert Turns.of(problem(bias="11qk")) == (64, 1.0, 1 / 64)
    assert Turns.of(problem(bias="bhqk")).turns == 1


def test_a_bias_beyond_the_l2_is_read_once_a_batch() -> None:
    """512 MiB in all: ten times the L2, so that nothing of it is there when the next batch begins."""
    size = 16 * 4096 * 4096 * 2
    assert of_bias(problem())[1] == pytest.approx(4 * size, rel=0.01)
    assert of_bias(problem(batch=1))[1] == pytest.approx(size, rel=0.01)


def test_a_bias_that_all_heads_share_is_read_once_where_l2_keeps_it() -> None:
    """8 MiB of 50: read by 64 heads, one after the other."""
    size = 2048 * 2048 * 2
    p = problem(seqlen_q=2048, seqlen_k=2048, bias="11qk")
    assert size <= of_bias(p)[1] < 1.5 * size


def test_under_a_mask_a_turn_reads_the_tiles_that_are_visited() -> None:
    p = problem(causal=True)
    (step,) = estimate("flash", p, "fwd", device=H100).steps
    assert of_bias(p)[1] == pytest.approx(step.read["bias"], rel=0.02)
    assert step.read["bias"] < 0.53 * 4 * 16 * 4096 * 4096 * 2


def test_the_gradient_of_a_bias_takes_its_turns_in_a_row() -> None:
    """A program goes over the batches that share its tile, which is there the second time."""
    one = kernels_alone(estimate("flash", problem(), "bwd", device=H100), H100)[-1]
    compulsory = 4 * 4 * 16 * 4096 * 128 * 2 + 16 * 4096 * 4096 * 2
    assert one.name == "dbias"
    assert one.read.value == pytest.approx(compulsory, rel=0.03)
