"""Where a series of numbers changed its level for good.

Optimal partitioning (Jackson et al. 2005, arXiv:math/0309285): of all ways to cut the series into levels, the
one with the least sum of squares around the levels, in variances of the noise, plus a penalty per cut. The
penalty, 3 log n, is the leading term of the modified BIC for normal means (Zhang and Siegmund 2007,
Biometrics 63). A level has two points at least, so that one odd run is no change; but the newest point counts
as soon as it has company.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MAD_TO_DEVIATION = 1.4826
"""Of a normal distribution."""
PRIOR_RUNS = 4
"""The assumed noise weighs as much as that many differences."""
SHORTEST = 2


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

    count = len(logs)
    if count < 2 * SHORTEST:
        return []
    values = np.asarray(logs, dtype=float)
    values = (values - values.mean()) / deviation
    sums = np.concatenate([[0.0], np.cumsum(values)])
    squares = np.concatenate([[0.0], np.cumsum(values**2)])
    penalty = 3 * math.log(count)
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


def exact_changes(values: Sequence[float]) -> list[int]:
    """Where a number that repeats exactly is another than before."""
    return [index for index in range(1, len(values)) if values[index] != values[index - 1]]
