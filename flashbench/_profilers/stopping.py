"""How many samples are enough: until the median is known well, within limits of time and number.

The interval of a median needs no shape of the samples: between two of them, by rank, it lies with a
probability that is binomial (Conover, Practical Nonparametric Statistics, section 3.2). Samples of one round
share its clock, so the rounds' own medians have to agree as well.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

CONFIDENCE = 0.95
LEAST_ROUNDS = 3
"""Fewer rounds do not tell how far rounds differ."""
MOST_IN_A_ROUND = 5
"""A round takes at most this part of max_samples, so that short calls have several rounds too."""

STOPS = {
    "precision": "the median's interval is as narrow as asked",
    "time": "the samples took as long as they may",
    "samples": "as many samples as there may be",
    "cap": "too many rounds had to be put aside, as a cap held the chip back",
}
"""Why sampling ended."""

Rounds = Sequence[Sequence[float]]
"""The samples of each round, seconds."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How many samples to take.

    limit_s: wanted time in samples per cell; a fast call is repeated up to max_samples within it, a
    slow one is repeated min_samples times all the same. warmup: calls before anything is timed.
    precision: half the width of the median's 95 % interval, over the median, from which on no further
    sample is taken, once they took min_s; 0 never stops early, and takes all samples in one round.
    round_s: about how long one round of a call's samples takes.
    """

    limit_s: float
    min_samples: int
    max_samples: int
    warmup: int
    min_s: float = 0.0
    precision: float = 0.0
    round_s: float = 0.02

    def samples(self, call_s: float) -> int:
        """How many samples at most of a call that takes about call_s seconds."""
        wanted = int(self.limit_s / call_s) if call_s > 0 else self.max_samples
        return max(self.min_samples, min(self.max_samples, wanted))

    def in_a_round(self, call_s: float, taken: int = 0) -> int:
        """How many samples the next round takes, where ``taken`` are there already."""
        left = max(1, self.max_samples - taken)
        if not self.precision:
            return min(left, self.samples(call_s))
        most = -(-self.max_samples // MOST_IN_A_ROUND)
        wanted = int(self.round_s / call_s) if call_s > 0 else most
        return max(1, min(wanted, most, left))

    def why_stop(self, rounds: Rounds) -> str | None:
        """Why no further round is needed, a key of STOPS, or None while one is."""
        samples = [sample for one in rounds for sample in one]
        if len(samples) >= self.max_samples:
            return "samples"
        if len(samples) < self.min_samples:
            return None
        spent = sum(samples)
        if spent >= self.limit_s or not self.precision:
            return "time"
        width = half_width(rounds) if spent >= self.min_s and len(rounds) >= LEAST_ROUNDS else None
        return "precision" if width is not None and width <= self.precision else None


def half_width(rounds: Rounds) -> float | None:
    """Half the width of the 95 % interval of the median over the median, a fraction.

    The larger of two: by rank over all samples, and from the spread of the rounds' medians. None for so few
    samples that there is no interval (under 6), and for a median of 0.
    """
    samples = sorted(sample for one in rounds for sample in one)
    rank = _rank(len(samples))
    middle = statistics.median(samples) if samples else 0.0
    if rank is None or middle <= 0:
        return None
    by_rank = (samples[-rank] - samples[rank - 1]) / 2
    if len(rounds) < 2:
        return by_rank / middle
    medians = [statistics.median(one) for one in rounds]
    reach = _quantile(len(medians) - 1) * statistics.stdev(medians) / math.sqrt(len(medians))
    return max(by_rank, reach) / middle


def median_error(samples: Sequence[float]) -> float:
    """Standard error of the median of normal samples, by their quartiles; of fewer than four, half the range.

    Source: sd ≈ IQR / 1.349, and sd(median) ≈ 1.2533 sd / sqrt(n).
    """
    if len(samples) < 4:
        return (max(samples) - min(samples)) / 2
    low, _, high = statistics.quantiles(samples, n=4)
    return 1.2533 * (high - low) / 1.349 / math.sqrt(len(samples))


@cache
def _rank(count: int) -> int | None:
    """The largest r for which the r-th smallest and r-th largest of count samples hold the median."""
    rarely = round(2 / (1 - CONFIDENCE))  # one in so many on either side; 2**count may be beyond floats
    # in how many ways of 2**count there are rank samples on one side of the median, and so many or fewer
    rank, ways, outside = 0, 1, 1
    while rank < count and outside * rarely <= 2**count:
        rank += 1
        ways = ways * (count - rank + 1) // rank
        outside += ways
    return rank or None


def _quantile(df: int) -> float:
    """Student's t for CONFIDENCE, two-sided, by Cornish and Fisher's expansion; exact for 1 and 2.

    Source: Abramowitz and Stegun, 26.7.5.
    """
    if df == 1:
        return math.tan(math.pi * CONFIDENCE / 2)
    if df == 2:
        return CONFIDENCE * math.sqrt(2 / (1 - CONFIDENCE**2))
    x = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    terms = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return float(x + sum(term / df**power for power, term in enumerate(terms, start=1)))
