"""``flashbench history``: each cell over commits, and where it changed."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashbench._cli import options
from flashbench.errors import EXIT_UNDECIDED, UsageError

if TYPE_CHECKING:
    from flashbench.console import Column
    from flashbench.judge import Measure, Run
    from flashbench.judge.history import Change, Point, Series

BARS = "▁▂▃▄▅▆▇█"
DIGITS = "12345678"
GAP = " "


def history(
    runs: Annotated[
        list[str],
        typer.Argument(help="Results files, globs, folders of them, stores of baselines.", metavar="RUNS"),
    ],
    metric: Annotated[
        str | None,
        typer.Option(
            help="What is drawn, as in 'compare'. Default: time_s, or what the files have.", metavar="NAMES"
        ),
    ] = None,
    cells: Annotated[
        str, typer.Option(help="Only cells that match, such as '* d128 *'.", metavar="GLOB")
    ] = "*",
    warn: Annotated[
        str, typer.Option(help="Smaller changes are none: a share or a percentage.", metavar="SHARE")
    ] = "2%",
    noise: Annotated[
        str, typer.Option(help="Assumed spread between runs, until there are enough.", metavar="SHARE")
    ] = "1%",
    all_: Annotated[bool, typer.Option("--all", help="Exact metrics that never changed as well.")] = False,
    html: options.Html = None,
    json: options.Json = False,
    csv: options.Csv = False,
    quiet: options.Quiet = False,
) -> None:
    """Draw each cell over commits, oldest first, and name the commits where its level changed for good.

    Runs of one commit are one point. Exits 0 whatever changed ('flashbench compare' is the gate), 6 where no
    file has a value of the metric.
    """
    options.one_format(json, csv)
    from flashbench import console
    from flashbench._cli import compare, io_sweep
    from flashbench.judge.history import points

    page = None if html is None else io_sweep.page_path(html)
    shares = compare.share(warn, "--warn"), compare.share(noise, "--noise")
    asked = compare.measures(metric)
    loaded = _load(runs)
    _spare(html, loaded)
    every: list[dict[str, Any]] = []
    for device, group in _by_device(loaded).items():
        found = points(group)
        every += _rows(device, found, asked, shares)
        if not quiet:
            names = ", ".join(point.name for point in found)
            console.note(f"{device}: {len(found)} points, oldest first: {names}")
    _refuse_empty(loaded, asked, every)
    rows = _wanted(every, cells, all_)
    rows.sort(key=lambda row: -max((abs(one["worse"] or math.inf) for one in row["changes"]), default=0))
    if page is not None:
        from flashbench.report import history_page

        io_sweep.put(page, history_page.build(rows, command=shlex.join(["flashbench", *sys.argv[1:]])))
    if json:
        console.show_json(rows)
    else:
        title = "Each cell over commits, largest change first"
        console.show_table(_columns(), [_shown(row) for row in rows], csv=csv, title=title)


def _rows(
    device: str, found: Sequence[Point], asked: Sequence[Measure], shares: tuple[float, float]
) -> list[dict[str, Any]]:
    """Every series, of what is asked for or else of what the files have."""
    from flashbench.judge import MEASURES
    from flashbench.judge import history as history_

    usual = dict.fromkeys(name for point in found for run in point.runs for name in run.measures)
    return [
        _row(device, found, one)
        for measure in asked or [MEASURES[name] for name in usual]
        for one in history_.series(found, measure, warn=shares[0], noise=shares[1] or 1e-6)
    ]


def _refuse_empty(runs: Sequence[Run], asked: Sequence[Measure], rows: Sequence[dict[str, Any]]) -> None:
    """Exits 6 where there is nothing to draw of a metric that was asked for, or of any."""
    from flashbench import console
    from flashbench._cli.compare_outcome import NONE, metrics
    from flashbench.judge import Side

    drawn = {row["metric"] for row in rows}
    empty = [measure.name for measure in asked if measure.name not in drawn]
    if rows and not empty:
        return
    has = metrics(Side(name="RUNS", runs=tuple(runs)))
    hint = "" if has == NONE else "--metric takes what they have"
    what = (
        f"--metric {empty[0]!r}: no cell of the files has a value of it" if empty else "RUNS: nothing to draw"
    )
    console.error(UsageError(f"{what}; they have {has}", hint=hint))
    raise typer.Exit(EXIT_UNDECIDED)


def _wanted(rows: Sequence[dict[str, Any]], cells: str, all_: bool) -> list[dict[str, Any]]:
    """Of cells that match, what is not always the same by nature, or changed. Raises UsageError for none that
    match.
    """
    from fnmatch import fnmatchcase

    from flashbench import units
    from flashbench.judge import MEASURES

    matching = [row for row in rows if fnmatchcase(row["cell"], cells)]
    if not matching:
        raise UsageError(
            f"--cells {units.quoted(cells)}: matches no cell; accepted: a pattern of cells such as"
            f" {rows[0]['cell']!r}"
        )
    return [row for row in matching if all_ or row["changes"] or MEASURES[row["metric"]].repeats != "exact"]


def _spare(html: str | None, loaded: Sequence[Run]) -> None:
    if html is not None:
        options.spare(Path(html), f"--html {html!r}", [run.path for run in loaded])


def _load(texts: Sequence[str]) -> list[Run]:
    """The runs of every argument. Raises UsageError, RunFileError."""
    from flashbench import baselines
    from flashbench.judge import load_side

    found: list[Run] = []
    for text in texts:
        kept = baselines.entries(Path(text)) if Path(text).is_dir() else []
        for one in kept:
            found += [
                replace(run, commit=one.commit or one.name, created_at=run.created_at or one.saved_at)
                for run in one.side().runs
            ]
        if not kept:
            found += load_side(text, "RUNS", copies=True).runs
    if len({run.path.resolve() for run in found}) < 2:
        raise UsageError(f"RUNS {' '.join(texts)!r}: one run is no history; accepted: two or more")
    return found


def _by_device(runs: Sequence[Run]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.conditions.get("device", "unknown device"), []).append(run)
    return found


def _row(device: str, points: Sequence[Point], one: Series) -> dict[str, Any]:
    return {
        "device": device, "metric": one.measure.name, "unit": one.measure.unit, "cell": one.cell,
        "points": [point.name for point in points], "values": list(one.values),
        "changes": [_change(change) for change in one.changes],
    }  # fmt: skip


def _change(one: Change) -> dict[str, Any]:
    return {
        "point": one.point, "before": one.before, "after": one.after,
        "worse": one.share if math.isfinite(one.share) else None, "versions": list(one.versions),
    }  # fmt: skip


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    from flashbench import console

    known = [value for value in row["values"] if value is not None]
    bars = BARS if console.shows(BARS) else DIGITS
    return {
        **{name: row[name] for name in ("metric", "unit", "cell")},
        "course": sparkline(row["values"], bars), "first": known[0], "last": known[-1],
        "changes": "; ".join(map(_said, row["changes"])),
    }  # fmt: skip


def _said(change: dict[str, Any]) -> str:
    worse = change["worse"]
    size = "from 0" if worse is None else f"{abs(worse):.1%} {'worse' if worse > 0 else 'better'}"
    versions = f" ({'; '.join(change['versions'])})" if change["versions"] else ""
    return f"{size} at {change['point']}{versions}"


def sparkline(values: Sequence[float | None], bars: str = BARS) -> str:
    """A character a value, from the least to the largest; a gap where there is none."""
    known = [value for value in values if value is not None]
    low, high = min(known), max(known)
    step = (high - low) / (len(bars) - 1) or 1.0
    return "".join(GAP if value is None else bars[round((value - low) / step)] for value in values)


def _columns() -> list[Column]:
    from flashbench.console import Column

    number = "{:.4g}".format
    return [
        Column(name="cell", header="cell"), Column(name="metric", header="metric"),
        Column(name="course", header="course"),
        Column(name="first", header="first", format=number, justify="right"),
        Column(name="last", header="last", format=number, justify="right"),
        Column(name="unit", header="unit"), Column(name="changes", header="changes"),
    ]  # fmt: skip
