"""The section of whole layers (``flashbench block``): its data and its tables."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from flashbench.record import hosts_share, layer_flags, spread_of
from flashbench.report import words
from flashbench.report.data import Results
from flashbench.report.html import row_of, status, table
from flashbench.units import format_length

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pandas import DataFrame

    from flashbench.report.sections import Section

_COLUMNS = ("run", "model", "mode", "dtype", "batch", "seqlen", "layers", "implementation", "status",
            "reason", "time_s", "spread", "flags", "tokens_per_s", "mfu", "peak_bytes",
            "attention_share")  # fmt: skip


def data(results: Results) -> DataFrame:
    """The rows of block of every file, in order, with their run and ``speedup`` over naive's time."""
    import pandas as pd

    rows: list[dict[str, Any]] = [
        {name: {**row, **_derived(row), "run": run}.get(name) for name in _COLUMNS}
        for run, found in results.blocks.items()
        for row in found
    ]
    naive = {_work(row): row["time_s"] for row in rows if row["implementation"] == "naive"}
    for row in rows:
        base = naive.get(_work(row))
        row["speedup"] = base / row["time_s"] if base and row["time_s"] else None
    return pd.DataFrame(rows, columns=[*_COLUMNS, "speedup"], dtype=object)


def _derived(row: Mapping[str, Any]) -> dict[str, Any]:
    """The spread of its samples, None without any, and its flags as text."""
    samples = row.get("samples_s")
    return {"spread": spread_of(samples) if samples else None, "flags": ", ".join(layer_flags(row))}


def _work(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in _COLUMNS[:7])


def page(_: Section, frame: DataFrame) -> str:
    """A table per run, model, step and shape: a row for each length and implementation."""
    parts, several = [], frame["run"].nunique() > 1
    keys = ["run", "model", "mode", "dtype", "batch", "layers"]
    for (run, model, mode, dtype, batch, layers), rows in frame.groupby(keys, sort=False):
        said = [f"{model}, {mode}: {layers} layers, batch {batch}, {dtype}", *([str(run)] if several else [])]
        lines = [row_of(_line(item)) for item in rows.to_dict("records")]
        head = [
            "tokens",
            "attention",
            "time",
            "spread",
            "flags",
            "× naive",
            "tokens/s",
            "MFU",
            "peak memory",
            "share of attention",
        ]
        parts.append(f"<h3>{escape(', '.join(said))}</h3>{table(head, lines)}{_note(rows)}")
    return "".join(parts)


def _note(rows: DataFrame) -> str:
    said = hosts_share({"flags": str(flags).split(", ")} for flags in rows["flags"])
    return f'<p class="about">{escape(said)}.</p>' if said else ""


def _line(item: dict[str, Any]) -> list[str]:
    head = [format_length(int(item["seqlen"])), escape(str(item["implementation"]))]
    if item["status"] != "ok":
        return [*head, status(str(item["status"]), str(item["reason"])), *[""] * 7]
    shown = (
        ("time_s", words.seconds), ("spread", words.percent), ("flags", escape),
        ("speedup", words.times), ("tokens_per_s", "{:,.0f}".format),
        ("mfu", words.percent), ("peak_bytes", words.bytes_text), ("attention_share", words.percent),
    )  # fmt: skip
    return [*head, *(show(item[name]) if words.known(item[name]) else "–" for name, show in shown)]
