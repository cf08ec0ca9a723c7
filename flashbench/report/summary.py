"""The words of the report: headline numbers and who is fastest where, computed from the table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flashbench.report import words
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

    claim: ``fastest`` (the implementation that is fastest or level with the fastest in the most problems:
    value, of the ``of`` in which it was timed; ran: its backend where it was one everywhere; lead, lead_low
    and lead_high: the next kernel's time over its own, in the middle, least and most), ``memory_wall`` (the
    shortest length that did not fit, with its reason), ``timed`` (value of ``of`` cells; ``rest``: cells by
    other status, by flag, and not reached; reason: the commonest, where none was timed), ``flops_per_s``
    (the highest), ``roof_fraction`` (nearest to its roof), ``speedup_over_naive`` (the largest),
    ``memory_saving`` (naive's peak_extra_bytes over the least of the same cell).
    A claim that nothing supports has no row.
    """
    import pandas as pd

    timed = _believed(results)
    rows: list[dict[str, Any]] = [*_leader(regimes(results))]
    if len(results.table) or _not_reached(results):
        counts = results.table["status"].value_counts()
        rest = {name: int(count) for name, count in counts.items() if name != "ok"}
        flags = results.table["flags"].dropna().str.split().explode().value_counts()
        rest |= {f"flagged {name}": int(count) for name, count in flags.items()}
        left = _not_reached(results)
        rest |= {"not reached": left} if left else {}
        timed_cells, of = int(counts.get("ok", 0)), len(results.table) + left
        reasons = [] if timed_cells else list(results.table["reason"].dropna())
        why = max(reasons, key=reasons.count) if reasons else None
        rows.append({"claim": "timed", "value": timed_cells, "of": of, "rest": rest, "reason": why})
    for claim in ("flops_per_s", "roof_fraction", "speedup_over_naive"):
        known = timed[timed[claim].notna()]
        if claim == "speedup_over_naive":
            known = known[known["implementation"] != "naive"]
        if len(known):
            best = known.loc[known[claim].idxmax()]
            rows.append({"claim": claim, "value": best[claim], **_cell(best)})
    rows += filter(None, (_memory_saving(timed), _memory_wall(results)))
    rows.sort(key=lambda row: _ORDER.index(row["claim"]))
    columns = ["claim", "value", "of", "rest", "implementation", *CELL, "peak_fraction", *_LEAD, "reason"]
    return pd.DataFrame(rows, columns=columns)


_ORDER = (
    "fastest", "speedup_over_naive", "flops_per_s", "roof_fraction", "memory_wall", "memory_saving", "timed",
)  # fmt: skip
"""What a reader asks first comes first."""
_LEAD = ("ran", "lead", "lead_low", "lead_high")


def nothing(results: Results) -> str:
    """What there is to say where no section has something to show."""
    return "The results hold no cell." if results.table.empty else "No cell was timed."


def _leader(found: DataFrame) -> list[dict[str, Any]]:
    """The implementation that is fastest, or level with the fastest, in the most problems."""
    import pandas as pd

    items = found.to_dict("records")
    covered, entered = (
        {name: sum(item[key].get(name, 0) for item in items) for item in items for name in item[key]}
        for key in ("covers", "entered")
    )
    if not covered:
        return []
    mine = [item for item in items if item["fastest"] == max(covered, key=lambda name: covered[name])]
    if not mine:
        return []
    name, ran = mine[0]["fastest"], {item["ran"] if words.known(item["ran"]) else None for item in mine}
    leads = pd.Series([lead for item in mine for lead in item["leads"]], dtype="float64")
    return [{
        "claim": "fastest", "implementation": name, "value": covered[name],
        "of": entered[name], "ran": ran.pop() if len(ran) == 1 else None,
        "lead": leads.median(), "lead_low": leads.min(), "lead_high": leads.max(),
    }]  # fmt: skip


