"""What timing itself costs on this card: an empty kernel, timed every way there is.

The time of a cell by events holds what an empty kernel takes by events beyond its own time by CUPTI. So
``event time − (events_s − cupti_s)`` is to be compared with kernel time.
"""

from __future__ import annotations

import logging
import statistics
from typing import Any

from flashbench._profilers.flush import Before, Flush, Pause
from flashbench._profilers.timers import Call, CuptiTimer, EventTimer, GraphTimer, Timer

log = logging.getLogger("flashbench")

COUNT = 100


def measure_overheads(device: str, *, cupti: bool) -> dict[str, float | None]:
    """Median seconds of an empty kernel by each method, hot and cold, and of the flush; {} on a CPU.

    Keys: events_s, events_cold_s, graph_s, graph_cold_s, cupti_s, cupti_cold_s; host_s: what one launch takes
    the host; flush_s: device time of one flush. None for a method that does not work here, and for CUPTI
    where it is not asked for: once it is loaded, every launch takes the host longer.
    """
    if not device.startswith("cuda"):
        return {}
    import torch

    def empty() -> None:
        torch.cuda._sleep(0)  # a kernel of one thread, which ends at once

    flush = Flush(device)
    with torch.cuda.device(device):
        empty()
    found: dict[str, float | None] = {}
    for suffix, one in (("", Pause()), ("_cold", flush)):
        found[f"events{suffix}_s"] = _median("events", EventTimer, empty, device, one)
        found[f"graph{suffix}_s"] = _median("graph", lambda call, *rest: GraphTimer(lambda: call, *rest),
                                            empty, device, one)  # fmt: skip
        found[f"cupti{suffix}_s"] = _median("cupti", CuptiTimer, empty, device, one) if cupti else None
    timer = EventTimer(empty, device, flush)
    found["host_s"] = min(timer.host_s() for _ in range(10))
    found["flush_s"] = timer.flush_s
    return found


def _median(name: str, make: Any, call: Call, device: str, flush: Before | None) -> float | None:
    try:
        timer: Timer = make(call, device, flush)
        timer.samples(COUNT // 10)
        return statistics.median(timer.samples(COUNT))
    except Exception as error:
        log.warning("an empty kernel could not be timed by %s: %s", name, error)
        return None
