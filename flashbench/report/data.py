"""What each section of the report shows, as data frames: no figure, no HTML, no formatting.

A section's data function takes ``Results`` and returns a frame. Frames for figures share columns:
the filters (``FILTERS``), ``run``, ``implementation``, ``series`` (its legend entry), ``seqlen``
(keys), ``value``, ``status``, ``reason``. Cells that were not timed keep their row with no value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from flashbench import table as tables
from flashbench import unstarted
from flashbench.compared import LEVELS, REQUESTED, SPILLED, SPILLS
from flashbench.units import format_length

if TYPE_CHECKING:
    from pandas import DataFrame, Series

    from flashbench.ceilings import Ceilings
    from flashbench.claims import Judged


@dataclass(frozen=True, kw_only=True)
class Results:
    """The joined table (table.build), and by run, as table gives them, its header, numerics, blocks, ring and
    decode.

    ceilings: what the run's card was measured to reach, by run; timelines: what ``profile --timeline``
    recorded of a cell, by the cell's key; claims: what a folder's results say of the literature's.
    """

    table: DataFrame
    headers: Mapping[str, Mapping[str, Any]]
    numerics: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    blocks: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    ring: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    decode: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    ceilings: Mapping[str, Ceilings] = field(default_factory=dict)
    timelines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    claims: Sequence[Judged] = ()

    @cached_property
    def labelled(self) -> DataFrame:
        """``labelled`` of the table, made once."""
        return labelled(self.table)


@dataclass(frozen=True, kw_only=True)
class Filter:
    """One choice of the control bar: a column of every figure's data, its title, its values' names."""

    key: str
    title: str
    label: Callable[[Any], str]
    names: Mapping[str, str]


def _dims(row: Any) -> str:
    same = row.head_dim == row.head_dim_v
    return f"{row.head_dim}" if same else f"{row.head_dim}/{row.head_dim_v}"


def _kv(row: Any) -> str:
    group = row.num_heads // row.num_kv_heads
    return "MHA" if group == 1 else "MQA" if row.num_kv_heads == 1 else f"GQA {group}:1"


PASS_NAMES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward + backward"}

FILTERS = (
    Filter(key="pass", title="Pass", label=lambda row: str(row.pass_), names=PASS_NAMES),
    Filter(key="dtype", title="Dtype", label=lambda row: str(row.dtype), names={}),
    Filter(key="dims", title="Head dim", label=_dims, names={}),
    Filter(
        key="mask", title="Mask", names={"full": "non-causal"},
        label=lambda row: "causal" if row.causal else "full",
    ),
    Filter(
        key="options", title="Options", names={"none": "no options"},
        label=lambda row: row.options if isinstance(row.options, str) else "none",
    ),
    Filter(
        key="queries", title="Queries", names={"same": "as keys"},
        label=lambda row: "same" if row.seqlen_q == row.seqlen_k else format_length(row.seqlen_q),
    ),
    Filter(key="kv", title="K/V heads", label=_kv, names={}),
)  # fmt: skip
"""The dimensions that tell panels apart, in the order of the control bar."""

KEYS = [row.key for row in FILTERS]
SAME = [*KEYS, "run", "implementation", "series", "seqlen"]
POINT = [*SAME, "cell"]


NOT_EXACT = " (not exact)"
"""What follows the name of an implementation that computes something else than attention."""


def labelled(table: DataFrame) -> DataFrame:
    """The table with the filters' columns, ``series``, ``seqlen`` and ``cell`` (the row's number) added."""
    import pandas as pd

    frame = table.copy()
    rows = list(table.rename(columns={"pass": "pass_"}).itertuples(index=False))
    for row in FILTERS:  # as objects: text of pandas' own kind is slow to go through
        frame[row.key] = pd.Series([row.label(item) for item in rows], index=table.index, dtype=object)
    frame["seqlen"] = table["seqlen_k"]
    frame["cell"] = range(len(table))
    if "implementation" in table:  # not in tables.models
        several = table["run"].nunique() > 1
        marks = ["" if exact else NOT_EXACT for exact in table["exact"]]
        names = zip(table["implementation"], marks, table["run"], strict=True)
        series = [f"{name}{mark}" + (f" · {run}" if several else "") for name, mark, run in names]
        frame["series"] = pd.Series(series, index=table.index, dtype=object)
    return frame


def points(metric: str, extra: tuple[str, ...] = ()) -> Callable[[Results], DataFrame]:
    """The data function of a figure that plots one metric over the length.

    Only cells that were timed have a value. Empty where no cell has one.
    """

    def data(results: Results) -> DataFrame:
        frame = results.labelled.assign(value=_timed(results.labelled, metric))
        if not frame["value"].notna().any():
            return frame.iloc[:0]
        return frame[[*POINT, "value", "status", "reason", "flags", *HOVER, *extra]]

    return data


def counted(metric: str) -> Callable[[Results], DataFrame]:
    """As points, of cells that were counted, whether they were timed as well or not."""

    def data(results: Results) -> DataFrame:
        frame = results.labelled.assign(value=results.labelled[metric].astype("float64"))
        frame = frame[frame["value"].notna()].assign(status="ok", reason=None)  # it has its mark
        return frame[[*POINT, "value", "status", "reason", "flags", *HOVER]]

    return data


HOVER = ["time_s", "spread", "peak_fraction"]
"""What hover texts say of a point beside its value; the rest is the cell's (``words.cell_note``)."""


