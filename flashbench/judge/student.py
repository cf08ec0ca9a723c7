"""Student's t without scipy: tail probabilities and quantiles for any (fractional) degrees of freedom.

Source: NIST Digital Library of Mathematical Functions, 8.17 (incomplete beta function, its continued fraction
8.17.22) and the relation P(|t| > x) = I_{df/(df+x²)}(df/2, 1/2).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

_STEPS, _PRECISE, _TINY = 400, 1e-14, 1e-300


def two_sided(t: float, df: float) -> float:
    """P(|T| > |t|) with ``df`` > 0 degrees of freedom; infinite df is the normal distribution."""
    if math.isinf(t):
        return 0.0
    if math.isinf(df):
        return math.erfc(abs(t) / math.sqrt(2))
    return _beta(df / (df + t * t), df / 2, 0.5)


def quantile(level: float, df: float) -> float:
    """The t with P(|T| <= t) = ``level``, 0 < level < 1, to a relative 1e-9."""
    return beyond(1 - level, df)


Part = tuple[float, float]
"""Of an error: its standard deviation as estimated, and the degrees of freedom of the estimate."""


def reach(level: float, parts: Sequence[Part]) -> float:
    """How far from 0 a sum of independent errors is, as a rule to ``level``.

    Each part has its own quantile, and these add up as the parts do. The sum of the variances with one number
    of degrees of freedom (Welch and Satterthwaite) would be too sure where a part with few of them is small
    by chance; this is exact where one part is alone, and holds the level between.
    """
    return math.hypot(*(deviation * quantile(level, df) for deviation, df in parts if deviation))


_LEAST, _FINE = 120, 4
"""Chances are told down to 2**-120, and found between powers of 2 that fine."""


def chance(distance: float, parts: Sequence[Part]) -> float:
    """The level at which ``reach`` is that distance, as the share that is beyond it."""
    parts = [part for part in parts if part[0]]
    if not parts:
        return float(distance == 0)
    if len(parts) == 1:
        deviation, df = parts[0]
        return two_sided(distance / deviation, df)

    def far(step: int) -> float:
        return math.hypot(*(deviation * beyond(2 ** (-step / _FINE), df) for deviation, df in parts))

    low, high = 0, _LEAST * _FINE
    if distance >= far(high):
        return 2.0**-_LEAST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if far(middle) <= distance else (low, middle)
    one, other = far(low), far(high)
    return float(2 ** (-(low + (distance - one) / (other - one)) / _FINE))


@functools.lru_cache(maxsize=50_000)
def beyond(share: float, df: float) -> float:
    """The t with P(|T| > t) = ``share``, 0 < share <= 1, to a relative 1e-9."""
    if share >= 1:
        return 0.0
    low, high = 0.0, 1.0
    while two_sided(high, df) > share:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided(middle, df) > share else (low, middle)
    return (low + high) / 2


def _beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b)."""
    if x <= 0 or x >= 1:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly
        return 1 - _beta(1 - x, b, a)
    log = a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(log) / (a * _fraction(x, a, b))


def _fraction(x: float, a: float, b: float) -> float:
    """1 + d1/(1 + d2/(1 + …)) of 8.17.22, by Lentz's method."""
    value, upper, lower = 1.0, 1.0, 0.0
    for step in range(1, _STEPS):
        half = step // 2
        if step % 2:
            term = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        else:
            term = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        lower = 1 / ((1 + term * lower) or _TINY)
        upper = (1 + term / upper) or _TINY
        value *= upper * lower
        if abs(upper * lower - 1) < _PRECISE:
            break
    return value
