"""The section of errors against fp64 (``check --numerics``): its data and its tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashbench.report import words
from flashbench.report.data import Results
from flashbench.report.tabled import Aside, Cell, Tabled, mark
from flashbench.units import format_length

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pandas import DataFrame

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


def tables(frame: DataFrame) -> Iterator[Tabled]:
    """A table per run, range and shape: a row for each dtype and implementation, a column per length."""
    several = frame["run"].nunique() > 1
    keys = ["run", "range", "seqlen_q", "num_heads", "head_dim"]
    for (run, range_, queries, heads, dim), rows in frame.groupby(keys, sort=False):
        said = [f"{range_}: {queries} queries of {heads} heads, head dim {dim}", *([run] if several else [])]
        lengths = sorted(set(rows["seqlen_k"]))
        head = ["dtype", "implementation", *(f"{format_length(int(n))} keys" for n in lengths)]
        yield Tabled(title=", ".join(map(str, said)), head=head, rows=list(_lines(rows, lengths)))


def _lines(rows: DataFrame, lengths: list[Any]) -> Iterator[list[Cell]]:
    for (dtype, share, turned, name), items in rows.groupby(
        ["dtype", "fp8_scale", "hadamard", "implementation"], sort=False, dropna=False
    ):
        kind = " ".join(str(word) for word in (dtype, share, "rotated" if turned else "") if word)
        by_length = {item["seqlen_k"]: _cell(item) for item in items.to_dict("records")}
        yield [kind, str(name), *(by_length.get(n, "") for n in lengths)]


def _cell(item: dict[str, Any]) -> Cell:
    """RMSE, the largest error, and what rounding the inputs costs by itself."""
    if item["status"] != "ok":
        return mark(item)
    rest = [f"max {_number(item['max_abs_error'])}", f"inputs {_number(item['input_rmse'])}"]
    if words.known(item["backend"]):
        rest.append(str(item["backend"]))
    return Aside(first=_number(item["rmse"]), rest=", ".join(rest))


def _number(value: Any) -> str:
    return f"{float(value):.2e}" if words.known(value) else "–"
