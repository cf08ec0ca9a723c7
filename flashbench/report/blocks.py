"""The section of whole layers (``flashbench block``): its data and its tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashbench.record import hosts_share, layer_flags, spread_of
from flashbench.report import words
from flashbench.report.data import Results
from flashbench.report.tabled import Cell, Tabled, mark, values
from flashbench.units import format_length

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pandas import DataFrame

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


_SHOWN = (
    ("time_s", "time", words.seconds), ("spread", "spread", words.percent), ("flags", "flags", str),
    ("speedup", "× naive", words.times), ("tokens_per_s", "tokens/s", "{:,.0f}".format),
    ("mfu", "MFU", words.percent), ("peak_bytes", "peak memory", words.bytes_text),
    ("attention_share", "share of attention", words.percent),
)  # fmt: skip


def tables(frame: DataFrame) -> Iterator[Tabled]:
    """A table per run, model, step and shape: a row for each length and implementation."""
    several = frame["run"].nunique() > 1
    keys = ["run", "model", "mode", "dtype", "batch", "layers"]
    for (run, model, mode, dtype, batch, layers), rows in frame.groupby(keys, sort=False):
        said = [f"{model}, {mode}: {layers} layers, batch {batch}, {dtype}", *([str(run)] if several else [])]
        note = hosts_share({"flags": str(flags).split(", ")} for flags in rows["flags"])
        yield Tabled(
            title=", ".join(said), head=["tokens", "attention", *(title for _, title, _ in _SHOWN)],
            rows=list(map(_line, rows.to_dict("records"))), note=f"{note}." if note else "",
        )  # fmt: skip


def _line(item: dict[str, Any]) -> list[Cell]:
    head = [format_length(int(item["seqlen"])), str(item["implementation"])]
    if item["status"] != "ok":
        return [*head, mark(item), *[""] * (len(_SHOWN) - 1)]
    return [*head, *values(item, ((name, show) for name, _, show in _SHOWN))]
