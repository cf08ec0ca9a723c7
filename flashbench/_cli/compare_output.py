"""What ``flashbench compare`` prints and writes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashbench import paths
from flashbench._cli import options
from flashbench.errors import UsageError

if TYPE_CHECKING:
    from flashbench.console import Column
    from flashbench.judge import Comparison, Side
    from flashbench.judge.profile import Profile

FORMATS = ("json", "csv", "markdown", "html", "junit", "bencher", "github-lower", "github-higher")
"""What --output takes; the last two are github-action-benchmark's, one for each direction."""


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Where a judgement goes: what stdout holds, and files by format."""

    shown: str
    files: tuple[tuple[str, Path], ...]
    quiet: bool
    everything: bool

    @classmethod
    def parse(
        cls, texts: Sequence[str], *, markdown: bool, json: bool, csv: bool, quiet: bool, everything: bool
    ) -> Outputs:
        """Raises UsageError for an unknown format and for a path that cannot be written."""
        files = []
        for text in texts:
            name, _, path = text.partition("=")
            if name not in FORMATS or not path:
                raise UsageError(
                    f"--output {text!r}: not FORMAT=FILE; accepted formats: {', '.join(FORMATS)}"
                )
            if why := _why_no_file(Path(path)):
                raise UsageError(f"--output {text!r}: {why}; accepted: a file in a folder that exists")
            files.append((name, Path(path)))
        shown = "json" if json else "csv" if csv else "markdown" if markdown else "table"
        return cls(shown=shown, files=tuple(files), quiet=quiet, everything=everything)

    def refuse(self, inputs: Iterable[Path | str | None]) -> None:
        """Raise UsageError for a file that is one of the inputs, or a results file."""
        for name, path in self.files:
            options.spare(path, f"--output {name}={path}", inputs)

    def show(
        self,
        comparisons: Sequence[Comparison],
        base: Side,
        new: Side,
        *,
        code: int,
        profile: Profile | None,
        failing: Collection[str],
    ) -> None:
        """Print and write everything. Raises UsageError for a file that cannot be written."""
        from flashbench import console, paths
        from flashbench.judge import render

        notes, warnings = _notes(comparisons, base, new)
        if profile is not None:
            notes.append(f"spread between runs of {profile.device} by {profile.path}")
        about = _about(base, new, code) | {"notes": notes, "warnings": warnings}
        strict = "undecided" in failing
        for name, path in self.files:
            try:
                text = (
                    _page(comparisons, about, facts(base, new)) if name == "html"
                    else _text(name, comparisons, about, strict)
                )  # fmt: skip
                paths.put(path, text)
            except OSError as error:
                raise UsageError(f"--output {name}={path}: {error.strerror or error}") from None
        if self.shown == "table":
            for one in comparisons if self.everything else render.changed(comparisons)[0]:
                if one.cells:
                    _table(one, everything=self.everything)
        else:
            console.show_text(_text(self.shown, comparisons, about, strict).rstrip("\n"))
        if not self.quiet:
            for text in [*render.summary(comparisons), *notes]:
                console.note(text)
            for text in warnings:
                console.warn(text)


def _why_no_file(path: Path) -> str:
    """Why no file can have that path, or empty."""
    if path.is_dir():
        return f"{str(path)!r} is a folder"
    try:
        return "" if paths.resolved(path).parent.is_dir() else "no such folder"
    except OSError as error:
        return error.strerror or str(error)


def _text(name: str, comparisons: Sequence[Comparison], about: Mapping[str, Any], strict: bool) -> str:
    """A judgement in one format, without characters that steer a terminal. strict: undecided cells fail."""
    from flashbench import console

    text = _raw(name, comparisons, about, strict)
    return console.printable(text, json=name not in ("csv", "markdown", "junit"))


def _raw(name: str, comparisons: Sequence[Comparison], about: Mapping[str, Any], strict: bool) -> str:
    from flashbench.judge import render

    if name == "json":
        import json

        document = render.document(comparisons, about)
        return json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    if name == "csv":
        return _csv([render.row(one, cell) for one in comparisons for cell in one.cells])
    if name == "markdown":
        return "\n".join(render.markdown(comparisons, [*about["notes"], *about["warnings"]])) + "\n"
    if name == "junit":
        return render.junit(comparisons, strict)
    if name == "bencher":
        return render.bencher(comparisons)
    return render.action(comparisons, name.removeprefix("github-"))


def page(comparison: Comparison, base: Side, new: Side) -> str:
    """The page of one comparison, as ``--output html=FILE`` writes it."""
    notes, warnings = _notes([comparison], base, new)
    about = _about(base, new, 0) | {"notes": notes, "warnings": warnings}
    return _page([comparison], about, facts(base, new))


def _page(
    comparisons: Sequence[Comparison], about: Mapping[str, Any], told: Sequence[tuple[str, str, str]]
) -> str:
    from flashbench.report import compare_page

    sides = {side: about[side] for side in ("base", "new")}
    notes = [*about["notes"], *about["warnings"]]
    return compare_page.build(comparisons, notes=notes, sides=sides, facts=told)


def facts(base: Side, new: Side) -> list[tuple[str, str, str]]:
    """What both sides tell of where and with what they were measured: name, base's value, new's."""

    def told(side: Side, name: str) -> str:
        if name in ("commit", "created_at"):
            return " and ".join(dict.fromkeys(filter(None, (getattr(run, name) for run in side.runs))))
        return " and ".join(sorted(side.condition(name, side.keys) | side.version(name)))

    runs = [*base.runs, *new.runs]
    cells = [cell for side in (base, new) for key in side.keys for cell in side.of(key)]
    names = dict.fromkeys([
        *(name for run in runs for name in run.conditions), "commit", "created_at",
        *(name for run in runs for name in run.versions), *(name for one in cells for name in one.conditions),
    ])  # fmt: skip
    found = [(name, told(base, name), told(new, name)) for name in names]
    return [row for row in found if row[1] or row[2]]


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    import csv
    import io

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = list(rows[0]) if rows else []
    writer.writerow(names)
    for row in rows:
        plain = [
            ("true" if value else "false") if isinstance(value, bool) else value for value in row.values()
        ]
        writer.writerow(["" if value is None else value for value in plain])
    return text.getvalue()


def _about(base: Side, new: Side, code: int) -> dict[str, Any]:
    from flashbench import judge
    from flashbench.judge import sides

    return {
        "exit_code": code,
        "base": [str(run.path) for run in base.runs], "new": [str(run.path) for run in new.runs],
        "unlike": {name: list(pair) for name, pair in judge.unlike(base, new).items()},
        "untold": sides.untold(base, new),
    }  # fmt: skip


def _notes(comparisons: Sequence[Comparison], base: Side, new: Side) -> tuple[list[str], list[str]]:
    """What a reader should know beside the cells; and what may make them wrong."""
    from flashbench import judge
    from flashbench.judge import sides

    notes = [text for one in comparisons for text in _spread(one)]
    notes += sides.changes(base, new)
    warnings = [text for side in (base, new) for run in side.runs for text in run.told]
    warnings += _untold(sides.untold(base, new))
    warnings += [
        f"allowed to differ: {name} is {one} on the base side and {other} on the new one"
        for name, (one, other) in judge.unlike(base, new).items()
    ]
    warnings += sides.partly_unlike(base, new)
    return notes, warnings


def _untold(found: Mapping[str, Sequence[str]]) -> list[str]:
    """One line of what files do not tell, none where they tell all."""
    told = {name: ", ".join(names) for name, names in found.items()}
    if len(told) == 2 and len(set(told.values())) == 1:
        return [f"not told by either side, taken to be the same: {next(iter(told.values()))}"]
    sides = "; nor ".join(
        f"by the {name} side{'' if number else ', taken to be the same'}: {names}"
        for number, (name, names) in enumerate(told.items())
    )
    return [f"not told {sides}"] if sides else []


def _spread(comparison: Comparison) -> list[str]:
    """How far the runs of a side were seen to differ."""
    seen = sorted(spread.deviation for spread in comparison.spread.cells.values())
    if not seen:
        return []
    return [
        f"{comparison.measure.name}: runs of a side differ by {seen[len(seen) // 2]:.2%} in the middle cell,"
        f" up to {seen[-1]:.2%}"
    ]


def _table(comparison: Comparison, *, everything: bool) -> None:
    from flashbench import console
    from flashbench.judge import render

    rows = [render.row(comparison, cell) for cell in comparison.cells if everything or cell.verdict != "same"]
    name = comparison.measure.name
    title = f"{name}, worst first" if rows else f"{name}: all cells are the same"
    console.show_table(_columns(comparison), rows, title=title)
    if comparison.groups:
        means = [
            {"group": one.name, "cells": one.cells, "ratio": one.ratio.value, "low": one.ratio.low,
             "high": one.ratio.high, "verdict": one.verdict}
            for one in comparison.groups
        ]  # fmt: skip
        console.show_table(_group_columns(), means, title=f"{name}, geometric mean of new over base")


def _ratios() -> list[Column]:
    from flashbench.console import Column

    return [
        Column(name=name, header=header, format="{:.3f}".format, justify="right")
        for name, header in (("ratio", "new/base"), ("low", "95 % from"), ("high", "to"))
    ]


def _group_columns() -> list[Column]:
    from flashbench.console import Column

    cells = Column(name="cells", header="cells", justify="right")
    return [
        Column(name="group", header="group"), cells, *_ratios(), Column(name="verdict", header="verdict")
    ]  # fmt: skip


def _columns(comparison: Comparison) -> list[Column]:
    from flashbench import units
    from flashbench.console import Column

    formats = {"s": units.format_seconds, "B": units.format_bytes}
    shown = formats.get(comparison.measure.unit, "{:.4g}".format)
    ratios = _ratios() if comparison.measure.repeats != "exact" else []
    return [
        Column(name="verdict", header="verdict"), Column(name="cell", header="cell"),
        Column(name="base", header="base", format=shown, justify="right"),
        Column(name="new", header="new", format=shown, justify="right"), *ratios,
        Column(name="fails", header="fails", format=lambda yes: "yes" if yes else ""),
        Column(name="reason", header="why"),
    ]  # fmt: skip
