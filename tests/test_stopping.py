"""Sampling ends when the median is known as well as asked, and always within its limits."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from flashbench import profilers
from flashbench._profilers.stopping import STOPS, Policy, _quantile, _rank, half_width
from flashbench.judge.student import quantile

POLICY = Policy(limit_s=1.0, min_samples=6, max_samples=100, warmup=1, min_s=0.1, precision=0.01)


def rounds(seed: int, spread: float, count: int, each: int = 10, between: float = 0.0) -> list[list[float]]:
    source = random.Random(seed)
    found = []
    for _ in range(count):
        level = 0.01 * (1 + source.gauss(0, between))
        found.append([level * (1 + source.gauss(0, spread)) for _ in range(each)])
    return found


@pytest.mark.parametrize(("count", "rank"), [(5, None), (6, 1), (8, 1), (9, 2), (20, 6), (100, 40)])
def test_the_ranks_that_hold_the_median_are_those_of_the_binomial(count: int, rank: int | None) -> None:
    # Conover's table of 95 % intervals of a median
    assert _rank(count) == rank


@pytest.mark.parametrize("count", [1023, 1024, 2000, 5000])
def test_samples_by_the_thousand_have_their_ranks_too(count: int) -> None:
    # a short call's samples; 2**1024 is no float
    rank = _rank(count)
    assert rank is not None
    outside = sum(math.comb(count, below) for below in range(rank))
    assert outside * 40 <= 2**count < (outside + math.comb(count, rank)) * 40
    assert rank == pytest.approx(count / 2 - 0.98 * count**0.5, abs=1.5)  # the normal's, of as many


def test_thousands_of_samples_are_a_timing() -> None:
    policy = Policy(limit_s=10, min_samples=1, max_samples=2000, warmup=1)
    timing = profilers.measure_time(lambda: None, device="cpu", cache="hot", policy=policy)
    assert len(timing.samples.samples_s) == 2000
    assert timing.how["half_width"] >= 0


@pytest.mark.parametrize("df", [1, 2, 3, 5, 10, 40])
def test_students_quantile_is_that_of_the_judge(df: int) -> None:
    assert _quantile(df) == pytest.approx(quantile(0.95, df), rel=0.02)


def test_the_interval_of_the_median_covers_it() -> None:
    runs = [rounds(seed, 0.02, 4) for seed in range(400)]
    held = [
        abs(statistics.median([x for one in run for x in one]) / 0.01 - 1) <= width
        for run in runs
        if (width := half_width(run)) is not None
    ]
    assert len(held) == 400
    assert sum(held) / len(held) >= 0.94


def test_rounds_that_differ_widen_the_interval_however_many_samples_they_have() -> None:
    alike, apart = half_width(rounds(1, 0.001, 4, each=200)), half_width(rounds(1, 0.001, 4, 200, 0.03))
    assert alike is not None
    assert apart is not None
    assert apart > 0.02 > 10 * alike


@pytest.mark.parametrize(("samples", "width"), [([1.0] * 5, None), ([], None), ([0.0] * 9, None)])
def test_too_few_samples_have_no_interval(samples: list[float], width: None) -> None:
    assert half_width([samples]) is width


def test_a_steady_call_stops_early_a_noisy_one_goes_on_and_both_say_why() -> None:
    assert POLICY.why_stop(rounds(2, 0.001, 3)) == "precision"
    assert POLICY.why_stop(rounds(2, 0.2, 3)) is None
    assert POLICY.why_stop(rounds(2, 0.2, 10)) == "samples"
    assert POLICY.why_stop([[0.3] * 6]) == "time"
    assert set(STOPS) == {"precision", "samples", "time", "cap"}


@pytest.mark.parametrize(
    "few",
    [[[0.5] * 5], [[0.01] * 4] * 2, [[0.0001] * 10] * 3],
    ids=["min_samples", "rounds", "min_s"],
)
def test_nothing_stops_below_any_of_the_least(few: list[list[float]]) -> None:
    assert POLICY.why_stop(few) is None


def test_without_a_precision_all_samples_are_one_round() -> None:
    policy = Policy(limit_s=0.3, min_samples=5, max_samples=100, warmup=3)
    assert policy.in_a_round(0.01) == policy.samples(0.01) == 30
    assert policy.why_stop([[0.01] * 30]) == "time"


@pytest.mark.parametrize(
    ("call_s", "taken", "count"),
    [(1e-6, 0, 20), (0.0, 0, 20), (0.002, 0, 10), (0.5, 0, 1), (1e-6, 95, 5), (1e-6, 100, 1)],
)
def test_a_round_is_short_and_never_empty(call_s: float, taken: int, count: int) -> None:
    assert POLICY.in_a_round(call_s, taken) == count


@pytest.mark.parametrize(("call_s", "samples"), [(1.0, 5), (0.01, 30), (1e-6, 200), (0.0, 200)])
def test_slow_calls_get_few_samples_and_fast_ones_many(call_s: float, samples: int) -> None:
    assert profilers.GPU_POLICY.samples(call_s) == samples
