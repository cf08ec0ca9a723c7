"""A results file of airspeed velocity (JSON, version 2) as a run.

What a benchmark measures is told by how its name begins, as asv decides it; ``track_`` has no direction and
is left out with a note. A parameter set without a value failed where it is null, and was skipped where it
is NaN."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from flashbench import units
from flashbench.judge.foreign import measured, texts
from flashbench.judge.sides import Measured, Run

KIND = "asv"
VERSION = 2
_MEASURES = {"time": "time_s", "timeraw": "time_s", "mem": "peak_extra_bytes", "peakmem": "peak_extra_bytes"}


def matches(document: Any) -> bool:
    """True for results with named columns."""
    return isinstance(document, dict) and {"result_columns", "results"} <= set(document)


def read(path: Path, document: Mapping[str, Any]) -> Run:
    """The run of one commit on one machine. Raises ValueError for another version of the format."""
    if document.get("version", VERSION) != VERSION:
        raise ValueError(f"version {units.cut(repr(document['version']))}; this flashbench reads {VERSION}")
    columns = list(document["result_columns"])
    cells, measures, left = dict[str, Measured](), dict[str, None](), list[str]()
    for name, row in document["results"].items():
        measure = _MEASURES.get(str(name).rsplit(".", 1)[-1].split("_", 1)[0].lower())
        if measure is None:
            left.append(str(name))
            continue
        measures[measure] = None
        values = dict(zip(columns, row, strict=False))  # asv cuts trailing columns that are null
        cells |= dict(_cells(str(name), measure, values))
    about = document.get("params") or {}
    notes = (f"{len(left)} benchmarks have no direction and are left out, first: {left[0]}",) if left else ()
    return Run(
        path=path, kind=KIND, cells=cells, measures=tuple(measures) or ("time_s",), notes=notes,
        conditions={"estimator": "median", "method": "wall", "cache": "hot", **texts(about, {"cpu":
        "device"})}, versions={ **texts(document, {"commit_hash": "commit"}), **texts(about, {"python":
        "python", "os": "os"}), **{str(name): str(value) for name, value in (document.get("requirements") or
        {}).items()}, },
    )  # fmt: skip


def _cells(name: str, measure: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Measured]]:
    """A cell per set of parameters, in the order in which asv flattens them."""
    sets = list(product(*(values.get("params") or [])))
    results = values.get("result") or [None] * len(sets)
    samples = values.get("samples") or [None] * len(sets)
    version = values.get("version")
    code = {"benchmark": str(version)[:12]} if version else {}
    for chosen, result, raw in zip(sets, results, samples, strict=True):
        key = f"{name}({', '.join(map(str, chosen))})" if chosen else name
        yield key, _cell(measure, result, raw, code)


def _cell(
    measure: str, result: float | None, samples: Sequence[float] | None, code: Mapping[str, str]
) -> Measured:
    if result is None:
        return measured({}, status="failed", reason="null in the results", conditions=code)
    if math.isnan(result):
        return measured({}, status="skipped", reason="NaN in the results", conditions=code)
    return measured({measure: samples or [result]}, conditions=code)
