"""Results in a notebook: a figure that needs no script, the summary in words, and the times as tables."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from flashbench.report import data, glance, summary, text, words
from flashbench.report.data import KEYS, Results
from flashbench.report.figures import LIGHT, styles
from flashbench.report.html import row_of, table

if TYPE_CHECKING:
    from pandas import DataFrame

WIDTH = 600
MOST = 8
"""So many selections are shown; the report has them all."""


def html(results: Results) -> str:
    """A fragment that a notebook shows: SVG bars of the longest length, paragraphs, a table per selection."""
    if results.table.empty:
        return "<p>The results hold no cell.</p>"
    items = summary.regimes(results).to_dict("records")
    several = results.table["run"].nunique() > 1
    parts = [f"<p>{escape(said)}.</p>" for said in data.not_begun(results)]
    parts += [
        f"<p><b>{glance.place(item, several)}</b>: {glance.paragraph(item)}</p>" for item in items[:MOST]
    ]
    frame = data.points("flops_per_s")(results)
    panels = list(frame.groupby(KEYS, sort=False)) if len(frame) else []
    for where, panel in panels[:MOST]:
        parts.append(_bars(panel, words.panel(dict(zip(KEYS, where, strict=True)))))
    shown = list(text.tables(results, "time_s"))[:MOST]
    for title, head, rows in shown:
        parts.append(f"<h4>{title}</h4>{table(head, map(row_of, rows))}")
    left = len(panels) - MOST
    if left > 0:
        parts.append(f"<p>{left} more selections: to_html() has them all.</p>")
    return "".join(parts)


def _bars(panel: DataFrame, title: str) -> str:
    """FLOP/s at the longest length that was timed, a bar per series."""
    timed = panel[panel["value"].notna()]
    if timed.empty:
        return ""
    longest = timed["seqlen"].max()
    rows: list[Any] = list(timed[timed["seqlen"] == longest].itertuples(index=False))
    look, top = styles(panel), max(row.value for row in rows)
    step = 26
    bars = "".join(
        f'<text x="150" y="{at * step + 17}" text-anchor="end">{escape(str(row.series))}</text>'
        f'<rect x="158" y="{at * step + 4}" width="{300 * row.value / top:.1f}" height="18"'
        f' fill="{LIGHT[look[row.series].slot]}"/>'
        f'<text x="{164 + 300 * row.value / top:.1f}" y="{at * step + 17}">{words.rate(row.value)}</text>'
        for at, row in enumerate(rows)
    )
    label = f"{title}, {words.lengths([longest])} keys"
    return (
        f"<p>{label}</p>"
        f'<svg role="img" aria-label="{label}" width="{WIDTH}" height="{len(rows) * step + 6}"'
        f' font-family="sans-serif" font-size="12" fill="currentColor">{bars}</svg>'
    )
