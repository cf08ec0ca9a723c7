"""The ratio of two sides of runs and how sure it is; and how many sure-looking cells chance alone makes.

Sources: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 6, for the standard error of
a median; Benjamini and Hochberg (1995) for the false discovery rate.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

RESAMPLES = 1000
Z_95 = 1.959964
"""Two-sided 95 % of a normal distribution."""


class Ratio(NamedTuple):
    """New over base. low, high: 95 % interval. error: standard error of the ratio's logarithm.

    p: chance of a ratio at least as far from 1 in its direction if nothing had changed (one-sided).
    """

    value: float
    low: float
    high: float
    error: float
    p: float


def ratio_of(
    base: Sequence[Sequence[float]], new: Sequence[Sequence[float]], noise: float, seed: int = 0
) -> Ratio:
    """The ratio of medians of two sides; a side is one sequence of positive samples per run.

    noise: spread between runs, relative, taken where a side has one run; with several their own spread
    counts, but not less than half the noise, as a few runs may agree by chance.
    """
    middle_base, error_base = _side(base, noise, seed)
    middle_new, error_new = _side(new, noise, seed + 1)
    log = math.log(middle_new / middle_base)
    error = math.hypot(error_base, error_new)
    if error == 0:
        return Ratio(math.exp(log), math.exp(log), math.exp(log), 0.0, 0.0 if log else 0.5)
    return Ratio(
        math.exp(log),
        math.exp(log - Z_95 * error),
        math.exp(log + Z_95 * error),
        error,
        0.5 * math.erfc(abs(log) / error / math.sqrt(2)),
    )


def _side(runs: Sequence[Sequence[float]], noise: float, seed: int) -> tuple[float, float]:
    """Median of the runs' medians, and the standard error of its logarithm."""
    medians = [statistics.median(run) for run in runs]
    within = math.sqrt(sum(median_error(run, seed) ** 2 for run in runs)) / len(runs)
    if len(runs) == 1:
        return medians[0], math.hypot(within, noise)
    logs = [math.log(median) for median in medians]
    between = max(statistics.stdev(logs), noise / 2)
    return statistics.median(medians), math.hypot(within, between / math.sqrt(len(runs)))


def median_error(samples: Sequence[float], seed: int) -> float:
    """Standard error of the logarithm of the samples' median, by the bootstrap; 0 for one sample."""
    if len(samples) < 2 or min(samples) == max(samples):
        return 0.0
    import numpy as np

    values = np.log(np.asarray(samples, dtype=float))
    picks = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    return float(np.median(values[picks], axis=1).std(ddof=1))


def false_discoveries(p_values: Sequence[float], rate: float) -> list[bool]:
    """Which of the p values stand when at most ``rate`` of those that stand may be chance."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    last = max(
        (rank for rank, index in enumerate(order, 1) if p_values[index] <= rate * rank / len(order)),
        default=0,
    )
    standing = set(order[:last])
    return [index in standing for index in range(len(p_values))]
