"""The ratio of two sides of runs and how sure it is.

A side is the mean over its runs of the logarithm of each run's median. Its error has two parts. Within a
run: the median's, by the bootstrap over the raw samples. Between runs: ``Spread``. Bootstrapping the runs
too would give their part in closed form (the variance of a mean, times (n-1)/n, which is put right here),
and for two to five runs its percentiles are far too narrow, so the interval is that error times Student's
t.

Where runs drift apart or have two levels, a median is not the cell's by an amount that no resampling shows.
That amount is added to the interval on both sides, unless there are runs enough for the spread between them
to hold it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flashbench.judge.bootstrap import LEAST, SHAPES, Shape, median_error, shape
from flashbench.judge.spread import Spread
from flashbench.judge.student import quantile, two_sided

LEVEL = 0.95
RUNS_THAT_TELL = {"drift": 3, "few": 3, "two levels": 5}
"""With so many runs a side the spread between runs holds what is wrong with their samples. Of three runs with
two levels each all may show the same one, one time in four."""


class Ratio(NamedTuple):
    """New over base. low, high: 95 % interval. error: standard error of the ratio's logarithm.

    p: chance of a ratio as far from 1 if nothing had changed (two-sided). trouble: what widened the
    interval beyond its error, in words; extra: by how much, in logarithms.
    """

    value: float
    low: float
    high: float
    error: float
    p: float
    trouble: str = ""
    extra: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Medians:
    """One side of one cell: by run the logarithm of the median, its error and what is wrong with the run."""

    logs: tuple[float, ...]
    errors: tuple[float, ...]
    shapes: tuple[Shape | None, ...]

    @property
    def log(self) -> float:
        """The side's value: the mean of the runs' logarithms."""
        return sum(self.logs) / len(self.logs)

    @property
    def within(self) -> float:
        """Variance of a run's median by its own samples."""
        return sum(error**2 for error in self.errors) / len(self.errors)

    def having(self, *names: str) -> list[Shape]:
        """What is wrong with runs that are too few for their spread to hold it, of those kinds."""
        return [
            one
            for one in self.shapes
            if one is not None and one.name in names and len(self.logs) < RUNS_THAT_TELL[one.name]
        ]


def medians(runs: Sequence[Sequence[float]]) -> Medians:
    """A side: one sequence of positive samples per run."""
    shapes = tuple(shape(run) for run in runs)
    return Medians(
        logs=tuple(math.log(statistics.median(run)) for run in runs),
        errors=tuple(median_error(run, found) for run, found in zip(runs, shapes, strict=True)),
        shapes=shapes,
    )


def ratio_of(base: Medians, new: Medians, spread: Spread) -> Ratio:
    """The ratio of two sides, where runs spread by ``spread``."""
    extra, words = _drifting_apart(base, new)
    for name, side in (("base", base), ("new", new)):
        found = side.having("few", "two levels")
        if found:
            size = sum(one.size for one in found) / len(side.logs)
            words.append(f"the {name} side's samples {SHAPES[found[0].name]} {math.expm1(size):.1%}")
            extra += size
    error = math.sqrt(_variance(base, spread) + _variance(new, spread))
    return interval(new.log - base.log, error, spread.df, extra, " and ".join(words))


def _drifting_apart(base: Medians, new: Medians) -> tuple[float, list[str]]:
    """How far the ratio depends on the quarter of the runs that it is taken of; both may drift alike."""
    mean = []
    for side in (base, new):
        found = side.having("drift")
        mean.append([sum(one.quarters[at] for one in found) / len(side.logs) for at in range(4)])
    apart = [other - one for one, other in zip(*mean, strict=True)]
    size = max(apart) - min(apart)
    return size, [f"the two sides' samples drift apart by {math.expm1(size):.1%}"] if size > LEAST else []


def interval(log: float, error: float, df: float, extra: float = 0.0, trouble: str = "") -> Ratio:
    """The ratio with that logarithm and standard error; a ratio without error is what it is."""
    reach = extra + (quantile(LEVEL, df) * error if error else 0.0)
    beyond = max(abs(log) - extra, 0.0)
    p = two_sided(beyond / error, df) if error else float(beyond == 0)
    return Ratio(
        math.exp(log), math.exp(log - reach), math.exp(log + reach), error, p, trouble=trouble, extra=extra
    )


def _variance(side: Medians, spread: Spread) -> float:
    """Of the side's mean. A spread that runs showed holds their samples' scatter; one that is given does
    not."""
    one = spread.deviation**2
    one = one + side.within if math.isinf(spread.df) else max(one, side.within)
    return one / len(side.logs)
