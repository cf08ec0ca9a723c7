"""The page of ``history --html``: every change of level over commits, and the course of each cell.

    history_page.build(rows, command="flashbench history …")

A row: device, metric, unit, cell, points (names of commits), values (None where missing) and changes (point,
before, after, worse, versions), as ``history --json`` prints them. Data (``changes``) → figures → page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from flashbench.report import words
from flashbench.report.figures import HEIGHT, LIGHT, Figure
from flashbench.report.grid import Column, Grid
from flashbench.report.grid import html as grid_html
from flashbench.report.html import row_of, table
from flashbench.report.page import radios
from flashbench.report.parts import Part, document, figure

Row = Mapping[str, Any]

MOST = 400
"""Cells whose course is drawn, those that changed most."""
KINDS = {"worse": (4, "triangle-up"), "better": (2, "triangle-down")}
"""Colour slot and marker of a change: never colour alone."""


def build(rows: Sequence[Row], *, command: str) -> str:
    """The page as text. rows: those that changed most first."""
    found = changes(rows)
    parts = (
        Part(
            key="summary", title="What changed, and where", body=_summary(rows, found),
            about="A commit from which a cell's level is another one for good; a single odd run is none.",
        ),
        Part(
            key="changes", title="Changes over commits",
            body=figure("changes", "Relative change of each cell over commits", changes_figure(rows)) if found
            else '<p class="empty">No cell changed its level.</p>',
            about="One mark a cell: how much worse (up) or better (down) from that commit on.",
        ),
        Part(
            key="course", title="Course of a cell",
            body=figure("course", "Value of the chosen cell", course_figure(rows)) if rows else "",
            about="Median of the runs of each commit; a ring marks a change. Choose the cell at the top.",
        ),
        Part(key="cells", title="All cells", about="Largest change first.", body=_cells(rows)),
    )  # fmt: skip
    devices = ", ".join(dict.fromkeys(str(row["device"]) for row in rows)) or "no device"
    return document(parts, title=f"History on {devices}", command=command, controls=_controls(rows))


def changes(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Every change with its cell: device, metric, cell, point, worse (relative; None from 0), kind."""
    return [
        {**{name: row[name] for name in ("device", "metric", "unit", "cell")}, **one,
         "kind": "better" if one["worse"] is not None and one["worse"] < 0 else "worse"}
        for row in rows for one in row["changes"]
    ]  # fmt: skip


def changes_figure(rows: Sequence[Row]) -> Figure:
    """A mark per change: the commit across, how much worse up."""
    found, fig = changes(rows), _plane("worse by", [])
    fig.layout["yaxis"]["tickformat"] = ".1~%"
    fig.layout["hovermode"] = "closest"
    points = [point for row in rows for point in row["points"]]
    names = [escape(name) for name in dict.fromkeys(points)]
    # every commit, also those before the first change and after the last
    axis = {"categoryorder": "array", "categoryarray": names, "range": [-0.5, len(names) - 0.5]}
    fig.layout["xaxis"] |= axis
    for kind, (slot, symbol) in KINDS.items():
        mine = [one for one in found if one["kind"] == kind and one["worse"] is not None]
        if mine:
            fig.data.append({
                "type": "scatter", "mode": "markers", "name": kind,
                "x": [escape(one["point"]) for one in mine], "y": [one["worse"] for one in mine],
                "marker": {"symbol": symbol, "size": 10, "color": LIGHT[slot]},
                "customdata": [_said(one) for one in mine], "hovertemplate": "%{customdata}",
                "meta": {"where": {}, "slot": slot},
            })  # fmt: skip
    return fig


def course_figure(rows: Sequence[Row]) -> Figure:
    """Each cell's values over its commits, with rings where its level changed."""
    fig = _plane("", [
        {"where": {"cell": str(at)}, "text": escape(f"{row['cell']}, {row['metric']} ({row['unit']})")}
        for at, row in enumerate(rows[:MOST])
    ])  # fmt: skip
    fig.layout["yaxis"] |= {"rangemode": "tozero", "tickformat": ".3~s"}
    for at, row in enumerate(rows[:MOST]):
        x, where = [escape(name) for name in row["points"]], {"cell": str(at)}
        texts = ["" if value is None else escape(shown(value, row["unit"])) for value in row["values"]]
        fig.data.append({
            "type": "scatter", "mode": "lines+markers", "name": escape(row["cell"]), "x": x,
            "y": list(row["values"]), "line": {"width": 2}, "marker": {"symbol": "circle", "size": 8},
            "customdata": texts, "hovertemplate": "%{customdata}",
            "meta": {"where": where, "slot": 2, "unit": row["unit"]},
        })  # fmt: skip
        marked = {one["point"]: one for one in row["changes"]}
        ringed = [i for i, name in enumerate(row["points"]) if name in marked]
        if ringed:
            fig.data.append({
                "type": "scatter", "mode": "markers", "name": "change", "x": [x[i] for i in ringed],
                "y": [row["values"][i] for i in ringed], "showlegend": False, "hoverinfo": "skip",
                "marker": {"symbol": "circle-open", "size": 18, "line": {"width": 2}},
                "meta": {"where": where, "slot": 4, "ring": True},
            })  # fmt: skip
    return fig


