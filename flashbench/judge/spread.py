"""How far runs of the same thing differ: what a run's cells share, and each cell's own.

Cells of one run share its clock and temperature, so many cells are not many witnesses of that: it is told by
the runs alone, however many cells they have, and a few runs may agree by chance. What is left of a cell once
it is taken out is its own. There cells are witnesses: as those of a machine spread alike, each cell's
variance is drawn towards that of all, as far as the cells themselves agree (moderated t: Smyth, Linear models
and empirical Bayes methods, 2004, section 6.2). The two parts have degrees of freedom of their own, and stay
apart until an interval is made of them (``statistics``)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

LEAST_CELLS = 5
"""Fewer cells with repeated runs say nothing of the others, nor of what they share."""


class Spread(NamedTuple):
    """Standard deviation of the logarithm of a run's median; df: of its estimate, inf where it is given."""

    deviation: float
    df: float


NONE = Spread(0.0, math.inf)


class Parts(NamedTuple):
    """What runs of a cell differ by: on its own, and with all cells of the run. Independent of each other."""

    own: Spread
    shared: Spread = NONE


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """What repeated runs say.

    cells: the whole spread of each. correlation: of the cells' deviations within a run, 0 to 1. shared, own:
    the two parts, None and empty where the cells are too few to tell them apart.
    """

    cells: Mapping[str, Spread] = field(default_factory=dict)
    correlation: float = 1.0
    shared: Spread | None = None
    own: Mapping[str, Spread] = field(default_factory=dict)

    def joined(self, other: Repeats) -> Repeats:
        """Both, cell by cell; the correlation of whichever has more to say."""
        larger = self if self.degrees >= other.degrees else other
        correlation = larger.correlation
        sources = [one.parted(correlation) for one in (self, other) if one.cells]
        cells = _pooled_cells([one.cells for one in sources])
        if len(cells) < LEAST_CELLS:
            return Repeats(cells=cells, correlation=correlation)
        return Repeats(
            cells=cells,
            correlation=correlation,
            shared=pooled([one.shared for one in sources if one.shared]),
            own=_pooled_cells([one.own for one in sources]),
        )

    def parted(self, correlation: float) -> Repeats:
        """With its parts; where they were never told apart, by a correlation."""
        if self.shared is not None or not self.cells:
            return self
        variance = pooled(self.cells.values()).deviation ** 2
        runs = max(spread.df for spread in self.cells.values())
        own = {
            key: Spread(math.sqrt(1 - correlation) * spread.deviation, spread.df)
            for key, spread in self.cells.items()
        }
        shared = Spread(math.sqrt(correlation * variance), runs)
        return Repeats(cells=self.cells, correlation=self.correlation, shared=shared, own=own)

    @property
    def degrees(self) -> float:
        """Degrees of freedom over all cells."""
        return sum(spread.df for spread in self.cells.values())


def pooled(spreads: Iterable[Spread]) -> Spread:
    """One spread of several estimates of it."""
    spreads = list(spreads)
    df = sum(spread.df for spread in spreads)
    return Spread(math.sqrt(sum(spread.df * spread.deviation**2 for spread in spreads) / df), df)


def _pooled_cells(sources: Sequence[Mapping[str, Spread]]) -> dict[str, Spread]:
    keys = dict.fromkeys(key for one in sources for key in one)
    return {key: pooled([one[key] for one in sources if key in one]) for key in keys}


Place = tuple[int, int]
"""A run: the number of its side, and its own."""


def repeats(cells: Mapping[str, Sequence[Sequence[float | None]]]) -> Repeats:
    """Spreads of cells, each a list of sides, each a list over the side's runs of the logarithm of a
    median."""
    found: dict[str, Spread] = {}
    residuals: dict[str, dict[Place, float]] = {}
    for key, sides in cells.items():
        apart = {
            (number, run): value
            for number, side in enumerate(sides)
            for run, value in _residuals(side).items()
        }
        df = len(apart) - len({number for number, _ in apart})
        if df:
            residuals[key] = apart
            found[key] = _spread(apart.values(), df)
    correlation = _correlation(residuals, found)
    if len(found) < LEAST_CELLS:
        return Repeats(cells=found, correlation=correlation)
    effects = _effects(residuals)
    own = {
        key: _spread([value - effects[place] for place, value in apart.items()], int(found[key].df))
        for key, apart in residuals.items()
    }
    shared = _spread(effects.values(), len(effects) - len({number for number, _ in effects}))
    return Repeats(cells=found, correlation=correlation, shared=shared, own=own)


