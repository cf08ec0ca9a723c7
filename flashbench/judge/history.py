"""Each cell over commits: its level at every point, and where that changed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flashbench.judge import sides
from flashbench.judge.changepoints import change_points, exact_changes, noise_of
from flashbench.judge.measures import Measure
from flashbench.judge.sides import Run, Side


@dataclass(frozen=True, kw_only=True)
class Point:
    """Runs of one commit. label: what it is called where it has no commit."""

    label: str
    runs: tuple[Run, ...]
    commit: str = ""
    at: str = ""

    @property
    def name(self) -> str:
        """The commit, shortened, else the label."""
        return self.commit[:12] or self.label


@dataclass(frozen=True, kw_only=True)
class Change:
    """A new level from one point on. share: how much worse, relative (negative: better)."""

    index: int
    point: str
    before: float
    after: float
    share: float
    versions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Series:
    """One cell by one measure. values: by point, None where it has none."""

    cell: str
    measure: Measure
    values: tuple[float | None, ...]
    changes: tuple[Change, ...]


def points(runs: Sequence[Run]) -> list[Point]:
    """Runs put together by commit, oldest first where all tell when they were made, else as given."""
    made: dict[str, list[Run]] = {}
    for run in runs:
        made.setdefault(run.commit or str(run.path), []).append(run)
    found = [
        Point(
            label=_label(group[0]), runs=tuple(group), commit=group[0].commit,
            at=min(run.created_at for run in group),
        )
        for group in made.values()
    ]  # fmt: skip
    return sorted(found, key=lambda one: one.at) if all(one.at for one in found) else found


def _label(run: Run) -> str:
    return run.path.parent.name if run.path.stem == "results" else run.path.stem


def series(found: Sequence[Point], measure: Measure, *, warn: float, noise: float = 0.01) -> Iterator[Series]:
    """Every cell that has the measure. warn: smaller changes are none; noise: assumed between runs."""
    keys = dict.fromkeys(key for point in found for run in point.runs for key in run.cells)
    for key in keys:
        values = [_value(point, key, measure) for point in found]
        if any(value is not None for value in values):
            yield Series(
                cell=key, measure=measure, values=tuple(values),
                changes=tuple(_changes(found, values, measure, warn, noise)),
            )  # fmt: skip


def _value(point: Point, key: str, measure: Measure) -> float | None:
    """The median over the runs of the samples' medians."""
    cells = [run.cells[key] for run in point.runs if key in run.cells]
    seen = [statistics.median(samples) for cell in cells if (samples := cell.samples(measure.name))]
    value = statistics.median(seen) if seen else math.nan
    usable = math.isfinite(value) and (value > 0 or measure.repeats == "exact")
    return value if usable else None


def _changes(
    found: Sequence[Point], values: Sequence[float | None], measure: Measure, warn: float, noise: float
) -> Iterator[Change]:
    known = [(index, value) for index, value in enumerate(values) if value is not None]
    numbers = [value for _, value in known]
    if measure.repeats == "exact":
        starts = exact_changes(numbers)
    else:
        logs = [math.log(value) for value in numbers]
        starts = change_points(logs, noise_of(logs, noise))
    edges = [0, *starts, len(numbers)]
    for low, start, end in zip(edges, starts, edges[2:], strict=False):
        before, after = (statistics.median(numbers[part]) for part in (slice(low, start), slice(start, end)))
        share = (after - before) / abs(before) if before else math.inf
        if measure.repeats == "exact" or (
            abs(math.log(after / before)) > math.log1p(warn) and abs(after - before) >= measure.floor
        ):
            here, last = known[start][0], known[start - 1][0]
            yield Change(
                index=here, point=found[here].name, before=before, after=after,
                share=_worse(share, measure),
                versions=tuple(
                    text.replace(" on the base side", "").replace(" on the new one", " now")
                    for text in sides.changes(
                        Side(name="base", runs=found[last].runs), Side(name="new", runs=found[here].runs)
                    )
                ),
            )  # fmt: skip


def _worse(share: float, measure: Measure) -> float:
    return {"higher": -share, "same": abs(share)}.get(measure.better, share)