def shown(value: float, unit: str) -> str:
    """A value in its unit."""
    text: str = {"s": words.seconds, "B": words.bytes_text}.get(unit, "{:.4g}".format)(value)
    return text if unit in ("s", "B", "") else f"{text} {unit}"


def _said(one: Row) -> str:
    versions = f" ({'; '.join(one['versions'])})" if one["versions"] else ""
    size = "from 0" if one["worse"] is None else f"{abs(one['worse']):.1%} {one['kind']}"
    return escape(f"{one['cell']}, {one['metric']}: {size}{versions}")


def _plane(title: str, captions: list[dict[str, Any]]) -> Figure:
    return Figure(layout={
        "height": HEIGHT, "margin": {"l": 64, "r": 16, "t": 24, "b": 48}, "hovermode": "x unified",
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "xanchor": "left"},
        "xaxis": {"type": "category", "automargin": True, "title": {"text": "commit", "standoff": 8}},
        "yaxis": {"automargin": True, "zeroline": True, "title": {"text": title, "standoff": 8}},
        "yaxis2": {"visible": False, "fixedrange": True},
        "meta": {"height": HEIGHT, "lane_row": 0, "captions": captions, "empty": "No such cell."},
    })  # fmt: skip


def _summary(rows: Sequence[Row], found: Sequence[Row]) -> str:
    """How many cells changed, and a row per commit."""
    points = list(dict.fromkeys(name for row in rows for name in row["points"]))
    cards = (
        (str(len(points)), "commits"), (str(len(rows)), "cells"),
        (str(sum(bool(row["changes"]) for row in rows)), "cells that changed"),
    )  # fmt: skip
    text = "".join(
        f'<div class="card"><strong>{value}</strong><span>{name}</span></div>' for value, name in cards
    )
    lines = []
    for point in points:
        here = [one for one in found if one["point"] == point]
        cells = []
        for kind in KINDS:
            mine = [one for one in here if one["kind"] == kind]
            largest = max((abs(one["worse"]) for one in mine if one["worse"] is not None), default=None)
            most = f", at most {largest:.1%}" if largest is not None else ""
            cells.append(f"{len(mine)}{most}" if mine else "–")
        versions = dict.fromkeys(text for one in here for text in one["versions"])
        if here:
            lines.append(row_of([escape(point), *cells, escape("; ".join(versions)) or "–"]))
    body = table(["commit", "worse", "better", "versions that changed there"], lines) if lines else ""
    return f'<div class="cards">{text}</div>{body}'


def _cells(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    known = [[value for value in row["values"] if value is not None] for row in rows]
    largest = [
        max((one["worse"] for one in row["changes"] if one["worse"] is not None), key=abs, default=None)
        for row in rows
    ]
    device = [Column(name="device", title="device", texts=[str(row["device"]) for row in rows])]
    metric = [Column(name="metric", title="metric", texts=[row["metric"] for row in rows])]
    columns = [
        *(device if len({row["device"] for row in rows}) > 1 else []),
        Column(name="cell", title="cell", texts=[row["cell"] for row in rows]),
        *(metric if len({row["metric"] for row in rows}) > 1 else []),
        *(
            Column(
                name=name, title=name, values=[values[at] for values in known],
                texts=[shown(values[at], row["unit"]) for values, row in zip(known, rows, strict=True)],
            )
            for name, at in (("first", 0), ("last", -1))
        ),
        Column(
            name="worse", title="worse by", values=largest,
            texts=["" if value is None else f"{value:+.1%}" for value in largest],
        ),
        Column(
            name="at", title="changed at", wide=True,
            texts=[", ".join(one["point"] for one in row["changes"]) for row in rows],
        ),
    ]  # fmt: skip
    return grid_html(Grid(key="cells-table", label="All cells", columns=columns, tools=True, noun="cell"))


def _controls(rows: Sequence[Row]) -> str:
    """The cell whose course is drawn."""
    if not rows:
        return ""
    if len(rows) == 1:
        return radios("cell", "Cell", ["0"], "0", {})
    options = "".join(
        f'<option value="{at}">{escape(row["cell"])}, {escape(row["metric"])}</option>'
        for at, row in enumerate(rows[:MOST])
    )
    return f'<label class="baseline">Cell <select name="cell">{options}</select></label>'
