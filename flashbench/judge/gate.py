"""What ``flashbench gate`` writes as a run: a cell per compiled kernel, launch configuration, traced tensor,
modelled and checked cell; all numbers exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flashbench.judge import static
from flashbench.judge.foreign import measured
from flashbench.judge.measures import GATE
from flashbench.judge.sides import Measured, Run

KIND = "flashbench gate"
SCHEMA = 1
TILES = "tiles"
"""The part that files of before it lack."""


def matches(document: Any) -> bool:
    """True for the one object that the command writes."""
    return isinstance(document, dict) and document.get("type") == "gate"


def read(path: Path, document: Mapping[str, Any]) -> Run:
    """The run of a document. Raises ValueError for a newer schema."""
    if document["schema"] != SCHEMA:
        raise ValueError(f"schema {document['schema']!r}; this flashbench reads {SCHEMA}")
    there = {part: document[part] for part in GATE if part != TILES or part in document}
    cells = dict(cell for part, rows in there.items() for row in rows for cell in _cells(part, row))
    measures = (measure.name for part, rows in there.items() if rows for measure in GATE[part])
    return Run(
        path=path,
        kind=KIND,
        cells=cells,
        measures=tuple(dict.fromkeys(measures)),
        conditions={"device": static.ANY_DEVICE},
        versions={name: str(document[name]) for name in ("triton", "flashbench")},
    )


def _cells(part: str, row: Mapping[str, Any]) -> Iterator[tuple[str, Measured]]:
    """The cells of a row: one, or one of each architecture that its configuration is for."""
    if part != TILES:
        yield _cell(part, row)
        return
    names = [measure.name for measure in GATE[TILES] if measure.name in row]
    for arch in row["archs"]:
        cell = measured(
            {name: [row[name]] for name in names},
            groups={"implementation": row["cell"].split(" ")[0], "arch": str(arch)},
            measures=frozenset(names),
        )
        yield f"{TILES} {row['cell']} {arch}", cell


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
