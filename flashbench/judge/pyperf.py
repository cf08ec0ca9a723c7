"""A pyperf suite (JSON, version 1.0) as a run: the values of all its processes are the samples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashbench import units
from flashbench.judge.foreign import measured, texts
from flashbench.judge.sides import Run

KIND = "pyperf"
_MEASURES = {"second": "time_s", "byte": "peak_extra_bytes"}
_VERSIONS = {"python_version": "python", "perf_version": "pyperf", "platform": "platform"}


def matches(document: Any) -> bool:
    """True for a suite of benchmarks that have runs."""
    benchmarks = document.get("benchmarks") if isinstance(document, dict) else None
    return isinstance(benchmarks, list) and any(isinstance(one, dict) and "runs" in one for one in benchmarks)


def read(path: Path, document: Mapping[str, Any]) -> Run:
    """The run of a suite. Raises ValueError for a unit that has no direction and for a name that two have."""
    shared = document.get("metadata") or {}
    cells, measures = {}, dict[str, None]()
    about: dict[str, Any] = dict(shared)
    for benchmark in document["benchmarks"]:
        own = {**shared, **(benchmark.get("metadata") or {})}
        for metadata in (own, *(run.get("metadata") or {} for run in benchmark["runs"])):
            about |= metadata
        unit = own.get("unit", "second")
        if unit not in _MEASURES:
            raise ValueError(f"unit {unit!r} has no direction; accepted: {', '.join(_MEASURES)}")
        values = [value for run in benchmark["runs"] for value in run.get("values") or ()]
        measures[_MEASURES[unit]] = None
        name = str(own.get("name", path.stem))
        if name in cells:
            raise ValueError(f"two benchmarks are named {units.quoted(name)}; accepted: a name each")
        cells[name] = measured({_MEASURES[unit]: values})
    conditions = {"estimator": "median", "method": "wall", "cache": "hot"}
    return Run(
        path=path, kind=KIND, cells=cells, measures=tuple(measures),
        conditions={**conditions, **texts(about, {"cpu_model_name": "device"})},
        versions=texts(about, _VERSIONS),
    )  # fmt: skip
