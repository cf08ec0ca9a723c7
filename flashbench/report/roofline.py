"""The roofline: FLOP/s over FLOPs per byte, by three counts of bytes, under the card's roofs.

compulsory: each tensor once. dram: as counted, where it was, else as the model expects. requested: what
kernels ask of the L2, whose bandwidth is the roof then. A roof is the data sheet's, and beside it the one
that ``flashbench calibrate`` measured, where the run or the reader has such a file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache, partial
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from flashbench import devices
from flashbench._iomodel.roofline import roofs
from flashbench.errors import SpecError
from flashbench.report import words
from flashbench.report.data import HOVER, POINT, Results
from flashbench.report.figures import (
    LIGHT,
    Axis,
    Figure,
    draw,
    numbers,
    plane,
    rate_unit,
    series,
    styles,
    value_ticks,
)

if TYPE_CHECKING:
    from pandas import DataFrame

    from flashbench.ceilings import Ceilings

LEVELS: Mapping[str, str] = {
    "compulsory": "compulsory byte", "dram": "byte of DRAM", "requested": "requested byte",
}  # fmt: skip
"""What an intensity is per, in the order of the control bar."""
CHOICE = "level"
"""The control's name, and the column."""


class Roof(NamedTuple):
    """FLOP/s of the dtype's matrix products and B/s of the level; NaN where not known."""

    flops_per_s: float
    bytes_per_s: float


def data(results: Results) -> DataFrame:
    """FLOP/s (``value``) over ``intensity`` (FLOP/B), a row per timed cell and level of bytes.

    roof_flops_per_s, roof_bytes_per_s: of the data sheet; measured_flops_per_s, measured_bytes_per_s: of the
    run's calibration, NaN without; roof_fraction, measured_fraction: value over the roof at that intensity.
    counted: whether DRAM bytes were counted. Empty where no timed cell ran on a device whose roofs are known.
    """
    import pandas as pd

    frame = results.labelled
    frame = frame.assign(value=frame["flops_per_s"].where(frame["status"] == "ok"))
    known = ["value", "device", "peak_flops_per_s", "hbm_bytes_per_s", "intensity_compulsory"]
    frame = frame[frame[known].notna().all(axis=1)]
    parts = []
    for level in LEVELS:
        part = frame.assign(level=level, intensity=frame[f"intensity_{level}"].astype("float64"))
        part["counted"] = (level == "dram") & part["counted_dram_read_bytes"].notna()
        rows = list(part[_OF].itertuples(index=False))
        for kind, find in (("roof", _of_sheet), ("measured", partial(_as_measured, results.ceilings))):
            of = [find(row, level) for row in rows]
            part[f"{kind}_flops_per_s"] = [one.flops_per_s for one in of]
            part[f"{kind}_bytes_per_s"] = [one.bytes_per_s for one in of]
            roof = (part["intensity"] * part[f"{kind}_bytes_per_s"]).clip(upper=part[f"{kind}_flops_per_s"])
            part[f"{kind}_fraction"] = part["value"] / roof
        parts.append(part[part["intensity"].notna()])
    names = [f"{kind}_{what}" for kind in ("roof", "measured") for what in
             ("flops_per_s", "bytes_per_s", "fraction")]  # fmt: skip
    columns = [CHOICE, "value", "intensity", "counted", "device", *names, "status", "reason", "flags"]
    return pd.concat(parts)[[*POINT, *columns, *HOVER]]


_OF = ["run", "device", "dtype", "peak_flops_per_s", "hbm_bytes_per_s"]


def _of_sheet(row: Any, level: str) -> Roof:
    speed = _l2(row.device, row.dtype) if level == "requested" else row.hbm_bytes_per_s
    return Roof(row.peak_flops_per_s, speed)


@cache
def _l2(device: str, dtype: str) -> float:
    card = devices.match(device)
    try:
        return roofs(card, dtype).l2 if card else math.nan
    except SpecError:
        return math.nan


def _as_measured(ceilings: Mapping[str, Ceilings], row: Any, level: str) -> Roof:
    found = ceilings.get(row.run)
    if found is None or found.device_name != row.device:
        return Roof(math.nan, math.nan)
    memory = max((rate for rate in (found.copy_bytes_per_s, found.read_bytes_per_s) if rate), default=None)
    speed = found.l2_bytes_per_s if level == "requested" else memory
    return Roof(found.flops_per_s.get(row.dtype) or math.nan, speed or math.nan)


def figure(frame: DataFrame) -> Figure:
    """The points of each level as lines over the length, under the roofs."""
    scale, unit = rate_unit(frame["roof_flops_per_s"].max())
    tops = [*frame["value"], *frame["roof_flops_per_s"], *frame["measured_flops_per_s"]]
    fig = plane(frame, Axis(title=unit), [top / scale for top in tops])
    look, hover = styles(frame), f"%{{y:.4g}} {unit}, %{{x:.4g}} FLOP/B, %{{customdata}}"
    meta = fig.layout["meta"]
    meta |= {
        "unit": unit,
        "captions": [
            {"where": {**one["where"], CHOICE: level}, "text": f"{one['text']}, FLOP per {LEVELS[level]}"}
            for level in dict.fromkeys(frame[CHOICE]) for one in meta["captions"]
        ],
    }  # fmt: skip
    for level, rows in frame.groupby(CHOICE, sort=False):
        for where, name, mine in series(rows):
            place = {**where, CHOICE: str(level)}
            draw(fig, mine, look[name], place, words.roof_note, x="intensity", scale=scale, hover=hover)
        fig.data.extend(_roofs(rows, str(level), scale))
    ticks = value_ticks(frame["intensity"])
    fig.layout["xaxis"] |= {
        "title": {"text": "FLOP per byte", "standoff": 8}, "tickvals": ticks,
        "ticktext": [f"{tick:g}" for tick in ticks],
    }  # fmt: skip
    low, high = frame["value"].min() / 1.5 / scale, frame["roof_flops_per_s"].max() * 1.3 / scale
    fig.layout["yaxis"]["range"] = [math.log10(low), math.log10(high)]
    fig.layout["hovermode"] = "closest"
    return fig


def _roofs(rows: DataFrame, level: str, scale: float) -> Iterator[dict[str, Any]]:
    """The roofs of each card and dtype of one level: solid of the data sheet, dashed as measured."""
    several = rows["device"].nunique() > 1
    low, high = rows["intensity"].min() / 2, rows["intensity"].max() * 2
    for kind, title, dash in (("roof", "roof", "solid"), ("measured", "measured roof", "dash")):
        known = rows[rows[f"{kind}_bytes_per_s"].notna() & rows[f"{kind}_flops_per_s"].notna()]
        names = ["device", "dtype", f"{kind}_flops_per_s", f"{kind}_bytes_per_s"]
        for device, dtype, flops, speed in known[names].drop_duplicates().itertuples(index=False):
            at = sorted({low, min(max(flops / speed, low), high * 2), max(high, flops / speed * 2)})
            yield {
                "type": "scatter", "x": numbers(at), "y": numbers(min(flops, x * speed) / scale for x in at),
                "mode": "lines", "hoverinfo": "skip",
                "name": escape(f"{title} of {device}, {dtype}" if several else f"{title}, {dtype}"),
                "line": {"width": 2, "color": LIGHT[0], "dash": dash},
                "meta": {"where": {"dtype": dtype, CHOICE: level}, "slot": "ink"},
            }  # fmt: skip
