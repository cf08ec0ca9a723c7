"""What the order and the heights of a run's samples say against their median: drift, and several levels."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

DRIFT = 0.05
"""Flagged above this change from the first quarter of the samples to the last."""
LEAST_FOR_LEVELS = 20
"""Fewer samples show no levels."""
LEAST_APART = 0.01
"""Smallest distance of two levels that counts, a share: timers count in steps."""
EMPTY = 2.0
"""What lies empty between two levels, over the spread within both. A sample from one peak, normal or
skewed, cut where it splits best, has next to nothing."""
LEVEL_SHARE = 0.1
"""Share of the samples that a second level must hold, or it moves no median."""


def drifted(samples: Sequence[float]) -> bool:
    """True if the median of the last quarter differs by over 5 % from that of the first.

    Fewer than 8 samples cannot tell.
    """
    quarter = len(samples) // 4
    if quarter < 2:
        return False
    first, last = statistics.median(samples[:quarter]), statistics.median(samples[-quarter:])
    return abs(last - first) > DRIFT * first


def multimodal(samples: Sequence[float], step_s: float = 0.0) -> bool:
    """True if positive samples have two levels apart by over 1 %, and by more than two of the timer's steps.

    step_s: of the timer, seconds.
    """
    if len(samples) < LEAST_FOR_LEVELS or min(samples) <= 0 or min(samples) == max(samples):
        return False
    import numpy as np

    logs = np.log(np.asarray(samples, dtype=float))
    apart = levels_apart(logs)
    return apart is not None and float(np.expm1(apart)) * statistics.median(samples) > 2 * step_s


def levels_apart(values: Any) -> float | None:
    """How far two levels lie apart; None for one level. values: as of ``split``."""
    found = split(values, LEVEL_SHARE)
    return None if found is None else abs(found)


def split(values: Any, least: float) -> float | None:
    """How far the smaller of two levels lies from the larger, split where the squares within both are least.

    None where there is one, or the smaller has less than the share ``least`` or fewer than 2. values:
    logarithms of at least 2 samples, an array of numpy.
    """
    import numpy as np

    ordered = np.sort(values)
    count = len(ordered)
    sums, squares = np.cumsum(ordered), np.cumsum(ordered**2)
    below = np.arange(1, count)
    above = count - below
    within = squares[-1] - sums[:-1] ** 2 / below - (sums[-1] - sums[:-1]) ** 2 / above
    cut = int(np.argmin(within)) + 1
    low, high = ordered[:cut], ordered[cut:]
    if min(len(low), len(high)) < max(least * count, 2):
        return None
    gap = float(np.median(high) - np.median(low))
    empty = float(np.quantile(high, 0.1) - np.quantile(low, 0.9))
    if gap < LEAST_APART or empty < EMPTY * float(np.hypot(low.std(), high.std())):
        return None
    return gap if len(high) <= len(low) else -gap