def _memory_wall(results: Results) -> dict[str, Any] | None:
    """The shortest cell that had no room."""
    frame = results.labelled
    walls = frame[[words.out_of_memory(row) for row in frame[["status", "reason"]].itertuples(index=False)]]
    if walls.empty:
        return None
    first = walls.sort_values("seqlen", kind="stable").iloc[0]
    return {"claim": "memory_wall", "value": int(first["seqlen"]), "reason": first["reason"], **_cell(first)}


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

    Columns: the filters, run, fastest (fastest or level with the fastest at the most lengths), lengths_won
    (so many), lengths, covers (of every implementation, at how many), entered (at how many it was timed),
    spans (implementation, first and last length of each stretch), level (implementations of another kernel
    that are level with it, and where), ran (its backend where it was one), twins (implementations that ran
    the same), leads (the next kernel's time
    over its own at each length), flops_per_s, peak_fraction and roof_fraction at its best length
    ``best_seqlen``, speedup_low and speedup_high over naive (NaN without it) with the spread of the latter,
    next_best (of another kernel, where there is one), lead (its time over the fastest's) and lead_spread at
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
    "fastest", "lengths_won", "lengths", "covers", "entered", "spans", "level", "ran", "twins", "leads",
    "flops_per_s", "peak_fraction", "roof_fraction",
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
    spreads = panel.pivot_table(index="seqlen", columns="implementation", values="spread", aggfunc="max")
    spreads = spreads.reindex(index=times.index, columns=times.columns)
    level = {int(at): _level(row.dropna(), spreads.loc[at]) for at, row in contested.iterrows()}
    winners = _leaders(level)
    fastest = next(iter(winners.values()))
    ran = _backends(panel)
    twins = [name for name in times.columns if name != fastest and ran.get(name, 0) == ran.get(fastest, 1)]
    mine = panel[panel["implementation"] == fastest]
    best = mine.loc[mine["flops_per_s"].idxmax()]
    shared = contested[contested[fastest].notna()].drop(columns=fastest)
    others = shared.drop(columns=twins).dropna(how="all")
    others = shared if others.empty else others
    last = others.iloc[-1].dropna()
    at, rival = others.index[-1], str(last.idxmin())
    return {
        **key, "fastest": fastest, "lengths_won": sum(fastest in names for names in level.values()),
        "lengths": len(contested), "spans": _spans(winners), "ran": ran.get(fastest), "twins": twins,
        "covers": {name: sum(name in names for names in level.values()) for name in times.columns},
        "entered": {str(name): int(contested[name].notna().sum()) for name in contested},
        "level": _beside(level, winners, fastest, twins),
        "leads": list(others.min(axis=1) / times.loc[others.index, fastest]),
        **{name: best[name] for name in ("flops_per_s", "peak_fraction", "roof_fraction")},
        "best_seqlen": int(best["seqlen"]),
        **_speedups(mine, spreads, fastest),
        "next_best": rival, "lead": float(last.min() / times.loc[at, fastest]),
        "lead_spread": _of_ratio(spreads.loc[at, fastest], spreads.loc[at, rival]), "lead_seqlen": int(at),
        **_memory(panel, fastest),
    }  # fmt: skip


def _level(times: Series, spreads: Series) -> list[str]:
    """Who is fastest at a length, then who is level with it: no further behind than both spreads explain."""
    first = times.idxmin()
    behind = (times / times[first]).sort_values(kind="stable")
    near = [
        str(name) for name, ratio in behind.items()
        if name != first and ratio - 1 <= _of_ratio(spreads[first], spreads[name]) * ratio
    ]  # fmt: skip
    return [str(first), *near]


def _leaders(level: Mapping[int, list[str]]) -> dict[int, str]:
    """Who is named at each length: as few names as do, the one of the most lengths first."""
    found: dict[int, str] = {}
    while left := {at: names for at, names in level.items() if at not in found}:
        wins: dict[str, tuple[int, int, int]] = {}
        for at, names in left.items():
            for place, name in enumerate(names):
                covered, won, _ = wins.get(name, (0, 0, 0))
                wins[name] = (covered + 1, won + (place == 0), at)
        best = max(wins, key=lambda name: wins[name])
        found |= {at: best for at, names in left.items() if best in names}
    return found


def _backends(panel: DataFrame) -> dict[str, str]:
    """What each implementation ran, of those that ran one backend at every length."""
    found = panel.dropna(subset=["backend"]).groupby("implementation")["backend"].unique()
    return {str(name): str(each[0]) for name, each in found.items() if len(each) == 1}


def _beside(
    level: Mapping[int, list[str]], winners: Mapping[int, str], fastest: str, twins: list[str]
) -> list[tuple[str, list[int]]]:
    """Who is level with the fastest where that one is named, but for those that run the same."""
    found: dict[str, list[int]] = {}
    for at, names in level.items():
        for name in names:
            if winners[at] == fastest and name != fastest and name not in twins:
                found.setdefault(name, []).append(at)
    return list(found.items())


def _spans(winners: Mapping[int, str]) -> list[tuple[str, int, int]]:
    spans: list[tuple[str, int, int]] = []
    for length, name in sorted(winners.items()):
        first = spans.pop()[1] if spans and spans[-1][0] == name else length
        spans.append((name, first, length))
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
