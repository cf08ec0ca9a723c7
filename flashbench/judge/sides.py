"""A side of a comparison: one run or several, and in what two sides differ that must not."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flashbench.errors import UsageError

CONDITIONS = ("device", "power_limit", "inputs", "cache", "flush", "method", "load", "estimator", "benchmark")
"""What must be the same on both sides, by the names that ``allow`` takes."""
EXPECTED = ("device", "cache", "method")
"""Conditions that a file of times should tell, whatever the other side does."""

MEASURED = ("ok", "checked", "profiled")
"""Statuses of a cell that was measured."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One cell of one run.

    samples: the numbers of a measure, in its unit; empty where it has none. status, reason: as in a record.
    flags: marks on the time. conditions: those of the cell alone, such as how it was timed. groups: what
    cells can be put together by (implementation, pass, …). measures: all that such a cell can have, None
    where that is open."""

    samples: Callable[[str], Sequence[float]]
    status: str = "ok"
    reason: str = ""
    flags: tuple[str, ...] = ()
    conditions: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    measures: frozenset[str] | None = None

    @property
    def ok(self) -> bool:
        """Whether it was measured, whatever of it."""
        return self.status in MEASURED

    def has(self, measure: str) -> bool:
        """Whether such a cell can have that measure at all."""
        return self.measures is None or measure in self.measures


@dataclass(frozen=True, kw_only=True)
class Run:
    """One file as read. kind: its format; measures: what is compared of it where nothing is asked for.

    commit, created_at (ISO 8601): of the sources that were measured, and when; empty where it does not tell.
    """

    path: Path
    kind: str
    cells: Mapping[str, Measured]
    measures: tuple[str, ...] = ("time_s",)
    conditions: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    commit: str = ""
    created_at: str = ""

    @property
    def told(self) -> list[str]:
        """Its notes, each with its path."""
        path = str(self.path)
        return [text if text.startswith(path) else f"{path}: {text}" for text in self.notes]


@dataclass(frozen=True, kw_only=True)
class Side:
    """Runs of one side."""

    name: str
    runs: tuple[Run, ...]

    @property
    def keys(self) -> list[str]:
        """Every cell that a run has, in order."""
        return list(dict.fromkeys(key for run in self.runs for key in run.cells))

    def of(self, key: str) -> list[Measured]:
        """A cell of the runs that have it."""
        return [run.cells[key] for run in self.runs if key in run.cells]

    def condition(self, name: str, keys: Iterable[str]) -> set[str]:
        """The values of a condition over the runs and those of their cells."""
        found = {run.conditions[name] for run in self.runs if name in run.conditions}
        cells = (cell for key in keys for cell in self.of(key))
        return found | {cell.conditions[name] for cell in cells if name in cell.conditions}

    def tells(self, name: str, key: str) -> bool | None:
        """Whether every run that measured a cell tells the condition; None where no run measured it."""
        cells = [(run, run.cells[key]) for run in self.runs if key in run.cells]
        told = [name in run.conditions or name in cell.conditions for run, cell in cells if cell.ok]
        return all(told) if told else None

    def version(self, name: str) -> set[str]:
        """The values of a version over the runs."""
        return {run.versions[name] for run in self.runs if name in run.versions}


def paths_of(texts: str, name: str) -> list[Path]:
    """The files of a comma list of files, folders with a results.jsonl, and globs, each once.

    Raises UsageError for an empty list and for a folder without results; a missing file is found on reading.
    """
    found: list[Path] = []
    for text in filter(None, (part.strip() for part in texts.split(","))):
        matches = [Path(path) for path in sorted(glob.glob(text, recursive=True))]
        for path in matches or [Path(text)]:
            found += in_folder(path, name) if path.is_dir() else [path]
    if not found:
        raise UsageError(
            f"{name} {texts!r}: no file; accepted: results files, folders or globs, comma-separated"
        )
    return list(dict.fromkeys(found))


def in_folder(folder: Path, name: str) -> list[Path]:
    """Its results.jsonl, or those of the folders in it, one run each, or its own JSON lines.

    Raises UsageError for a folder with neither; name: of the option or argument, for the message.
    """
    own = folder / "results.jsonl"
    below = (
        [own] if own.exists() else sorted(folder.glob("*/results.jsonl")) or sorted(folder.glob("*.jsonl"))
    )
    if not below:
        raise UsageError(
            f"{name} {str(folder)!r}: a folder without results; accepted: a folder with results.jsonl,"
            " with folders of those, or with *.jsonl files"
        )
    return below


def unlike(base: Side, new: Side) -> dict[str, tuple[str, str]]:
    """Conditions in which the sides differ as a whole, with what each side has: those of runs, and those of
    cells where no cell in common has the same on both."""
    common = set(base.keys) & set(new.keys)
    found = {}
    for name in CONDITIONS:
        one, other = base.condition(name, common), new.condition(name, common)
        if one and other and one != other and not _cells_alike(base, new, name, common):
            found[name] = (_said(one), _said(other))
    return found


def _cells_alike(base: Side, new: Side, name: str, keys: Iterable[str]) -> bool:
    """Whether a condition is of cells, and of some cell the same on both sides."""
    if any(name in run.conditions for side in (base, new) for run in side.runs):
        return False
    return any(one == other for one, other in _both(base, new, name, keys))


def _both(base: Side, new: Side, name: str, keys: Iterable[str]) -> list[tuple[set[str], set[str]]]:
    """The values of a cell's own condition on both sides, of the cells of which both tell it."""
    pairs = [tuple(_own(side.of(key), name) for side in (base, new)) for key in keys]
    return [(one, other) for one, other in pairs if one and other]


