"""The words of the report: headline numbers and who is fastest where, computed from the table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from flashbench.report.data import KEYS, Results

if TYPE_CHECKING:
    from pandas import DataFrame, Series

CELL = [*KEYS, "run", "batch", "num_heads", "seqlen"]


def _believed(results: Results) -> DataFrame:
    """Timed cells of exact attention without the flag ``suspect``: what a claim may rest on."""
    frame = results.labelled
    suspect = frame["flags"].fillna("").str.contains("suspect")
    return frame[(frame["status"] == "ok") & ~suspect & frame["exact"].astype(bool)]


def headline(results: Results) -> DataFrame:
    """The page's big numbers: one row per claim (claim, value, of, and the cell that holds it).

    claim: ``timed`` (value of ``of`` cells; ``rest``: cells by other status, by flag, and not reached),
    ``flops_per_s`` (the highest), ``roof_fraction`` (nearest to its roof), ``speedup_over_naive`` (the
    largest), ``memory_saving`` (naive's peak_extra_bytes over the least of the same cell).
    A claim that nothing supports has no row.
    """
    import pandas as pd

    timed = _believed(results)
    rows: list[dict[str, Any]] = []
    if len(results.table):
        counts = results.table["status"].value_counts()
        rest = {name: int(count) for name, count in counts.items() if name != "ok"}
        flags = results.table["flags"].dropna().str.split().explode().value_counts()
        rest |= {f"flagged {name}": int(count) for name, count in flags.items()}
        left = _not_reached(results)
        rest |= {"not reached": left} if left else {}
        timed_cells, of = int(counts.get("ok", 0)), len(results.table) + left
        rows.append({"claim": "timed", "value": timed_cells, "of": of, "rest": rest})
    for claim in ("flops_per_s", "roof_fraction", "speedup_over_naive"):
        known = timed[timed[claim].notna()]
        if claim == "speedup_over_naive":
            known = known[known["implementation"] != "naive"]
        if len(known):
            best = known.loc[known[claim].idxmax()]
            rows.append({"claim": claim, "value": best[claim], **_cell(best)})
    saving = _memory_saving(timed)
    if saving is not None:
        rows.append(saving)
    columns = ["claim", "value", "of", "rest", "implementation", *CELL, "peak_fraction"]
    return pd.DataFrame(rows, columns=columns)


def _not_reached(results: Results) -> int:
    """Cells that a run planned and has no row for: it was stopped, or is at work."""
    keys = results.table.groupby("run")["key"].agg(set)
    planned = {run: header.get("cells") for run, header in results.headers.items()}
    return sum(
        len({key for key in cells if isinstance(key, str)} - keys.get(run, set()))
        for run, cells in planned.items()
        if isinstance(cells, list)
    )


def _cell(row: Any) -> dict[str, Any]:
    return {name: row[name] for name in ["implementation", *CELL, "peak_fraction"]}


def _memory_saving(timed: DataFrame) -> dict[str, Any] | None:
    known = timed[timed["peak_extra_bytes"].notna() & (timed["peak_extra_bytes"] > 0)]
    naive = known[known["implementation"] == "naive"][[*CELL, "peak_extra_bytes"]]
    pairs = known[known["implementation"] != "naive"].merge(naive, on=CELL, suffixes=("", "_naive"))
    if pairs.empty:
        return None
    ratio = (pairs["peak_extra_bytes_naive"] / pairs["peak_extra_bytes"]).astype("float64")
    best = pairs.loc[ratio.idxmax()]
    return {"claim": "memory_saving", "value": float(ratio.max()), **_cell(best)}


def regimes(results: Results) -> DataFrame:
    """Who is fastest: one row per run and combination of the filters with two timed implementations.

    Columns: the filters, run, fastest (most lengths won, then the longest), lengths_won, lengths, spans
    (implementation, first and last length of each stretch won in a row), flops_per_s, peak_fraction and
    roof_fraction at its best length ``best_seqlen``, speedup_low and speedup_high over naive (NaN without
    naive) with the spread of the latter, next_best, lead (its time over the fastest's) and lead_spread at
    the longest length ``lead_seqlen`` that both have, memory_ratio (naive's extra memory over the
    fastest's) at the longest length ``memory_seqlen`` of both, untimed (implementation, status, lengths,
    reason). A spread of a ratio is half the root of the sum of both spreads squared.
    """
    import pandas as pd

    timed = _believed(results)
    order = {name: {value: at for at, value in enumerate(timed[name].unique())} for name in ["run", *KEYS]}
    panels = sorted(
        timed.groupby(list(order), sort=False),
        key=lambda item: [order[name][value] for name, value in zip(order, item[0], strict=True)],
    )
    missing = _untimed(results)
    rows = []
    for key, panel in panels:
        found = _regime(dict(zip(order, key, strict=True)), panel)
        if found is not None:
            rows.append({**found, "untimed": missing.get(key, [])})
    return pd.DataFrame(rows, columns=["run", *KEYS, *_REGIME])


_REGIME = (
    "fastest", "lengths_won", "lengths", "spans", "flops_per_s", "peak_fraction", "roof_fraction",
    "best_seqlen", "speedup_low", "speedup_high", "speedup_spread", "next_best", "lead", "lead_spread",
    "lead_seqlen", "memory_ratio", "memory_seqlen", "untimed",
)  # fmt: skip


def _untimed(results: Results) -> dict[tuple[str, ...], list[tuple[str, str, list[int], str]]]:
    """What was asked for and has no time, by run and filters: implementation, status, lengths, reason."""
    frame = results.labelled
    frame = frame[~frame["status"].isin(["ok", "profiled"])]
    found: dict[tuple[str, ...], list[tuple[str, str, list[int], str]]] = {}
    for key, rows in frame.groupby(["run", *KEYS, "implementation"], sort=False):
        lengths = sorted(set(map(int, rows["seqlen"])))
        first = rows.sort_values("seqlen").iloc[0]
        found.setdefault(key[:-1], []).append((key[-1], first["status"], lengths, str(first["reason"])))
    return found


def _regime(key: dict[str, Any], panel: DataFrame) -> dict[str, Any] | None:
    if panel["implementation"].nunique() < 2:
        return None
    times = panel.pivot_table(index="seqlen", columns="implementation", values="time_s", aggfunc="min")
    contested = times[times.notna().sum(axis=1) > 1]
    if contested.empty:
        return None
    winners = contested.idxmin(axis=1)
    won = winners.value_counts()
    ties = list(won[won == won.max()].index)
    fastest = next(name for name in winners.iloc[::-1] if name in ties)
    mine = panel[panel["implementation"] == fastest]
    best = mine.loc[mine["flops_per_s"].idxmax()]
    shared = contested[contested[fastest].notna()]
    last = shared.iloc[-1].dropna().drop(fastest)
    spreads = panel.pivot_table(index="seqlen", columns="implementation", values="spread", aggfunc="max")
    spreads = spreads.reindex(index=times.index, columns=times.columns)
    at, rival = shared.index[-1], str(last.idxmin())
    return {
        **key, "fastest": fastest, "lengths_won": int(won.max()), "lengths": len(contested),
        "spans": _spans(winners),
        **{name: best[name] for name in ("flops_per_s", "peak_fraction", "roof_fraction")},
        "best_seqlen": int(best["seqlen"]),
        **_speedups(mine, spreads, fastest),
        "next_best": rival, "lead": float(last.min() / shared.iloc[-1][fastest]),
        "lead_spread": _of_ratio(spreads.loc[at, fastest], spreads.loc[at, rival]), "lead_seqlen": int(at),
        **_memory(panel, fastest),
    }  # fmt: skip


def _spans(winners: Series) -> list[tuple[str, int, int]]:
    spans: list[tuple[str, int, int]] = []
    for length, name in winners.items():
        first = spans.pop()[1] if spans and spans[-1][0] == name else int(length)
        spans.append((str(name), first, int(length)))
    return spans


def _of_ratio(one: float, other: float) -> float:
    return math.hypot(one, other) / 2


def _speedups(mine: DataFrame, spreads: DataFrame, fastest: str) -> dict[str, float]:
    """The least and the largest speed-up over naive, and the spread of the largest."""
    known = mine[mine["speedup_over_naive"].notna()]
    if fastest == "naive" or known.empty:
        return dict.fromkeys(("speedup_low", "speedup_high", "speedup_spread"), math.nan)
    top = known.loc[known["speedup_over_naive"].idxmax()]
    naive = spreads["naive"].get(top["seqlen"], math.nan) if "naive" in spreads else math.nan
    return {
        "speedup_low": known["speedup_over_naive"].min(), "speedup_high": top["speedup_over_naive"],
        "speedup_spread": _of_ratio(top["spread"], naive),
    }  # fmt: skip


def _memory(panel: DataFrame, fastest: str) -> dict[str, float]:
    """naive's extra memory over the fastest's at the longest length at which both were measured."""
    known = panel[panel["peak_extra_bytes"].notna() & (panel["peak_extra_bytes"] > 0)]
    sizes = known.pivot_table(
        index="seqlen", columns="implementation", values="peak_extra_bytes", aggfunc="min"
    )
    if fastest == "naive" or not {"naive", fastest} <= set(sizes.columns):
        return {"memory_ratio": math.nan, "memory_seqlen": math.nan}
    both = sizes[["naive", fastest]].dropna()
    if both.empty:
        return {"memory_ratio": math.nan, "memory_seqlen": math.nan}
    return {
        "memory_ratio": float(both["naive"].iloc[-1]) / float(both[fastest].iloc[-1]),
        "memory_seqlen": int(both.index[-1]),
    }
