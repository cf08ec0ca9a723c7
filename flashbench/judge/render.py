"""A judgement as other programs read it: Markdown, JUnit, Bencher's BMF, github-action-benchmark, plain data.

Formats: JUnit as Jenkins, GitLab and GitHub's actions read it; Bencher Metric Format
(bencher.dev/docs/reference/bencher-metric-format); github-action-benchmark's custom files, whose direction is
the tool's name, so that there is one for each.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from flashbench.judge.statistics import Ratio
from flashbench.judge.verdicts import VERDICTS, Comparison, Judged

BROKEN = ("failed", "missing", "incomparable")
"""Verdicts of a cell that cannot be judged, an error in JUnit's words."""


def counts(comparison: Comparison) -> str:
    """How many cells have each verdict, worst first."""
    found = (f"{count} {name}" for name in VERDICTS if (count := comparison.count(name)))
    return ", ".join(found) or "no cells"


def changed(comparisons: Sequence[Comparison]) -> tuple[list[Comparison], list[str]]:
    """Those to show, and of several the names of those that have nothing but cells that are the same; what no
    cell has is neither."""
    comparisons = [one for one in comparisons if one.cells] or comparisons[:1]
    if len(comparisons) == 1:
        return list(comparisons), []
    still = [one for one in comparisons if one.count("same") == len(one.cells) and not one.groups]
    return [one for one in comparisons if one not in still], [one.measure.name for one in still]


def summary(comparisons: Sequence[Comparison]) -> list[str]:
    """A line of counts for each metric, and one for all that did not change."""
    shown, still = changed(comparisons)
    lines = [
        f"{one.measure.name}: {f'{len(one.cells)} cells: ' if one.cells else ''}{counts(one)}"
        for one in shown
    ]
    return [*lines, f"the same in all cells: {', '.join(still)}"] if still else lines


def row(comparison: Comparison, cell: Judged) -> dict[str, Any]:
    """One cell as plain data; the unit of base and new stands beside them."""
    return {
        "metric": comparison.measure.name, "unit": comparison.measure.unit, "cell": cell.cell,
        "verdict": cell.verdict, "fails": cell.fails, "base": cell.base, "new": cell.new,
        **_interval(cell.ratio), "change": cell.change, "base_runs": cell.runs[0], "new_runs": cell.runs[1],
        "reason": cell.reason,
    }  # fmt: skip


def _interval(ratio: Ratio | None) -> dict[str, float | None]:
    return {name: getattr(ratio, name, None) for name in ("low", "high")} | {
        "ratio": ratio.value if ratio else None, "p": ratio.p if ratio else None
    }  # fmt: skip


def document(comparisons: Sequence[Comparison], about: Mapping[str, Any]) -> dict[str, Any]:
    """Everything as one JSON object. about: what the caller knows of the sides and the outcome."""
    return {
        "type": "comparison", "schema": 1, **about,
        "metrics": [
            {
                "name": one.measure.name, "unit": one.measure.unit, "better": one.measure.better,
                "counts": {name: one.count(name) for name in VERDICTS},
                "groups": [
                    {"name": group.name, "cells": group.cells, **_interval(group.ratio),
                     "verdict": group.verdict, "reason": group.reason} for group in one.groups
                ],
            }
            for one in comparisons
        ],
        "cells": [row(one, cell) for one in comparisons for cell in one.cells],
    }  # fmt: skip


def markdown(comparisons: Sequence[Comparison], notes: Iterable[str] = ()) -> list[str]:
    """Lines of GitHub's Markdown: counts, the summary by group, and a table of what is not the same."""
    lines: list[str] = []
    shown, still = changed(comparisons)
    for one in shown:
        lines += [f"### {one.measure.name}: {counts(one)}", ""]
        rows = [cell for cell in one.cells if cell.verdict != "same"]
        if rows:
            lines += ["| verdict | cell | new/base | why |", "|---|---|---|---|"]
            lines += [_markdown_row(cell) for cell in rows] + [""]
        if one.groups:
            lines += [
                "| geometric mean of | cells | new/base | 95 % from | to | verdict |",
                "|---|--:|--:|--:|--:|---|",
            ]
            lines += [
                f"| {group.name} | {group.cells} | {group.ratio.value:.3f} | {group.ratio.low:.3f}"
                f" | {group.ratio.high:.3f} | {group.verdict} |"
                for group in one.groups
            ] + [""]
    if still:
        lines += [f"The same in all cells: {', '.join(still)}.", ""]
    lines += [f"- {_plain(text)}" for text in notes]
    return lines


