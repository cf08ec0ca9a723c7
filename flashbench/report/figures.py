"""Data frames to figures of plotly.js. Each trace carries ``meta``: the selection it belongs to.

``meta["where"]`` maps filter keys to the value at which the trace is shown; the page's script shows
the traces of the current selection and colours them by ``meta["slot"]`` for light or dark; ``cells`` are
the rows of the table behind its points, ``times`` their seconds, by which the script can change a baseline.
Plotly reads text as HTML, so names and reasons are escaped here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING, Any

from flashbench.report import words
from flashbench.report.data import KEYS
from flashbench.units import format_length

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure as PlotlyFigure

LIGHT = ("#5f6b7a", "#d1495b", "#0072b2", "#00876c", "#b5651d", "#8e5ab5", "#2f9ac4", "#7a7a00", "#b83280")
"""Colours by slot, after Okabe and Ito: told apart with any colour vision, 3:1 or more on white."""
DARK = ("#a3afbf", "#ff8a8f", "#56b4e9", "#2ecfa6", "#f0a04b", "#c79bf0", "#8fd8f5", "#d9d345", "#ff8fce")
SYMBOLS = (
    "circle", "star", "square", "diamond", "triangle-up", "triangle-down", "pentagon", "cross", "hexagram"
)  # fmt: skip
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
KIN = {"standard": "naive", "flash-v2": "flash"}
"""Models that look like the implementation that runs them."""
HEIGHT = 420
LANE_ROW = 34
"""Pixels of one row of the lane below a plot, which holds the cells that were not timed."""


Where = Mapping[str, str]


_OWN = {"x", "y", "customdata", "where", "cells", "times"}
"""What differs between traces of one series."""


def _compact(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What plotly.js draws: plain data, as a figure of plotly.py checks every value for longer than it
    takes to make the page."""

    data: list[dict[str, Any]] = field(default_factory=list)
    layout: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Strict JSON, in which what traces have in common stands once: the script puts them together.

        shared: traces without x, y, customdata, where, cells and times; traces: index of shared, of where
        and of x (in xs), and the other four.
        """
        shared: dict[str, int] = {}
        wheres: dict[str, int] = {}
        xs: dict[str, int] = {}
        traces = []
        for trace in self.data:
            meta = {key: value for key, value in trace["meta"].items() if key not in _OWN}
            rest = {key: value for key, value in trace.items() if key not in _OWN} | {"meta": meta}
            own = [
                trace["y"],
                trace.get("customdata"),
                trace["meta"].get("cells"),
                trace["meta"].get("times"),
            ]
            where = wheres.setdefault(_compact(trace["meta"]["where"]), len(wheres))
            at = xs.setdefault(_compact(trace["x"]), len(xs))
            traces.append([shared.setdefault(_compact(rest), len(shared)), where, at, *own])
        return (
            f'{{"shared":[{",".join(shared)}],"wheres":[{",".join(wheres)}],'
            f'"xs":[{",".join(xs)}],"traces":{_compact(traces)},"layout":{_compact(self.layout)}}}'
        )

    def plotly(self) -> PlotlyFigure:
        """The same for plotly.py, which checks it."""
        import plotly.graph_objects as go

        return go.Figure(data=self.data, layout=self.layout)


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The value axis: its title, ``log`` or ``linear``, and how a tick of a log axis reads.

    rate: values are FLOP/s, plotted in TFLOP/s or GFLOP/s, whichever the largest needs. percent: shares.
    ghz: values are Hz, plotted in GHz.
    """

    title: str
    kind: str = "log"
    tick: Callable[[float], str] = "{:g}".format
    rate: bool = False
    percent: bool = False
    ghz: bool = False


def line_figure(axis: Axis, note: Callable[[Any], str]) -> Callable[[DataFrame], Figure]:
    """The figure function of a metric over the length: a line per series, a lane for what has no time."""

    def figure(data: DataFrame) -> Figure:
        scale, title = 1e9 if axis.ghz else 1.0, axis.title
        if axis.rate:
            scale, title = rate_unit(data["value"].max())
        fig = plane(data, replace(axis, title=title), data["value"])
        look = styles(data)
        for where, name, rows in series(data):
            draw(fig, rows, look[name], where, note, scale=scale)
        _lane(fig, data)
        return fig

    return figure