def _own(cells: Iterable[Measured], name: str) -> set[str]:
    return {cell.conditions[name] for cell in cells if name in cell.conditions}


def partly_unlike(base: Side, new: Side) -> list[str]:
    """Conditions that differ in some cells in common and in others do not, one sentence each."""
    common = set(base.keys) & set(new.keys)
    whole = unlike(base, new)
    said = []
    for name in CONDITIONS:
        pairs = [] if name in whole else _both(base, new, name, common)
        if apart := sum(one != other for one, other in pairs):
            said.append(f"{name} differs between the sides in {apart} of {len(pairs)} cells")
    return said


def cell_unlike(base: Sequence[Measured], new: Sequence[Measured], allowed: frozenset[str]) -> str:
    """In what one cell's own conditions differ, in words, or empty."""
    said = []
    for name in CONDITIONS:
        one, other = _own(base, name), _own(new, name)
        if one and other and one != other and name not in allowed:
            said.append(f"{name} is {_said(one)} on the base side and {_said(other)} on the new one")
    return "; ".join(said)


def untold(base: Side, new: Side) -> dict[str, list[str]]:
    """By side the conditions that it does not tell of a cell in common: those that the other side tells of
    it, and those that every file of times should, which an older one, or another tool's, may not."""
    common = [key for key in base.keys if any(key in run.cells for run in new.runs)]
    timed = any("time_s" in run.measures for side in (base, new) for run in side.runs)
    expected = EXPECTED if timed else ()
    found = {
        side.name: [
            name
            for name in CONDITIONS
            if any(
                side.tells(name, key) is False and (name in expected or other.tells(name, key))
                for key in common
            )
        ]
        for side, other in ((base, new), (new, base))
    }
    return {name: missing for name, missing in found.items() if missing}


def changes(base: Side, new: Side) -> list[str]:
    """Versions that differ, one sentence each."""
    names = dict.fromkeys(name for side in (base, new) for run in side.runs for name in run.versions)
    return [
        f"{name}: {_said(base.version(name)) or 'unknown'} on the base side,"
        f" {_said(new.version(name)) or 'unknown'} on the new one"
        for name in names
        if base.version(name) != new.version(name)
    ]


def _said(values: set[str]) -> str:
    return " and ".join(sorted(values))
