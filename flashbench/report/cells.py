"""The table of all cells: every row of the run, sortable and searchable in the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flashbench.report import words
from flashbench.report.data import KEYS
from flashbench.report.grid import Column, Grid, Text, html
from flashbench.units import format_length

if TYPE_CHECKING:
    from pandas import DataFrame

    from flashbench.report.sections import Section

COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("run", "run", str),
    ("implementation", "implementation", str),
    ("exact", "exact", lambda value: "yes" if value else "no"),
    ("pass", "pass", str),
    ("dtype", "dtype", str),
    ("causal", "mask", lambda value: "causal" if value else "non-causal"),
    ("options", "options", str),
    ("seqlen_q", "queries", format_length),
    ("seqlen_k", "keys", format_length),
    ("head_dim", "head dim", str),
    ("head_dim_v", "head dim of v", str),
    ("batch", "batch", str),
    ("num_heads", "heads", str),
    ("num_kv_heads", "K/V heads", str),
    ("status", "status", str),
    ("time_s", "time", words.seconds),
    ("spread", "spread", words.percent),
    ("num_samples", "samples", str),
    ("flops_per_s", "rate", words.rate),
    ("peak_fraction", "of peak", words.percent),
    ("roof_fraction", "of roof", words.percent),
    ("speedup_over_naive", "× naive", words.times),
    ("peak_extra_bytes", "extra memory", words.bytes_text),
    ("predicted_extra_bytes", "predicted", words.bytes_text),
    ("max_error_ratio", "error / budget", lambda value: f"{value:.2g}"),
    ("exact_error", "error to exact", lambda value: f"{value:.2g}"),
    ("exact_error_relative", "relative", words.percent),
    ("limiting", "limit", str),
    ("j_per_tflop", "J/TFLOP", "{:.3g}".format),
    ("flags", "flags", str),
    ("backend", "backend", str),
    ("cache", "cache", str),
    ("config", "config", str),
    ("tuned", "tuned by", str),
    ("band_missed", "outside the band", str),
    ("not_counted", "not counted", str),
    ("not_traced", "not traced", str),
    ("reason", "reason", str),
)
"""(column of the table, heading, how a value reads). A column without any value is left out."""

WIDE = {"reason", "not_counted", "not_traced"}
SCREEN = {
    "head_dim_v", "batch", "num_heads", "num_kv_heads", "num_samples", "roof_fraction",
    "predicted_extra_bytes",
    "max_error_ratio", "exact_error", "exact_error_relative", "limiting", "backend", "cache", "config",
    "tuned", "band_missed", "not_counted", "not_traced", "reason",
}  # fmt: skip
"""Columns that paper has no room for; why cells were not timed has a section of its own."""
ALWAYS = {"implementation", "pass", "status", "time_s", "flops_per_s"}


def cells(_: Section, frame: DataFrame) -> str:
    """The table of all cells, with the numbers behind the texts for sorting and saving."""
    shown = [column for column in COLUMNS if _is_shown(column[0], frame)]
    where = frame.assign(options=frame["shown_options"])[KEYS].to_dict("records")
    columns = [_column(column, frame[column[0]].tolist()) for column in shown]
    if frame["seqlen_q"].equals(frame["seqlen_k"]):  # paper has no room to say so in every row
        columns = [replace(one, printed=False) if one.name == "seqlen_q" else one for one in columns]
    return html(Grid(
        key="cells-table", label="All cells", columns=columns, where=where, tools=True, noun="cell",
        example="flash causal 16k",
    ))  # fmt: skip


def _column(column: tuple[str, str, Callable[[Any], str]], values: list[Any]) -> Column:
    name, title, show = column
    known = [value if words.known(value) else None for value in values]
    if name == "status":
        marks: list[Text] = [(str(text), f"status {text}", "") for text in known]
        return Column(name=name, title=title, texts=marks)
    texts = {value: show(value) for value in set(known) if value is not None}
    numbers = not any(isinstance(value, str | bool) for value in texts)
    return Column(
        name=name, title=title, texts=["" if value is None else texts[value] for value in known],
        values=known if numbers else None, wide=name in WIDE, printed=name not in SCREEN,
    )  # fmt: skip


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
