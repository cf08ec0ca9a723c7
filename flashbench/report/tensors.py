"""The section of bytes by tensor: what each algorithm reads and writes of which tensor, by its model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from flashbench import iomodel
from flashbench import table as tables
from flashbench.errors import FlashbenchError
from flashbench.problem import Problem
from flashbench.report import words
from flashbench.report.data import KEYS, Results
from flashbench.report.grid import Column, Grid, html
from flashbench.units import format_length

if TYPE_CHECKING:
    from pandas import DataFrame

    from flashbench.iomodel import Step
    from flashbench.report.sections import Section

PARTS = ("read", "write", "atomic")


def data(results: Results) -> DataFrame:
    """Requested bytes by model and tensor, at the longest length of each selection.

    Columns: the filters, model, seqlen, tensor, read, write and atomic (bytes of the pass, of all kernels).
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    plain = results.labelled[results.table["options"].isna()]
    longest = plain.sort_values("seqlen", kind="stable").drop_duplicates(KEYS, keep="last").sort_index()
    for item in longest.to_dict("records"):
        problem = Problem(**{name: item[name] for name in tables.PROBLEM_COLUMNS})
        for model in (row.name for row in iomodel.MODELS if row.shown):
            for tensor, moved in _moved(model, problem, item["pass"]).items():
                where = {key: item[key] for key in KEYS}
                rows.append({**where, "model": model, "seqlen": item["seqlen"], "tensor": tensor, **moved})
    return pd.DataFrame(rows, columns=[*KEYS, "model", "seqlen", "tensor", *PARTS])


def _moved(model: str, problem: Problem, pass_: str) -> dict[str, dict[str, int]]:
    try:
        steps = iomodel.estimate(model, problem, pass_).steps
    except FlashbenchError:
        return {}
    return of_steps(steps)


def of_steps(steps: Iterable[Step]) -> dict[str, dict[str, int]]:
    """Bytes of all kernels by tensor and by what is done to it."""
    found: dict[str, dict[str, int]] = {}
    for step in steps:
        for part in PARTS:
            for tensor, count in getattr(step, part).items():
                of = found.setdefault(tensor, dict.fromkeys(PARTS, 0))
                of[part] += count
    return found


def page(_: Section, frame: DataFrame) -> str:
    """The table, of the selection that is shown."""
    columns = [
        Column(name="model", title="algorithm", texts=frame["model"].tolist()),
        Column(
            name="seqlen_k", title="keys", texts=list(map(format_length, frame["seqlen"])),
            values=frame["seqlen"].tolist(),
        ),
        Column(name="tensor", title="tensor", texts=frame["tensor"].tolist()),
        *(
            Column(
                name=f"{part}_bytes", title=title, values=frame[part].tolist(),
                texts=[words.bytes_text(value) if value else "" for value in frame[part]],
            )
            for part, title in zip(PARTS, ("read", "written", "added atomically"), strict=True)
        ),
    ]  # fmt: skip
    where = frame[KEYS].to_dict("records")
    return html(Grid(key="tensors-table", label="Bytes by tensor", columns=columns, where=where, tools=True))
