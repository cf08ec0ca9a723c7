"""``flashbench baseline``: keep runs to judge later ones by, list them, show one, make one the standard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashbench._cli import options
from flashbench.errors import EXIT_UNDECIDED, UsageError

if TYPE_CHECKING:
    from flashbench.baselines import Baseline
    from flashbench.console import Column
    from flashbench.judge import Side

app = typer.Typer(
    help="Keep runs as baselines, by name, device and environment; 'compare --baseline' finds them.",
)

Store = Annotated[
    str | None,
    typer.Option(
        help="Folder of baselines. Default: $FLASHBENCH_BASELINES, else ./flashbench-baselines.",
        metavar="DIR",
    ),
]
Name = Annotated[str, typer.Argument(help="Name of a baseline.", metavar="NAME")]


@app.command("save")
def save(
    runs: Annotated[
        str, typer.Argument(help="Results files, folders or globs, comma-separated.", metavar="RUNS")
    ],
    name: Annotated[str, typer.Option(help="What to keep them as.", metavar="NAME")] = "main",
    commit: Annotated[
        str | None,
        typer.Option(
            help="Commit that was measured. Default: what the files say, else HEAD of the current folder.",
            metavar="REV",
        ),
    ] = None,
    store: Store = None,
    quiet: options.Quiet = False,
) -> None:
    """Keep runs of one device and environment under a name, in the place of what it held for those.

    Exits 4 for a damaged file, and 6 for a run of which no cell was measured: nothing can be judged by it.
    """
    from flashbench import baselines, console
    from flashbench.judge import load_side

    side = load_side(runs, "RUNS")
    if problem := _nothing_in(side):
        console.error(problem)
        raise typer.Exit(EXIT_UNDECIDED)
    baselines.key_of(side, f"RUNS {runs!r}")
    said = next((run.commit for run in side.runs if run.commit), "")
    found = baselines.save(side, baselines.store(store), name, commit or said or _head())
    if not quiet:
        console.note(f"{found.name} of {found.key}: {len(found.files)} runs in {found.folder}")


def _nothing_in(side: Side) -> UsageError | None:
    """The error where a run holds nothing to judge by."""
    from collections import Counter

    for run in side.runs:
        if not any(cell.ok for cell in run.cells.values()):
            ended = Counter(cell.status for cell in run.cells.values())
            said = ", ".join(f"{count} {status}" for status, count in ended.items()) or "it has none"
            text = f"{run.path}: no cell of it was measured ({said}); nothing can be judged by it"
            return UsageError(text, hint="measure again, then save")
    return None


def _head() -> str:
    """The commit that is checked out here, or empty."""
    import subprocess

    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


@app.command("list")
def list_(
    store: Store = None, json: options.Json = False, csv: options.Csv = False, quiet: options.Quiet = False
) -> None:
    """List every baseline of the store: name, device, environment, commit, when it was saved."""
    options.one_format(json, csv)
    from flashbench import baselines, console

    root = baselines.store(store)
    rows = [_row(one) for one in baselines.entries(root)]
    console.show_table(_columns(), rows, json=json, csv=csv)
    if not rows and not quiet:
        console.note(f"{str(root)!r} holds no baseline")


def _row(one: Baseline) -> dict[str, Any]:
    return {
        "name": one.name, "device": one.key.device, "environment": dict(one.key.environment),
        "commit": one.commit, "saved_at": one.saved_at, "runs": len(one.files), "folder": str(one.folder),
    }  # fmt: skip


def _columns() -> list[Column]:
    from flashbench.console import Column

    def versions(value: Mapping[str, str]) -> str:
        return ", ".join(f"{name} {version}" for name, version in value.items())

    return [
        Column(name="name", header="name"), Column(name="device", header="device"),
        Column(name="environment", header="environment", format=versions),
        Column(name="commit", header="commit", format=lambda value: value[:12]),
        Column(name="saved_at", header="saved at"), Column(name="runs", header="runs", justify="right"),
        Column(name="folder", header="folder"),
    ]  # fmt: skip


@app.command("show")
def show(
    name: Name,
    store: Store = None,
    json: options.Json = False,
    csv: options.Csv = False,
    quiet: options.Quiet = False,
) -> None:
    """Show what a baseline holds: a row per cell and metric, the median over its runs."""
    options.one_format(json, csv)
    from flashbench import baselines, console
    from flashbench.console import Column

    found = baselines.named(name, baselines.store(store))
    rows = [row for one in found for row in _values(one)]
    columns = [
        Column(name="device", header="device"), Column(name="cell", header="cell"),
        Column(name="metric", header="metric"),
        Column(name="value", header="value", format="{:.6g}".format, justify="right"),
        Column(name="unit", header="unit"), Column(name="status", header="status"),
    ]  # fmt: skip
    console.show_table(columns, rows, json=json, csv=csv)
    if not quiet:
        for one in found:
            console.note(f"{one.key}: commit {one.commit or 'unknown'}, saved {one.saved_at}, {one.folder}")


def _values(one: Baseline) -> Sequence[dict[str, Any]]:
    from statistics import median

    from flashbench.judge import MEASURES

    side = one.side()
    names = dict.fromkeys(name for run in side.runs for name in run.measures)
    rows: list[dict[str, Any]] = []
    for key in side.keys:
        cells = side.of(key)
        about: dict[str, Any] = {"device": one.key.device, "cell": key, "status": cells[0].status}
        seen = {
            name: [median(samples) for cell in cells if (samples := cell.samples(name))] for name in names
        }
        rows += [
            about | {"metric": name, "unit": MEASURES[name].unit, "value": median(values)}
            for name, values in seen.items() if values
        ] or [about]  # fmt: skip
    return rows


@app.command("promote")
def promote(
    name: Name,
    to: Annotated[str, typer.Argument(help="Name that it becomes the baseline of.", metavar="TO")] = "main",
    store: Store = None,
    quiet: options.Quiet = False,
) -> None:
    """Make what is kept under NAME the baseline TO, for every device and environment that NAME has."""
    from flashbench import baselines, console

    for one in baselines.promote(baselines.store(store), name, to):
        if not quiet:
            console.note(f"{to} of {one.key}: what {name} held, in {one.folder}")
