"""The ratio of two sides of runs and how sure it is.

A side is the mean over its runs of the logarithm of each run's median. Its error has two parts. Within a
run: the median's, by the bootstrap over the raw samples. Between runs: ``Spread``. Bootstrapping the runs
too would give their part in closed form (the variance of a mean, times (n-1)/n, which is put right here),
and for two to five runs its percentiles are far too narrow, so the interval is that error times Student's
t. What a run's cells share and what is a cell's own have degrees of freedom of their own (``together``).

Where runs drift apart or have two levels, a median is not the cell's by an amount that no resampling shows.
That amount is added to the interval on both sides, unless there are runs enough for the spread between them
to hold it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flashbench.judge.bootstrap import LEAST, SHAPES, Shape, median_error, rare_level, shape
from flashbench.judge.spread import NONE, Spread
from flashbench.judge.student import least_variance, quantile, two_sided

LEVEL = 0.95
SMALL, MOST_SMALL = 0.05, 0.2
"""How rarely what runs share looks as small as it is taken to, by degree of freedom, and at most: the fewer,
the smaller it may look."""
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
    """One side of one cell: by run the logarithm of the median, its error and what is wrong with the run.

    rare: by run, where few of its samples lie, over the median; 0 for one level, and where many have two.
    """

    logs: tuple[float, ...]
    errors: tuple[float, ...]
    shapes: tuple[Shape | None, ...]
    rare: tuple[float, ...] = ()

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
        rare=tuple(0.0 if found else rare_level(run) for run, found in zip(runs, shapes, strict=True)),
    )


def ratio_of(base: Medians, new: Medians, own: Spread, shared: Spread = NONE) -> Ratio:
    """The ratio of two sides, where the cell's runs spread by ``own`` and by what ``shared`` says of all."""
    extra, words = _drifting_apart(base, new)
    for name, side in (("base", base), ("new", new)):
        found = side.having("few", "two levels")
        if found:
            size = sum(one.size for one in found) / len(side.logs)
            words.append(f"the {name} side's samples {SHAPES[found[0].name]} {math.expm1(size):.1%}")
            extra += size
    if not words:
        extra, words = _at_the_others(base, new)
    sides = (base, new)
    own = Spread(math.sqrt(sum(_variance(side, own) for side in sides)), own.df)
    runs = sum(1 / len(side.logs) for side in sides)
    shared = Spread(shared.deviation * math.sqrt(runs), shared.df)
    return interval(new.log - base.log, together(own, shared), extra, " and ".join(words))


def together(own: Spread, shared: Spread) -> Spread:
    """The error of two independent ones, with its degrees of freedom (Welch and Satterthwaite's).

    What few runs share may look small by chance, and the many degrees of the cells' own part would make that
    sure. So it has the weight of as large a variance as looks so small one time in five; in twenty, of one
    degree.
    """
    variance = own.deviation**2 + shared.deviation**2
    if not own.deviation or not shared.deviation:
        return own if own.deviation else shared
    larger = (
        1.0 if math.isinf(shared.df) else 1 / least_variance(min(SMALL * shared.df, MOST_SMALL), shared.df)
    )
    weight = 1 / (1 + own.deviation**2 / (larger * shared.deviation**2))
    inverse = weight**2 / shared.df + (1 - weight) ** 2 / own.df
    return Spread(math.sqrt(variance), 1 / inverse if inverse else math.inf)


def _at_the_others(base: Medians, new: Medians) -> tuple[float, list[str]]:
    """How far apart the levels are where a few samples of one side are as the other side's."""
    apart = new.log - base.log
    found = []
    for name, side, towards in (("base", base, apart), ("new", new, -apart)):
        if len(side.logs) < RUNS_THAT_TELL["two levels"] and towards:
            sizes = [abs(one) for one in side.rare if 0.5 <= one / towards <= 2]
            found.append((sum(sizes) / len(side.logs), name))
    size, name = max(found, default=(0.0, ""))
    other = "new" if name == "base" else "base"
    words = f"some of the {name} side's samples are {math.expm1(size):.1%} off, at the {other} side's level"
    return (size, [words]) if size else (0.0, [])


def _drifting_apart(base: Medians, new: Medians) -> tuple[float, list[str]]:
    """How far the ratio depends on the quarter of the runs that it is taken of; both may drift alike."""
    mean = []
    for side in (base, new):
        found = side.having("drift")
        mean.append([sum(one.quarters[at] for one in found) / len(side.logs) for at in range(4)])
    apart = [other - one for one, other in zip(*mean, strict=True)]
    size = max(apart) - min(apart)
    return size, [f"the two sides' samples drift apart by {math.expm1(size):.1%}"] if size > LEAST else []


def interval(log: float, error: Spread, extra: float = 0.0, trouble: str = "") -> Ratio:
    """The ratio with that logarithm and error; one without error is what it is."""
    deviation, df = error
    far = extra + (quantile(LEVEL, df) * deviation if deviation else 0.0)
    beyond = max(abs(log) - extra, 0.0)
    p = two_sided(beyond / deviation, df) if deviation else float(beyond == 0)
    return Ratio(
        math.exp(log), math.exp(log - far), math.exp(log + far), deviation, p, trouble=trouble, extra=extra
    )


def _variance(side: Medians, spread: Spread) -> float:
    """Of the side's mean. A spread that runs showed holds their samples' scatter; one that is given does
    not."""
    one = spread.deviation**2
    one = one + side.within if math.isinf(spread.df) else max(one, side.within)
    return one / len(side.logs)
