"""The section of errors against fp64 (``check --numerics``): its data and its tables."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from flashbench.report import words
from flashbench.report.data import Results
from flashbench.report.html import row_of, status, table
from flashbench.units import format_length

if TYPE_CHECKING:
    from pandas import DataFrame

    from flashbench.report.sections import Section

_COLUMNS = ("run", "range", "implementation", "backend", "dtype", "fp8_scale", "hadamard", "seqlen_k",
            "seqlen_q", "num_heads", "head_dim", "status", "reason", "rmse", "max_abs_error",
            "input_rmse")  # fmt: skip


def data(results: Results) -> DataFrame:
    """The rows of numerics of every file, in order, with their run."""
    import pandas as pd

    rows = [
        {name: run if name == "run" else row.get(name) for name in _COLUMNS}
        for run, found in results.numerics.items()
        for row in found
    ]
    return pd.DataFrame(rows, columns=list(_COLUMNS), dtype=object)


def page(_: Section, frame: DataFrame) -> str:
    """A table per run, range and shape: a row for each dtype and implementation, a column per length."""
    parts = []
    several = frame["run"].nunique() > 1
    keys = ["run", "range", "seqlen_q", "num_heads", "head_dim"]
    for (run, range_, queries, heads, dim), rows in frame.groupby(keys, sort=False):
        words_ = [
            f"{range_}: {queries} queries of {heads} heads, head dim {dim}",
            *([run] if several else []),
        ]
        parts.append(f"<h3>{escape(', '.join(map(str, words_)))}</h3>{_table(rows)}")
    return "".join(parts)


def _table(rows: DataFrame) -> str:
    lengths = sorted(set(rows["seqlen_k"]))
    lines = []
    for (dtype, share, turned, name), items in rows.groupby(
        ["dtype", "fp8_scale", "hadamard", "implementation"], sort=False, dropna=False
    ):
        kind = " ".join(str(word) for word in (dtype, share, "rotated" if turned else "") if word)
        by_length = {item["seqlen_k"]: _cell(item) for item in items.to_dict("records")}
        lines.append(row_of([escape(kind), escape(str(name)), *(by_length.get(n, "") for n in lengths)]))
    return table(["dtype", "implementation", *(f"{format_length(int(n))} keys" for n in lengths)], lines)


def _cell(item: dict[str, Any]) -> str:
    """RMSE, the largest error, and what rounding the inputs costs by itself."""
    if item["status"] != "ok":
        return status(str(item["status"]), str(item["reason"]))
    rest = [f"max {_number(item['max_abs_error'])}", f"inputs {_number(item['input_rmse'])}"]
    if words.known(item["backend"]):
        rest.append(escape(str(item["backend"])))
    return f"{_number(item['rmse'])} <small>({', '.join(rest)})</small>"


def _number(value: Any) -> str:
    return f"{float(value):.2e}" if words.known(value) else "–"
