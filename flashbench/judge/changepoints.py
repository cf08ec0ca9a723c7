"""Where a series of numbers changed its level for good.

Optimal partitioning (Jackson et al. 2005, arXiv:math/0309285): of all ways to cut the series into levels, the
one with the least sum of squares around the levels, in variances of the noise, plus a penalty per cut. A cut
of noise alone takes the square of a normal deviate off that sum at each of n places, so that the penalty is
the quantile which the largest of n stays below in 99 of 100 series (Bonferroni). A level has two points at
least, and a lone odd run is set to its neighbours, so that it is no change; the newest counts as soon as it
has company.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

MAD_TO_DEVIATION = 1.4826
"""Of a normal distribution."""
PRIOR_RUNS = 4
"""The assumed noise weighs as much as that many differences."""
SHORTEST = 2
FALSE = 0.01
"""Share of the series without a change that are said to have one."""
ODD = 4.0
"""Deviations of a difference from which a point that stands alone is odd."""


def noise_of(logs: Sequence[float], assumed: float) -> float:
    """Standard deviation of the points around their level, drawn towards an assumed one.

    From the median absolute difference of neighbours, which a few changes of level do not disturb.
    """
    import numpy as np

    steps = np.abs(np.diff(np.asarray(logs, dtype=float)))
    if not len(steps):
        return assumed
    seen = MAD_TO_DEVIATION * float(np.median(steps)) / math.sqrt(2)
    count = len(steps)
    return math.sqrt((PRIOR_RUNS * assumed**2 + count * seen**2) / (PRIOR_RUNS + count))


def change_points(logs: Sequence[float], deviation: float) -> list[int]:
    """First index of every level but the first; deviation: of a point around its level, above 0."""
    import numpy as np

    if len(logs) < 2 * SHORTEST:
        return []
    values = _without_odd(np.asarray(logs, dtype=float), deviation)
    return partition((values - values.mean()) / deviation)


def partition(values: Any) -> list[int]:
    """The best cuts of numbers in units of their noise (an array)."""
    import numpy as np

    count = len(values)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    squares = np.concatenate([[0.0], np.cumsum(values**2)])
    penalty = penalty_of(count)
    best = np.full(count + 1, math.inf)
    best[0] = -penalty
    cut = np.zeros(count + 1, dtype=int)
    for end in range(SHORTEST, count + 1):
        starts = np.arange(0, end - SHORTEST + 1)
        length = end - starts
        within = squares[end] - squares[starts] - (sums[end] - sums[starts]) ** 2 / length
        totals = best[starts] + within + penalty
        cut[end] = starts[np.argmin(totals)]
        best[end] = totals.min()
    found = []
    end = count
    while cut[end] > 0:
        end = int(cut[end])
        found.append(end)
    return found[::-1]


def penalty_of(count: int) -> float:
    """What a cut costs in a series of so many points, in variances."""
    return NormalDist().inv_cdf(1 - FALSE / 2 / count) ** 2


def _without_odd(values: Any, deviation: float) -> Any:
    """The series with each point that is far from the median of itself and its neighbours set to that."""
    import numpy as np

    last = len(values) - 3
    starts = np.clip(np.arange(len(values)) - 1, 0, last)
    middle = np.median(np.stack([values[starts + step] for step in range(3)]), axis=0)
    return np.where(np.abs(values - middle) > ODD * math.sqrt(2) * deviation, middle, values)


def exact_changes(values: Sequence[float]) -> list[int]:
    """Where a number that repeats exactly is another than before."""
    return [index for index in range(1, len(values)) if values[index] != values[index - 1]]
