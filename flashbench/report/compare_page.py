"""One side of runs against another as a page: verdicts, ratios over length and head dim, intervals.

    compare_page.build(comparisons, notes=["…"], sides={"base": ["a.jsonl"], "new": ["b.jsonl"]})

One self-contained file in the report's design. Data (``rows``) → figures (``heat``, ``intervals``) → page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from flashbench.judge import VERDICTS, Comparison
from flashbench.report import words
from flashbench.report.data import PASS_NAMES
from flashbench.report.figures import HEIGHT, LIGHT, SYMBOLS, Figure
from flashbench.report.grid import Column, Grid
from flashbench.report.grid import html as grid_html
from flashbench.report.html import row_of, table
from flashbench.report.page import heading, radios, script_json, shell
from flashbench.units import format_length

Row = dict[str, Any]

TITLES = {
    "measure": "Metric", "implementation": "Implementation", "pass": "Pass", "dtype": "Dtype",
    "head_dim": "Head dim", "mask": "Mask",
}  # fmt: skip
"""The choices of the control bar."""
NAMES = {**PASS_NAMES, "full": "non-causal"}
"""How values of the control bar and of captions read."""
MEANINGS = {
    "missing": "only the base side has them", "new": "only the new side has them",
    "undecided": "the interval holds more than one answer", "failed": "without a value on a side",
    "incomparable": "measured under other conditions", "same": "the interval holds no change that counts",
}  # fmt: skip
"""What verdicts say that their names leave open."""
HEAT = ("measure", "implementation", "pass", "dtype", "mask")
LINES = ("measure", "pass", "dtype", "head_dim", "mask")
COLOURS = [[0, "#2166ac"], [0.5, "#f7f7f7"], [1, "#b35806"]]
"""Better is blue, worse is brown: told apart with any colour vision, and the numbers stand in the fields."""


def rows(comparisons: Sequence[Comparison]) -> list[Row]:
    """A row per metric and cell: its groups, verdict, base, new, ratio with its interval, change, reason.

    ratio, low and high are new over base; change is how much worse, relative. None where not known.
    """
    found = []
    for one in comparisons:
        for cell in one.cells:
            ratio = cell.ratio
            groups = {key: (cell.groups or {}).get(key, "") for key in [*TITLES, "seqlen"]}
            found.append({
                **groups, "measure": one.measure.name, "unit": one.measure.unit, "cell": cell.cell,
                "verdict": cell.verdict, "fails": cell.fails, "base": cell.base, "new": cell.new,
                "ratio": ratio.value if ratio else None, "low": ratio.low if ratio else None,
                "high": ratio.high if ratio else None, "change": cell.change, "reason": cell.reason,
            })  # fmt: skip
    return found


def build(
    comparisons: Sequence[Comparison], *, notes: Iterable[str] = (), sides: Mapping[str, Sequence[str]],
    facts: Sequence[tuple[str, str, str]] = (),
) -> str:  # fmt: skip
    """The page as text. notes: what a reader should know; sides: the files of ``base`` and ``new``; facts:
    name, base's value and new's of what was measured where and with what."""
    found = rows(comparisons)
    parts = [
        ("summary", "Verdicts", "", _summary(comparisons, found, notes)),
        ("heat", "Ratio over length and head dim",
         "new over base; blue is better, brown is worse, and the number stands in the field. Of several"
         " cells of one field the worst.", _figure("heat", "Ratio over length and head dim", heat(found))),
        ("intervals", "Ratios with their intervals",
         "new over base with its 95 % interval, over the length. Dotted: no change. A ring: judged to"
         " have changed.",
         _figure("intervals", "Ratios with their intervals", intervals(found))),
        ("cells", "All cells", "Worst first.", _cells(found)),
        ("environment", "Environment", "What was measured where, and with what; differences first.",
         _facts(facts)),
    ]  # fmt: skip
    parts = [part for part in parts if part[3] or part[0] != "environment"]
    bodies = [
        f'<section id="{key}">{heading(key, title)}'
        + (f'<p class="about">{escape(about)}</p>' if about and body else "")
        + (body or '<p class="empty">No cell of these runs has a ratio, a length and a head dim.</p>')
        + "</section>"
        for key, title, about, body in parts
    ]
    commands = "".join(
        f"<p><b>{escape(name)}</b><code>{escape(', '.join(map(str, paths)))}</code></p>"
        for name, paths in sides.items()
    )
    return shell(
        title="Comparison" + _on(facts), commands=commands, contents={key: title for key, title, *_ in parts},
        controls=_controls(found), bodies=bodies,
    )  # fmt: skip


def _on(facts: Sequence[tuple[str, str, str]]) -> str:
    """On which device, where both sides name the same one."""
    return next((f" on {one}" for name, one, other in facts if name == "device" and one == other), "")


def _facts(facts: Sequence[tuple[str, str, str]]) -> str:
    """A row per name, those that differ first and in bold."""
    lines = []
    for name, one, other in sorted(facts, key=lambda row: row[1] == row[2]):
        cells = [escape(text or "–") for text in (name, one, other)]
        lines.append(row_of(cells if one == other else [f"<b>{text}</b>" for text in cells]))
    return table(["what", "base", "new"], lines, ' class="texts"') if lines else ""


def heat(found: Sequence[Row]) -> Figure:
    """A field per length and head dim, of each selection."""
    fig = _plane("sequence length (queries)", "head dim", HEAT, _known(found))
    fig.layout["hovermode"] = "closest"
    for where, group in _grouped(found, HEAT):
        lengths = sorted({int(row["seqlen"]) for row in group})
        dims = sorted({int(row["head_dim"]) for row in group})
        field: dict[tuple[int, int], Row] = {}
        for row in group:  # worst first
            field.setdefault((int(row["head_dim"]), int(row["seqlen"])), row)
        grid = [[field.get((dim, length)) for length in lengths] for dim in dims]
        fig.data.append({
            "type": "heatmap", "x": list(map(format_length, lengths)), "y": list(map(str, dims)),
            "z": [[row["change"] if row else None for row in line] for line in grid],
            "text": [[f"{row['ratio']:.3f}" if row else "" for row in line] for line in grid],
            "texttemplate": "%{text}", "colorscale": COLOURS, "zmin": -0.2, "zmax": 0.2, "zmid": 0,
            "customdata": [[_note(row) if row else "" for row in line] for line in grid],
            "hovertemplate": "%{x}, head dim %{y}: %{customdata}<extra></extra>", "xgap": 2, "ygap": 2,
            "colorbar": {"title": {"text": "worse by"}, "tickformat": ".0%"},
            "meta": {"where": where},
        })  # fmt: skip
    for axis in ("xaxis", "yaxis"):
        fig.layout[axis]["type"] = "category"
    return fig


def intervals(found: Sequence[Row]) -> Figure:
    """A line per implementation over the length, with error bars."""
    fig = _plane("sequence length (queries)", "new / base", LINES, _known(found))
    order = list(map(format_length, sorted({int(row["seqlen"]) for row in _known(found)})))
    fig.layout["xaxis"] |= {"type": "category", "categoryorder": "array", "categoryarray": order}
    names = list(dict.fromkeys(["naive", "flash", *(row["implementation"] for row in found)]))
    for where, group in _grouped(found, LINES):
        for name in dict.fromkeys(row["implementation"] for row in group):
            mine = sorted(
                (row for row in group if row["implementation"] == name), key=lambda row: int(row["seqlen"])
            )
            slot = names.index(name) % len(LIGHT)
            fig.data.append({
                "type": "scatter", "x": [format_length(int(row["seqlen"])) for row in mine],
                "y": [float(f"{row['ratio']:.7g}") for row in mine], "mode": "lines+markers",
                "name": escape(name), "legendgroup": escape(name), "showlegend": True, "line": {"width": 2},
                "marker": {"symbol": SYMBOLS[slot], "size": 8},
                "error_y": {
                    "type": "data", "symmetric": False, "thickness": 1.5,
                    "array": [row["high"] - row["ratio"] for row in mine],
                    "arrayminus": [row["ratio"] - row["low"] for row in mine],
                },
                "customdata": list(map(_note, mine)), "hovertemplate": "%{customdata}",
                "meta": {"where": where, "slot": slot},
            })  # fmt: skip
            fig.data.extend(_rings(mine, escape(name), where, slot))
        lengths = sorted({int(row["seqlen"]) for row in group})
        fig.data.append({
            "type": "scatter", "x": list(map(format_length, lengths)), "y": [1.0] * len(lengths),
            "mode": "lines", "name": "no change", "showlegend": False, "hoverinfo": "skip",
            "line": {"dash": "dot", "width": 1.5}, "meta": {"where": where, "slot": "ink"},
        })  # fmt: skip
    return fig


def _rings(mine: Sequence[Row], name: str, where: Mapping[str, str], slot: int) -> list[dict[str, Any]]:
    """Around the cells that are judged to have changed."""
    changed = [row for row in mine if row["verdict"] in ("slower", "faster")]
    if not changed:
        return []
    return [{
        "type": "scatter", "mode": "markers", "name": name, "legendgroup": name, "showlegend": False,
        "x": [format_length(int(row["seqlen"])) for row in changed],
        "y": [float(f"{row['ratio']:.7g}") for row in changed], "hoverinfo": "skip",
        "marker": {"symbol": "circle-open", "size": 17, "line": {"width": 1.5}},
        "meta": {"where": where, "slot": slot, "ring": True},
    }]  # fmt: skip


def _plane(x: str, y: str, keys: Sequence[str], found: Sequence[Row]) -> Figure:
    titles = [{"text": text, "standoff": 8} for text in (x, y)]
    wheres = [where for where, _ in _grouped(found, keys)]
    several = len({row["measure"] for row in found}) > 1
    captions = [{"where": where, "text": escape(_caption(where, several))} for where in wheres]
    return Figure(layout={
        "height": HEIGHT, "margin": {"l": 64, "r": 16, "t": 24, "b": 48}, "hovermode": "x unified",
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "xanchor": "left"},
        "xaxis": {"title": titles[0], "automargin": True},
        "yaxis": {"title": titles[1], "automargin": True}, "yaxis2": {"visible": False, "fixedrange": True},
        "meta": {
            "height": HEIGHT, "lane_row": 0, "empty": "Nothing to compare in this selection.",
            "captions": captions,
        },
    })  # fmt: skip


def _caption(where: Mapping[str, str], several: bool) -> str:
    """A selection in words; with its metric where there are several."""
    said = [
        f"head dim {value}" if key == "head_dim" else NAMES.get(value, value)
        for key, value in sorted(where.items(), key=lambda item: item[0] == "implementation")
        if value and key != "measure"
    ]
    return ", ".join(said) + (f" ({where['measure']})" if several else "")


def _known(found: Iterable[Row]) -> list[Row]:
    return [row for row in found if row["ratio"] and row["seqlen"] and row["head_dim"]]


def _grouped(found: Iterable[Row], keys: Sequence[str]) -> list[tuple[dict[str, str], list[Row]]]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in _known(found):
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [(dict(zip(keys, values, strict=True)), group) for values, group in groups.items()]


def _note(row: Row) -> str:
    return escape(f"{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f}): {row['verdict']}")


def _summary(comparisons: Sequence[Comparison], found: Sequence[Row], notes: Iterable[str]) -> str:
    """Counts by verdict, the largest changes in words and the geometric means, per metric."""
    parts = []
    for one in comparisons:
        cards = "".join(
            f'<div class="card"><strong>{count}</strong><span>{name}</span>'
            f"<small>{MEANINGS.get(name, '')}</small></div>"
            for name in VERDICTS
            if (count := one.count(name))
        )
        failing = f", {len(one.failing)} of them fail the gate" if one.failing else ""
        parts.append(
            f"<h3>{escape(one.measure.name)}: {len(one.cells)} cells{failing}</h3>"
            f'<div class="cards">{cards}</div>'
            + _largest([row for row in found if row["measure"] == one.measure.name])
        )
        means = [
            row_of([escape(group.name), str(group.cells), f"{group.ratio.value:.3f}",
                    f"{group.ratio.low:.3f} to {group.ratio.high:.3f}", group.verdict])
            for group in one.groups
        ]  # fmt: skip
        if means:
            parts.append(
                table(["geometric mean of", "cells", "new / base", "95 % interval", "verdict"], means)
            )
    said = "".join(f"<li>{escape(text)}</li>" for text in notes)
    return "".join(parts) + (f"<ul>{said}</ul>" if said else "")


def _largest(found: Sequence[Row]) -> str:
    """The cells that changed most in either direction, whatever they are judged."""
    known = [row for row in found if row["change"] is not None]
    said = []
    if known:
        worst, best = max(known, key=lambda row: row["change"]), min(known, key=lambda row: row["change"])
        ends = [("Worst", worst)] if worst["change"] > 0 else []
        for title, row in [*ends, *([("Best", best)] if best["change"] < 0 else [])]:
            said.append(f"<b>{title}</b>: {escape(row['cell'])}, new over base {_note(row)}.")
    return f"<p>{'<br>'.join(said)}</p>" if said else ""


def _figure(key: str, title: str, figure: Figure) -> str:
    if not figure.data:
        return ""
    label = escape(f"{title}. The same numbers stand in the table of all cells.", quote=True)
    return (
        f'<figure><figcaption class="selection"></figcaption>'
        f'<div class="plot" id="plot-{key}" role="group" aria-label="{label}"></div>'
        f'<script type="application/json" class="plot-data" data-for="plot-{key}">'
        f"{script_json(figure)}</script></figure>"
    )


def _cells(found: Sequence[Row]) -> str:
    def numbers(name: str, title: str, show: Callable[[Row], str]) -> Column:
        texts = [show(row) if row[name] is not None else "" for row in found]
        return Column(name=name, title=title, texts=texts, values=[row[name] for row in found])

    several = len({row["measure"] for row in found}) > 1
    metric = [Column(name="measure", title="metric", texts=[row["measure"] for row in found])]
    columns = [
        Column(
            name="verdict", title="verdict",
            texts=[(row["verdict"], f"status {_mark(row)}", "") for row in found],
        ),
        Column(name="cell", title="cell", texts=[row["cell"] for row in found]),
        *(metric if several else []),
        numbers("base", "base", lambda row: _value(row, "base")),
        numbers("new", "new", lambda row: _value(row, "new")),
        numbers("ratio", "new / base", lambda row: f"{row['ratio']:.3f}"),
        numbers("low", "95 % from", lambda row: f"{row['low']:.3f}"),
        numbers("high", "to", lambda row: f"{row['high']:.3f}"),
        Column(name="reason", title="why", texts=[row["reason"] for row in found], wide=True),
    ]  # fmt: skip
    if not found:
        return ""
    return grid_html(Grid(key="cells-table", label="All cells", columns=columns, tools=True, noun="cell"))


def _mark(row: Row) -> str:
    return "ok" if row["verdict"] in ("same", "faster", "new") else "bad" if row["fails"] else "skipped"


def _value(row: Row, name: str) -> str:
    shown = {"s": words.seconds, "B": words.bytes_text}.get(row["unit"], "{:.4g}".format)
    return shown(row[name])


def _controls(found: Sequence[Row]) -> str:
    parts = []
    for key, title in TITLES.items():
        values = list(dict.fromkeys(row[key] for row in _known(found)))  # the worst cell's first
        if values:
            ordered = sorted(values, key=_place) if key in ("pass", "head_dim", "mask") else values
            parts.append(radios(key, title, ordered, values[0], NAMES))
    return "".join(parts)


def _place(value: str) -> tuple[int, str]:
    """Where a value of the control bar stands, as on the other pages."""
    usual = [*PASS_NAMES, "full", "causal"]
    return (usual.index(value), "") if value in usual else (int(value) if value.isdigit() else 99, value)
