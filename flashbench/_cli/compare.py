"""``flashbench compare``: did it get worse? Two sides of runs, cell by cell, with a verdict and exit code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashbench._cli import options
from flashbench.errors import EXIT_UNDECIDED, GateError, SpecError, UnknownName, UsageError

if TYPE_CHECKING:
    from flashbench.console import Column
    from flashbench.judge import Comparison, Rules, Side
    from flashbench.metrics import Metric

ALLOWED = ("device", "cache", "method", "power_limit", "missing")
FAIL_ON = ("slower", "undecided")


def compare(
    base: Annotated[
        str, typer.Argument(help="Results files, folders or globs, comma-separated.", metavar="BASE")
    ],
    new: Annotated[str, typer.Argument(help="The same, of what is judged.", metavar="NEW")],
    metric: Annotated[
        str, typer.Option(help="What is compared; 'flashbench list metrics' shows all.", metavar="NAME")
    ] = "time_s",
    warn: Annotated[
        str, typer.Option(help="Smaller changes are none: a share or a percentage.", metavar="SHARE")
    ] = "3%",
    fail: Annotated[str, typer.Option(help="Worse by more fails the gate.", metavar="SHARE")] = "5%",
    noise: Annotated[
        str, typer.Option(help="Spread between runs, assumed where a side has one run.", metavar="SHARE")
    ] = "1%",
    floor: Annotated[
        str | None,
        typer.Option(
            help="Smallest difference that counts, in the metric's unit. Default: 5e-6 s, 1 MiB.", metavar="N"
        ),
    ] = None,
    allow: Annotated[
        str | None,
        typer.Option(help=f"Compare although these differ: {', '.join(ALLOWED)}.", metavar="NAMES"),
    ] = None,
    fail_on: Annotated[
        str, typer.Option(help="slower, or slower,undecided: verdicts that fail.", metavar="NAMES")
    ] = "slower",
    all_: Annotated[bool, typer.Option("--all", help="Show cells that are the same as well.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print GitHub's Markdown, for a job summary.")
    ] = False,
    json: options.Json = False,
    csv: options.Csv = False,
    quiet: options.Quiet = False,
) -> None:
    """Compare two sides of runs, cell by cell: faster, slower, same or undecided, and why.

    Several runs a side tell how far runs differ by themselves; with one, --noise is assumed.

    Exits 0 when nothing got worse by more than --fail, 5 when something did, 6 when cells are missing, the
    runs are unlike or have nothing in common.
    """
    options.one_format(json, csv)
    if markdown and (json or csv):
        raise UsageError("--markdown excludes --json and --csv; accepted: one of the three")
    rules = _rules(warn, fail, noise, floor)
    allowed = _names(allow or "", "--allow", ALLOWED)
    failing = _names(fail_on, "--fail-on", FAIL_ON)
    from flashbench import console, judge

    row = _metric(metric)
    sides = judge.load_side(base, "BASE"), judge.load_side(new, "NEW")
    _refuse(*sides, allowed)
    comparison = judge.compare(*sides, row, rules)
    if markdown:
        console.show_lines(_markdown(comparison))
    elif json or csv or not quiet:
        _show(comparison, everything=all_ or json or csv, json=json, csv=csv)
    if not quiet:
        _notes(comparison, *sides)
    _verdict(comparison, rules, allowed, failing)


def _rules(warn: str, fail: str, noise: str, floor: str | None) -> Rules:
    from flashbench.judge import Rules

    found = Rules(
        warn=_share(warn, "--warn"), fail=_share(fail, "--fail"), noise=_share(noise, "--noise"),
        floor=None if floor is None else _number(floor, "--floor"),
    )  # fmt: skip
    if found.fail < found.warn:
        raise UsageError(f"--fail {fail!r} is below --warn {warn!r}; accepted: the same or more")
    return found


def _share(text: str, option: str) -> float:
    """ "3%" and "0.03" are 0.03. Raises SpecError."""
    plain = text.strip()
    value = _number(plain.removesuffix("%"), option) / (100 if plain.endswith("%") else 1)
    if not 0 <= value < 1:
        raise SpecError(
            f"{option} {text!r}: out of range; accepted: 0 to below 1, or a percentage such as 3%"
        )
    return value


def _number(text: str, option: str) -> float:
    import math

    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise SpecError(f"{option} {text!r}: not a number; accepted: 0 or more, such as 3%, 0.03")
    return value


def _names(text: str, option: str, known: Sequence[str]) -> frozenset[str]:
    names = frozenset(filter(None, (part.strip() for part in text.split(","))))
    for name in names:
        if name not in known:
            raise UsageError(f"{option} {name!r}: not known; accepted: {', '.join(known)}")
    return names


def _metric(name: str) -> Metric:
    from flashbench.metrics import METRICS

    rows = {row.name: row for row in METRICS}
    if name not in rows:
        raise UnknownName("metric", name, rows)
    if not rows[name].better:
        directed = ", ".join(row.name for row in METRICS if row.better)
        raise UsageError(f"--metric {name!r}: neither more nor less of it is better; accepted: {directed}")
    return rows[name]


def _refuse(base: Side, new: Side, allowed: frozenset[str]) -> None:
    """Runs under unlike conditions say nothing of each other. Exits 6, naming every field."""
    from flashbench import console, judge

    differ = {name: pair for name, pair in judge.unlike(base, new).items() if name not in allowed}
    if differ:
        said = "; ".join(f"{name} is {one} on the base side and {other} on the new one" for name, (one, other)
                         in differ.items())  # fmt: skip
        console.error(
            _incomparable(
                f"the runs are unlike: {said}", f"--allow {','.join(differ)} compares them all the same"
            )
        )
        raise typer.Exit(EXIT_UNDECIDED)
    if not set(base.records) & set(new.records):
        console.error(_incomparable("the two sides have no cell in common", "compare runs of the same grid"))
        raise typer.Exit(EXIT_UNDECIDED)


def _incomparable(text: str, hint: str) -> UsageError:
    return UsageError(text, hint=hint)


def _notes(comparison: Comparison, base: Side, new: Side) -> None:
    from flashbench import console, judge
    from flashbench.judge import sides
    from flashbench.judge.verdicts import VERDICTS

    counts = ", ".join(f"{count} {name}" for name in VERDICTS if (count := comparison.count(name)))
    console.note(f"{len(comparison.cells)} cells: {counts}")
    if mean := comparison.geomean:
        console.note(f"geometric mean of new over base: {mean.value:.3f} ({mean.low:.3f} to {mean.high:.3f})")
    for text in sides.changes(base, new):
        console.note(text)
    if names := sides.unknown(base, new):
        console.warn(f"not told by one side, taken to be the same: {', '.join(names)}")
    for name, (one, other) in judge.unlike(base, new).items():
        console.warn(f"allowed to differ: {name} is {one} on the base side and {other} on the new one")


def _verdict(comparison: Comparison, rules: Rules, allowed: frozenset[str], failing: frozenset[str]) -> None:
    """Exit 5 for a gate that fails, 6 for what is missing or cannot be compared."""
    from flashbench import console

    if worse := comparison.failing:
        raise GateError(
            f"{len(worse)} of {len(comparison.cells)} cells are worse by more than {rules.fail:.0%}, first:"
            f" {worse[0].cell}: {worse[0].reason}"
        )
    for name in ("missing", "incomparable", *(("undecided",) if "undecided" in failing else ())):
        cells = [cell for cell in comparison.cells if cell.verdict == name]
        if cells and name not in allowed:
            hint = "--allow missing passes them" if name == "missing" else ""
            text = f"{len(cells)} cells are {name}, first: {cells[0].cell}: {cells[0].reason}"
            console.error(_incomparable(text, hint))
            raise typer.Exit(EXIT_UNDECIDED)


def _row(cell: Any) -> dict[str, Any]:
    ratio = cell.ratio
    return {
        "cell": cell.cell, "verdict": cell.verdict, "base": cell.base, "new": cell.new,
        "ratio": ratio.value if ratio else None, "low": ratio.low if ratio else None,
        "high": ratio.high if ratio else None, "change": cell.change, "fails": cell.fails,
        "reason": cell.reason,
    }  # fmt: skip


def _show(comparison: Comparison, *, everything: bool, json: bool, csv: bool) -> None:
    from flashbench import console

    rows = [_row(cell) for cell in comparison.cells if everything or cell.verdict != "same"]
    title = (
        f"{comparison.metric.name}, worst first"
        if rows
        else f"{comparison.metric.name}: all cells are the same"
    )
    console.show_table(_columns(comparison), rows, json=json, csv=csv, title=title)


def _columns(comparison: Comparison) -> list[Column]:
    from flashbench import units
    from flashbench.console import Column

    formats = {"s": units.format_seconds, "B": units.format_bytes}
    shown = formats.get(comparison.metric.unit, "{:.4g}".format)
    return [
        Column(name="verdict", header="verdict"), Column(name="cell", header="cell"),
        Column(name="base", header="base", format=shown, justify="right"),
        Column(name="new", header="new", format=shown, justify="right"),
        Column(name="ratio", header="new/base", format="{:.3f}".format, justify="right"),
        Column(name="low", header="95 % from", format="{:.3f}".format, justify="right"),
        Column(name="high", header="to", format="{:.3f}".format, justify="right"),
        Column(name="fails", header="fails", format=lambda yes: "yes" if yes else ""),
        Column(name="reason", header="why"),
    ]  # fmt: skip


def _markdown(comparison: Comparison) -> list[str]:
    """A table of what is not the same, and a line of counts."""
    from flashbench.judge.verdicts import VERDICTS

    counts = ", ".join(f"{count} {name}" for name in VERDICTS if (count := comparison.count(name)))
    lines = [f"**{comparison.metric.name}**: {counts}", ""]
    rows = [cell for cell in comparison.cells if cell.verdict != "same"]
    if rows:
        lines += ["| verdict | cell | new/base | why |", "|---|---|---|---|"]
    for cell in rows:
        ratio = f"{cell.ratio.value:.3f}" if cell.ratio else ""
        mark = " (fails)" if cell.fails else ""
        why = cell.reason.replace("|", "\\|")
        lines.append(f"| {cell.verdict}{mark} | `{cell.cell}` | {ratio} | {why} |")
    return lines
