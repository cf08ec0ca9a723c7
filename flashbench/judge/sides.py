"""A side of a comparison: one run file or several, and in what two sides differ that must not."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flashbench import metrics, runfile, table
from flashbench.errors import UsageError
from flashbench.record import Record
from flashbench.runfile import RunFile

CONDITIONS = ("device", "cache", "method", "power_limit")
"""What must be the same on both sides, by the names that ``allow`` takes."""
VERSIONS = ("driver", "cuda", "cudnn", "torch", "triton", "python", "flashbench", "source_hash")
"""What may differ, and is told."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """Runs of one side. records: by cell key, one per run that has the cell."""

    name: str
    files: tuple[RunFile, ...]
    records: Mapping[str, tuple[Record, ...]]

    def facts(self, name: str) -> set[str]:
        """The values of a condition or a version over all runs, as text."""
        return {text for file in self.files for text in _facts(file, name)}


def load_side(texts: str, name: str) -> Side:
    """The side of a comma list of files, folders with a results.jsonl, and globs.

    Raises UsageError for what matches nothing, and as runfile.load does.
    """
    paths: list[Path] = []
    for text in filter(None, (part.strip() for part in texts.split(","))):
        found = [Path(path) for path in sorted(glob.glob(text))] or [Path(text)]
        paths += [path / "results.jsonl" if path.is_dir() else path for path in found]
    if not paths:
        raise UsageError(
            f"{name} {texts!r}: no file; accepted: results files, folders or globs, comma-separated"
        )
    files = tuple(runfile.load(path) for path in dict.fromkeys(paths))
    records: dict[str, list[Record]] = {}
    for file in files:
        for record in file.records:
            records.setdefault(record.cell.key, []).append(record)
    return Side(name=name, files=files, records={key: tuple(rows) for key, rows in records.items()})


def unlike(base: Side, new: Side) -> dict[str, tuple[str, str]]:
    """Conditions that differ, with what each side has."""
    found = {}
    for name in CONDITIONS:
        one, other = base.facts(name), new.facts(name)
        if one != other and one and other:
            found[name] = (" and ".join(sorted(one)), " and ".join(sorted(other)))
    return found


def unknown(base: Side, new: Side) -> list[str]:
    """Conditions that a side does not tell, such as an older file."""
    return [name for name in CONDITIONS[:3] if not (base.facts(name) and new.facts(name))]


def changes(base: Side, new: Side) -> list[str]:
    """Versions that differ, one sentence each."""
    return [
        f"{name}: {' and '.join(sorted(base.facts(name))) or 'unknown'} on the base side,"
        f" {' and '.join(sorted(new.facts(name))) or 'unknown'} on the new one"
        for name in VERSIONS
        if base.facts(name) != new.facts(name)
    ]


def values(records: tuple[Record, ...], metric: metrics.Metric) -> list[list[float]]:
    """The samples of a metric, one list per run: all of them for time, else the one number that a run has."""
    if metric.name == "time_s":
        return [list(record.samples.samples_s) for record in records if record.samples]
    found = [table.value_of(record, metric.name) for record in records if record.status != "wrong"]
    return [[float(value)] for value in found if value is not None]


def _facts(file: RunFile, name: str) -> set[str]:
    about = file.header.get("environment") or {}
    if name == "device":
        return {str(about["device_name"])} if about.get("device_name") else set()
    if name == "power_limit":
        limit = about.get("power_limit_w")
        return {f"{limit:g} W"} if isinstance(limit, int | float) else set()
    if name in ("cache", "method"):
        return {str(getattr(record.samples, name)) for record in file.records if record.samples}
    return {str(about[name])} if about.get(name) is not None else set()
