"""The section of the literature's claims: what the cells of the page, or of a folder, say of each."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING, Any

from flashbench import claims, table, unstarted
from flashbench.report.data import Results
from flashbench.report.html import row_of
from flashbench.report.html import table as html_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pandas import DataFrame

    from flashbench.claims import Claim, Judged
    from flashbench.report.sections import Section

_COLUMNS = ("run", "says", "source", "conditions", "shown", "verdict", "cards", "judged")


def data(results: Results) -> DataFrame:
    """A row per claim and run: the folder's, if one was given, else those that a run's own cells bear on, and
    then, not judged, the claims that no run's do. None where there is nothing but these.
    """
    import pandas as pd

    rows = [_row("", one) for one in results.claims]
    if not rows:
        known = claims.load()
        found = list(_of_runs(results, known))
        rows = [_row(run, one) for run, one in found]
        others = claims.unjudged(known, (one for _, one in found)) if rows else []
        rows += [{**_row("", one), "judged": False} for one in others]
    return pd.DataFrame(rows, columns=list(_COLUMNS), dtype=object)


def _of_runs(results: Results, known: Sequence[Claim]) -> Iterator[tuple[str, Judged]]:
    """Each run by itself: two cards, or two versions, are not set beside each other."""
    frame = results.table
    wanted = [name for name in frame.columns if name in {"key", *claims.columns(known)}]
    for run, header in results.headers.items():
        card = (header.get("environment") or {}).get("device_name")
        rows = table.rows(frame.loc[frame["run"] == run, wanted])
        blocks = claims.timed(results.blocks.get(run, ()), card)
        rows += unstarted.unreached(header, rows)
        yield from ((run, one) for one in claims.of_rows(known, [*rows, *blocks]))


def _row(run: str, one: Judged) -> dict[str, Any]:
    claim = one.claim
    return {
        "run": run, "says": claim.says, "source": claim.source, "conditions": claim.conditions,
        "shown": one.shown, "verdict": one.verdict, "cards": ", ".join(one.cards),
        "judged": True,
    }  # fmt: skip


def page(_: Section, frame: DataFrame) -> str:
    """A row per claim; the run where there are several. Below, folded, a line for each that is not judged."""
    judged = frame[frame["judged"].astype(bool)]
    several = judged["run"].nunique() > 1
    head = ["claim", "source and conditions", "what is seen here", "verdict", "card"]
    lines = [row_of(_line(item, several)) for item in judged.to_dict("records")]
    table = html_table([*(["run"] if several else []), *head], lines, ' class="texts"')
    return table + _others(frame[~frame["judged"].astype(bool)].to_dict("records"))


def _others(items: Sequence[dict[str, Any]]) -> str:
    """The claims that are not judged, each with why."""
    if not items:
        return ""
    said = "".join(f"<li>{escape(item['says'])}: {_text(item['shown'])}</li>" for item in items)
    count = f"{len(items)} claim{'s' * (len(items) > 1)} not judged by these cells"
    summary = f"<summary>{count}, and what would judge them</summary>"
    return f'<details class="others">{summary}<ul>{said}</ul></details>'


def _line(item: dict[str, Any], several: bool) -> Iterable[str]:
    cells = [
        item["says"], f"{item['source']}; {item['conditions']}", item["shown"], item["verdict"],
        item["cards"] or "–",
    ]  # fmt: skip
    return map(_text, [*([item["run"]] if several else []), *cells])


def _text(value: str) -> str:
    """Escaped, with commands in backticks as code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(value))
