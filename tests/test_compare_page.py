"""The page of a comparison shows what was judged: every cell, its ratio and interval, and nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic

from flashbench import judge
from flashbench.judge import MEASURES, Rules, Side
from flashbench.judge.native import run_of
from flashbench.report import compare_page

HOSTILE = "</script><img src=x onerror=alert(1)>"


def side(name: str, factor: float, reason: str = "no room") -> Side:
    records = []
    for one in synthetic.sweep(implementations=("naive", "flash"), lengths=(1024, 2048), passes=("fwd",)):
        times = tuple(value * factor for value in one.samples.samples_s)
        records.append(replace(one, samples=replace(one.samples, samples_s=times)))
    records.append(synthetic.record("sdpa", 4096, status="oom" if factor != 1 else "skipped", reason=reason))
    return Side(name=name, runs=(run_of(synthetic.run_file(records, path=Path(f"{name}.jsonl"))),))


@pytest.fixture(scope="module")
def comparison() -> judge.Comparison:
    return judge.compare(side("base", 1.0), side("new", 1.2), MEASURES["time_s"], Rules())


def test_a_row_per_cell_with_what_was_judged(comparison: judge.Comparison) -> None:
    found = compare_page.rows([comparison])
    assert [(row["cell"], row["verdict"]) for row in found] == [
        (cell.cell, cell.verdict) for cell in comparison.cells
    ]
    known = [row for row in found if row["ratio"]]
    assert len(known) == 16
    assert [row["ratio"] for row in known] == pytest.approx([1.2] * 16)
    assert all(row["low"] < row["ratio"] < row["high"] for row in known)


def test_the_heat_map_has_a_field_per_length_and_head_dim(comparison: judge.Comparison) -> None:
    figure = compare_page.heat(compare_page.rows([comparison])).plotly()
    assert len(figure.data) == 4  # 2 implementations x 2 masks
    for trace in figure.data:
        assert (list(trace.x), list(trace.y)) == (["1k", "2k"], ["64", "128"])
        assert [change for line in trace.z for change in line] == pytest.approx([0.2] * 4)
        assert [text for line in trace.text for text in line] == ["1.200"] * 4  # never colour alone


def test_error_bars_are_the_intervals(comparison: judge.Comparison) -> None:
    rows = compare_page.rows([comparison])
    trace = compare_page.intervals(rows).plotly().data[0]
    where = trace.meta["where"]
    mine = [
        row for row in rows
        if row["implementation"] == trace.name and all(row[key] == value for key, value in where.items())
    ]  # fmt: skip
    mine.sort(key=lambda row: int(row["seqlen"]))
    assert list(trace.error_y.array) == pytest.approx([row["high"] - row["ratio"] for row in mine])
    assert list(trace.error_y.arrayminus) == pytest.approx([row["ratio"] - row["low"] for row in mine])


def test_text_of_files_stays_text(comparison: judge.Comparison) -> None:
    judged = judge.compare(side("base", 1.0), side("new", 1.2, HOSTILE), MEASURES["time_s"], Rules())
    page = compare_page.build([judged], notes=[HOSTILE], sides={"base": [HOSTILE], "new": ["b"]})
    assert "<img" not in page
    [grid] = re.findall(r'class="grid-data">(.*?)</script>', page, re.DOTALL)
    assert any(HOSTILE in str(text) for text in json.loads(grid)["texts"])


def test_nothing_in_common_is_a_page_that_says_so() -> None:
    empty = judge.Comparison(
        measure=MEASURES["time_s"], cells=(), groups=(), spread=judge.Repeats()
    )  # fmt: skip
    page = compare_page.build([empty], sides={"base": ["a"], "new": ["b"]})
    assert "No cell of these runs has a ratio" in page
