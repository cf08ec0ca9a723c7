"""What times by events are worth on this machine's GPU: beside CUPTI's kernel times, on a copy, after a load.

python tools/timing_evidence.py --out reports/h200-sxm/timing/evidence.json [--only overheads,copy]

- overheads: an empty kernel by each method, hot and cold.
- lengths: a kernel of one thread that waits for some SM cycles, from none on, by each method, hot and cold:
  what a method takes beyond kernels that are not empty.
- copy: 1 KB copied, cold and hot, by each method. A flush that leaked would show as its own time.
- cells: calls of one kernel, between events while CUPTI records them, so that both times are of one launch
  and a step of the clock is theirs alike; in turns with them calls that nobody records. Compared with CUPTI's
  time is that of the events around it less what they show of an empty kernel beyond CUPTI's time of that.
- cooling: after a load that the power cap holds back, a pause of each length later: what NVML says, how fast
  the SM clock really is (by a kernel that counts cycles), and how long each of some calls of the load takes
  then. It says how long a burst has to wait, and what NVML's word on a cap is worth.

The file is written after each part; a part that fails leaves its reason.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from flashbench import environment, profilers  # noqa: E402
from flashbench.problem import Cell, Problem  # noqa: E402

METHODS = ("events", "graph", "cupti")
SHAPES = (
    (1, 2, 512),
    (1, 16, 512),
    (1, 16, 1024),
    (4, 16, 1024),
    (2, 16, 4096),
    (1, 16, 8192),
    (1, 16, 16384),
)
"""Batch, heads and length: from some µs to some ms of a forward."""
IMPLEMENTATIONS = ("sdpa-flash", "flash")
ROUNDS, ROUND_S, SAMPLES = 6, 0.01, (4, 30)
"""Turns, seconds of calls in one, and its fewest and most samples."""
LONG_S = 200e-6
"""From here on times have to agree by share, below by SHORT_S."""
SHORT_S, MEDIAN, WORST = 2e-6, 0.01, 0.03
CYCLES = (0, 1_000, 4_000, 16_000, 64_000, 256_000)
LENGTH_SAMPLES = 60
LOAD_S, PAUSES_S, REPEATS = 0.3, (0.0, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64), 2
PROBE_CYCLES = 1_000_000
"""Of the kernel that shows the SM clock, some 500 µs."""
PRODUCTS = 20
"""Calls of the load after each pause, together some 35 ms, about what a round takes."""


def overheads(device: str) -> dict[str, Any]:
    """As flashbench has them in the header of a run with --timing cupti."""
    return dict(profilers.measure_overheads(device, cupti=True))


def lengths(device: str) -> list[dict[str, Any]]:
    """Rows of cycles, method, cache and samples_s of a kernel that waits for so many."""
    import torch

    from flashbench._profilers.flush import Pause
    from flashbench._profilers.timers import timer_of

    found = []
    for cycles in CYCLES:

        def wait(cycles: int = cycles) -> None:
            torch.cuda._sleep(cycles)

        for cache, before in (("hot", Pause()), ("cold", profilers.Flush(device))):
            for method in METHODS:
                timer = timer_of(method, wait, lambda: wait, device, before)
                timer.samples(LENGTH_SAMPLES // 10)
                samples = timer.samples(LENGTH_SAMPLES)
                found.append({"cycles": cycles, "method": method, "cache": cache, "samples_s": samples})
    return found


def copy(device: str) -> dict[str, Any]:
    """Samples of a copy of 1 KB, seconds, by method and cache."""
    import torch

    source, target = torch.zeros(256, device=device), torch.empty(256, device=device)
    found: dict[str, Any] = {}
    for method in METHODS:
        for cache in ("cold", "hot"):
            timing = profilers.measure_time(
                lambda: target.copy_(source), device=device, cache=cache, method=method
            )
            found.setdefault(method, {})[cache] = list(timing.samples.samples_s)
            found[method]["method"] = timing.samples.method
    return found


def cells(device: str) -> dict[str, Any]:
    """Forwards of SHAPES, from a cold L2: kernels of a call, and samples as of ``in_turns``.

    empty: pairs of an empty kernel.
    """
    import torch

    from flashbench.counting.child import call_of

    target, flush, found = environment.target(device), profilers.Flush(device), []
    for name in IMPLEMENTATIONS:
        for batch, heads, seqlen in SHAPES:
            problem = Problem(
                batch=batch, num_heads=heads, num_kv_heads=heads, seqlen_q=seqlen, seqlen_k=seqlen,
                head_dim=128, head_dim_v=128, dtype="bf16", causal=False,
            )  # fmt: skip
            cell = Cell(implementation=name, problem=problem, pass_="fwd")
            try:
                with call_of(cell, target, 0, None) as call:
                    row = in_turns(call, device, flush)
            except Exception as error:  # one that does not run leaves the others
                row = {"reason": f"{type(error).__name__}: {error}"[:300]}
            found.append({"cell": cell.key, **row})
    empty = in_turns(lambda: torch.cuda._sleep(0), device, flush)
    return {"rows": found, "empty_s": empty["pairs_s"]}


def in_turns(call: Callable[[], object], device: str, flush: profilers.Flush) -> dict[str, Any]:
    """alone_s: seconds between events. pairs_s: the same of calls that CUPTI records, and what it says."""
    from flashbench._profilers.timers import EventTimer

    call()
    timer = EventTimer(call, device, flush)
    about = statistics.median(timer.samples(5))
    count = max(SAMPLES[0], min(SAMPLES[1], int(ROUND_S / about)))
    alone: list[float] = []
    pairs: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        alone += timer.samples(count)
        pairs += recorded(call, device, flush, count)
    kernels = len(profilers.timeline(call, device).kernels)
    return {"kernels": kernels, "late": timer.late / len(alone), "alone_s": alone, "pairs_s": pairs}


def recorded(
    call: Callable[[], object], device: str, flush: profilers.Flush, count: int
) -> list[tuple[float, float]]:
    """(seconds between events, in which kernels ran) of each of so many calls while CUPTI records them.

    A pause that is longer than any launch comes before each.
    """
    from flashbench._profilers.flush import Pause
    from flashbench._profilers.timeline import device_records
    from flashbench._profilers.timers import LONG_PAUSE, between_events, busy_times

    pause, between = Pause(LONG_PAUSE), list[float]()

    def before() -> None:
        pause()
        flush()

    records = device_records(lambda: between.extend(between_events(call, before, count)), device)
    busy = busy_times(records, count, skip=pause.KERNELS + flush.KERNELS)
    return list(zip(between, busy, strict=True))


def cooling(device: str) -> list[dict[str, Any]]:
    """Rows of pause_s, NVML before and after, sm_clock_hz as it is then, and seconds of products after it.

    The first two rows are of a chip that was idle.
    """
    import torch

    from flashbench._profilers.timers import between_events

    clocks = profilers.open_clocks(device)
    x = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(x)

    def product() -> object:
        return torch.mm(x, x, out=out)

    def row(pause_s: float | None) -> dict[str, Any]:
        read = dict(clocks.read()) if clocks else {}
        (probe_s,) = between_events(lambda: torch.cuda._sleep(PROBE_CYCLES), None, 1)
        samples = between_events(product, None, PRODUCTS)
        after = dict(clocks.read()) if clocks else {}
        (last_s,) = between_events(lambda: torch.cuda._sleep(PROBE_CYCLES), None, 1)
        return {
            "pause_s": pause_s, "before": read, "after": after, "sm_clock_hz": PROBE_CYCLES / probe_s,
            "sm_clock_after_hz": PROBE_CYCLES / last_s, "samples_s": samples,
        }  # fmt: skip

    product()
    torch.cuda._sleep(PROBE_CYCLES)
    torch.cuda.synchronize(device)
    found = []
    for _ in range(2):
        time.sleep(1.0)
        found.append(row(None))
    for pause_s in PAUSES_S * REPEATS:
        end = time.perf_counter() + LOAD_S
        while time.perf_counter() < end:
            for _ in range(4):
                product()
            torch.cuda.synchronize(device)
        time.sleep(pause_s)
        found.append(row(pause_s))
    return found


PARTS: Mapping[str, Callable[[str], Any]] = {
    "overheads": overheads, "lengths": lengths, "copy": copy, "cells": cells, "cooling": cooling
}  # fmt: skip


def differences(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of each cell of one kernel: its time by CUPTI, and how far that by the events around it, less what they
    take around an empty kernel, is from it; medians, seconds."""

    def beyond(pairs: Sequence[Sequence[float]]) -> float:
        return statistics.median(between - busy for between, busy in pairs)

    cells, found = document["cells"], []
    overhead_s = beyond(cells["empty_s"])
    for row in cells["rows"]:
        if row.get("kernels") == 1:
            kernel_s = statistics.median(busy for _, busy in row["pairs_s"])
            apart_s = beyond(row["pairs_s"]) - overhead_s
            found.append({"cell": row["cell"], "kernel_s": kernel_s, "apart_s": apart_s,
                          "share": apart_s / kernel_s})  # fmt: skip
    return found


def leaks(document: Mapping[str, Any]) -> dict[str, float]:
    """By method the cold copy's time less the hot one's, medians, seconds."""
    return {
        name: statistics.median(row["cold"]) - statistics.median(row["hot"])
        for name, row in document["copy"].items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, a comma list")
    given = parser.parse_args()
    target = environment.target("cuda")
    document: dict[str, Any] = {"type": "timing-evidence", "environment": environment.collect(target)}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for name in given.only.split(","):
        start = time.perf_counter()
        try:
            document[name] = PARTS[name](target.device)
        except Exception as error:
            document[name] = {"reason": f"{type(error).__name__}: {error}"[:300]}
        given.out.write_text(json.dumps(document) + "\n", encoding="utf-8")
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    for row in differences(document) if "rows" in document.get("cells", ()) else ():
        apart = f"{1e6 * row['apart_s']:+.2f} us, {100 * row['share']:+.2f} %"
        print(f"{row['cell']}: kernel {1e6 * row['kernel_s']:.1f} us, events {apart}")


if __name__ == "__main__":
    main()
