"""Made-up runs for the tests of judging, and the command on them.

For the statistics: a level, a spread between runs, and samples with some noise. The truth is known: a run's
level is exp(N(0, between)), the cell's is 1 or the shift.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import synthetic

from flashbench import cli, judge, runfile
from flashbench.judge import Ratio
from flashbench.record import Record, Samples

Noise = Callable[[np.random.Generator, int], np.ndarray]
"""Samples over the run's level, their median near 1."""


def normal(random: np.random.Generator, count: int) -> np.ndarray:
    return 1 + random.normal(0, 0.02, count)


def skewed(random: np.random.Generator, count: int) -> np.ndarray:
    return 1 + random.exponential(0.02, count) - 0.02 * math.log(2)


def bimodal(random: np.random.Generator, count: int) -> np.ndarray:
    """Two levels 4 % apart in a share that differs from run to run; the cell's own is the lower."""
    share = random.uniform(0, 1)
    return 1 + 0.04 * (random.random(count) < share) + random.normal(0, 0.003, count)


def drifting(random: np.random.Generator, count: int) -> np.ndarray:
    """A ramp of up to 8 % either way over the run; the cell's own level is where it began."""
    return (1 + random.normal(0, 0.004, count)) * (1 + random.uniform(-0.08, 0.08) * np.linspace(0, 1, count))


def wandering(random: np.random.Generator, count: int) -> np.ndarray:
    """A slow stationary process: neighbours share 95 % of their deviation of 2 %; its mean is the level."""
    steps = random.normal(0, 0.02 * math.sqrt(1 - 0.95**2), count)
    level = random.normal(0, 0.02)
    found = []
    for step in steps:
        level = 0.95 * level + step
        found.append(level)
    return np.exp(np.array(found)) * (1 + random.normal(0, 0.003, count))


def side(
    random: np.random.Generator, level: float, noise: Noise, runs: int, between: float, count: int = 40
) -> judge.Medians:
    """A side of so many runs."""
    levels = level * np.exp(random.normal(0, between, runs))
    return judge.medians([list(one * noise(random, count)) for one in levels])


def ratios(
    noise: Noise, *, trials: int, runs: int = 1, between: float = 0.01, shift: float = 1.0, cells: int = 1,
    count: int = 40, common: float = 0.0, assumed: float = 0.01, seed: int = 11,
) -> list[list[Ratio]]:  # fmt: skip
    """The ratios of so many comparisons. common: share of the variance that cells of a run share."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(trials):
        shared = [np.exp(random.normal(0, between * math.sqrt(common), runs)) for _ in range(2)]
        pairs = []
        for _ in range(cells):
            pair = []
            for number, level in enumerate((1.0, shift)):
                own = level * shared[number] * np.exp(random.normal(0, between * math.sqrt(1 - common), runs))
                pair.append(judge.medians([list(one * noise(random, count)) for one in own]))
            pairs.append(pair)
        seen = judge.repeats({str(index): [one.logs for one in pair] for index, pair in enumerate(pairs)})
        spreads = judge.steadied(seen, [str(index) for index in range(cells)], assumed)
        found.append([judge.ratio_of(*pair, *spreads[str(index)]) for index, pair in enumerate(pairs)])
    return found


def halves(
    *, trials: int, runs: int, half: int, shift: float, between: float, common: float, seed: int = 11
) -> list[list[Ratio]]:
    """The ratios of comparisons of so many cells that are shifted, and as many that are not."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(trials):
        shared = random.normal(0, between * math.sqrt(common), (2, runs))
        pairs = []
        for index in range(2 * half):
            own = random.normal(0, between * math.sqrt(1 - common), (2, runs))
            levels = np.exp(shared + own) * np.array([[1.0], [shift if index < half else 1.0]])
            pairs.append([judge.medians([list(one * normal(random, 40)) for one in row]) for row in levels])
        seen = judge.repeats({str(index): [one.logs for one in pair] for index, pair in enumerate(pairs)})
        spreads = judge.steadied(seen, list(map(str, range(2 * half))), 0.01)
        found.append([judge.ratio_of(*pair, *spreads[str(index)]) for index, pair in enumerate(pairs)])
    return found


def coverage(found: list[list[Ratio]], shift: float) -> float:
    """Share of the intervals that hold the truth."""
    every = [ratio for row in found for ratio in row]
    return sum(ratio.low <= shift <= ratio.high for ratio in every) / len(every)


def compared(
    counts: tuple[int, int], *, between: float, common: float, trials: int, cells: int = 16,
    shift: float = 1.0, noisy: int = 0, seed: int = 3,
) -> list[judge.Comparison]:  # fmt: skip
    """Comparisons by the default rules of sides with so many runs, whose medians are known to 0.3 %.

    common: share of the variance that cells of a run share. noisy: so many cells are ten times as noisy.
    """
    random = np.random.default_rng(seed)
    spreads = between * np.where(np.arange(cells) < noisy, 10, 1)
    found = []
    for _ in range(trials):
        sides = []
        for count, level in zip(counts, (0.0, math.log(shift)), strict=True):
            shared = random.normal(0, math.sqrt(common), (count, 1))
            own = random.normal(0, math.sqrt(1 - common), (count, cells))
            logs = level + spreads * (shared + own) + random.normal(0, 0.003, (count, cells))
            sides.append(judge.Side(name="side", runs=tuple(map(_bare, np.exp(logs)))))
        found.append(judge.compare(*sides, judge.MEASURES["time_s"], judge.Rules()))
    return found


def _bare(times: np.ndarray) -> judge.Run:
    """A run with one sample a cell."""
    made = {
        str(index): judge.Measured(samples=lambda name, value=value: (1e-3 * value,))
        for index, value in enumerate(map(float, times))
    }
    return judge.Run(path=Path("run"), kind="made up", cells=made)


def cell(time_s: float, seqlen: int = 1024, spread: float = 0.004, **changes: object) -> Record:
    """A row whose samples lie evenly around time_s."""
    row = synthetic.record("flash", seqlen, **changes)
    steps = [time_s * (1 + spread * (index - 10) / 10) for index in range(21)]
    return replace(row, samples=Samples(samples_s=tuple(steps), cache="cold", method="events"))


def written(path: Path, records: list[Record], **environment: object) -> str:
    head = runfile.header(argv=[], options={}, cells=[r.cell for r in records],
                          environment={"device_name": synthetic.H100, **environment})  # fmt: skip
    with runfile.create(path, head) as writer:
        for record in records:
            writer.append(record)
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        cli.main(["compare", *argv])
    said = capsys.readouterr()
    return int(stop.value.code or 0), said.out, said.err
