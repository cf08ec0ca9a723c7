"""What was measured on a card: events beside CUPTI, a flush that must not leak, a sweep's overhead."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from flashbench import runfile, spending
from flashbench._profilers.patience import helped

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import timing_evidence  # noqa: E402

EVIDENCE = ROOT / "reports" / "h200-sxm" / "timing" / "evidence.json"
SWEEP = ROOT / "reports" / "h200-sxm" / "results.jsonl"

measured = pytest.mark.skipif(not EVIDENCE.is_file(), reason="nothing is committed yet")


@pytest.fixture(scope="module")
def evidence() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(EVIDENCE.read_text(encoding="utf-8"))
    return document


def row(name: str, pairs: list[tuple[float, float]], **more: Any) -> dict[str, Any]:
    return {"cell": name, "kernels": 1, "pairs_s": pairs, **more}


def test_an_empty_kernels_overhead_is_taken_off_and_several_kernels_are_left_out() -> None:
    document = {
        "cells": {
            "empty_s": [(5e-6, 2e-6), (5e-6, 2e-6), (9e-6, 2e-6)],
            "rows": [
                row("a", [(104e-6, 100e-6), (154e-6, 150e-6), (84e-6, 80e-6)]),  # at three clocks
                row("two", [(1.0, 1.0)], kernels=2),
                {"cell": "none", "reason": "no room"},
            ],
        }
    }
    (found,) = timing_evidence.differences(document)
    assert (found["cell"], found["kernel_s"]) == ("a", 100e-6)
    assert found["apart_s"] == pytest.approx(1e-6)
    assert found["share"] == pytest.approx(0.01)


def test_a_leak_is_the_cold_copy_less_the_hot_one() -> None:
    document = {"copy": {"events": {"cold": [60e-6, 61e-6, 62e-6], "hot": [4e-6], "method": "events"}}}
    assert timing_evidence.leaks(document) == {"events": pytest.approx(57e-6)}


@measured
def test_events_agree_with_kernel_times(evidence: dict[str, Any]) -> None:
    found = timing_evidence.differences(evidence)
    long = [abs(one["share"]) for one in found if one["kernel_s"] >= timing_evidence.LONG_S]
    short = [abs(one["apart_s"]) for one in found if one["kernel_s"] < timing_evidence.LONG_S]
    assert min(len(long), len(short)) >= 3
    assert statistics.median(long) <= timing_evidence.MEDIAN
    assert max(long) <= timing_evidence.WORST
    assert max(short) <= timing_evidence.SHORT_S


@measured
def test_no_flush_leaks_into_a_copy_of_a_kilobyte(evidence: dict[str, Any]) -> None:
    found = timing_evidence.leaks(evidence)
    assert set(found) == set(timing_evidence.METHODS)
    assert [evidence["copy"][name]["method"] for name in found] == list(found)
    assert max(found.values()) < 5e-6 < evidence["overheads"]["flush_s"] / 2


def test_the_default_sweep_takes_at_most_one_and_a_half_times_what_it_needs() -> None:
    """As measured."""
    file = runfile.load(SWEEP)
    ratio = spending.overhead(file.records, file.timings)
    assert ratio is not None
    assert ratio <= 1.5, spending.rows(file.records, file.timings)


def test_so_it_does_in_a_second_run_where_nothing_is_compiled_ahead() -> None:
    """What is compiled at a first call, cuDNN's plans too, a second run needs as well."""
    file = runfile.load(SWEEP)
    found = spending.seconds(file.records, file.timings)
    ahead = found["compiling ahead"]
    assert ahead > 10
    needed = sum(found[part] for part in spending.NEEDED)
    assert (sum(found.values()) - ahead) / (needed - ahead) <= 1.5


@measured
def test_a_pause_gives_the_clock_back_long_before_nvml_stops_naming_the_cap(evidence: dict[str, Any]) -> None:
    """Why the times of rounds say whether waiting helps, and not whether the cap is named after it."""
    times = {pause_s: list[float]() for pause_s in (None, 0.0, 0.08, 0.16, 0.32)}
    named = {pause_s: set[str]() for pause_s in times}
    for one in evidence["cooling"]:
        if one["pause_s"] in times:
            times[one["pause_s"]].append(statistics.median(one["samples_s"]))
            named[one["pause_s"]] |= set(one["before"]["throttle"])
    rested = [statistics.median(times[None])]
    assert helped(rested, times[0.0])
    assert not named[None]
    for pause_s in (0.08, 0.16, 0.32):
        assert not helped(rested, times[pause_s])
        assert named[pause_s] == {"power cap"}