def speedup_figure(data: DataFrame) -> Figure:
    """Times faster than the baseline; another one is chosen in the page."""
    axis = Axis(title="times faster than the baseline", tick="{:g}×".format)
    fig = line_figure(axis, words.speedup_note)(data)
    fig.layout["meta"]["baseline"] = str(data["baseline"].iloc[0])
    return fig


def memory_figure(data: DataFrame) -> Figure:
    """Measured memory as lines with markers, the model's prediction dashed in the same colour, the wall."""
    axis = Axis(title="extra memory (GB = 1e9)", tick=words.bytes_tick)
    fig = plane(data, axis, [*data["value"], *data["predicted"], *data["device_bytes"]])
    look = styles(data)
    for where, name, rows in series(data):
        style, known = look[name], any(row.value == row.value for row in rows)
        if known:
            draw(fig, rows, style, where, words.memory_note)
        if any(row.predicted == row.predicted for row in rows):
            fig.data.append({
                "type": "scatter", "x": [row.seqlen for row in rows],
                "y": numbers(row.predicted for row in rows), "mode": "lines",
                "name": escape(f"{name} (model)"), "legendgroup": escape(name), "showlegend": not known,
                "line": {"dash": "2px,4px", "width": 2.5, "color": LIGHT[style.slot]},
                "customdata": [words.predicted_note(row) for row in rows], "hovertemplate": "%{customdata}",
                "meta": {"where": where, "slot": style.slot},
            })  # fmt: skip
    _wall(fig, data)
    _lane(fig, data)
    return fig


def _wall(fig: Figure, data: DataFrame) -> None:
    """The memory of the card, across the plot."""
    ends = [int(data["seqlen"].min()), int(data["seqlen"].max())]
    for size in dict.fromkeys(value for value in data["device_bytes"] if value == value):
        fig.data.append({
            "type": "scatter", "x": ends, "y": [float(size)] * 2, "mode": "lines", "hoverinfo": "skip",
            "name": f"the card's memory, {words.bytes_text(size)}",
            "line": {"dash": "longdash", "width": 2, "color": LIGHT[0]}, "meta": {"where": {}, "slot": "ink"},
        })  # fmt: skip


