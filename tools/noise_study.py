"""Repeated runs of one grid, and the same with every call slowed on purpose, for tools/noise_table.py.

python tools/noise_study.py --out reports/h200-sxm/noise --seconds 250

Each call of the script is a sitting and makes a folder; a run is a folder in it with the results.jsonl that
``flashbench run`` writes and a variant.json that says by how much its calls are slower. Runs are interleaved:
a block has one of each variant, and blocks begin with another one in turn. No run starts that would not end
in time.

A run is a process of its own, with its own context on the device; it is forked from one that has imported
torch and has not touched the device, which saves the import.

A call is slowed by work after it, inside of what is timed: on a GPU a kernel of one thread that counts SM
cycles, on a CPU a loop. How many make a share of a cell's time is found once a sitting, before its runs, by
timing the call with and without, in turns, each after a pause in which the chip recovers from a cap
(work.json); a run that is not slowed leaves the kernel out. What this cannot be: a kernel of one thread needs
no power and no memory. Where a power cap holds the clock back, the chip gains some of the share back, so the
table has what came out beside what was asked for.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
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
WORK = "work.json"
ROUNDS, SAMPLES = 4, 10
"""To find the work: so often the call is timed so many times without, with none and with some of it."""
SOME = 0.1
"""The work that it is found by, of the call's time."""
RECOVERED_S = 0.1
"""After so long a pause a chip that was at its power cap runs at its full clock for as long as a measurement
here takes (tools/timing_evidence.py)."""
RUN_LIMIT_S = 240.0
"""A run that takes longer is ended, and with it the sitting."""

Call = Callable[[], object]
Work = dict[str, Any]


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

    work: of each call in the order in which they are made ready, as ``told`` has it of the run that found it.
    """

    def __init__(self, share: float, device: str, work: Sequence[Work] | None) -> None:
        from flashbench.kernels import _backward

        self.share = share
        self.told: list[Work] = []
        self._work = None if work is None else iter(work)
        self._bench = _OnGpu(device) if device.startswith("cuda") else _OnCpu()
        self._plain = _backward.timed_call
        _backward.timed_call = self.timed_call

    def timed_call(self, pass_: str, call: Call, inputs: Any) -> tuple[Call, Any, Any]:
        """As of the runner."""
        timed, o, gradients = self._plain(pass_, call, inputs)
        if self._work is None:
            self.told.append({"pass": pass_, "unit": self._bench.unit, **self._find(timed)})
            return timed, o, gradients
        mine = next(self._work)
        if mine["pass"] != pass_:
            raise RuntimeError(f"the {pass_} of this run is where {WORK} has a {mine['pass']}")
        amount = (self.share * float(mine["call_s"]) - float(mine["gap_s"])) * float(mine["per_second"])
        return (self._bench.slower(timed, max(0.0, amount)) if self.share else timed), o, gradients

    def _find(self, timed: Call) -> dict[str, float]:
        """call_s: of the call; gap_s: what no work adds to it; per_second: work that takes a second more."""
        calls: dict[str, Call] = {"call": timed, "none": self._bench.slower(timed, 0.0)}
        some = SOME * statistics.median(self._bench.seconds(timed, SAMPLES)) * self._bench.per_second
        calls["some"] = self._bench.slower(timed, some)
        found: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(ROUNDS):
            for name, one in calls.items():
                time.sleep(RECOVERED_S)
                found[name] += self._bench.seconds(one, SAMPLES)
        call_s, none_s, some_s = (statistics.median(samples) for samples in found.values())
        return {"call_s": call_s, "gap_s": none_s - call_s, "per_second": some / (some_s - none_s)}


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
    """What ``flashbench run --in-process`` does but for its report, with calls slower by the share.

    Without work in the folder's sitting it is found, and nothing else is left.
    """
    from flashbench import environment
    from flashbench.isolation import lifeline

    lifeline.die_with(parent)

    start = time.perf_counter()
    sys.argv[1:] = ["run", *(f"--{key.replace('_', '-')}={value}" for key, value in options.items())]
    sys.argv += [f"--config={config}"] if config else []
    sys.argv += [f"(of tools/noise_study.py: each call slower by {share:.0%})"]
    request = run.resolve({**options, "out": str(folder), "in_process": True}, config)
    found = folder.parent / WORK
    work = json.loads(found.read_text(encoding="utf-8")) if found.exists() else None
    folder.mkdir(parents=True)
    slow = Slow(share, request.target.device, work)
    about = environment.collect(request.target)
    with measure.sweep(request, folder / run.RESULTS, about):
        pass
    if work is None:
        found.write_text(json.dumps(slow.told) + "\n", encoding="utf-8")
        shutil.rmtree(folder)
        return
    document = {"share": share, "wall_s": time.perf_counter() - start}
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
    _in_a_process(folder / "work", options, config, 0.0)
    for number, share in order(shares):
        began = time.monotonic()
        if number == most or began - start + 1.1 * longest > seconds:
            break
        path = folder / f"{number:03d}-{name_of(share)}"
        _in_a_process(path, options, config, share)
        longest = max(longest, time.monotonic() - began)
        print(
            f"{path.name}: {time.monotonic() - began:.1f} s, {time.monotonic() - start:.0f} s in all",
            flush=True,
        )
    return folder


def _in_a_process(path: Path, options: dict[str, str | bool], config: str | None, share: float) -> None:
    """``one_run``. Raises SystemExit if it fails."""
    context = multiprocessing.get_context("fork")
    process = context.Process(target=one_run, args=(path, options, config, share, os.getpid()))
    process.start()
    process.join(RUN_LIMIT_S)
    if process.exitcode != 0:
        process.kill()
        raise SystemExit(f"{path}: {'it took too long' if process.exitcode is None else 'it failed'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=Path, help="folder to which the sitting's is added")
    parser.add_argument("--seconds", default=250.0, type=float, help="no run starts that would end later")
    parser.add_argument("--runs", type=int, help="so many at most")
    parser.add_argument("--config", default="configs/noise.toml", help="the grid")
    parser.add_argument("--slower", default="0,2,3,5", help="percent of each variant; 0: as it is")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--load", help="burst or sustained, else what the config says")
    given = parser.parse_args()
    options = {"device": given.device, "quiet": True} | ({"load": given.load} if given.load else {})
    shares = [float(percent) / 100 for percent in given.slower.split(",")]
    sitting(given.out, options, given.config, given.seconds, shares, given.runs)


if __name__ == "__main__":
    main()
