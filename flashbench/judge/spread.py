"""How far runs of the same thing differ: estimated per cell, and steadied by what all cells say.

A few runs tell their own spread badly: three may agree by chance. As the cells of a machine spread alike,
each cell's variance is drawn towards that of all, as far as the cells themselves agree (moderated t: Smyth,
Linear models and empirical Bayes methods, 2004, section 6.2). Cells of one run share its clock and
temperature, so many cells are not many witnesses: their mutual correlation says how many."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

LEAST_CELLS = 5
"""Fewer cells with repeated runs say nothing of the others."""


class Spread(NamedTuple):
    """Standard deviation of the logarithm of a run's median; df: of its estimate, inf where it is given."""

    deviation: float
    df: float


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """What repeated runs say. correlation: of the cells' deviations within a run, 0 to 1."""

    cells: Mapping[str, Spread] = field(default_factory=dict)
    correlation: float = 1.0

    def joined(self, other: Repeats) -> Repeats:
        """Both, cell by cell; the correlation of whichever has more to say."""
        cells = dict(self.cells)
        for key, more in other.cells.items():
            own = cells.get(key, Spread(0.0, 0.0))
            df = own.df + more.df
            variance = (own.df * own.deviation**2 + more.df * more.deviation**2) / df
            cells[key] = Spread(math.sqrt(variance), df)
        larger = self if self.degrees >= other.degrees else other
        return Repeats(cells=cells, correlation=larger.correlation)

    @property
    def degrees(self) -> float:
        """Degrees of freedom over all cells."""
        return sum(spread.df for spread in self.cells.values())


def repeats(cells: Mapping[str, Sequence[Sequence[float | None]]]) -> Repeats:
    """Spreads of cells, each a list of sides, each a list over the side's runs of the logarithm of a
    median."""
    found: dict[str, Spread] = {}
    residuals: dict[tuple[int, int], list[float]] = {}
    for key, sides in cells.items():
        apart = [_residuals(side) for side in sides]
        df = sum(max(len(side) - 1, 0) for side in apart)
        if not df:
            continue
        deviation = math.sqrt(sum(value**2 for side in apart for value in side.values()) / df)
        found[key] = Spread(deviation, float(df))
        if deviation:
            for number, side in enumerate(apart):
                for run, value in side.items():
                    residuals.setdefault((number, run), []).append(value / deviation)
    return Repeats(cells=found, correlation=_correlation(residuals, found))


def _residuals(side: Sequence[float | None]) -> dict[int, float]:
    """Each run's distance from the side's mean, where the side has several."""
    values = {run: value for run, value in enumerate(side) if value is not None}
    if len(values) < 2:
        return {}
    mean = sum(values.values()) / len(values)
    return {run: value - mean for run, value in values.items()}


def _correlation(residuals: Mapping[tuple[int, int], Sequence[float]], cells: Mapping[str, Spread]) -> float:
    """Of two cells' deviations within a run: from the variance of the mean over all cells of a run."""
    count = sum(map(len, residuals.values())) / len(residuals) if residuals else 0.0
    if count < 2:
        return 1.0
    degrees = len(residuals) - len({side for side, _ in residuals})
    variance = sum((sum(row) / len(row)) ** 2 for row in residuals.values()) / degrees
    return min(max((count * variance - 1) / (count - 1), 0.0), 1.0)


def steadied(own: Repeats, keys: Sequence[str], assumed: float) -> dict[str, Spread]:
    """The spread to judge each of ``keys`` by; ``assumed`` where nothing was repeated, taken as given."""
    prior = _prior(own) or Spread(assumed, math.inf)
    known = prior.df if math.isfinite(prior.df) else 0.0
    found = {}
    for key in keys:
        spread = own.cells.get(key)
        if spread is None:
            found[key] = prior
            continue
        df = known + spread.df
        variance = (known * prior.deviation**2 + spread.df * spread.deviation**2) / df
        found[key] = Spread(math.sqrt(variance), df)
    return found


def _prior(own: Repeats) -> Spread | None:
    """What all cells say of one: a scaled inverse chi-square, by the moments of the log variances."""
    spreads = [spread for spread in own.cells.values() if spread.deviation > 0]
    if len(spreads) < LEAST_CELLS:
        return None
    middle = sorted(spread.deviation for spread in spreads)[len(spreads) // 2]
    logs, noise = [], 0.0
    for deviation, df in spreads:
        clipped = max(deviation, middle / 100)  # a spread of nearly 0 has no logarithm to speak of
        logs.append(2 * math.log(clipped) - _digamma(df / 2) + math.log(df / 2))
        noise += _trigamma(df / 2) / len(spreads)
    mean = sum(logs) / len(logs)
    beyond = sum((log - mean) ** 2 for log in logs) / (len(logs) - 1) - noise
    degrees = sum(spread.df for spread in spreads) / len(spreads)
    witnesses = len(spreads) / (1 + (len(spreads) - 1) * own.correlation**2)
    most = degrees * max(witnesses - 1, 0.0)
    df = min(2 * _inverse_trigamma(beyond), most) if beyond > 0 else most
    if df < 0.5:
        return None
    shift = 0.0 if beyond <= 0 else _digamma(_inverse_trigamma(beyond)) - math.log(_inverse_trigamma(beyond))
    return Spread(math.exp((mean + shift) / 2), df)


def _digamma(x: float) -> float:
    """Derivative of log Γ, by its asymptotic series above 16 (DLMF 5.11.2)."""
    found = 0.0
    while x < 16:
        found -= 1 / x
        x += 1
    return found + math.log(x) - 1 / (2 * x) - 1 / (12 * x**2) + 1 / (120 * x**4) - 1 / (252 * x**6)


def _trigamma(x: float) -> float:
    """Derivative of digamma."""
    found = 0.0
    while x < 16:
        found += 1 / x**2
        x += 1
    return found + 1 / x + 1 / (2 * x**2) + 1 / (6 * x**3) - 1 / (30 * x**5) + 1 / (42 * x**7)


def _inverse_trigamma(value: float) -> float:
    """The x > 0 whose trigamma is ``value`` > 0; trigamma falls from infinity to 0."""
    low, high = 1e-8, 1e8
    while high / low > 1 + 1e-10:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _trigamma(middle) > value else (low, middle)
    return low
