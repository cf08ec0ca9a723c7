"""The words of the report: headline numbers and who is fastest where, computed from the table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashbench.report.data import KEYS, Results, labelled

if TYPE_CHECKING:
    from pandas import DataFrame

CELL = [*KEYS, "run", "batch", "num_heads", "seqlen"]


def _believed(results: Results) -> DataFrame:
    """Timed cells of exact attention without the flag ``suspect``: what a claim may rest on."""
    frame = labelled(results.table)
    suspect = frame["flags"].fillna("").str.contains("suspect")
    return frame[(frame["status"] == "ok") & ~suspect & frame["exact"].astype(bool)]


def headline(results: Results) -> DataFrame:
    """The page's big numbers: one row per claim (claim, value, of, and the cell that holds it).

    claim: ``timed`` (value of ``of`` cells; ``rest``: cells by other status and by flag), ``flops_per_s``
    (the highest), ``speedup_over_naive`` (the largest), ``memory_saving`` (naive's peak_extra_bytes
    over the least of the same cell).
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
        timed_cells = int(counts.get("ok", 0))
        rows.append({"claim": "timed", "value": timed_cells, "of": len(results.table), "rest": rest})
    for claim in ("flops_per_s", "speedup_over_naive"):
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

    Columns: the filters, run, fastest (most lengths won, then the longest), lengths_won, lengths,
    flops_per_s and peak_fraction at its best length ``best_seqlen``, speedup_low and speedup_high
    over naive (NaN without naive), next_best and lead (its time over the fastest's) at the longest
    length ``lead_seqlen`` that both have.
    """
    import pandas as pd

    timed = _believed(results)
    order = {name: {value: at for at, value in enumerate(timed[name].unique())} for name in ["run", *KEYS]}
    panels = sorted(
        timed.groupby(list(order), sort=False),
        key=lambda item: [order[name][value] for name, value in zip(order, item[0], strict=True)],
    )
    rows = [
        found
        for key, panel in panels
        if (found := _regime(dict(zip(order, key, strict=True)), panel)) is not None
    ]
    columns = ["run", *KEYS, "fastest", "lengths_won", "lengths", "flops_per_s", "peak_fraction"]
    more = ["best_seqlen", "speedup_low", "speedup_high", "next_best", "lead", "lead_seqlen"]
    return pd.DataFrame(rows, columns=columns + more)


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
    speedups = mine["speedup_over_naive"] if fastest != "naive" else mine["speedup_over_naive"].iloc[:0]
    shared = contested[contested[fastest].notna()]
    last = shared.iloc[-1].dropna().drop(fastest)
    return {
        **key, "fastest": fastest, "lengths_won": int(won.max()), "lengths": len(contested),
        "flops_per_s": best["flops_per_s"], "peak_fraction": best["peak_fraction"],
        "best_seqlen": int(best["seqlen"]),
        "speedup_low": speedups.min(), "speedup_high": speedups.max(),
        "next_best": last.idxmin(), "lead": float(last.min() / shared.iloc[-1][fastest]),
        "lead_seqlen": int(shared.index[-1]),
    }  # fmt: skip
