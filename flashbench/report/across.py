"""The section of one sequence on several cards (``flashbench ring``): its data and its tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from flashbench.report import words
from flashbench.report.data import Results
from flashbench.report.tabled import Tabled, mark, values
from flashbench.units import format_length, format_rate

if TYPE_CHECKING:
    from pandas import DataFrame

_WORK = ("run", "pass", "dtype", "causal", "batch", "num_heads", "num_kv_heads", "head_dim", "head_dim_v",
         "world_size", "device", "link")  # fmt: skip
"""What the rows of one table share."""

_Column = tuple[str, str, Callable[[Any], str]]

_SHOWN: tuple[_Column, ...] = (
    ("time_s", "time", words.seconds), ("model_time_s", "time, model", words.seconds),
    ("one_card_s", "one card", words.seconds), ("speedup", "speed-up", words.times),
    ("efficiency", "efficiency", words.percent), ("flops_per_s", "rate", words.rate),
    ("compute_s", "compute alone", words.seconds), ("link_s", "link alone", words.seconds),
    ("overlap", "overlap", words.percent), ("sent_bytes", "bytes sent", words.bytes_text),
    ("link_bytes", "bytes, model", words.bytes_text),
    ("link_bytes_per_s", "link rate", lambda value: format_rate(value, "B/s")),
    ("peak_bytes", "peak memory", words.bytes_text),
)  # fmt: skip

_COLUMNS = (*_WORK, "seqlen", "implementation", "status", "reason", *(name for name, *_ in _SHOWN))


def data(results: Results) -> DataFrame:
    """The rows of ring of every file, in order, with their run; ``link`` is that of the run's other rows
    where a row, as of another package's algorithm, names none."""
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for run, found in results.ring.items():
        links = {row["link"] for row in found if row.get("link")}
        only = links.pop() if len(links) == 1 else None
        for row in found:
            kept = {name: row.get(name) for name in _COLUMNS}
            rows.append({**kept, "run": run, "link": kept["link"] or only})
    return pd.DataFrame(rows, columns=list(_COLUMNS), dtype=object)


def tables(frame: DataFrame) -> Iterator[Tabled]:
    """A table for each run and work: a row for each length and algorithm, without columns that are empty."""
    several = frame["run"].nunique() > 1
    for _work, rows in frame.groupby(list(_WORK), sort=False, dropna=False):
        items = rows.to_dict("records")
        columns = [row for row in _SHOWN if any(words.known(item[row[0]]) for item in items)]
        yield Tabled(
            title=_title(items[0], several=several),
            head=["tokens", "algorithm", "status", *(title for _, title, _ in columns)],
            rows=[
                [*_who(item), mark(item), *values(item, ((name, show) for name, _, show in columns))]
                for item in items
            ],
        )  # fmt: skip


def _title(item: dict[str, Any], *, several: bool) -> str:
    heads, dim = item["num_heads"], item["head_dim"]
    if item["num_kv_heads"] != heads:
        heads = f"{heads}/{item['num_kv_heads']}"
    if item["head_dim_v"] != dim:
        dim = f"{dim}/{item['head_dim_v']}"
    link = f" over {item['link']}" if words.known(item["link"]) else ""
    return ", ".join([
        f"{item['world_size']} × {item['device'] or 'card'}{link}: {item['pass']}",
        "causal" if item["causal"] else "full", str(item["dtype"]), f"batch {item['batch']}",
        f"{heads} heads of {dim}", *([str(item["run"])] if several else []),
    ])  # fmt: skip


def _who(item: dict[str, Any]) -> list[str]:
    length = format_length(int(item["seqlen"])) if words.known(item["seqlen"]) else "–"
    return [length, str(item["implementation"])]
