"""The table of model, trace and counters: a row per cell and level, of the selection that is shown."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from flashbench.compared import REQUESTED
from flashbench.report import words
from flashbench.report.data import KEYS
from flashbench.report.html import group_of, row_of, status, table_of
from flashbench.units import format_length

if TYPE_CHECKING:
    from pandas import DataFrame

    from flashbench.report.sections import Section

HEAD = ("series", "keys", "level", "model", "traced", "traced − model", "counted", "counted / model",
        "band")  # fmt: skip


def joined(_: Section, frame: DataFrame) -> str:
    """The table; a level outside the model's band is marked, with the band as its tooltip."""
    groups = []
    for values, rows in frame.groupby(KEYS, sort=False):
        where = dict(zip(KEYS, values, strict=True))
        lines = [row_of(_cells(item)) for item in rows.to_dict("records")]
        groups.append(group_of(words.panel(where), lines, where, len(HEAD)))
    return table_of(HEAD, groups)


def _cells(item: Mapping[str, Any]) -> list[str]:
    return [
        escape(str(item["series"])), format_length(int(item["seqlen"])), item["level"],
        _bytes(item["predicted"]), _measured(item, "traced"),
        _difference(item["difference"]),
        _measured(item, "counted"),
        f"{item['ratio']:.3f}" if words.known(item["ratio"]) else "", _band(item),
    ]  # fmt: skip


def _bytes(value: Any) -> str:
    return words.bytes_text(value) if words.known(value) else ""


def _measured(item: Mapping[str, Any], name: str) -> str:
    """Traced or counted bytes, or that there are none where they were asked for, and why."""
    if words.known(item[name]):
        return words.bytes_text(item[name])
    reason = item[f"not_{name}"]
    asked = words.known(reason) and (name == "counted" or item["level"] in REQUESTED)
    return status("skipped", str(reason)) if asked else ""


def _difference(value: Any) -> str:
    """0 B, -4,096 B: exact, as one byte is a mistake."""
    return f"{int(value):,} B" if words.known(value) else ""


def _band(item: Mapping[str, Any]) -> str:
    """Whether the count lies in the model's band: nothing where one of them is missing."""
    if not words.known(item["predicted"]) or not words.known(item["counted"]):
        return ""
    low, high = (item[name] if words.known(item[name]) else item["predicted"] for name in ("least", "most"))
    band = f"{words.bytes_text(low)} to {words.bytes_text(high)}"
    return status("missed", band) if item["missed"] else f'<span title="{band}">met</span>'
