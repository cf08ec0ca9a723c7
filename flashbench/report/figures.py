"""Data frames to Plotly figures. Each trace carries ``meta``: the selection it belongs to.

``meta["where"]`` maps filter keys to the value at which the trace is shown; the page's script shows
the traces of the current selection and colours them by ``meta["slot"]`` for light or dark.
Plotly reads text as HTML, so names and reasons are escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Any

from flashbench.report import words
from flashbench.report.data import KEYS
from flashbench.units import format_length

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

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


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The value axis: its title, ``log`` or ``linear``, and how a tick of a log axis reads.

    rate: values are FLOP/s, plotted in TFLOP/s or GFLOP/s, whichever the largest needs.
    """

    title: str
    kind: str = "log"
    tick: Callable[[float], str] = "{:g}".format
    rate: bool = False


def line_figure(axis: Axis, note: Callable[[Any], str]) -> Callable[[DataFrame], Figure]:
    """The figure function of a metric over the length: a line per series, a lane for what has no time."""

    def figure(data: DataFrame) -> Figure:
        scale, title = _rate_unit(data["value"].max()) if axis.rate else (1.0, axis.title)
        fig = _figure(data, replace(axis, title=title), data["value"])
        look = styles(data)
        for where, name, rows in _series(data):
            _draw(fig, rows, rows["value"] / scale, look[name], where, note)
        _lane(fig, data)
        return fig

    return figure


def memory_figure(data: DataFrame) -> Figure:
    """Measured memory as lines with markers, the model's prediction dashed in the same colour."""
    import plotly.graph_objects as go

    axis = Axis(title="extra memory (GB = 1e9)", tick=words.bytes_tick)
    fig = _figure(data, axis, [*data["value"], *data["predicted"]])
    look = styles(data)
    for where, name, rows in _series(data):
        style = look[name]
        known = rows["value"].notna().any()
        if known:
            _draw(fig, rows, rows["value"], style, where, words.memory_note)
        if rows["predicted"].notna().any():
            fig.add_trace(go.Scatter(
                x=list(rows["seqlen"]), y=_numbers(rows["predicted"]), mode="lines",
                name=escape(f"{name} (model)"), legendgroup=escape(name), showlegend=not known,
                line={"dash": "2px,4px", "width": 2.5, "color": LIGHT[style.slot]},
                customdata=[words.predicted_note(row) for row in rows.itertuples(index=False)],
                hovertemplate="%{customdata}", meta={"where": where, "slot": style.slot},
            ))  # fmt: skip
    _lane(fig, data)
    return fig


def traffic_figure(data: DataFrame) -> Figure:
    """Requested bytes of each algorithm over the length, and the compulsory bytes as the floor."""
    import plotly.graph_objects as go

    axis = Axis(title="bytes moved, by the model (GB = 1e9)", tick=words.bytes_tick)
    fig = _figure(data, axis, [*data["value"], *data["compulsory"]])
    look = styles(data.assign(series=data["model"], implementation=data["model"].replace(KIN), run=""))
    for where, panel in _panels(data):
        for name, style in look.items():
            rows = panel[panel["model"] == name].sort_values("seqlen")
            _draw(fig, rows, rows["value"], style, where, words.traffic_note)
        floor = panel.drop_duplicates("seqlen").sort_values("seqlen")
        fig.add_trace(go.Scatter(
            x=list(floor["seqlen"]), y=_numbers(floor["compulsory"]), mode="lines", name="compulsory",
            line={"dash": "dot", "width": 2, "color": LIGHT[0]}, meta={"where": where, "slot": "ink"},
            customdata=[words.bytes_text(value) for value in floor["compulsory"]],
            hovertemplate="%{customdata}",
        ))  # fmt: skip
    return fig


def roofline_figure(data: DataFrame) -> Figure:
    """FLOP/s over compulsory intensity, under the device's bandwidth and peak."""
    import plotly.graph_objects as go

    fig = _figure(
        data, Axis(title="FLOP/s", tick=words.rate_tick), [*data["value"], *data["peak_flops_per_s"]]
    )
    look = styles(data)
    for where, name, rows in _series(data):
        _draw(fig, rows, rows["value"], look[name], where, words.roof_note, x="intensity_compulsory")
    low, high = data["intensity_compulsory"].min() / 2, data["intensity_compulsory"].max() * 2
    for item in data.drop_duplicates(["device", "dtype"]).itertuples(index=False):
        ridge = item.peak_flops_per_s / item.hbm_bytes_per_s
        at = sorted({low, min(max(ridge, low), high * 2), max(high, ridge * 2)})
        fig.add_trace(go.Scatter(
            x=at, y=[min(item.peak_flops_per_s, x * item.hbm_bytes_per_s) for x in at], mode="lines",
            name=escape(f"roof of {item.device}, {item.dtype}"), hoverinfo="skip",
            line={"width": 2, "color": "#5f6b7a"}, meta={"where": {"dtype": item.dtype}, "slot": "ink"},
        ))  # fmt: skip
    ticks = value_ticks(data["intensity_compulsory"])
    labels = [f"{tick:g}" for tick in ticks]
    fig.update_xaxes(title_text="FLOP per compulsory byte", tickvals=ticks, ticktext=labels)
    bottom, top = math.log10(data["value"].min() / 1.5), math.log10(data["peak_flops_per_s"].max() * 1.3)
    fig.update_yaxes(range=[bottom, top])
    return fig.update_layout(hovermode="closest")


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


