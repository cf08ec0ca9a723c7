"""The report without a page: GitHub's Markdown for a README, a plot and tables for a terminal."""

from __future__ import annotations

import html
import shlex
import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from flashbench.errors import UnavailableError
from flashbench.report import data, glance, summary, tabled, words
from flashbench.report.data import KEYS, Results
from flashbench.report.figures import rate_unit
from flashbench.report.sections import SECTIONS, Section
from flashbench.report.tabled import Tabled, pipes
from flashbench.units import format_length

if TYPE_CHECKING:
    from pandas import DataFrame

METRICS = {
    "time_s": ("Median time of one call", words.seconds),
    "flops_per_s": ("Nominal FLOP/s", words.rate),
}


def markdown(results: Results) -> list[str]:
    """Lines of Markdown: headline numbers, what was not begun, a paragraph per selection, a table of times
    each, the sections that are tables, the command.
    """
    lines = [f"## Attention on {_device(results)}", ""]
    for caption, value, detail in glance.claims(summary.headline(results)):
        lines.append(f"- **{value}** {caption}" + (f" ({detail})" if detail else ""))
    lines += [f"- {tabled.safe(said)}" for said in data.not_begun(results)]
    regimes = summary.regimes(results)
    several = regimes["run"].nunique() > 1
    if len(regimes):
        lines += ["", "### Who is fastest", ""]
    for item in regimes.to_dict("records"):
        said = glance.paragraph(item, "**{}**".format)
        lines.append(f"- {glance.place(item, several)}: {said}")
    for title, head, rows in tables(results, "time_s"):
        lines += ["", f"### Time: {title}", "", pipes(head), pipes(["---", *["--:"] * (len(head) - 1)])]
        lines += map(pipes, rows)
    for section, found in _tabled(results):
        lines += ["", f"### {tabled.safe(section.title)}", "", tabled.safe(section.about)]
        for one in found:
            lines += ["", *tabled.markdown(one)]
    lines += map(tabled.safe, _without(results, lines))
    return _spaced([*lines, "", *_commands(results)])


def _tabled(results: Results) -> Iterator[tuple[Section, list[Tabled]]]:
    """The sections that are tables, of those that have data."""
    for section in SECTIONS:
        if section.tables is not None and len(frame := section.data(results)):
            yield section, list(section.tables(frame))


def _spaced(lines: list[str]) -> list[str]:
    """Without an empty line after another."""
    return [line for line, before in zip(lines, ["", *lines], strict=False) if line or before]


def _without(results: Results, lines: list[str]) -> list[str]:
    """Why there is nothing but a title, if that is so."""
    return [summary.nothing(results)] if not any(lines[1:]) else []


def tables(results: Results, metric: str) -> Iterable[tuple[str, list[str], list[list[str]]]]:
    """Per selection: its words, the heading, a row per series with a text per length. Safe as HTML."""
    _, show = METRICS[metric]
    frame = data.points(metric)(results)
    for where, panel in frame.groupby(KEYS, sort=False):
        lengths = sorted(set(panel["seqlen"]))
        rows = []
        for name, mine in panel.groupby("series", sort=False):
            at = {row.seqlen: _cell(row, show) for row in mine.itertuples(index=False)}
            rows.append([html.escape(str(name)), *(at.get(length, "") for length in lengths)])
        title = words.panel(dict(zip(KEYS, where, strict=True)))
        yield title, ["implementation", *map(format_length, lengths)], rows


def _cell(row: Any, show: Any) -> str:
    return show(row.value) if words.known(row.value) else html.escape(row.status)


def _device(results: Results) -> str:
    named = (header.get("environment") or {} for header in results.headers.values())
    names = {str(name) for name in results.table["device"].dropna()} or {
        str(name) for one in named if (name := one.get("device_name"))
    }
    return html.escape(", ".join(sorted(names)) or "an unnamed device")


def _commands(results: Results) -> list[str]:
    lines = []
    for header in results.headers.values():
        argv = header.get("argv")
        if isinstance(argv, list | tuple) and argv:
            command = shlex.join(map(str, argv)).replace("`", "'").replace("\n", " ")
            lines.append(f"Made by `{command}`.")
    return lines


def terminal(results: Results, *, width: int, height: int = 20) -> list[str]:
    """Lines for a terminal of ``width`` columns: headline numbers, a plot of FLOP/s per selection, and the
    sections that are tables.

    Raises UnavailableError without the package plotext.
    """
    lines = [html.unescape(f"Attention on {_device(results)}"), ""]
    for caption, value, detail in glance.claims(summary.headline(results)):
        said = html.unescape(f"{value} {caption}: {detail}")
        lines += textwrap.wrap(said, max(40, width), initial_indent="  ", subsequent_indent="    ")
    for said in data.not_begun(results):
        lines += textwrap.wrap(said, max(40, width), initial_indent="  ", subsequent_indent="    ")
    frame = data.points("flops_per_s")(results)
    frame = frame[frame["value"].notna()]
    regimes = {tuple(item[key] for key in KEYS): item for item in summary.regimes(results).to_dict("records")}
    for where, panel in frame.groupby(KEYS, sort=False):
        title = html.unescape(words.panel(dict(zip(KEYS, where, strict=True))))
        lines += ["", *_plot(panel, title, width, height)]
        if where in regimes:
            said = html.unescape(glance.paragraph(regimes[where], "{}".format))
            lines += textwrap.wrap(said, max(40, width))
    for section, found in _tabled(results):
        lines += ["", section.title, *textwrap.wrap(section.about, max(40, width))]
        for one in found:
            lines += ["", *tabled.terminal(one, max(40, width))]
    return _spaced([*lines, *_without(results, lines)])


MARKS = "ox+*#@%&"
"""Told apart without colour."""


def _plot(panel: DataFrame, title: str, width: int, height: int) -> list[str]:
    try:
        import plotext as plot
    except ImportError as error:
        raise UnavailableError(
            "--terminal needs the package plotext", hint="pip install 'flashbench[terminal]'"
        ) from error
    plot.clear_figure()
    plot.plot_size(max(40, width), height)
    plot.theme("clear")
    plot.xscale("log")
    scale, unit = rate_unit(panel["value"].max())
    plot.title(f"{unit}: {title}")
    for at, (name, rows) in enumerate(panel.groupby("series", sort=False)):
        mine = rows.sort_values("seqlen")
        values = [value / scale for value in mine["value"]]
        plot.plot(mine["seqlen"].tolist(), values, label=str(name), marker=MARKS[at % len(MARKS)])
    lengths = sorted(set(panel["seqlen"].tolist()))
    plot.xticks(lengths, list(map(format_length, lengths)))
    plot.ylim(0, None)
    text: str = plot.uncolorize(plot.build())
    return [line.rstrip() for line in text.rstrip().splitlines()]
