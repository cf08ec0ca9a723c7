"""The kernels of a call: each one's share of the kernels' time, from ``profile --timeline --json``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from flashbench import paths
from flashbench.errors import RunFileError
from flashbench.report import page as page_
from flashbench.report import words
from flashbench.report.data import KEYS, POINT, Results
from flashbench.report.figures import HEIGHT, LIGHT, Figure, captions
from flashbench.report.grid import Column, Grid, html
from flashbench.units import format_length

if TYPE_CHECKING:
    from pandas import DataFrame

    from flashbench.report.sections import Section

MAX_BYTES = 2**26
BAR = 26
"""Pixels of a bar with its gap."""


def load(path: str) -> dict[str, Mapping[str, Any]]:
    """What ``profile --timeline --json`` printed, by the cell's key; cells without a record are left out.

    Raises RunFileError for a file that cannot be read or is something else.
    """
    where = f"--timeline {path!r}"
    accepted = "accepted: what 'flashbench profile --timeline --json' prints"
    try:
        with paths.opened(path) as file:
            text = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise RunFileError(f"{where}: {getattr(error, 'strerror', None) or error}; {accepted}") from None
    try:
        found = json.loads(text) if len(text) <= MAX_BYTES else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(map(_is_one, found)):
        raise RunFileError(f"{where}: no timelines; {accepted}")
    return {one["cell"]: one for one in found if "kernels" in one}


def _is_one(one: Any) -> bool:
    if not isinstance(one, dict) or not isinstance(one.get("cell"), str):
        return False
    kernels = one.get("kernels", [])
    return isinstance(kernels, list) and all(
        isinstance(kernel, dict) and isinstance(kernel.get("kernel"), str)
        and isinstance(kernel.get("duration_s"), int | float) and 0 <= kernel["duration_s"] < 1e9
        for kernel in kernels
    )  # fmt: skip


def data(results: Results) -> DataFrame:
    """A row per cell that was recorded and kernel (by name, in the order of their first start).

    Columns: POINT, kernel, launches, duration_s (of all its launches), value (its share of the kernels'
    time), gap_s (idle time between the kernels of the call).
    """
    import pandas as pd

    frame = results.labelled[[*POINT, "key"]]
    rows: list[dict[str, Any]] = []
    for item in frame[frame["key"].isin(list(results.timelines))].to_dict("records"):
        one = results.timelines[item["key"]]
        spent: dict[str, list[float]] = {}
        for kernel in one["kernels"]:
            spent.setdefault(kernel["kernel"], []).append(float(kernel["duration_s"]))
        total = sum(map(sum, spent.values()))
        point = {name: item[name] for name in POINT}
        rows += [
            {**point, "kernel": name, "launches": len(times), "duration_s": sum(times),
             "value": sum(times) / total, "gap_s": one.get("gap_s")}
            for name, times in spent.items() if total
        ]  # fmt: skip
    return pd.DataFrame(rows, columns=[*POINT, "kernel", "launches", "duration_s", "value", "gap_s"])


def figure(frame: DataFrame) -> Figure:
    """A bar per cell; its parts are kernels in the order of their start, with their names."""
    fig = Figure(layout={
        "height": HEIGHT, "barmode": "stack", "bargap": 0.25, "hovermode": "closest", "showlegend": False,
        "uniformtext": {"mode": "hide", "minsize": 9},
        "margin": {"l": 56, "r": 16, "t": 40, "b": 48},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "xanchor": "left"},
        "xaxis": {
            "title": {"text": "share of the kernels' time", "standoff": 8}, "tickformat": ".0%",
            "range": [0, 1], "zeroline": False,
        },
        "yaxis": {"type": "category", "autorange": "reversed", "automargin": True},
        "yaxis2": {"visible": False, "fixedrange": True},
        "meta": {"height": HEIGHT, "lane_row": 0, "captions": captions(frame), "bar": BAR,
                 "empty": "No cell of this selection was recorded.",
                 "instead": f"recorded: {_recorded(frame)}"},
    })  # fmt: skip
    for where, rows in frame.groupby(KEYS, sort=False):
        ordered = rows.sort_values(["seqlen", "cell"], kind="stable")
        rank = ordered.groupby("cell").cumcount()
        for slot, mine in ordered.groupby(rank):
            fig.data.append(_parts(mine, dict(zip(KEYS, where, strict=True)), int(slot) % len(LIGHT)))
    return fig


def _recorded(frame: DataFrame) -> str:
    """The selections that were recorded, in words; where there are many, how many."""
    said = [one["text"] for one in captions(frame)]
    return "; ".join(said) if len(said) <= 2 else f"{said[0]}, and {len(said) - 1} more selections"


def _parts(rows: DataFrame, where: Mapping[str, str], slot: int) -> dict[str, Any]:
    """The kernels that come as n-th in their cells."""
    items = list(rows.itertuples(index=False))
    return {
        "type": "bar", "orientation": "h", "x": [round(item.value, 6) for item in items],
        "y": [escape(f"{item.series} {format_length(int(item.seqlen))}") for item in items],
        "text": [escape(short(item.kernel)) for item in items], "textposition": "inside",
        "insidetextanchor": "start", "textangle": 0, "showlegend": False,
        "marker": {"color": LIGHT[slot]}, "name": f"kernel {slot + 1}",
        "customdata": list(map(_note, items)), "hovertemplate": "%{customdata}<extra></extra>",
        "meta": {"where": where, "slot": slot},
    }  # fmt: skip


def _note(item: Any) -> str:
    times = f" in {item.launches} launches" if item.launches > 1 else ""
    name = escape(item.kernel if len(item.kernel) <= 90 else item.kernel[:89] + "…")
    return f"{name}: {words.seconds(item.duration_s)}{times}, {words.percent(item.value)}"


def short(name: str) -> str:
    """The name of a kernel without its return type, namespaces, templates and arguments."""
    text = name.replace("(anonymous namespace)::", "")
    while (shorter := re.sub(r"<[^<>]*>", "", text)) != text:
        text = shorter
    text = text.split("(")[0].strip() or name
    if not text or name.startswith("Mem"):  # copies and sets have a name of their own
        return text
    return text.split()[-1].split("::")[-1]


def page(row: Section, frame: DataFrame) -> str:
    """The figure, and the numbers as a table."""
    rows = frame.to_dict("records")
    columns = [
        Column(name="series", title="series", texts=[str(item["series"]) for item in rows]),
        Column(
            name="seqlen_k", title="keys", texts=[format_length(int(item["seqlen"])) for item in rows],
            values=[int(item["seqlen"]) for item in rows],
        ),
        Column(name="kernel", title="kernel", texts=[item["kernel"] for item in rows], wide=True),
        Column(name="launches", title="launches", texts=[str(item["launches"]) for item in rows],
               values=[item["launches"] for item in rows]),
        Column(name="duration_s", title="time", texts=[words.seconds(item["duration_s"]) for item in rows],
               values=[item["duration_s"] for item in rows]),
        Column(name="share", title="share", texts=[words.percent(item["value"]) for item in rows],
               values=[item["value"] for item in rows]),
        Column(
            name="gap_s", title="gaps of the call",
            texts=[words.seconds(item["gap_s"]) if words.known(item["gap_s"]) else "" for item in rows],
            values=[item["gap_s"] if words.known(item["gap_s"]) else None for item in rows],
        ),
    ]  # fmt: skip
    where = frame[KEYS].to_dict("records")
    grid = Grid(key="timeline-table", label="Kernels of each call", columns=columns, where=where, tools=True)
    return page_.figure(row, frame) + html(grid)
