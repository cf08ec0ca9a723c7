"""Figures of the model's page: lines of one quantity over a length, a memory or a block size.

Traces carry ``meta`` as those of ``figures`` do, so that the same script selects and colours them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from flashbench.report.figures import HEIGHT, LIGHT, SYMBOLS, Figure, fine_ticks, value_ticks

FIRST = ("standard", "flash-v2")
"""Models that look like the implementations that run them: naive is grey, flash is red."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One trace. where: the selection at which it is shown; y may hold None. slot: colour, or "ink".

    notes: hover text, HTML already; group: its legend group; open: points drawn hollow.
    """

    where: Mapping[str, str]
    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    notes: Sequence[str]
    slot: int | str
    symbol: str = ""
    dash: str = "solid"
    group: str = ""
    open: Sequence[bool] = ()
    legend: bool = True


@dataclass(frozen=True, kw_only=True)
class Chart:
    """The axes of a figure: titles, where x has ticks and how they read, how a tick of y reads."""

    x_title: str
    y_title: str
    x_ticks: Mapping[float, str]
    y_tick: Callable[[float], str]
    captions: Sequence[tuple[Mapping[str, str], str]] = ()
    hover: str = "x unified"
    y_range: tuple[float, float] | None = None
    marks: Sequence[Line] = field(default=())
    """Lines without a say in the range of y."""


def slots(models: Iterable[str]) -> dict[str, int]:
    """The colour slot of each model."""
    names = list(dict.fromkeys(models))
    order = [*FIRST, *(name for name in names if name not in FIRST)]
    return {name: order.index(name) % len(LIGHT) for name in names}


def symbol(slot: int) -> str:
    """The marker of a colour slot."""
    return SYMBOLS[slot % len(SYMBOLS)]


def draw(chart: Chart, lines: Sequence[Line]) -> Figure:
    """The figure of the lines, on log axes."""
    values = [value for line in lines for value in line.y if value is not None]
    ticks = value_ticks(values)
    y: dict[str, Any] = {
        "type": "log", "title": {"text": escape(chart.y_title), "standoff": 10}, "zeroline": False,
        "automargin": True, "tickmode": "array", "tickvals": ticks,
        "ticktext": [chart.y_tick(tick) for tick in ticks],
    }  # fmt: skip
    if chart.y_range is not None:
        y["range"] = list(chart.y_range)
    x = {
        "type": "log", "title": {"text": escape(chart.x_title), "standoff": 8}, "zeroline": False,
        "automargin": True, "tickmode": "array", "tickvals": list(chart.x_ticks),
        "ticktext": list(chart.x_ticks.values()),
    }  # fmt: skip
    layout = {
        "height": HEIGHT, "margin": {"l": 56, "r": 16, "t": 24, "b": 48}, "hovermode": chart.hover,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "xanchor": "left"},
        "xaxis": x, "yaxis": y, "yaxis2": {"visible": False, "fixedrange": True},
        "meta": {
            "height": HEIGHT, "lane_row": 0, "empty": "The model has nothing for this selection.",
            "captions": [{"where": dict(where), "text": escape(text)} for where, text in chart.captions],
            "fine": fine_ticks(values, chart.y_tick),
        },
    }  # fmt: skip
    return Figure(data=[_trace(line) for line in (*lines, *chart.marks)], layout=layout)


def _trace(line: Line) -> dict[str, Any]:
    colour = LIGHT[line.slot] if isinstance(line.slot, int) else LIGHT[0]
    hollow = list(line.open) if line.symbol and line.open else [False] * len(line.x)
    markers = [line.symbol + ("-open" if open_ else "") for open_ in hollow]
    hover = {"hovertemplate": "%{customdata}"} if line.notes else {"hoverinfo": "skip"}
    return {
        "type": "scatter", "x": list(line.x), "y": list(line.y), "name": escape(line.name),
        "mode": "lines+markers" if line.symbol else "lines", "legendgroup": escape(line.group or line.name),
        "showlegend": line.legend, "line": {"dash": line.dash, "width": 2, "color": colour},
        "marker": {"symbol": markers if any(hollow) else line.symbol or "circle", "size": 8},
        "customdata": list(line.notes), **hover, "meta": {"where": dict(line.where), "slot": line.slot},
    }  # fmt: skip
