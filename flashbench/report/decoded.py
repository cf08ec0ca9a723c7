"""The section of decode steps (``flashbench decode``): its data and its tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from flashbench.record import spread_of
from flashbench.report import words
from flashbench.report.data import Results
from flashbench.report.tabled import Tabled, mark, values
from flashbench.units import format_length, format_rate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pandas import DataFrame

_WORK = ("device", "model", "dtype", "batch", "queries")
"""What the rows of one table share: a cache in pages stands beside a contiguous one of another file."""

_Column = tuple[str, str, Callable[[Any], str]]


def _bandwidth(value: float) -> str:
    return format_rate(value, "B/s")


_SHOWN: tuple[_Column, ...] = (
    ("splits", "splits", str), ("time_s", "time", words.seconds), ("spread", "spread", words.percent),
    ("flags", "flags", str), ("bytes_per_s", "rate", _bandwidth),
    ("copy_fraction", "of a copy", words.percent), ("model_s", "model", words.seconds),
    ("over_model", "time / model", words.times), ("bound_s", "bound", words.seconds),
    ("counted_ratio", "counted / requested", words.times), ("max_abs_error", "error", "{:.1e}".format),
    ("over_contiguous", "time / contiguous", words.times), ("run", "run", str),
)  # fmt: skip

_COLUMNS = (*_WORK, "kv_len", "page_size", "status", "reason", "copy_bytes_per_s",
            *(name for name, *_ in _SHOWN))  # fmt: skip


def data(results: Results) -> DataFrame:
    """The rows of decode of every file with their run, each card's steps by length, pages and splits."""
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for run, found in results.decode.items():
        header = results.headers.get(run, {})
        of_run = {
            "run": run, "device": (header.get("environment") or {}).get("device_name"),
            "copy_bytes_per_s": (header.get("copy") or {}).get("value"),
        }  # fmt: skip
        rows += [{name: {**row, **_derived(row), **of_run}.get(name) for name in _COLUMNS} for row in found]
    fastest: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if row["time_s"] and not row["page_size"]:
            fastest[_step(row)] = min(row["time_s"], fastest.get(_step(row), row["time_s"]))
    for row in rows:
        if row["time_s"] and _step(row) in fastest:
            row["over_contiguous"] = row["time_s"] / fastest[_step(row)]
    rows.sort(key=lambda row: (row["kv_len"], row["page_size"], -(row["splits"] or 0)))
    return pd.DataFrame(rows, columns=list(_COLUMNS), dtype=object)


def _derived(row: Mapping[str, Any]) -> dict[str, Any]:
    """Spread of the samples, flags as text, time over the model's; the error of a step that was not timed."""
    samples, time_s, model_s = (row.get(name) for name in ("samples_s", "time_s", "model_s"))
    error = row.get("max_abs_error")
    return {
        "spread": spread_of(samples) if samples else None,
        "flags": ", ".join(row.get("flags") or ()) or None,
        "over_model": time_s / model_s if time_s and model_s else None,
        "max_abs_error": error if time_s is None and isinstance(error, int | float) else None,
    }


def _step(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in (*_WORK, "kv_len"))


def tables(frame: DataFrame) -> Iterator[Tabled]:
    """A table for each card, model, dtype, batch and number of queries: a row for each length and cache, the
    columns that have something; the run where there are several.
    """
    for _work, rows in frame.groupby(list(_WORK), sort=False, dropna=False):
        items = rows.to_dict("records")
        several = rows["run"].nunique() > 1
        columns = [
            row for row in _SHOWN
            if (row[0] != "run" or several) and any(words.known(item[row[0]]) for item in items)
        ]  # fmt: skip
        yield Tabled(
            title=_title(items[0]), head=["keys", "cache", "status", *(title for _, title, _ in columns)],
            rows=[
                [*_what(item), mark(item), *values(item, ((name, show) for name, _, show in columns))]
                for item in items
            ],
            note=_copies(items),
        )  # fmt: skip


def _title(item: dict[str, Any]) -> str:
    queries = item["queries"]
    asked = "1 query" if queries == 1 else f"{queries} queries"
    where = item["device"] or "a card"
    return f"{item['model']} on {where}: batch {item['batch']}, {asked}, {item['dtype']} cache"


def _copies(items: list[dict[str, Any]]) -> str:
    rates = {
        _bandwidth(item["copy_bytes_per_s"]): None for item in items if words.known(item["copy_bytes_per_s"])
    }
    return f"A copy reached {' and '.join(rates)}." if rates else ""


def _what(item: dict[str, Any]) -> list[str]:
    size = item["page_size"]
    return [format_length(int(item["kv_len"])), f"pages of {size}" if size else "contiguous"]
