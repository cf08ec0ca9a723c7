"""What ``profile --static --json`` prints as a run: each kernel's resources, exact to the last unit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashbench.judge.foreign import measured
from flashbench.judge.measures import STATIC
from flashbench.judge.sides import Measured, Run

KIND = "flashbench profile --static"
ANY_DEVICE = "any device"
"""What is exact without a GPU is of no card."""
NAMES = frozenset(measure.name for measure in STATIC)


def matches(document: Any) -> bool:
    """True for a list of compiled kernels."""
    return (
        isinstance(document, list)
        and bool(document)
        and all(isinstance(row, dict) and {"kernel", "registers_per_thread"} <= set(row) for row in document)
    )


def read(path: Path, document: list[dict[str, Any]]) -> Run:
    """The run of a list of kernels; a cell is a kernel, architecture, dtype, head dim and mask."""
    versions = {str(row["triton_version"]) for row in document}
    return Run(
        path=path,
        kind=KIND,
        cells={key_of(row): cell_of(row) for row in document},
        measures=tuple(measure.name for measure in STATIC),
        conditions={"device": ANY_DEVICE},
        versions={"triton": " and ".join(sorted(versions))},
    )


def key_of(row: Mapping[str, Any]) -> str:
    """What a compiled kernel is called."""
    names = ("implementation", "pass", "kernel", "arch", "dtype")
    return " ".join([*(str(row[name]) for name in names), f"d{row['head_dim']}", _mask(row)])


def _mask(row: Mapping[str, Any]) -> str:
    return "causal" if row["causal"] else "full"


def cell_of(row: Mapping[str, Any]) -> Measured:
    """A compiled kernel's numbers."""
    values = {measure.name: row.get(measure.name) for measure in STATIC}
    if row.get("static_shared_bytes") is not None:
        values["shared_bytes"] = row["static_shared_bytes"] + row["dynamic_shared_bytes"]
    return measured(
        {name: [value] for name, value in values.items() if value is not None},
        status=str(row["status"]),
        reason=str(row["reason"] or ""),
        measures=NAMES,
        groups={
            "implementation": str(row["implementation"]), "pass": str(row["pass"]), "arch": str(row["arch"]),
            "kernel": str(row["kernel"]), "dtype": str(row["dtype"]), "head_dim": str(row["head_dim"]),
            "mask": _mask(row),
        },
    )  # fmt: skip