def _timed(frame: DataFrame, metric: str) -> Series:
    return frame[metric].astype("float64").where(frame["status"] == "ok")


def memory(results: Results) -> DataFrame:
    """Measured peak_extra_bytes as ``value`` beside ``predicted``; empty where neither is known.

    device_bytes: the memory of the card as its driver says, NaN where the header does not.
    """
    frame = results.labelled
    sizes = {
        run: (header.get("environment") or {}).get("total_bytes") for run, header in results.headers.items()
    }
    frame = frame.assign(
        value=_timed(frame, "peak_extra_bytes"),
        predicted=frame["predicted_extra_bytes"].astype("float64"),
        device_bytes=frame["run"].map(sizes).astype("float64"),
    )
    if not frame[["value", "predicted"]].notna().any(axis=None):
        return frame.iloc[:0]
    columns = ["value", "predicted", "device_bytes", "status", "reason", "flags"]
    return frame[[*POINT, *columns, *HOVER]]


def speedup(results: Results, baseline: str | None = None) -> DataFrame:
    """The ``baseline``'s time over each implementation's (``value``), for the same problem in the same run.

    baseline: an implementation; None for naive, or without times of it for the first that has one.
    """
    frame = results.labelled
    frame = frame.assign(time_s=_timed(frame, "time_s"))
    named = list(dict.fromkeys(frame["implementation"][frame["time_s"].notna()]))
    if not named:
        return frame.iloc[:0]
    chosen = baseline or ("naive" if "naive" in named else named[0])
    # as in speedup_over_naive: batch and heads are of the problem, cache, method and load of how it was timed
    keys = [*KEYS, *_PROBLEM, "run", "seqlen", "cache", "method", "load"]
    rows = list(zip(*(frame[key] for key in keys), strict=True))
    times = {
        _known(row): time_s
        for row, name, time_s in zip(rows, frame["implementation"], frame["time_s"], strict=True)
        if name == chosen and time_s == time_s
    }
    base = [times.get(_known(row), float("nan")) for row in rows]
    frame = frame.assign(value=base / frame["time_s"], baseline=chosen)
    return frame[[*POINT, "value", "baseline", "status", "reason", "flags", *HOVER]]


_PROBLEM = ("batch", "num_heads", "num_kv_heads")


