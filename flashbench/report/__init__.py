"""The HTML report: one self-contained file, from the joined table alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pandas import DataFrame

    from flashbench.ceilings import Ceilings
    from flashbench.report.data import Results


def build(
    table: DataFrame,
    headers: Mapping[str, Mapping[str, Any]],
    numerics: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    blocks: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    ceilings: Mapping[str, Ceilings] | None = None,
    timelines: Mapping[str, Mapping[str, Any]] | None = None,
) -> str:
    """The page as text: opens offline from disk, asks nothing of any network.

    table: table.build's frame; headers: table.headers' run headers by run name; numerics, blocks, ceilings:
    table's of the same name; timelines: report.timelines.load's.
    """
    from flashbench.report.data import Results

    return of(Results(
        table=table, headers=headers, numerics=numerics or {}, blocks=blocks or {}, ceilings=ceilings or {},
        timelines=timelines or {},
    ))  # fmt: skip


def of(results: Results) -> str:
    """The page as text."""
    from flashbench.report import page, summary
    from flashbench.report.sections import SECTIONS

    if len(results.table) and (results.table["status"] != "profiled").any():
        return page.document(results, SECTIONS, [page.section(row, results) for row in SECTIONS])
    # no cell, or none that was more than counted and traced: most sections would say so one after the other
    shown = [row for row in SECTIONS if not row.data(results).empty]
    without = page.without(summary.nothing(results), [row for row in SECTIONS if row not in shown])
    return page.document(results, shown, [*(page.section(row, results) for row in shown), without])
