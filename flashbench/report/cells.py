"""The table of all cells: every row of the run, sortable and searchable in the page."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any

from flashbench.report import words
from flashbench.report.html import status, table
from flashbench.units import format_length

if TYPE_CHECKING:
    from pandas import DataFrame

    from flashbench.report.sections import Section

Column = tuple[str, str, Callable[[Any], str]]


def _text(value: Any) -> str:
    return escape(str(value))


COLUMNS: tuple[Column, ...] = (
    ("run", "run", _text),
    ("implementation", "implementation", _text),
    ("exact", "exact", lambda value: "yes" if value else "no"),
    ("pass", "pass", _text),
    ("dtype", "dtype", _text),
    ("causal", "mask", lambda value: "causal" if value else "non-causal"),
    ("options", "options", _text),
    ("seqlen_q", "queries", format_length),
    ("seqlen_k", "keys", format_length),
    ("head_dim", "head dim", str),
    ("head_dim_v", "head dim of v", str),
    ("batch", "batch", str),
    ("num_heads", "heads", str),
    ("num_kv_heads", "K/V heads", str),
    ("status", "status", status),
    ("time_s", "time", words.seconds),
    ("spread", "spread", words.percent),
    ("flops_per_s", "rate", words.rate),
    ("peak_fraction", "of peak", words.percent),
    ("roof_fraction", "of roof", words.percent),
    ("speedup_over_naive", "× naive", words.times),
    ("peak_extra_bytes", "extra memory", words.bytes_text),
    ("predicted_extra_bytes", "predicted", words.bytes_text),
    ("max_error_ratio", "error / budget", lambda value: f"{value:.2g}"),
    ("exact_error", "error to exact", lambda value: f"{value:.2g}"),
    ("exact_error_relative", "relative", words.percent),
    ("flags", "flags", _text),
    ("backend", "backend", _text),
    ("cache", "cache", _text),
    ("config", "config", _text),
    ("tuned", "tuned by", _text),
    ("band_missed", "outside the band", _text),
    ("not_counted", "not counted", _text),
    ("not_traced", "not traced", _text),
    ("reason", "reason", _text),
)
"""(column of the table, heading, how a value reads). A column without any value is left out."""

ALWAYS = {"implementation", "pass", "status", "time_s", "flops_per_s"}


def cells(_: Section, frame: DataFrame) -> str:
    """The search box and the table; raw numbers stand in ``data-value`` for sorting."""
    shown = [column for column in COLUMNS if _is_shown(column[0], frame)]
    values = frame[[name for name, _, _ in shown]].astype(object).to_dict("split")["data"]
    lines = ["<tr>" + "".join(map(_cell, shown, line)) + "</tr>" for line in values]
    return (
        '<p class="search"><label>Search <input type="search" id="search" placeholder="flash causal 16k"'
        f' autocomplete="off"></label> <output id="found">{len(lines)} cells</output></p>'
        + table([heading for _, heading, _ in shown], lines, ' class="sortable" id="cells-table"')
    )


def _is_shown(name: str, frame: DataFrame) -> bool:
    if name == "num_kv_heads":
        return bool((frame["num_kv_heads"] != frame["num_heads"]).any())
    if name == "head_dim_v":
        return bool((frame["head_dim_v"] != frame["head_dim"]).any())
    if name == "exact":
        return not bool(frame["exact"].all())
    if name == "run":
        return bool(frame["run"].nunique() > 1)
    return name in ALWAYS or bool(frame[name].notna().any())


def _cell(column: Column, value: Any) -> str:
    name, _, show = column
    if not words.known(value):
        return "<td></td>"
    if name in ("reason", "not_counted", "not_traced"):
        return f'<td class="reason">{show(value)}</td>'
    raw = "" if isinstance(value, str | bool) else f' data-value="{float(value):.9g}"'
    return f"<td{raw}>{show(value)}</td>"
