"""What ``flashbench gate`` writes as a run: a cell per compiled kernel, traced tensor, modelled and checked
cell; all numbers exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flashbench.judge import static
from flashbench.judge.foreign import measured
from flashbench.judge.measures import GATE
from flashbench.judge.sides import Measured, Run

KIND = "flashbench gate"
SCHEMA = 1


def matches(document: Any) -> bool:
    """True for the one object that the command writes."""
    return isinstance(document, dict) and document.get("type") == "gate"


def read(path: Path, document: Mapping[str, Any]) -> Run:
    """The run of a document. Raises ValueError for a newer schema."""
    if document["schema"] != SCHEMA:
        raise ValueError(f"schema {document['schema']!r}; this flashbench reads {SCHEMA}")
    cells = dict(_cell(part, row) for part in GATE for row in document[part])
    return Run(
        path=path,
        kind=KIND,
        cells=cells,
        measures=tuple(measure.name for part in GATE if document[part] for measure in GATE[part]),
        conditions={"device": static.ANY_DEVICE},
        versions={name: str(document[name]) for name in ("triton", "flashbench")},
    )


def _cell(part: str, row: Mapping[str, Any]) -> tuple[str, Measured]:
    if part == "static":
        return f"static {static.key_of(row)}", static.cell_of(row)
    names = [part, row["cell"], *(str(row[name]) for name in ("arch", "kernel", "tensor") if row.get(name))]
    found = _VALUES[part](row)
    status = str(row["status"])
    cell = measured(
        {name: [value] for name, value in found.items() if value is not None},
        status="ok" if part == "check" and status in ("wrong", "failed") else status,
        reason=str(row["reason"] or ""),
        groups={"implementation": row["cell"].split(" ")[0]},
        measures=frozenset(measure.name for measure in GATE[part]),
    )
    return " ".join(names), cell


def _traced(row: Mapping[str, Any]) -> dict[str, Any]:
    moved = {f"traced_{kind}_bytes": row.get(f"{kind}_bytes") for kind in ("read", "write", "atomic")}
    return moved | {f"traced_{name}": row.get(name) for name in ("programs", "flops", "exps")}


def _modelled(row: Mapping[str, Any]) -> dict[str, Any]:
    return {measure.name: row.get(measure.name.removeprefix("modelled_")) for measure in GATE["model"]}


def _checked(row: Mapping[str, Any]) -> dict[str, Any]:
    """A wrong result is a number that got worse, a cell that could not be checked has none."""
    known = {"ok": 0, "wrong": 1, "failed": 1}
    return {"wrong_results": known.get(row["status"])}


_VALUES: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "model": _modelled, "trace": _traced, "check": _checked
}  # fmt: skip
