"""``flashbench compare``: did it get worse? Two sides of runs, cell by cell, with a verdict and exit code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from flashbench._cli import options
from flashbench._cli.baseline import Store
from flashbench._cli.compare_output import Outputs
from flashbench.errors import EXIT_UNDECIDED, SpecError, UnknownName, UsageError

if TYPE_CHECKING:
    from flashbench.judge import Measure, Rules, Side
    from flashbench.judge.profile import Profile

FAIL_ON = ("slower", "undecided", "changed")
ALLOWED_CELLS = ("missing", "failed", "suspect", "damaged")
"""What --allow takes beside the conditions."""
GROUPS = ("implementation", "pass", "dtype", "head_dim", "mask", "seqlen", "kernel", "arch")

_RULES, _OUTPUT = "Rules", "Output"


def compare(
    base: Annotated[
        str, typer.Argument(help="Results files, folders or globs, comma-separated.", metavar="BASE")
    ],
    new: Annotated[
        str | None,
        typer.Argument(help="The same, of what is judged. With --baseline the only one.", metavar="NEW"),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            help="The base side: what 'flashbench baseline' keeps for the device and environment, by name or"
            " folder.",
            metavar="NAME|DIR",
        ),
    ] = None,
    store: Store = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="What is compared, a comma list of 'flashbench list metrics'. Default: time_s, and of static"
            " profiles what the compiler made.",
            metavar="NAMES",
        ),
    ] = None,
    warn: Annotated[
        str | None,
        typer.Option(
            help="Smaller changes are none: a share or a percentage. Default: 2%, of exact numbers 0.",
            metavar="SHARE",
            rich_help_panel=_RULES,
        ),
    ] = None,
    fail: Annotated[
        str | None,
        typer.Option(
            help="Worse by more fails the gate. Default: 5%, of exact numbers 0.",
            metavar="SHARE",
            rich_help_panel=_RULES,
        ),
    ] = None,
    noise: Annotated[
        str | None,
        typer.Option(
            help="Spread between runs, where none were repeated: a share, or a file of 'flashbench noise'."
            " Default: what is stored of this device, else 1%.",
            metavar="SHARE|FILE",
            rich_help_panel=_RULES,
        ),
    ] = None,
    floor: Annotated[
        str | None,
        typer.Option(
            help="Smallest difference that counts, in the metric's unit. Default: 5e-6 s, 1 MiB.",
            metavar="N",
            rich_help_panel=_RULES,
        ),
    ] = None,
    allow: Annotated[
        str | None,
        typer.Option(
            help="Let pass: device, power_limit, inputs, cache, flush, method, load, estimator, benchmark"
            " (may differ), missing and failed (cells), suspect (times), damaged (lines of files).",
            metavar="NAMES",
            rich_help_panel=_RULES,
        ),
    ] = None,
    fail_on: Annotated[
        str,
        typer.Option(
            help="slower, undecided, changed (better and new cells as well): a comma list of what fails.",
            metavar="NAMES",
            rich_help_panel=_RULES,
        ),
    ] = "slower",
    by: Annotated[
        str,
        typer.Option(
            help=f"The summary's groups, a comma list of {', '.join(GROUPS)}.",
            metavar="NAMES",
            rich_help_panel=_OUTPUT,
        ),
    ] = "implementation,pass",
    all_: Annotated[
        bool, typer.Option("--all", help="Show cells that are the same as well.", rich_help_panel=_OUTPUT)
    ] = False,
    cards: Annotated[
        bool,
        typer.Option(
            "--cards",
            help="Compare the cards of one kind in BASE's files with each other: no NEW.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    output: Annotated[
        list[str] | None,
        typer.Option(
            "--output",
            "-o",
            help="Also write FORMAT=FILE, any number of times: json, csv, markdown, html (a page), junit,"
            " bencher, and github-action-benchmark's github-lower or github-higher.",
            metavar="FORMAT=FILE",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    markdown: Annotated[
        bool,
        typer.Option(
            "--markdown", help="Print GitHub's Markdown, for a job summary.", rich_help_panel=_OUTPUT
        ),
    ] = False,
    json: options.Json = False,
    csv: options.Csv = False,
    quiet: options.Quiet = False,
) -> None:
    """Compare two sides of runs, cell by cell: faster, slower, same or undecided, and why.

    Several runs a side tell how far runs differ by themselves; with one, the device's noise profile does,
    or --noise.

    Exits 0 when nothing got worse by more than --fail, 4 for a damaged file, 5 when something did, 6 when
    cells are missing, failed or incomparable, or the runs are unlike or have nothing in common.
    """
    options.one_format(json, csv)
    if markdown and (json or csv):
        raise UsageError("--markdown excludes --json and --csv; accepted: one of the three")
    if cards:
        if new is not None or baseline is not None:
            raise UsageError("--cards: has one side; accepted: BASE alone")
        from flashbench._cli.compare_cards import show

        bounds = {"warn": share(warn or "2%", "--warn"), "fail": share(fail or "5%", "--fail")}
        show(base, **bounds, allowed=allowances(allow), json=json, csv=csv, quiet=quiet)
        return
    from flashbench import judge
    from flashbench._cli import compare_outcome

    allowed = allowances(allow)
    failing = _names(fail_on, "--fail-on", FAIL_ON)
    groups = sorted(_names(by, "--by", GROUPS), key=GROUPS.index)
    files = Outputs.parse(output or (), markdown=markdown, json=json, csv=csv, quiet=quiet, everything=all_)
    rules = _rules(warn, fail, noise, floor, allowed)
    asked = measures(metric)
    sides = sides_of(base, new, baseline, store, allowed)
    files.refuse([*(run.path for side in sides for run in side.runs), noise])
    compare_outcome.refuse_unlike(*sides, allowed)
    profile = _profile(noise, sides[0])
    comparisons = [
        judge.compare(*sides, one, _with(rules, profile, one), groups) for one in asked or _usual(*sides)
    ]
    code, said = compare_outcome.outcome(comparisons, rules, failing)
    if said is None and (said := compare_outcome.nothing(comparisons, *sides, every=bool(asked))):
        code = EXIT_UNDECIDED
    files.show(comparisons, *sides, code=code, profile=profile, failing=failing)
    if said:
        from flashbench import console

        console.error(said)
        raise typer.Exit(code)


def allowances(text: str | None) -> frozenset[str]:
    """What --allow lists. Raises UsageError."""
    from flashbench.judge.sides import CONDITIONS

    return _names(text or "", "--allow", (*CONDITIONS, *ALLOWED_CELLS))


def sides_of(
    base: str, new: str | None, baseline: str | None, store: str | None, allowed: frozenset[str]
) -> tuple[Side, Side]:
    """Both sides of a command line. Raises UsageError, RunFileError; exits 6 where no baseline fits the
    runs."""
    from flashbench import baselines, console, judge

    if baseline is None:
        if new is None or store is not None:
            what = "NEW is missing" if new is None else "--store is of --baseline"
            raise UsageError(f"{what}; accepted: BASE NEW, or --baseline NAME NEW")
        return judge.load_side(base, "BASE", allowed), judge.load_side(new, "NEW", allowed)
    if new is not None:
        raise UsageError(f"--baseline {baseline!r} is the base side; accepted: one side beside it, not two")
    side = judge.load_side(base, "NEW", allowed)
    key = baselines.key_of(side, f"NEW {base!r}")
    known = baselines.named(baseline, baselines.store(store))
    found = baselines.fitting(known, side)
    if found is None:
        kept = "; ".join(str(one.key) for one in known) or "nothing"
        text = f"--baseline {baseline!r} holds nothing of {key}; it holds: {kept}"
        console.error(UsageError(text, hint="'flashbench baseline save' keeps one"))
        raise typer.Exit(EXIT_UNDECIDED)
    return found.side(allowed=allowed), side


def _rules(
    warn: str | None, fail: str | None, noise: str | None, floor: str | None, allowed: frozenset[str]
) -> Rules:
    from flashbench.judge import Rules

    assumed = None if noise is None or _is_file(noise) else share(noise, "--noise")
    found = Rules(
        warn=None if warn is None else share(warn, "--warn"),
        fail=None if fail is None else share(fail, "--fail"),
        noise=Rules().noise if assumed is None else assumed,
        floor=None if floor is None else _number(floor, "--floor"),
        allowed=allowed,
    )
    if found.fail is not None and found.warn is not None and found.fail < found.warn:
        raise UsageError(f"--fail {fail!r} is below --warn {warn!r}; accepted: the same or more")
    return found


def _is_file(noise: str) -> bool:
    return noise.endswith(".json") or "/" in noise


def _profile(noise: str | None, base: Side) -> Profile | None:
    """The file of --noise, or where it is not given the base device's own. Raises UsageError for
    another's."""
    from flashbench.judge import profile

    devices = base.condition("device", base.keys)
    if noise is None:
        return profile.stored(next(iter(devices))) if len(devices) == 1 else None
    if not _is_file(noise):
        return None
    found = profile.load(noise)
    if devices and found.device not in devices:
        raise UsageError(
            f"--noise {noise!r}: of {found.device}, and the base side is of {' and '.join(sorted(devices))};"
            " accepted: a profile of the same device"
        )
    return found


def _with(rules: Rules, profile: Profile | None, measure: Measure) -> Rules:
    """The rules with what the profile says of a measure."""
    from dataclasses import replace

    if profile is None or measure.name not in profile.measures:
        return rules
    return replace(rules, profile=profile.measures[measure.name])


def share(text: str, option: str) -> float:
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


def measures(text: str | None) -> list[Measure]:
    """What is asked for, none where the files decide."""
    from flashbench.judge import MEASURES
    from flashbench.metrics import METRICS

    found = []
    for name in filter(None, (part.strip() for part in (text or "").split(","))):
        if name not in MEASURES:
            if name in {row.name for row in METRICS}:
                raise UsageError(
                    f"--metric {name!r}: neither more nor less of it is better;"
                    f" accepted: {', '.join(MEASURES)}"
                )
            raise UnknownName("--metric", name, MEASURES)
        found.append(MEASURES[name])
    return found


def _usual(base: Side, new: Side) -> list[Measure]:
    """What the formats of the files have to compare."""
    from flashbench.judge import MEASURES

    names = dict.fromkeys(name for side in (base, new) for run in side.runs for name in run.measures)
    return [MEASURES[name] for name in names]
