"""The summary: geometric means of new over base, of all cells and by group, with their intervals.

What all cells of a run share (clock, temperature) does not average out over cells. So with several runs the
interval comes from the spread of each run's own mean, of which a few runs say little whatever the number of
cells; with one, the assumed noise is taken to be shared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashbench.judge.spread import NONE, Repeats, Spread, pooled
from flashbench.judge.statistics import Medians, Ratio, interval

if TYPE_CHECKING:
    from flashbench.judge.verdicts import Judged

Pair = tuple[Medians, Medians]


@dataclass(frozen=True, kw_only=True)
class Group:
    """name: ``all``, or the values that its cells share. cells: how many; ratio: the geometric mean.

    verdict: slower, faster, same or undecided, as of a cell, and its reason.
    """

    name: str
    cells: int
    ratio: Ratio
    verdict: str = ""
    reason: str = ""


def means(
    cells: Sequence[Judged],
    sampled: Mapping[str, Pair],
    profile: Repeats,
    noise: float,
    by: Sequence[str],
) -> tuple[Group, ...]:
    """All cells that were compared, then each group of several cells, in the order of their names."""
    members: dict[str, list[str]] = {"all": [cell.cell for cell in cells if cell.cell in sampled]}
    for cell in cells:
        name = " ".join(value for field in by if (value := (cell.groups or {}).get(field)))
        if name and cell.cell in sampled:
            members.setdefault(name, []).append(cell.cell)
    return tuple(
        Group(name=name, cells=len(keys), ratio=_mean([sampled[key] for key in keys], keys, profile, noise))
        for name, keys in sorted(members.items(), key=lambda item: (item[0] != "all", item[0]))
        if keys and (name == "all" or len(keys) < len(members["all"]))
    )


def _mean(pairs: Sequence[Pair], keys: Sequence[str], profile: Repeats, noise: float) -> Ratio:
    log = sum(new.log - base.log for base, new in pairs) / len(pairs)
    counts = [max(len(pair[side].logs) for pair in pairs) for side in (0, 1)]
    whole = [pair for pair in pairs if [len(side.logs) for side in pair] == counts]
    squares, df = 0.0, 0
    for side, count in enumerate(counts):
        run_means = (
            [sum(pair[side].logs[run] for pair in whole) / len(whole) for run in range(count)]
            if whole
            else []
        )
        middle = sum(run_means) / count if run_means else 0.0
        squares += sum((one - middle) ** 2 for one in run_means)
        df += max(len(run_means) - 1, 0)
    shares = sum(1 / count for count in counts)
    within = sum(side.within / len(side.logs) for pair in pairs for side in pair) / len(pairs) ** 2
    if noise == 0:
        return interval(log, NONE)
    told = [spread for spread in (_seen(squares, df), _stored(keys, profile)) if spread.df]
    if told:
        spread = pooled(told)
        return interval(log, Spread(math.sqrt(max(spread.deviation**2 * shares, within)), spread.df))
    return interval(log, Spread(math.sqrt(noise**2 * shares + within), math.inf))


def _seen(squares: float, df: int) -> Spread:
    return Spread(math.sqrt(squares / df) if df else 0.0, df)


def _stored(keys: Sequence[str], profile: Repeats) -> Spread:
    """How far the means of two runs differ by a profile."""
    profile = profile.parted(profile.correlation)
    own = [profile.own[key] for key in keys if key in profile.own]
    if not own or profile.shared is None:
        return Spread(0.0, 0.0)
    shared = profile.shared
    return Spread(math.sqrt(shared.deviation**2 + pooled(own).deviation ** 2 / len(keys)), shared.df)