def traffic_figure(data: DataFrame) -> Figure:
    """Requested bytes of each algorithm over the length, and the compulsory bytes as the floor."""
    axis = Axis(title="bytes, by the model (GB = 1e9)", tick=words.bytes_tick)
    named = data.assign(series=data["model"], implementation=data["model"].replace(KIN), run="")
    fig = plane(data, axis, [*data["value"], *data["compulsory"]])
    look = styles(named)
    panels: dict[str, list[Any]] = {}
    for where, name, rows in series(named):
        draw(fig, rows, look[name], where, words.traffic_note)
        panels.setdefault(json.dumps(where), []).extend(rows)
    for where_text, found in panels.items():
        floor = sorted({row.seqlen: row.compulsory for row in found}.items())
        fig.data.append({
            "type": "scatter", "x": [x for x, _ in floor], "y": numbers(y for _, y in floor),
            "mode": "lines", "name": "compulsory", "line": {"dash": "dot", "width": 2, "color": LIGHT[0]},
            "meta": {"where": json.loads(where_text), "slot": "ink"},
            "customdata": [words.bytes_text(y) for _, y in floor], "hovertemplate": "%{customdata}",
        })  # fmt: skip
    return fig


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a series looks: colour slot and marker by implementation, dash by run."""

    name: str
    slot: int
    symbol: str
    dash: str


def styles(data: DataFrame) -> dict[str, Style]:
    """The style of each series. naive is always grey and flash always red; the rest follow in order."""
    names = list(dict.fromkeys(data["implementation"]))
    order = ["naive", "flash", *(name for name in names if name not in {"naive", "flash"})]
    runs = list(dict.fromkeys(data["run"]))
    return {
        row.series: Style(
            name=row.series,
            slot=order.index(row.implementation) % len(LIGHT),
            symbol=SYMBOLS[order.index(row.implementation) % len(SYMBOLS)],
            dash=DASHES[runs.index(row.run) % len(DASHES)],
        )
        for row in data.drop_duplicates("series").itertuples(index=False)
    }


def length_ticks(lengths: Iterable[int], most: int = 12) -> list[int]:
    """The measured lengths that get a tick: all of them, or those far enough apart on a log axis."""
    found = sorted(set(lengths))
    if len(found) <= most:
        return found
    gap = math.log(found[-1] / found[0]) / most
    kept = found[:1]
    for length in found[1:-1]:
        if math.log(length / kept[-1]) >= gap and math.log(found[-1] / length) >= gap:
            kept.append(length)
    return [*kept, found[-1]]


def value_ticks(values: Iterable[float], most: int = 16) -> list[float]:
    """Ticks of a log axis around the values: 1, 2, 5 of each decade, or its 1 alone over many decades."""
    known = [value for value in values if value == value and value > 0]
    if not known:
        return []
    decades = range(math.floor(math.log10(min(known))), math.ceil(math.log10(max(known))) + 1)
    steps = (1, 2, 5) if 3 * len(decades) <= most + 3 else (1,)
    # through text, so that 1e-4 is 0.0001 to the last bit
    return [float(f"{step}e{decade}") for decade in decades for step in steps]


FINE = (
    *(step / 10 for step in range(10, 20)), *(step / 4 for step in range(8, 20)),
    *(step / 2 for step in range(10, 20)),
)  # fmt: skip
"""Of each decade, for selections whose values lie too near each other for 1, 2, 5."""


def fine_ticks(values: Iterable[float], tick: Callable[[float], str]) -> dict[str, list[Any]]:
    """Ticks of ``FINE`` around the values and how they read, of which a selection takes what it needs."""
    known = [value for value in values if value == value and value > 0]
    if not known:
        return {"tickvals": [], "ticktext": []}
    decades = range(math.floor(math.log10(min(known))), math.ceil(math.log10(max(known))) + 1)
    ticks = [float(f"{step:g}e{decade}") for decade in decades for step in FINE]
    kept = [one for one in ticks if min(known) / 1.2 < one < max(known) * 1.2]
    return {"tickvals": kept, "ticktext": list(map(tick, kept))}


def rate_unit(top: float) -> tuple[float, str]:
    """What rates up to ``top`` FLOP/s are divided by, and the unit then."""
    return (1e12, "TFLOP/s") if top >= 1e12 else (1e9, "GFLOP/s")


def plane(data: DataFrame, axis: Axis, values: Iterable[float]) -> Figure:
    """A figure without traces: the length across, the axis up, the captions of each selection."""
    lengths = length_ticks(data["seqlen"])
    y: dict[str, Any] = {
        "type": axis.kind, "title": {"text": axis.title, "standoff": 10}, "zeroline": False,
        "automargin": True,
    }  # fmt: skip
    if axis.kind == "linear":  # from 0, and with room for a marker that stands there
        y["autorangeoptions"] = {"include": 0}
    if axis.percent:
        y["tickformat"] = ".1~%"
    fine: dict[str, Any] = {}
    if axis.kind == "log":
        values = list(values)
        ticks, fine = value_ticks(values), {"fine": fine_ticks(values, axis.tick)}
        y |= {"tickmode": "array", "tickvals": ticks, "ticktext": [axis.tick(tick) for tick in ticks]}
    x = {
        "type": "log", "title": {"text": "sequence length (keys)", "standoff": 8}, "zeroline": False,
        "automargin": True, "tickmode": "array", "tickvals": lengths,
        "ticktext": [format_length(tick) for tick in lengths],
    }  # fmt: skip
    return Figure(layout={
        "height": HEIGHT, "margin": {"l": 56, "r": 16, "t": 24, "b": 48}, "hovermode": "x unified",
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "xanchor": "left"},
        "xaxis": x, "yaxis": y, "yaxis2": {"visible": False, "autorange": False, "fixedrange": True},
        "meta": {
            "height": HEIGHT, "lane_row": LANE_ROW,
            "captions": captions(data), **fine,
        },
    })  # fmt: skip


def captions(data: DataFrame) -> list[dict[str, Any]]:
    """Every selection of the data (``where``) and how it reads (``text``), in their order."""
    keys = [key for key in KEYS if key in data]
    found = dict.fromkeys(zip(*map(data.get, keys), strict=True))
    panels = [dict(zip(keys, panel, strict=True)) for panel in found]
    return [{"where": where, "text": words.panel(where)} for where in panels]


def series(data: DataFrame) -> Iterator[tuple[dict[str, str], str, list[Any]]]:
    """The rows of each selection and series, in the order of the data, by length."""
    keys = [key for key in KEYS if key in data]
    groups: dict[tuple[str, ...], list[Any]] = {}
    names = zip(*map(data.get, [*keys, "series"]), strict=True)
    for name, row in zip(names, data.itertuples(index=False), strict=True):
        groups.setdefault(name, []).append(row)
    for name, rows in sorted(groups.items(), key=_in_panels(groups)):
        rows.sort(key=lambda row: row.seqlen)
        yield dict(zip(keys, name[:-1], strict=True)), str(name[-1]), rows


def _in_panels(groups: Iterable[tuple[str, ...]]) -> Callable[[Any], int]:
    order = {panel: at for at, panel in enumerate(dict.fromkeys(name[:-1] for name in groups))}
    return lambda item: order[item[0][:-1]]


def draw(
    fig: Figure,
    rows: Sequence[Any],
    style: Style,
    where: Where,
    note: Callable[[Any], str],
    x: str = "seqlen",
    scale: float = 1.0,
    hover: str = "%{customdata}",
) -> None:
    """Add a series: a line with gaps where there is no value, and a ring around each flagged point."""
    values = numbers(row.value / scale for row in rows)
    at, name = [_plain(getattr(row, x)) for row in rows], escape(style.name)
    meta: dict[str, Any] = {"where": where, "slot": style.slot}
    if hasattr(rows[0], "cell"):
        meta |= {"cells": [int(row.cell) for row in rows]}
    if hasattr(rows[0], "baseline"):
        times = numbers(row.time_s if value is not None else math.nan for row, value in _timed(rows))
        meta |= {"times": times, "of": rows[0].implementation, "run": rows[0].run}
    fig.data.append({
        "type": "scatter", "x": at, "y": values, "mode": "lines+markers", "name": name, "legendgroup": name,
        "showlegend": any(value is not None for value in (meta.get("times") or values)),
        "line": {"dash": style.dash, "width": 2, "color": LIGHT[style.slot]},
        "marker": {"symbol": style.symbol, "size": 9},
        "customdata": [note(row) for row in rows], "hovertemplate": hover, "meta": meta,
    })  # fmt: skip
    ringed = [
        i for i, row in enumerate(rows)
        if isinstance(getattr(row, "flags", None), str) and values[i] is not None
    ]  # fmt: skip
    if ringed:
        fig.data.append({
            "type": "scatter", "x": [at[i] for i in ringed], "y": [values[i] for i in ringed],
            "mode": "markers", "name": name, "legendgroup": name, "showlegend": False, "hoverinfo": "skip",
            "marker": {
                "symbol": "circle-open", "size": 17, "line": {"width": 1.5}, "color": LIGHT[style.slot]
            },
            "meta": {"where": where, "slot": style.slot, "ring": True},
        })  # fmt: skip


def _timed(rows: Sequence[Any]) -> Iterator[tuple[Any, float | None]]:
    return ((row, row.time_s if row.status == "ok" and words.known(row.time_s) else None) for row in rows)


def _plain(value: Any) -> float:
    return int(value) if int(value) == value else float(f"{value:.7g}")


def numbers(values: Iterable[Any]) -> list[float | None]:
    """Seven digits, which is more than any sample has; None where there is no number."""
    return [None if value != value else float(f"{value:.7g}") for value in values]


def _lane(fig: Figure, data: DataFrame) -> None:
    """Below the plot: a row per series with a cross at each length that was not timed, and why."""
    look = styles(data)
    # the label stands above its crosses, towards the wider side
    middle = data["seqlen"].min() * data["seqlen"].max()
    lanes: dict[str, int] = {}
    for where, name, rows in series(data[data["status"] != "ok"]):
        row = lanes.setdefault(json.dumps(where), -1) + 1
        lanes[json.dumps(where)] = row
        style, labels = look[name], [""] * len(rows)
        left = rows[0].seqlen * rows[-1].seqlen > middle
        labels[-1 if left else 0] = escape(words.lane_label(name, rows))
        fig.data.append({
            "type": "scatter", "x": [item.seqlen for item in rows], "y": [row] * len(rows), "yaxis": "y2",
            "mode": "markers+text", "text": labels, "textposition": "top left" if left else "top right",
            "showlegend": False, "textfont": {"size": 11}, "cliponaxis": False,
            "marker": {
                "symbol": ["circle-open" if item.status == "checked" else "x" for item in rows],
                "size": 8, "color": LIGHT[style.slot],
            },
            "customdata": [words.untimed_note(item) for item in rows],
            "hovertemplate": "%{customdata}", "name": escape(name), "legendgroup": escape(name),
            "meta": {"where": where, "slot": style.slot, "lane": row},
        })  # fmt: skip
