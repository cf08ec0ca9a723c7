"""When ``--timing auto`` takes a graph, held to what sweeps on cards recorded."""

from __future__ import annotations

import statistics
from collections import defaultdict
from functools import cache
from pathlib import Path

from flashbench import runfile
from flashbench._profilers.rounds import LATE, launch_bound
from flashbench.record import Record

REPORTS = Path(__file__).resolve().parent.parent / "reports"
SWEEPS = ("h200-sxm", "h200-sxm-x2/fleet/one", "h200-sxm-x2/fleet/two")


@cache
def timed(method: str) -> dict[tuple[str, str], list[Record]]:
    """The timed rows of the sweeps by cell and configuration: another kernel is another call."""
    found = defaultdict(list)
    for name in SWEEPS:
        for record in runfile.load(REPORTS / name / "results.jsonl").records:
            if record.samples is not None and record.samples.method == method:
                found[record.cell.key, str(record.config)].append(record)
    return found


def both() -> list[tuple[Record, Record]]:
    """A row timed by graph, and one of the same cell that another sweep timed by events."""
    events = timed("events")
    return [(one, other) for key, rows in timed("graph").items() for one in rows for other in events[key]]


def median_s(record: Record) -> float:
    assert record.samples is not None
    return record.samples.median_s


def test_what_was_timed_by_graph_as_a_host_was_busy_is_not_launch_bound_however_late() -> None:
    """Of a pair of sweeps one flipped to graphs and the other did not: nothing of the call is bound."""
    pairs = both()
    assert len(pairs) > 50
    bound = [
        (other.cell.key, other.clocks["host_s"], median_s(other))
        for _, other in pairs
        if launch_bound(1.0, other.clocks["host_s"], median_s(other))
    ]
    assert bound == []


def test_events_and_graph_agree_on_calls_that_are_not_launch_bound() -> None:
    apart = [median_s(other) / median_s(one) - 1 for one, other in both()]
    assert abs(statistics.median(apart)) < 0.005
    assert statistics.median(map(abs, apart)) < 0.01


def test_late_samples_of_long_calls_are_no_sign_that_the_device_waited() -> None:
    """The same cells in another sweep, where few samples were late, took as long."""
    apart = [
        median_s(late) / median_s(other) - 1
        for rows in timed("events").values()
        for late in rows
        for other in rows
        if late.timing["late"] > LATE > 0.2 > other.timing["late"]
    ]
    assert len(apart) >= 10
    assert abs(statistics.median(apart)) < 0.01
    assert max(apart) < 0.05


def test_calls_that_take_the_host_as_long_are_not_launch_bound_where_nothing_is_late() -> None:
    """While the device flushes and pauses, the host gets ahead of it."""
    rows = [one for found in timed("events").values() for one in found]
    short = [one for one in rows if one.clocks["host_s"] > median_s(one) / 2]
    assert len(short) >= 10
    assert not any(launch_bound(one.timing["late"], one.clocks["host_s"], median_s(one)) for one in short)
