"""Every second of the wall time has one place, and what nobody can do without is told from the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest
import synthetic

from flashbench import spending

SPENT = {
    "inputs_s": 1.0, "reference_s": 2.0, "check_s": 1.0, "prepare_s": 3.0, "memory_s": 1.0, "warmup_s": 2.0,
    "load_s": 1.0, "rounds_s": 6.0, "samples_s": 4.0, "flushes_s": 1.5, "paused_s": 2.0, "energy_s": 1.0,
}  # fmt: skip
RECORDS = [replace(synthetic.record(), spent=SPENT), replace(synthetic.record(), spent={"warmup_s": 1.0})]
ASIDE = replace(
    synthetic.record(), spent={"rounds_s": 3.0, "samples_s": 1.0, "given_up_s": 2.0, "warmup_s": 1.0},
    timing={"set_aside": [{"samples_s": [0.5, 0.25], "caps": ["power cap"]}, {"samples_s": [0.75]}]},
)  # fmt: skip
TIMINGS = [{"wall_s": 20.0, "precompile_s": 3.0}, {"wall_s": 6.0}]


def test_the_parts_add_up_to_the_wall_time() -> None:
    found = spending.seconds(RECORDS, TIMINGS)
    assert sum(found.values()) == pytest.approx(26.0)
    assert found["the rest of the rounds"] == 0.5  # of which samples and flushes are taken off
    assert found["warm-up"] == 4.0
    assert found["compiling ahead"] == 3.0
    assert found[spending.ELSE] == pytest.approx(26.0 - 24.0)


def test_rounds_that_were_put_aside_and_timing_that_was_given_up_stand_apart_and_were_not_needed() -> None:
    timings = [{"wall_s": 6.0}]
    found = spending.seconds([ASIDE], timings)
    assert found["rounds put aside"] == 1.5
    assert found["the rest of the rounds"] == 0.5
    assert found["timing by events that was given up"] == 2.0
    assert sum(found.values()) == 6.0
    assert spending.overhead([ASIDE], timings) == 3.0  # samples and warm-up, a second each


def test_rows_are_the_largest_first_and_leave_out_what_took_nothing() -> None:
    rows = spending.rows(RECORDS[1:], TIMINGS[1:])
    assert [(row["name"], row["seconds"]) for row in rows] == [("everything else", 5.0), ("warm-up", 1.0)]
    assert sum(row["share"] for row in rows) == pytest.approx(1.0)


def test_the_overhead_is_over_what_cannot_be_left_out() -> None:
    # warm-up 4, samples 4, flushes 1.5, checks 3, preparing 3, compiling 3
    assert spending.overhead(RECORDS, TIMINGS) == pytest.approx(26.0 / 18.5)
    assert spending.overhead([], []) is None
    assert spending.overhead([replace(synthetic.record(), spent={})], []) is None
    assert spending.rows([], []) == []
