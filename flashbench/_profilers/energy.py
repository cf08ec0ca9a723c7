"""Energy of a call: the board's own counter over calls that run back to back for a second or more.

It is the whole board, with memory, idle power and losses in it. Boards without the counter (before
Volta, MIG slices, some virtual GPUs) have their power integrated instead, which is coarser.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from flashbench._profilers.clocks import Clocks
from flashbench._profilers.telemetry import INTERVAL_S, Reading, sampling

MIN_S = 1.0
"""Seconds that are measured at least: the counter is renewed every 20 to 100 ms."""


def measure_energy(
    call: Callable[[], object], *, device: str, clocks: Clocks | None, call_s: float, min_s: float = MIN_S
) -> dict[str, Any]:
    """Joules of one call, or ``{"reason": …}`` where this device does not tell.

    call_s: about how long a call takes. Keys: joules_per_call, watts (mean), calls, seconds, method
    (``counter`` or ``power``). The L2 is warm.
    """
    if clocks is None:
        return {"reason": "energy needs a GPU that NVML can read"}
    import torch

    calls = max(1, round(min_s * 1.1 / call_s)) if call_s > 0 else 1
    torch.cuda.synchronize(device)
    with sampling(clocks) as readings:
        before, start = clocks.energy_j(), time.perf_counter()
        done = 0
        while done == 0 or time.perf_counter() - start < min_s:
            for _ in range(calls):
                call()
            torch.cuda.synchronize(device)
            done += calls
            calls = max(1, calls // 4)
        seconds, after = time.perf_counter() - start, clocks.energy_j()
    return settle(before, after, readings, seconds, done)


def settle(
    before: float | None, after: float | None, readings: Sequence[Reading], seconds: float, calls: int
) -> dict[str, Any]:
    """The result from what was read: the counter where it moved, else the mean power times the time."""
    if before is not None and after is not None and after > before:
        joules, method = after - before, "counter"
    else:
        powers = [power for r in readings if (power := r.get("power_w")) is not None]
        if not powers:
            return {"reason": "this GPU tells neither energy nor power"}
        joules, method = sum(powers) / len(powers) * seconds, "power"
    return {
        "joules_per_call": joules / calls,
        "watts": joules / seconds,
        "calls": calls,
        "seconds": seconds,
        "method": method,
        "interval_s": INTERVAL_S,
    }