def _rate_unit(top: float) -> tuple[float, str]:
    return (1e12, "TFLOP/s") if top >= 1e12 else (1e9, "GFLOP/s")


def _figure(data: DataFrame, axis: Axis, values: Iterable[float]) -> Figure:
    import plotly.graph_objects as go

    fig = go.Figure()
    fig.update_layout(
        template="none", height=HEIGHT, margin={"l": 56, "r": 16, "t": 24, "b": 48}, hovermode="x unified",
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "xanchor": "left"},
        meta={
            "height": HEIGHT, "lane_row": LANE_ROW,
            "captions": [{"where": where, "text": words.panel(where)} for where, _ in _panels(data)],
        },
    )  # fmt: skip
    ticks = length_ticks(data["seqlen"])
    fig.update_xaxes(
        type="log", title={"text": "sequence length (keys)", "standoff": 8}, zeroline=False, automargin=True,
        tickmode="array", tickvals=ticks, ticktext=[format_length(tick) for tick in ticks],
    )  # fmt: skip
    fig.update_yaxes(
        type=axis.kind, title={"text": axis.title, "standoff": 10}, zeroline=False, automargin=True,
        rangemode="tozero" if axis.kind == "linear" else "normal",
    )  # fmt: skip
    if axis.kind == "log":
        shown = value_ticks(values)
        fig.update_yaxes(tickmode="array", tickvals=shown, ticktext=[axis.tick(tick) for tick in shown])
    return fig


def _panels(data: DataFrame) -> Iterator[tuple[dict[str, str], DataFrame]]:
    keys = [key for key in KEYS if key in data]
    for values, panel in data.groupby(keys, sort=False):
        yield dict(zip(keys, values, strict=True)), panel


def _series(data: DataFrame) -> Iterator[tuple[dict[str, str], str, DataFrame]]:
    for where, panel in _panels(data):
        for name, rows in panel.groupby("series", sort=False):
            yield where, str(name), rows.sort_values("seqlen")


def _draw(
    fig: Figure,
    rows: DataFrame,
    values: Sequence[float],
    style: Style,
    where: dict[str, str],
    note: Callable[[Any], str],
    x: str = "seqlen",
) -> None:
    """Add a series: a line with gaps where there is no value, and a ring around each flagged point."""
    import plotly.graph_objects as go

    numbers, at, name = _numbers(values), list(rows[x]), escape(style.name)
    fig.add_trace(go.Scatter(
        x=at, y=numbers, mode="lines+markers", name=name, legendgroup=name,
        showlegend=any(value is not None for value in numbers),
        line={"dash": style.dash, "width": 2, "color": LIGHT[style.slot]},
        marker={"symbol": style.symbol, "size": 9},
        customdata=[note(row) for row in rows.itertuples(index=False)], hovertemplate="%{customdata}",
        meta={"where": where, "slot": style.slot},
    ))  # fmt: skip
    flags = rows.get("flags", [None] * len(rows))
    ringed = [i for i, flag in enumerate(flags) if isinstance(flag, str) and numbers[i] is not None]
    if ringed:
        fig.add_trace(go.Scatter(
            x=[at[i] for i in ringed], y=[numbers[i] for i in ringed], mode="markers",
            name=name, legendgroup=name, showlegend=False, hoverinfo="skip",
            marker={"symbol": "circle-open", "size": 17, "line": {"width": 1.5}, "color": LIGHT[style.slot]},
            meta={"where": where, "slot": style.slot, "ring": True},
        ))  # fmt: skip


def _numbers(values: Iterable[Any]) -> list[float | None]:
    return [None if value != value else float(value) for value in values]


def _lane(fig: Figure, data: DataFrame) -> None:
    """Below the plot: a row per series with a cross at each length that was not timed, and why."""
    import plotly.graph_objects as go

    look = styles(data)
    for where, panel in _panels(data[data["status"] != "ok"]):
        for row, (name, rows) in enumerate(panel.groupby("series", sort=False)):
            rows = rows.sort_values("seqlen")
            style = look[str(name)]
            labels = [""] * len(rows)
            # the label stands above its crosses, towards the wider side
            middle = math.sqrt(data["seqlen"].min() * data["seqlen"].max())
            left = rows["seqlen"].iloc[0] * rows["seqlen"].iloc[-1] > middle**2
            labels[-1 if left else 0] = escape(words.lane_label(str(name), rows))
            fig.add_trace(go.Scatter(
                x=list(rows["seqlen"]), y=[row] * len(rows), yaxis="y2", mode="markers+text", text=labels,
                textposition="top left" if left else "top right", showlegend=False, textfont={"size": 11},
                marker={
                    "symbol": ["circle-open" if status == "checked" else "x" for status in rows["status"]],
                    "size": 8, "color": LIGHT[style.slot],
                },
                customdata=[words.untimed_note(item) for item in rows.itertuples(index=False)],
                hovertemplate="%{customdata}", name=escape(str(name)), legendgroup=escape(str(name)),
                meta={"where": where, "slot": style.slot, "lane": row},
            ))  # fmt: skip
    fig.update_layout(yaxis2={"visible": False, "autorange": False, "fixedrange": True})
