"""A GPU's clocks, power, temperature and caps while something runs on it: NVML, read in a thread.

    with sampling(clocks) as readings:
        call()
    summary(readings)

The thread wakes every INTERVAL_S and costs the host less than a hundredth of that; what it can't read
is None, and nothing that NVML does reaches the caller.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from flashbench._profilers.clocks import Clocks

INTERVAL_S = 0.02
CLOCK_DROP = 0.10
"""Flagged as throttled where the SM clock ends lower than it began by more than this share.

A card that keeps its clock wavers by steps of 15 MHz, under 1 %.
"""

Reading = Mapping[str, Any]


@contextmanager
def sampling(clocks: Clocks | None, interval_s: float = INTERVAL_S) -> Iterator[list[Reading]]:
    """Collects ``clocks.read()`` every interval_s until the block ends; an empty list without clocks."""
    readings: list[Reading] = []
    if clocks is None:
        yield readings
        return
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            try:
                readings.append(clocks.read())
            except Exception:  # a driver that goes away ends the telemetry, not the run
                return
            done.wait(interval_s)

    thread = threading.Thread(target=watch, name="flashbench-telemetry", daemon=True)
    with suppress(RuntimeError):  # no more threads here: no readings
        thread.start()
    try:
        yield readings
    finally:
        done.set()
        if thread.ident is not None:
            thread.join(timeout=5.0)


def summary(readings: Sequence[Reading], interval_s: float = INTERVAL_S) -> dict[str, Any]:
    """What the readings say, JSON-able; None for what no reading has; empty without readings.

    sm_clock_mhz, memory_clock_mhz, power_w: first, last, min, median, max. temperature_c: the highest.
    throttle: share of the readings in which each cap was active.
    """
    if not readings:
        return {}
    temperatures = [t for r in readings if (t := r.get("temperature_c")) is not None]
    capped = [caps for r in readings if (caps := r.get("throttle")) is not None]
    names = dict.fromkeys(name for caps in capped for name in caps)
    return {
        "readings": len(readings),
        "interval_s": interval_s,
        **{name: _spread(readings, name) for name in ("sm_clock_mhz", "memory_clock_mhz", "power_w")},
        "temperature_c": max(temperatures, default=None),
        "throttle": {name: sum(name in caps for caps in capped) / len(capped) for name in names}
        if capped
        else None,
    }


def _spread(readings: Sequence[Reading], name: str) -> dict[str, float] | None:
    values = [value for r in readings if (value := r.get(name)) is not None]
    if not values:
        return None
    return {
        "first": values[0],
        "last": values[-1],
        "min": min(values),
        "median": statistics.median(values),
        "max": max(values),
    }


def throttled_by(
    before: Reading, during: Mapping[str, Any], after: Reading, expected: Sequence[str] = ()
) -> list[str]:
    """Why a time is that of a GPU held back, in words; empty where it ran freely.

    before, after: as of ``Clocks.read``; during: a summary. Any of them may be empty. expected: caps that
    are no reason.
    """

    def unexpected(names: Iterable[str] | None) -> list[str]:
        return [name for name in names or () if name not in expected]

    reasons = [f"{name} before the samples" for name in unexpected(before.get("throttle"))]
    shares = during.get("throttle") or {}
    of = f"of {during.get('readings')} readings"
    reasons += [f"{name} in {shares[name]:.0%} {of}" for name in unexpected(shares)]
    reasons += [f"{name} at the last samples" for name in unexpected(after.get("throttle"))]
    clock = during.get("sm_clock_mhz")
    if not expected and clock and clock["last"] < (1 - CLOCK_DROP) * clock["first"]:
        reasons.append(f"the SM clock fell from {clock['first']:g} to {clock['last']:g} MHz")
    return reasons