def _markdown_row(cell: Judged) -> str:
    ratio = f"{cell.ratio.value:.3f}" if cell.ratio else ""
    mark = " (fails)" if cell.fails else ""
    return f"| {cell.verdict}{mark} | `{_plain(cell.cell)}` | {ratio} | {_plain(cell.reason)} |"


def _plain(text: str) -> str:
    """Text that cannot break out of a cell of a Markdown table or be read as HTML."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


def junit(comparisons: Sequence[Comparison], undecided_fails: bool = False) -> str:
    """A test suite per metric and a test case per cell; what only warns is a skipped case with its reason."""
    suites = []
    for one in comparisons:
        cases = [_case(one, cell, undecided_fails) for cell in one.cells]
        failures = len(one.failing) + (one.count("undecided") if undecided_fails else 0)
        errors = sum(one.count(name) for name in BROKEN)
        skipped = sum("<skipped" in case for case in cases)
        suites.append(
            f'<testsuite name={_attribute(one.measure.name)} tests="{len(cases)}" failures="{failures}"'
            f' errors="{errors}" skipped="{skipped}">\n' + "".join(cases) + "</testsuite>\n"
        )
    return '<?xml version="1.0" encoding="UTF-8"?>\n<testsuites>\n' + "".join(suites) + "</testsuites>\n"


def _case(comparison: Comparison, cell: Judged, undecided_fails: bool) -> str:
    name, reason = _attribute(cell.cell), _attribute(f"{cell.verdict}: {cell.reason}")
    inner = f"<system-out>{escape(_legal(f'{cell.verdict}: {cell.reason}'))}</system-out>"
    if cell.fails or (undecided_fails and cell.verdict == "undecided"):
        inner = f'<failure type="{cell.verdict}" message={reason}/>'
    elif cell.verdict in BROKEN:
        inner = f'<error type="{cell.verdict}" message={reason}/>'
    elif cell.verdict in ("slower", "undecided", "new"):
        inner = f"<skipped message={reason}/>"
    return f"<testcase classname={_attribute(comparison.measure.name)} name={name}>{inner}</testcase>\n"


def _legal(text: str) -> str:
    """Without the control characters that XML 1.0 has no way to write."""
    return "".join(one for one in text if one in "\t\n" or " " <= one < "\ufffe")


def _attribute(text: str) -> str:
    return quoteattr(" ".join(_legal(text).split()))


def bencher(comparisons: Sequence[Comparison]) -> str:
    """The new side in Bencher Metric Format, in the measures' own units; bounds of the interval where
    known."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for one in comparisons:
        for cell in one.cells:
            if cell.new is None:
                continue
            value = {"value": cell.new}
            if cell.ratio and cell.base:
                value |= {
                    "lower_value": cell.base * cell.ratio.low, "upper_value": cell.base * cell.ratio.high
                }  # fmt: skip
            found.setdefault(cell.cell, {})[one.measure.name] = value
    return _json(found)


def action(comparisons: Sequence[Comparison], direction: str) -> str:
    """The new side as github-action-benchmark's custom file for that direction: ``lower`` or ``higher``."""
    directions = ("higher",) if direction == "higher" else ("lower", "same")
    wanted = [one for one in comparisons if one.measure.better in directions]
    return _json([
        _entry(one, cell) for one in wanted for cell in sorted(one.cells, key=lambda cell: cell.cell)
        if cell.new is not None
    ])  # fmt: skip


def _entry(comparison: Comparison, cell: Judged) -> dict[str, Any]:
    measure, ratio = comparison.measure, cell.ratio
    spread = {"range": f"{(ratio.high - ratio.low) / 2 / ratio.value:.2%}"} if ratio else {}
    return {
        "name": f"{cell.cell} {measure.name}", "unit": measure.unit, "value": cell.new, **spread,
        "extra": f"{cell.verdict}: {cell.reason}",
    }  # fmt: skip


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