def _spread(deviations: Iterable[float], df: int) -> Spread:
    return Spread(math.sqrt(sum(value**2 for value in deviations) / df), float(df))


def _residuals(side: Sequence[float | None]) -> dict[int, float]:
    """Each run's distance from the side's mean, where the side has several."""
    values = {run: value for run, value in enumerate(side) if value is not None}
    if len(values) < 2:
        return {}
    mean = sum(values.values()) / len(values)
    return {run: value - mean for run, value in values.items()}


def _effects(residuals: Mapping[str, Mapping[Place, float]]) -> dict[Place, float]:
    """By how much each run differs in all its cells: the mean of the middle half, as some cells are noisy."""
    rows: dict[Place, list[float]] = {}
    for apart in residuals.values():
        for place, value in apart.items():
            rows.setdefault(place, []).append(value)
    return {place: _midmean(row) for place, row in rows.items()}


def _midmean(values: Sequence[float]) -> float:
    ordered = sorted(values)
    cut = len(ordered) // 4
    middle = ordered[cut : len(ordered) - cut]
    return sum(middle) / len(middle)


def _correlation(residuals: Mapping[str, Mapping[Place, float]], cells: Mapping[str, Spread]) -> float:
    """Of two cells' deviations within a run: from the variance of the mean over all cells of a run."""
    rows: dict[Place, list[float]] = {}
    for key, apart in residuals.items():
        for place, value in apart.items() if cells[key].deviation else ():
            rows.setdefault(place, []).append(value / cells[key].deviation)
    count = sum(map(len, rows.values())) / len(rows) if rows else 0.0
    if count < 2:
        return 1.0
    degrees = len(rows) - len({side for side, _ in rows})
    variance = sum((sum(row) / len(row)) ** 2 for row in rows.values()) / degrees
    return min(max((count * variance - 1) / (count - 1), 0.0), 1.0)


def steadied(known: Repeats, keys: Sequence[str], assumed: float) -> dict[str, Parts]:
    """The spread to judge each of ``keys`` by; ``assumed`` where nothing was repeated, taken as given."""
    if len(known.cells) < LEAST_CELLS:
        return {key: Parts(known.cells.get(key, Spread(assumed, math.inf))) for key in keys}
    known = known.parted(known.correlation)
    shared = known.shared or NONE
    prior = _prior(known.own)
    found = {}
    for key in keys:
        spreads = [one for one in (known.own.get(key), prior) if one is not None]
        found[key] = Parts(pooled(spreads), shared) if spreads else Parts(Spread(assumed, math.inf))
    return found


def _prior(own: Mapping[str, Spread]) -> Spread | None:
    """What all cells say of one: a scaled inverse chi-square, by the moments of the log variances.

    How far cells differ is itself told by so many cells only, so two standard errors more are taken; and the
    scale is the mean variance, as a cell that seems quiet may be a noisy one whose runs agree by chance.
    """
    spreads = [spread for spread in own.values() if spread.deviation > 0]
    if len(spreads) < LEAST_CELLS:
        return None
    middle = sorted(spread.deviation for spread in spreads)[len(spreads) // 2]
    logs, noise = [], 0.0
    for deviation, df in spreads:
        clipped = max(deviation, middle / 100)  # a spread of nearly 0 has no logarithm to speak of
        logs.append(2 * math.log(clipped) - _digamma(df / 2) + math.log(df / 2))
        noise += _trigamma(df / 2) / len(spreads)
    mean = sum(logs) / len(logs)
    total = sum((log - mean) ** 2 for log in logs) / (len(logs) - 1)
    unsure = math.sqrt(2 / (len(logs) - 1))
    beyond = total * (1 + 2 * unsure) - noise
    degrees = sum(spread.df for spread in spreads) / len(spreads)
    most = degrees * (len(spreads) - 1)
    df = min(2 * _inverse_trigamma(beyond), most) if beyond > 0 else most
    if df < 0.5:
        return None
    return Spread(pooled(spreads).deviation, df)


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
