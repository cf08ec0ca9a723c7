"""Results of NVIDIA's nvbench (``--json`` or ``--jsonbin``) as a run: cold measurements on the GPU.

With ``--jsonbin`` the samples stand in files beside the JSON, as little-endian float32 seconds; else each
state has one number, its median or, from older versions, its mean."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashbench import paths
from flashbench.judge.foreign import measured, texts
from flashbench.judge.sides import Measured, Run

KIND = "nvbench"
_SAMPLES = "nv/json/bin:nv/cold/sample_times"
_TIME = "nv/cold/time/gpu/"


def matches(document: Any) -> bool:
    """True for benchmarks with states."""
    benchmarks = document.get("benchmarks") if isinstance(document, dict) else None
    return isinstance(benchmarks, list) and any(
        isinstance(one, dict) and "states" in one for one in benchmarks
    )


def read(path: Path, document: Mapping[str, Any]) -> Run:
    """The run of one file; the device stands in each cell's conditions, as a file may hold several."""
    devices = {one["id"]: str(one["name"]) for one in document["devices"]}
    states = [(str(one["name"]), state) for one in document["benchmarks"] for state in one["states"] or ()]
    several = len({state.get("device") for _, state in states}) > 1
    cells = {}
    for name, state in states:
        key = _key(name, state)
        if several:  # else the device is a condition alone, so that files of two cards have cells in common
            key += f" on {devices.get(state.get('device'), 'no device')}"
        cells[key] = _cell(path, state, devices)
    version = (document.get("meta") or {}).get("version") or {}
    return Run(
        path=path, kind=KIND, cells=cells,
        versions={"nvbench": str((version.get("nvbench") or {}).get("string", "unknown"))} | texts(
            (version.get("json") or {}), {"string": "nvbench JSON"}
        ),
    )  # fmt: skip


def _key(name: str, state: Mapping[str, Any]) -> str:
    """The benchmark and its axes."""
    axes = [f"{axis['name']}={axis['value']}" for axis in state.get("axis_values") or ()]
    return " ".join([name, *axes])


def _cell(path: Path, state: Mapping[str, Any], devices: Mapping[int, str]) -> Measured:
    conditions = {"cache": "cold", "method": "events"}
    if state.get("device") in devices:
        conditions["device"] = devices[state["device"]]
    if state.get("is_skipped"):
        return measured(
            {}, status="skipped", reason=str(state.get("skip_reason") or ""), conditions=conditions
        )
    found = {one["tag"]: _values(one) for one in state.get("summaries") or ()}
    samples, estimator = _samples(path, found)
    return measured({"time_s": samples}, conditions={**conditions, "estimator": estimator})


def _values(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {str(one["name"]): one["value"] for one in summary.get("data") or ()}


def _samples(path: Path, found: Mapping[str, Mapping[str, Any]]) -> tuple[Sequence[float], str]:
    """The samples, else the one number that stands for them; and which it is."""
    if _SAMPLES in found:
        beside = path.parent / str(found[_SAMPLES]["filename"])
        if not beside.is_file():  # written relative to where nvbench ran
            beside = path.parent / beside.parent.name / beside.name
        if not paths.resolved(beside).is_relative_to(paths.resolved(path.parent)):
            raise ValueError(f"its samples are in {str(beside)!r}, which is not beside it")
        if beside.is_file():
            count, data = int(found[_SAMPLES]["size"]), paths.whole(beside)
            if len(data) != 4 * count:
                raise ValueError(f"{beside} holds {len(data)} bytes; {count} samples are {4 * count}")
            return struct.unpack(f"<{count}f", data), "median"
    for name in ("median", "mean"):
        if _TIME + name in found:
            return [float(found[_TIME + name]["value"])], name
    return [], "median"
