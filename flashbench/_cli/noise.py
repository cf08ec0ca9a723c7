"""``flashbench noise``: how far repeated runs differ on this device, stored for ``compare``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashbench._cli import options
from flashbench.errors import EXIT_UNDECIDED, UnknownName, UsageError

if TYPE_CHECKING:
    from flashbench.judge import Repeats, Side
    from flashbench.judge.profile import Profile


def noise(
    runs: Annotated[
        str,
        typer.Argument(
            help="Repeated runs of one grid: files, folders or globs, comma-separated.", metavar="RUNS"
        ),
    ],
    metric: Annotated[
        str, typer.Option(help="Whose noise, a comma list of what varies from run to run.", metavar="NAMES")
    ] = "time_s",
    out: Annotated[
        str | None,
        typer.Option(
            help="File to write. Default: the device's in the user's data folder, where 'compare' finds it.",
            metavar="FILE",
        ),
    ] = None,
    json: options.Json = False,
    csv: options.Csv = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure how far repeated runs of the same code differ, and store it for comparisons of single runs.

    Copies of a file are one run. Exits 6 where the runs are unlike or no cell was repeated.
    """
    options.one_format(json, csv)
    from flashbench import console
    from flashbench.judge import load_side, profile

    names = _metrics(metric)
    path = None if out is None else options.out_file(out)
    side = load_side(runs, "RUNS")
    if path is not None:
        options.spare(path, f"--out {out!r}", [run.path for run in side.runs])
    for text in () if quiet else (text for run in side.runs for text in run.told):
        console.warn(text)
    found = _profile(side, names)
    path = path or profile.path_for(found.device)
    profile.save(found, len(side.runs), path)
    rows = [row for name, seen in found.measures.items() for row in _rows(name, seen)]
    title = f"spread between {len(side.runs)} runs on {found.device}, largest first"
    console.show_table(_columns(), rows, json=json, csv=csv, title=title)
    if not quiet:
        console.note(f"stored in {path}")


def _metrics(text: str) -> list[str]:
    from flashbench.judge import MEASURES

    known = [name for name, measure in MEASURES.items() if measure.repeats == "varies"]
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in known:
            raise UnknownName("--metric", name, known)
    if not names:
        raise UsageError(f"--metric {text!r}: names nothing; accepted: {', '.join(known)}")
    return names


def _profile(side: Side, names: list[str]) -> Profile:
    """The profile of the runs. Exits 6 where they say nothing."""
    from flashbench import console
    from flashbench.judge.profile import Profile
    from flashbench.judge.sides import CONDITIONS
    from flashbench.judge.verdicts import seen

    differ = {name: values for name in CONDITIONS[:3] if len(values := side.condition(name, ())) > 1}
    measures = {name: seen((side,), name) for name in names}
    problem = None
    if differ:
        said = "; ".join(f"{name} is {' and '.join(sorted(values))}" for name, values in differ.items())
        problem = UsageError(f"the runs are unlike: {said}", hint="give runs of one grid on one device")
    elif not any(one.cells for one in measures.values()):
        problem = UsageError("no cell was measured by two runs", hint="give several runs of one grid")
    if problem is not None:
        console.error(problem)
        raise typer.Exit(EXIT_UNDECIDED)
    device = next(iter(side.condition("device", ())), "unknown device")
    return Profile(device=device, measures={name: one for name, one in measures.items() if one.cells})


def _rows(name: str, seen: Repeats) -> list[dict[str, Any]]:
    order = sorted(seen.cells.items(), key=lambda item: -item[1].deviation)
    return [
        {"metric": name, "cell": key, "spread": spread.deviation, "runs": int(spread.df) + 1}
        for key, spread in order
    ]


def _columns() -> list[Any]:
    from flashbench.console import Column

    return [
        Column(name="metric", header="metric"), Column(name="cell", header="cell"),
        Column(name="spread", header="spread", format="{:.2%}".format, justify="right"),
        Column(name="runs", header="runs", justify="right"),
    ]  # fmt: skip
