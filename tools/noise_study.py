"""Repeated runs of one grid, and the same with every call slowed on purpose, for tools/noise_table.py.

python tools/noise_study.py --out reports/h200-sxm/noise --seconds 250

Each call of the script is a sitting and makes a folder; a run is a folder in it with the results.jsonl that
``flashbench run`` writes and a variant.json that says by how much its calls are slower. Runs are interleaved:
a block has one of each variant, and blocks begin with another one in turn. No run starts that would not end
in time.

A run is a process of its own, with its own context on the device; it is forked from one that has imported
torch and has not touched the device, which saves the import.

A call is slowed by work after it, inside of what is timed: on a GPU a kernel of one thread that counts SM
cycles, on a CPU a loop. How many, each run finds for each cell by timing the call with and without, in turns,
until they differ by the wanted share; a run that is not slowed does the same and leaves the kernel out. What
this cannot be: a kernel of one thread needs no power and no memory. Where a power cap holds the clock back,
the chip gains some of the share back, so the table has what came out beside what was asked for.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from flashbench._cli import measure, run  # noqa: E402

VARIANT = "variant.json"
SHARES = (0.0, 0.02, 0.03, 0.05)
"""By how much the calls of each variant are slower."""
ROUNDS, SAMPLES = 3, 6
"""To find the cycles: so often the call is timed so many times without and with them, twice in turns."""
RUN_LIMIT_S = 240.0
"""A run that takes longer is ended, and with it the sitting."""

Call = Callable[[], object]


def name_of(share: float) -> str:
    """Of a variant: same, or slower-3 for 3 %."""
    return f"slower-{100 * share:g}" if share else "same"


def order(shares: Sequence[float]) -> Iterator[tuple[int, float]]:
    """Number and share of each run of a sitting, without end; each block begins with the next variant."""
    number = 0
    while True:
        start = number // len(shares) % len(shares)
        for share in (*shares[start:], *shares[:start]):
            yield number, share
            number += 1


class Slow:
    """Stands in for ``timed_call`` of the runner: what it gives takes longer by a share. 0 changes nothing.

    told: what was found for each call, in the order in which they were made ready.
    """

    def __init__(self, share: float, device: str) -> None:
        from flashbench.kernels import _backward

        self.share = share
        self.told: list[dict[str, float | str]] = []
        self._bench = _OnGpu(device) if device.startswith("cuda") else _OnCpu()
        self._plain = _backward.timed_call
        _backward.timed_call = self.timed_call

    def timed_call(self, pass_: str, call: Call, inputs: Any) -> tuple[Call, Any, Any]:
        """As of the runner."""
        timed, o, gradients = self._plain(pass_, call, inputs)
        amount, found = self._find(timed, self.share or SHARES[-1])
        self.told.append({"pass": pass_, "amount": amount, "unit": self._bench.unit, "share": found})
        return (self._bench.slower(timed, amount) if self.share else timed), o, gradients

    def _find(self, timed: Call, share: float) -> tuple[float, float]:
        """The amount of work that takes the share of the call's time, and what it took at last."""
        amount, plain_s, more_s = 0.0, 0.0, 0.0
        for _ in range(ROUNDS + 1):
            plain, more = [], []
            for _ in range(2):
                plain += self._bench.seconds(timed, SAMPLES)
                more += self._bench.seconds(self._bench.slower(timed, amount), SAMPLES)
            plain_s, more_s = statistics.median(plain), statistics.median(more)
            last = amount
            amount = max(0.0, amount + (share * plain_s - (more_s - plain_s)) * self._bench.per_second)
        return last, more_s / plain_s - 1


