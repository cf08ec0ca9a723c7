"""Cell by cell: faster, slower, same, undecided or incomparable, each with a reason in words."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from flashbench.judge import sides
from flashbench.judge.sides import Side
from flashbench.judge.statistics import Ratio, false_discoveries, ratio_of
from flashbench.metrics import Metric
from flashbench.record import Record

VERDICTS = ("slower", "faster", "same", "undecided", "incomparable", "missing", "new")
"""slower and faster stand for worse and better, whatever the metric."""

FLOOR = {"s": 5e-6, "B": 2**20}
"""Differences below are the same: five microseconds, one MiB (an allocator's grain)."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """When a difference counts. All shares are relative.

    warn: below it nothing changed. fail: a worse cell above it fails the gate. noise: assumed spread between
    runs where a side has one run. rate: share of the verdicts that may be chance. floor: smallest absolute
    difference that counts, in the metric's unit; None for FLOOR's.
    """

    warn: float = 0.03
    fail: float = 0.05
    noise: float = 0.01
    rate: float = 0.05
    floor: float | None = None


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One cell. change: how much worse, relative (negative: better), None where it cannot be told."""

    cell: str
    verdict: str
    reason: str
    base: float | None = None
    new: float | None = None
    ratio: Ratio | None = None
    change: float | None = None
    fails: bool = False


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All cells, worst first, and the geometric mean of new over base over those that have both."""

    metric: Metric
    cells: tuple[Judged, ...]
    geomean: Ratio | None

    def count(self, verdict: str) -> int:
        """How many cells have that verdict."""
        return sum(cell.verdict == verdict for cell in self.cells)

    @property
    def failing(self) -> tuple[Judged, ...]:
        """The cells that fail the gate."""
        return tuple(cell for cell in self.cells if cell.fails)


def compare(base: Side, new: Side, metric: Metric, rules: Rules) -> Comparison:
    """Judge every cell of either side by one metric."""
    keys = dict.fromkeys([*base.records, *new.records])
    cells = [_cell(key, base.records.get(key, ()), new.records.get(key, ()), metric, rules) for key in keys]
    cells = _without_chance(cells, rules)
    order = {name: rank for rank, name in enumerate(VERDICTS)}
    cells.sort(key=lambda cell: (order[cell.verdict], -(cell.change or 0.0)))
    return Comparison(metric=metric, cells=tuple(cells), geomean=_geomean(cells))


def _cell(
    key: str, base: tuple[Record, ...], new: tuple[Record, ...], metric: Metric, rules: Rules
) -> Judged:
    if not new:
        return Judged(cell=key, verdict="missing", reason="the new side does not have it")
    if not base:
        return Judged(cell=key, verdict="new", reason="the base side does not have it")
    one, other = sides.values(base, metric), sides.values(new, metric)
    if not one or not other:
        return _without_value(key, (base, one), (new, other), metric)
    if any(not (math.isfinite(value) and value > 0) for run in one + other for value in run):
        return _of_zero(key, one, other, metric)
    noise = 0.0 if metric.whole else rules.noise
    return _judge(key, ratio_of(one, other, noise), (_middle(one), _middle(other)), metric, rules)


def _without_value(
    key: str,
    base: tuple[tuple[Record, ...], list[list[float]]],
    new: tuple[tuple[Record, ...], list[list[float]]],
    metric: Metric,
) -> Judged:
    """A cell that one side, or both, could not measure."""
    (records, found), (others, other) = base, new
    if found and not other:
        said = f"{others[0].status}: {others[0].reason}" if others[0].status != "ok" else f"no {metric.name}"
        return Judged(
            cell=key, verdict="missing", reason=f"the new side has no value ({said})", base=_middle(found)
        )
    if other and not found:
        return Judged(
            cell=key, verdict="new", new=_middle(other),
            reason=f"the base side has no value ({records[0].status})",
        )  # fmt: skip
    return Judged(cell=key, verdict="same", reason=f"neither side has a value ({others[0].status})")


def _of_zero(key: str, base: list[list[float]], new: list[list[float]], metric: Metric) -> Judged:
    """Zeros have no ratio: equal ones are the same."""
    one, other = _middle(base), _middle(new)
    if one == other:
        return Judged(cell=key, verdict="same", reason="equal", base=one, new=other)
    reason = f"{metric.name} is 0 or no number on one side"
    return Judged(cell=key, verdict="incomparable", reason=reason, base=one, new=other)


def _judge(key: str, ratio: Ratio, middles: tuple[float, float], metric: Metric, rules: Rules) -> Judged:
    base, new = middles
    upward = metric.better != "higher"
    change = ratio.value - 1 if upward else 1 - ratio.value
    least, most = sorted((ratio.low - 1, ratio.high - 1) if upward else (1 - ratio.high, 1 - ratio.low))
    floor = FLOOR.get(metric.unit, 0.0) if rules.floor is None else rules.floor

    def judged(verdict: str, reason: str, *, fails: bool = False) -> Judged:
        return Judged(
            cell=key, verdict=verdict, reason=reason, base=base, new=new, ratio=ratio, change=change,
            fails=fails,
        )  # fmt: skip

    between = f"{change:+.1%}, 95 % between {least:+.1%} and {most:+.1%}"
    if abs(new - base) < floor:
        return judged("same", f"{between}; less than {floor:g} {metric.unit} apart")
    if abs(change) <= rules.warn:
        if most > rules.fail:
            return judged(
                "undecided", f"{between}: it may be over {rules.fail:.0%} worse; take more samples or runs"
            )
        return judged("same", between)
    if least > 0:
        return judged("slower", between, fails=change > rules.fail)
    if most < 0:
        return judged("faster", between)
    return judged("undecided", f"{between}: the interval holds no change; take more samples or runs")


def _without_chance(cells: list[Judged], rules: Rules) -> list[Judged]:
    """Verdicts that chance would give among so many cells become undecided."""
    tested = [index for index, cell in enumerate(cells) if cell.ratio is not None]
    stands = false_discoveries(
        [p for i in tested if (r := cells[i].ratio) and (p := r.p) is not None], rules.rate
    )
    for index, stand in zip(tested, stands, strict=True):
        cell = cells[index]
        if cell.verdict in ("slower", "faster") and not stand:
            reason = f"{cell.reason}; among {len(tested)} cells chance alone may do that"
            cells[index] = replace(cell, verdict="undecided", reason=reason, fails=False)
    return cells


def _geomean(cells: Iterable[Judged]) -> Ratio | None:
    """The geometric mean of the ratios, with the interval of their mean."""
    ratios = [cell.ratio for cell in cells if cell.ratio is not None]
    if not ratios:
        return None
    log = sum(math.log(ratio.value) for ratio in ratios) / len(ratios)
    error = math.sqrt(sum(ratio.error**2 for ratio in ratios)) / len(ratios)
    p = 0.5 * math.erfc(abs(log) / error / math.sqrt(2)) if error else 0.5
    return Ratio(math.exp(log), math.exp(log - 1.96 * error), math.exp(log + 1.96 * error), error, p)


def _middle(runs: list[list[float]]) -> float:
    import statistics

    return statistics.median(statistics.median(run) for run in runs)
