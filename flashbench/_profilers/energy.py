"""Energy of a call: the board's own counter over calls that run back to back for a second or more.

It is the whole board, with memory, idle power and losses in it, and on a MIG slice the card's other
slices too. Boards without the counter (before Volta, some virtual GPUs) have their power averaged
instead, which is coarser.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from flashbench._profilers.clocks import Clocks
from flashbench._profilers.load import Load
from flashbench._profilers.telemetry import INTERVAL_S, Reading, sampling

MIN_S = 1.0
"""Seconds that are measured at least."""

TICK_S = 0.25
"""The longest that a change of the counter is waited for; it is renewed every 20 to 100 ms."""

SETTLE_S = 1.0
"""Without a counter the calls run that long first: power is a mean of the last second on most cards.

Source: nvml.h, nvmlDeviceGetPowerUsage.
"""


REMEDY = "run without --energy, or on a whole NVIDIA GPU of which 'nvidia-smi' shows the power"
"""What helps where there is no energy to be had."""


def measure_energy(
    call: Callable[[], object], *, device: str, clocks: Clocks | None, min_s: float = MIN_S
) -> dict[str, Any]:
    """Joules of one call that has run before, or ``{"reason": …}`` where this device does not tell.

    Begins and ends where the counter has just changed, so that its period is no error.
    Keys: joules_per_call, watts (mean), calls, seconds, method (``counter`` or ``power``), scope (whose
    energy), interval_s (of the power readings). The L2 is warm. Raises what the call raises.
    """
    if clocks is None:
        return {"reason": f"energy: NVML does not answer for this device; {REMEDY}"}
    load, changed = Load(call, _waiter(device)), _Change(clocks)
    if not load.run_until(changed, most_s=TICK_S):
        load.run_for(SETTLE_S)
    with sampling(clocks) as readings:
        before, start, done = clocks.energy_j(), time.perf_counter(), load.calls
        load.run_until(changed, least_s=min_s, most_s=min_s + TICK_S)
        after, seconds, calls = clocks.energy_j(), time.perf_counter() - start, load.calls - done
    found = settle(before, after, readings, seconds, calls)
    return found if "reason" in found else found | {"scope": _scope(clocks)}


def _waiter(device: str) -> Callable[[], object]:
    if not device.startswith("cuda"):
        return lambda: None
    import torch

    return partial(torch.cuda.synchronize, device)


class _Change:
    """Whether the energy counter has changed since it was asked last; never where there is none."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._seen = clocks.energy_j()

    def __call__(self) -> bool:
        before, self._seen = self._seen, self._clocks.energy_j()
        return self._seen is not None and self._seen != before


def _scope(clocks: Clocks) -> str:
    return "board, idle included" if clocks.card is None else "board, idle and other MIG slices included"


def settle(
    before: float | None, after: float | None, readings: Sequence[Reading], seconds: float, calls: int
) -> dict[str, Any]:
    """The result from what was read: the counter where it moved, else the mean power times the time."""
    if before is not None and after is not None and after > before:
        joules, method = after - before, "counter"
    else:
        powers = [power for r in readings if (power := r.get("power_w")) is not None]
        if not powers:
            return {
                "reason": f"this GPU tells neither energy nor power (a virtual GPU, an old board); {REMEDY}"
            }
        joules, method = sum(powers) / len(powers) * seconds, "power"
    return {
        "joules_per_call": joules / calls,
        "watts": joules / seconds,
        "calls": calls,
        "seconds": seconds,
        "method": method,
        "interval_s": INTERVAL_S,
    }