class _OnGpu:
    unit = "SM cycles"

    def __init__(self, device: str) -> None:
        from flashbench.profilers import Flush

        self.device, self.flush = device, Flush(device)
        self.slower(lambda: None, 0)()
        self.per_second = 1e6 / statistics.median(self.seconds(self.slower(lambda: None, 1e6), 5))

    def slower(self, call: Call, amount: float) -> Call:
        import torch

        sleep, cycles = torch.cuda._sleep, round(amount)

        def both() -> object:
            found = call()
            sleep(cycles)
            return found

        return both

    def seconds(self, call: Call, count: int) -> list[float]:
        from flashbench._profilers.timers import EventTimer

        return EventTimer(call, self.device, self.flush).samples(count)


class _OnCpu:
    unit = "s"
    per_second = 1.0

    def slower(self, call: Call, amount: float) -> Call:
        def both() -> object:
            found = call()
            end = time.perf_counter() + amount
            while time.perf_counter() < end:
                pass
            return found

        return both

    def seconds(self, call: Call, count: int) -> list[float]:
        from flashbench._profilers.timers import WallTimer

        return WallTimer(call).samples(count)


def one_run(
    folder: Path, options: dict[str, str | bool], config: str | None, share: float, parent: int
) -> None:
    """What ``flashbench run --in-process`` does but for its report, with calls slower by the share."""
    from flashbench import environment
    from flashbench.isolation import lifeline

    lifeline.die_with(parent)

    start = time.perf_counter()
    sys.argv[1:] = ["run", *(f"--{key.replace('_', '-')}={value}" for key, value in options.items())]
    sys.argv += [f"--config={config}"] if config else []
    sys.argv += [f"(of tools/noise_study.py: each call slower by {share:.0%})"]
    request = run.resolve({**options, "out": str(folder), "in_process": True}, config)
    folder.mkdir(parents=True)
    slow = Slow(share, request.target.device)
    about = environment.collect(request.target)
    with measure.sweep(request, folder / run.RESULTS, about):
        pass
    document = {"share": share, "wall_s": time.perf_counter() - start, "calls": slow.told}
    (folder / VARIANT).write_text(json.dumps(document) + "\n", encoding="utf-8")


def sitting(
    out: Path, options: dict[str, str | bool], config: str | None, seconds: float,
    shares: Sequence[float] = SHARES, most: int | None = None,
) -> Path:  # fmt: skip
    """Runs until the time is spent, or so many; the folder of the sitting. Raises SystemExit if one fails."""
    import torch  # noqa: F401  before the forks

    if str(options["device"]).startswith("cuda"):
        import triton  # noqa: F401

    start, longest = time.monotonic(), 0.0
    folder = out / f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
    context = multiprocessing.get_context("fork")
    for number, share in order(shares):
        began = time.monotonic()
        if number == most or (number and began - start + 1.1 * longest > seconds):
            break
        path = folder / f"{number:03d}-{name_of(share)}"
        process = context.Process(target=one_run, args=(path, options, config, share, os.getpid()))
        process.start()
        process.join(RUN_LIMIT_S)
        if process.exitcode != 0:
            process.kill()
            raise SystemExit(f"{path}: {'it took too long' if process.exitcode is None else 'it failed'}")
        took = time.monotonic() - began
        if number:  # the first one compiles
            longest = max(longest, took)
        print(f"{path.name}: {took:.1f} s, {time.monotonic() - start:.0f} s in all", flush=True)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=Path, help="folder to which the sitting's is added")
    parser.add_argument("--seconds", default=250.0, type=float, help="no run starts that would end later")
    parser.add_argument("--runs", type=int, help="so many at most")
    parser.add_argument("--config", default=str(ROOT / "configs" / "noise.toml"), help="the grid")
    parser.add_argument("--slower", default="0,2,3,5", help="percent of each variant; 0: as it is")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--load", help="burst or sustained, else what the config says")
    given = parser.parse_args()
    options = {"device": given.device, "quiet": True} | ({"load": given.load} if given.load else {})
    shares = [float(percent) / 100 for percent in given.slower.split(",")]
    sitting(given.out, options, given.config, given.seconds, shares, given.runs)


if __name__ == "__main__":
    main()
