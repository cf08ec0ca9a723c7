"""The table of model, trace and counters: a row per cell and level, of the selection that is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from flashbench.compared import REQUESTED
from flashbench.report import words
from flashbench.report.data import KEYS
from flashbench.report.grid import Column, Grid, Text, html
from flashbench.units import format_length

if TYPE_CHECKING:
    from pandas import DataFrame

    from flashbench.report.sections import Section


def joined(_: Section, frame: DataFrame) -> str:
    """The table; a level outside the model's band is marked, with the band as its tooltip."""
    rows = frame.to_dict("records")
    columns = [
        Column(name="series", title="series", texts=[str(row["series"]) for row in rows]),
        Column(
            name="seqlen_k", title="keys", texts=[format_length(int(row["seqlen"])) for row in rows],
            values=[int(row["seqlen"]) for row in rows],
        ),
        Column(name="level", title="level", texts=[row["level"] for row in rows]),
        _numbers("predicted_bytes", "model", rows, "predicted", lambda row: _bytes(row["predicted"])),
        _numbers("traced_bytes", "traced", rows, "traced", lambda row: _measured(row, "traced")),
        _numbers("difference_bytes", "traced − model", rows, "difference", _difference),
        _numbers("counted_bytes", "counted", rows, "counted", lambda row: _measured(row, "counted")),
        _numbers("ratio", "counted / model", rows, "ratio", _ratio),
        Column(name="band", title="band", texts=list(map(_band, rows))),
    ]  # fmt: skip
    where = frame[KEYS].to_dict("records")
    label = "Bytes by model, trace and counters"
    return html(Grid(key="joined-table", label=label, columns=columns, where=where, tools=True))


def _numbers(
    name: str, title: str, rows: list[Any], key: str, text: Callable[[Mapping[str, Any]], Text]
) -> Column:
    values = [row[key] if words.known(row[key]) else None for row in rows]
    return Column(name=name, title=title, texts=list(map(text, rows)), values=values)


def _bytes(value: Any) -> str:
    return words.bytes_text(value) if words.known(value) else ""


def _ratio(item: Mapping[str, Any]) -> str:
    return f"{item['ratio']:.3f}" if words.known(item["ratio"]) else ""


def _measured(item: Mapping[str, Any], name: str) -> Text:
    """Traced or counted bytes, or that there are none where they were asked for, and why."""
    if words.known(item[name]):
        return words.bytes_text(item[name])
    reason = item[f"not_{name}"]
    asked = words.known(reason) and (name == "counted" or item["level"] in REQUESTED)
    return ("skipped", "status skipped", str(reason)) if asked else ""


def _difference(item: Mapping[str, Any]) -> str:
    """0 B, -4,096 B: exact, as one byte is a mistake."""
    return f"{int(item['difference']):,} B" if words.known(item["difference"]) else ""


def _band(item: Mapping[str, Any]) -> Text:
    """Whether the count lies in the model's band: nothing where one of them is missing."""
    if not words.known(item["predicted"]) or not words.known(item["counted"]):
        return ""
    low, high = (item[name] if words.known(item[name]) else item["predicted"] for name in ("least", "most"))
    exact = low == high == item["predicted"]
    band = (
        "to the byte"
        if exact and not item["missed"]
        else f"{words.bytes_text(low)} to {words.bytes_text(high)}"
    )
    return ("missed", "status missed", band) if item["missed"] else ("met", "", band)
