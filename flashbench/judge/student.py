"""Student's t without scipy: tail probabilities and quantiles for any (fractional) degrees of freedom.

Source: NIST Digital Library of Mathematical Functions, 8.17 (incomplete beta function, its continued fraction
8.17.22) and the relation P(|t| > x) = I_{df/(df+x²)}(df/2, 1/2).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

_STEPS, _PRECISE, _TINY = 400, 1e-14, 1e-300


def two_sided(t: float, df: float) -> float:
    """P(|T| > |t|) with ``df`` > 0 degrees of freedom; infinite df is the normal distribution."""
    if math.isinf(t):
        return 0.0
    if math.isinf(df):
        return math.erfc(abs(t) / math.sqrt(2))
    return _beta(df / (df + t * t), df / 2, 0.5)


@functools.lru_cache(maxsize=4096)
def quantile(level: float, df: float) -> float:
    """The t with P(|T| <= t) = ``level``, 0 < level < 1, to a relative 1e-9."""
    low, high = 0.0, 1.0
    while two_sided(high, df) > 1 - level:
        low, high = high, 2 * high
    return _where(lambda t: two_sided(t, df) > 1 - level, low, high)


@functools.lru_cache(maxsize=4096)
def least_variance(chance: float, df: float) -> float:
    """The share of the true variance below which an estimate with ``df`` degrees lies with that chance."""
    return _where(lambda share: _gamma(df / 2, share * df / 2) < chance, 0.0, 1.0)


def _where(below: Callable[[float], bool], low: float, high: float) -> float:
    """Where what is below from ``low`` on stops being so, before ``high``, to a relative 1e-9."""
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return (low + high) / 2


def _gamma(a: float, x: float) -> float:
    """The regularised incomplete gamma function P(a, x), by its series (DLMF 8.11.4)."""
    term = total = 1.0
    step = 0
    while term > _PRECISE * total:
        step += 1
        term *= x / (a + step)
        total += term
    return total * math.exp(a * math.log(x) - x - math.lgamma(a + 1)) if x > 0 else 0.0


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