def _known(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(None if value != value else value for value in row)  # no NaN equals another


def traffic(results: Results) -> DataFrame:
    """Requested bytes of each algorithm (``value``) and compulsory bytes, over the length."""
    import pandas as pd

    if results.table.empty:
        return pd.DataFrame(columns=[*KEYS, "model", "seqlen", "value", "compulsory", "tiles"])
    frame = labelled(tables.models(results.table))
    # batch and heads follow from the length; two runs that differ in them are two problems
    frame = frame.drop_duplicates([*KEYS, "model", "seqlen"])
    frame["value"] = frame["requested_bytes"].astype("float64")
    frame["compulsory"] = frame["compulsory_bytes"].astype("float64")
    return frame[[*KEYS, "model", "seqlen", "value", "compulsory", "tiles"]]


def causal_ratio(results: Results) -> DataFrame:
    """Causal time over full time (``value``) of the same implementation and shape; no ``mask`` column."""
    return _ratio(results, "mask", "causal", "full")


def backward_ratio(results: Results) -> DataFrame:
    """Backward time over forward time (``value``), and both; no ``pass`` column."""
    return _ratio(results, "pass", "bwd", "fwd")


def _ratio(results: Results, key: str, above: str, below: str) -> DataFrame:
    """time_s where the filter ``key`` is ``above`` over the other's (``other_s``), else all the same."""
    frame = results.labelled
    frame = frame.assign(value=_timed(frame, "time_s"))
    frame = frame[frame["value"].notna()]
    same = [name for name in SAME if name != key] + ["batch", "num_heads"]
    other = frame.loc[frame[key] == below, [*same, "value"]].rename(columns={"value": "other_s"})
    both = frame[frame[key] == above].merge(other, on=same)
    both["value"] = both["time_s"].astype("float64") / both["other_s"]
    return both[[*same, "cell", "value", "time_s", "other_s", "status", "reason", "flags"]]


def joined(results: Results) -> DataFrame:
    """Model, trace and counters, bytes: a row per cell and level that was counted or traced.

    Columns: POINT, level, predicted, least and most (of the band, at DRAM), traced, difference (traced
    less what the model's kernels ask for), counted (at L2 without spilled registers), ratio (counted over
    predicted), missed (True outside the band), not_traced and not_counted (why).
    """
    import pandas as pd

    frame = results.labelled
    missed = frame["band_missed"].fillna("")
    parts = []
    for order, (level, counter) in enumerate({**LEVELS, SPILLS: "spill_write_bytes"}.items()):
        part = frame[[*POINT, "not_traced", "not_counted"]].assign(level=level, order=order)
        part["counted"] = frame[f"counted_{counter}"]
        if level in SPILLED:
            part["counted"] -= frame[f"counted_{SPILLED[level]}"].fillna(0)
        part["traced"] = frame.get(f"traced_{REQUESTED.get(level)}_bytes")
        part["difference"] = frame.get(f"{REQUESTED.get(level)}_difference_bytes")
        part["missed"] = [level in names.split(", ") for names in missed]
        for name in ("predicted", "least", "most"):
            part[name] = frame.get(f"{name}_{counter}")
        part["ratio"] = frame.get(f"{counter.removesuffix('_bytes')}_ratio")
        if level in (SPILLS, "L2 atomic"):  # most cells have none
            part = part[part[["predicted", "traced", "counted"]].fillna(0).ne(0).any(axis=1)]
        parts.append(part[part[["traced", "counted"]].notna().any(axis=1)])
    found = pd.concat(parts).sort_values(["cell", "order"], kind="stable")
    return found.drop(columns="order").reset_index(drop=True)


def environment(results: Results) -> DataFrame:
    """(run, item, value) of each header: when, the argv, then the environment with dotted names."""
    import pandas as pd

    rows: list[tuple[str, str, Any]] = []
    for run, header in results.headers.items():
        rows.append((run, "created_at", header.get("created_at")))
        rows.append((run, "argv", header.get("argv")))
        rows += [(run, *item) for item in _flatten(header.get("environment") or {})]
    frame = pd.DataFrame(rows, columns=["run", "item", "value"], dtype=object)
    return frame[[value is not None and value != "" for value in frame["value"]]]


def _flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            found += _flatten(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value))
    return found


def untimed(results: Results) -> DataFrame:
    """Why cells were not timed: (run, implementation, status, reason, passes, seqlens, cells), most first."""
    frame = results.labelled
    frame = frame[frame["status"] != "ok"]
    groups = frame.groupby(["run", "implementation", "status", "reason"], sort=False, dropna=False)
    grouped = groups.agg(
        passes=("pass", lambda column: [name for name in PASS_NAMES if name in set(column)]),
        seqlens=("seqlen", lambda column: sorted(set(column))),
        cells=("seqlen", "size"),
    ).reset_index()
    return grouped.sort_values("cells", ascending=False, kind="stable").reset_index(drop=True)


def not_begun(results: Results) -> list[str]:
    """What of a run was planned and never begun, in words: how many cells, which lengths, why."""
    columns = [name for name in ("status", "reason", *unstarted.TELLS) if name in results.table]
    several, said = len(results.headers) > 1, []
    for run in results.headers:
        rows = tables.rows(results.table.loc[results.table["run"] == run, columns])
        said += [f"{run}: {text}" if several else text for text in unstarted.lines(rows)]
    return said


def cells(results: Results) -> DataFrame:
    """The whole table, a row per cell, in the order of the files, with the filters' columns."""
    frame = results.labelled
    return frame.assign(options=results.table["options"], shown_options=frame["options"])
